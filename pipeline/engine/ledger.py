"""Which chunks of an unfinished output are in: a folder `OUTPUT.ledger` of small JSON files beside the partial output.

`job.json` says which job the ledger speaks of and how it was cut. Each entry names chunks whose output is durable,
with what the audit needs of them. An entry is a file of its own, written under another name and renamed, so that
processes on several hosts can add entries without a lock, and a killed one leaves either a whole entry or none.

Every run has a name, which stands in those of its entries: a worker cut off from a run that was killed may still add
some, and they count only where the partial output is still the one that it wrote to. `receipt.json` is written last,
just before the output is published, and says what that is as a file: whoever finds it so under its final name knows
that it was.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pipeline import __version__
from pipeline.engine.identity import input_version
from pipeline.errors import OutputError, ParameterError
from pipeline.storage.partial import partial_path, samples_path, settle_older, sync_folder
from pipeline.storage.writable import writing
from pipeline.workloads.paths import ledger_path
from pipeline.workloads.protocol import Budget, JobSpec, Plan

_JOB = "job.json"
_RECEIPT = "receipt.json"
_ENTRY = "chunks-{first:08d}-{run}.json"
_ENTRY_NAME = re.compile(r"chunks-\d+-([0-9a-f]+)\.json")
_ABSENT = object()
# Every name that a ledger's folder holds, while entries are being written too.
_OURS = re.compile(r"\.?(job|receipt|chunks-\d+(-[0-9a-f]+)?)\.json(\.\d+)?")
_REMOVALS = 20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Chunks that are in, `notes` for the audit, and the device that computed them."""

    chunks: tuple[int, ...]
    notes: Mapping[str, Any]
    device: str


def job_identity(spec: JobSpec, version: Mapping[str, Any], budget: Budget, plan: Plan) -> dict[str, Any]:
    """What must be the same for a ledger's chunks to be of use: the job, its input's version, and the cut."""
    regions = hashlib.sha256(repr([(chunk.region, chunk.halo) for chunk in plan.chunks]).encode()).hexdigest()
    return {
        "millrace": __version__,
        "workload": spec.workload,
        "parameters": json.loads(json.dumps(spec.parameters.in_force())),
        "input": {"path": os.path.realpath(spec.input), **version},
        "cut": vars(budget),
        "chunks": len(plan.chunks),
        "regions_sha256": regions,
    }


class Ledger:
    """The ledger of one output. Its folder is made by the first entry, or by `create`.

    identity : as `job_identity` says, and `runs`, the names of the runs that add entries, this one's last; workers
               are given it whole
    """

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        self._output = Path(os.path.realpath(output))
        self.folder = ledger_path(self._output)
        self.identity = identity

    @staticmethod
    def recorded_budget(output: Path, spec: JobSpec | None = None) -> Budget | None:
        """How the job of an earlier ledger was cut; None where there is no ledger that can be read.

        spec : None too where that was a job with other parameters
        """
        job = _read(ledger_path(Path(os.path.realpath(output))) / _JOB)
        if job is not None and spec is not None:
            asked = (spec.workload, json.loads(json.dumps(spec.parameters.in_force())))
            job = job if (job.get("workload"), job.get("parameters")) == asked else None
        cut = job.get("cut") if job is not None else None
        if not isinstance(cut, dict) or cut.keys() != {"budget_bytes", "target_bytes"}:
            return None
        return Budget(**cut) if all(type(value) is int and value > 0 for value in cut.values()) else None

    @classmethod
    def resumed(cls, output: Path, identity: Mapping[str, Any]) -> Self:
        """The ledger that an interrupted run of the same job left.

        ParameterError where it was another job, OutputError where it could not be removed in the end.
        """
        ledger = cls(output, identity)
        ledger.refuse_others()
        found = _read(ledger.folder / _JOB)
        if found is None:
            raise ParameterError(f"--resume: {ledger.folder} cannot be read; run again without --resume")
        for key, now in identity.items():
            then = found.get(key, _ABSENT)
            if then != now:
                raise ParameterError(
                    f"--resume: {ledger.folder} is of another job ({_difference(key, then, now)}); "
                    "run again without --resume"
                )
        runs = found.get("runs")
        ledger.identity = {**identity, "runs": [str(run) for run in runs] if isinstance(runs, list) else []}
        return ledger

    @property
    def exists(self) -> bool:
        return self.folder.is_dir() and not self.folder.is_symlink()

    @property
    def begun(self) -> bool:
        """Whether it says of which job it is: who was killed while making or removing the folder left it without."""
        return self.exists and os.path.lexists(self.folder / _JOB)

    @property
    def is_this_runs(self) -> bool:
        """Whether it is there and no other run has taken it over, or has begun one in its place."""
        found = _read(self.folder / _JOB)
        return found is not None and found.get("runs") == self._runs

    def create(self) -> None:
        """Make the folder now, in place of an older one, for a first run."""
        self.remove()
        with writing(self.folder):
            self.folder.mkdir()
            sync_folder(self.folder.parent)
        self._begin_run([])

    def go_on(self) -> None:
        """Another run adds to what is in. The output must be its own."""
        self._begin_run(self._runs)

    def _begin_run(self, earlier: Sequence[str]) -> None:
        self.identity = {**self.identity, "runs": [*earlier, secrets.token_hex(6)]}
        with writing(self.folder):
            _write(self.folder / _JOB, self.identity)

    def restart(self, identity: Mapping[str, Any]) -> None:
        """The job is cut anew: what was entered is of no use."""
        self.remove()
        self.identity = identity

    def add(self, entry: Entry) -> None:
        """Keep an entry, for good. StorageError where the disk fails, OutputError where the ledger was removed."""
        with writing(self.folder):
            try:
                _write(self._path(entry.chunks[0]), vars(entry))
            except FileNotFoundError as error:
                raise OutputError(f"{self.folder}: was removed while the job ran; run the job again") from error

    def entries(self) -> list[Entry]:
        """Every entry, in the order of their first chunks. One that is damaged counts for nothing: its chunks are
        computed again, and it is replaced. So does one whose chunks others have: a worker was given up and was alive.
        """
        by_run: dict[str, list[Entry]] = {run: [] for run in reversed(self._runs)}
        for path in sorted(self.folder.glob("chunks-*.json")):
            named = _ENTRY_NAME.fullmatch(path.name)
            entry = _entry(path, self.identity["chunks"]) if named and named[1] in by_run else None
            if named and entry is not None:
                by_run[named[1]].append(entry)
        found: list[Entry] = []
        seen: set[int] = set()
        for entry in (entry for entries in by_run.values() for entry in entries):
            if seen.isdisjoint(entry.chunks):
                found.append(entry)
                seen.update(entry.chunks)
        return sorted(found, key=lambda entry: entry.chunks[0])

    def within(self, chunks: Sequence[int]) -> list[Entry]:
        """This run's entries that begin with one of these chunks and hold no others."""
        read = (_entry(self._path(chunk), self.identity["chunks"]) for chunk in chunks)
        return [entry for entry in read if entry is not None and set(chunks).issuperset(entry.chunks)]

    def conclude(self, receipt: Mapping[str, Any]) -> None:
        """The partial output is sealed, and published next: what remains to be done then is in the ledger."""
        if not self.exists:
            self.create()
        with writing(self.folder):
            _write(self.folder / _RECEIPT, {"receipt": dict(receipt), "publishes": _seal(partial_path(self._output))})

    @staticmethod
    def concluded(output: Path) -> dict[str, Any] | None:
        """The receipt of a run that was killed after it had published; None where there was none."""
        final = Path(os.path.realpath(output))
        found = _read(ledger_path(final) / _RECEIPT) or {}
        receipt, publishes = found.get("receipt"), found.get("publishes")
        if not isinstance(receipt, dict) or not isinstance(publishes, dict):
            return None
        try:
            return receipt if _seal(final) == publishes else None
        except OSError:
            return None

    def remove(self) -> None:
        """Harmless where there is none. OutputError where something else has its name, which is left alone."""
        if not os.path.lexists(self.folder):
            return
        self.refuse_others()
        with writing(self.folder):
            (self.folder / _JOB).unlink(missing_ok=True)  # first: a ledger that is removed in part is none
            _remove_tree(self.folder)

    def refuse_others(self) -> None:
        """OutputError where something else has its name, or lies in its folder."""
        if not self.exists:
            raise OutputError(f"{self.folder}: stands where the ledger belongs and is none; remove or rename it")
        strange = next((path for path in self.folder.iterdir() if not _OURS.fullmatch(path.name)), None)
        if strange is not None:
            raise OutputError(f"{strange}: lies where the ledger belongs and is not of it; remove or rename it")

    @property
    def _runs(self) -> list[str]:
        return list(self.identity.get("runs", []))

    def _path(self, first: int) -> Path:
        return self.folder / _ENTRY.format(first=first, run=self._runs[-1] if self._runs else "0")


def remove_leftovers(output: Path) -> None:
    """Remove what an interrupted run kept for one that resumes, and settle the older result if it was killed while it
    replaced that; harmless where there is nothing.

    No run may be at work on the output. OutputError where something else stands where its ledger belongs.
    """
    final = Path(os.path.realpath(output))
    ledger = Ledger(output, {})
    if not ledger.exists:
        return  # whatever has the name of a partial output is then nobody's of ours
    for path in _partials(final):
        with writing(final):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    settle_older(final)
    ledger.remove()


def _partials(final: Path) -> tuple[Path, Path]:
    return partial_path(final), partial_path(samples_path(final))


def _seal(output: Path) -> dict[str, Any]:
    """What an output keeps as it is renamed, and another one, or the same one changed, does not have."""
    return {"inode": output.stat().st_ino, **input_version(output)}


def _remove_tree(folder: Path) -> None:
    """Also while a worker cut off from its run puts an entry there."""
    for _ in range(_REMOVALS):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return
    shutil.rmtree(folder)


def _entry(path: Path, chunk_count: int) -> Entry | None:
    """None where there is no entry, or none that can be right."""
    found = _read(path) or {}
    chunks, notes, device = (found.get(name) for name in ("chunks", "notes", "device"))
    if not isinstance(chunks, list) or not isinstance(notes, dict) or not isinstance(device, str) or not chunks:
        return None
    if not all(type(chunk) is int and 0 <= chunk < chunk_count for chunk in chunks):
        return None
    return Entry(chunks=tuple(chunks), notes=notes, device=device)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Whole or not at all, and for good: the file's content first, then its name in the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _difference(name: str, then: Any, now: Any) -> str:
    """What two values that differ were and are; of objects, the first of their values that differ."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        return f"{name}: then {_short(then)}, now {_short(now)}"
    pairs = ((key, then.get(key, _ABSENT), now.get(key, _ABSENT)) for key in (*now, *then))
    key, before, after = next(pair for pair in pairs if pair[1] != pair[2])
    return _difference(f"{name}.{key}", before, after)


def _short(value: Any) -> str:
    text = "not given" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
