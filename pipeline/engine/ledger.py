"""The finished chunks of an unfinished output: a folder `OUTPUT.ledger` of small JSON files beside the partial output.

`job.json` identifies the job and how it was cut. Each entry lists chunks whose output is durable, with their notes for
the audit. An entry is a file of its own, written under another name and renamed, so that processes on several hosts can
add entries without a lock, and a killed process leaves either a whole entry or none.

An iterate is the state of a chunk's iterations, so that a long chunk need not start again. It belongs to the job, not
to a run: it holds no part of the output.

Every run has a name, which is part of its entries' names: a worker cut off from a killed run may still add entries, and
they count only if the partial output is still the one that it wrote to. `receipt.json` is written last, just before
the output is published, with the output file's identity: if the file of the final name has it, publishing succeeded.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeline import __version__
from pipeline.engine.identity import input_version
from pipeline.errors import OutputError, ParameterError, counted
from pipeline.storage.confinement import in_its_folder, open_beneath, open_new, resolved
from pipeline.storage.objects import ObjectPath, buffer_of
from pipeline.storage.partial import partial_path, samples_path, settle_older, sync_folder
from pipeline.storage.partial_objects import ROOT, is_published, partial_objects
from pipeline.storage.writable import writing
from pipeline.workloads.paths import ledger_path
from pipeline.workloads.protocol import Budget, JobSpec, Plan

_JOB = "job.json"
_RECEIPT = "receipt.json"
_ITERATE = "iterate-{chunk:08d}.npz"
_ENTRY = "chunks-{first:08d}-{run}.json"
_ENTRY_NAME = re.compile(r"chunks-\d+-([0-9a-f]+)\.json")
_ABSENT = object()
# All names in a ledger's folder, including temporary ones.
_OURS = re.compile(r"\.?((job|receipt|chunks-\d+(-[0-9a-f]+)?)\.json|iterate-\d+\.npz)(\.\d+)?")
_REMOVALS = 20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Finished chunks, their notes, and the device that computed them."""

    chunks: tuple[int, ...]
    notes: Mapping[str, Any]
    device: str


def job_identity(spec: JobSpec, version: Mapping[str, Any], budget: Budget, plan: Plan) -> dict[str, Any]:
    """What must be equal to resume from a ledger: the job, its input's version, and the chunks."""
    regions = hashlib.sha256(repr([(chunk.region, chunk.halo) for chunk in plan.chunks]).encode()).hexdigest()
    return {
        "millrace": __version__,
        "workload": spec.workload,
        "parameters": json.loads(json.dumps(spec.parameters.in_force())),
        "input": {"path": str(resolved(spec.input)), **version},
        "cut": vars(budget),
        "chunks": len(plan.chunks),
        "regions_sha256": regions,
    }


class Ledger:
    """The ledger of one output.

    identity : as from `job_identity`; once begun, also `runs`, the names of the runs that add entries, this one's last
    """

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        self._output = resolved(output)
        self.folder = ledger_path(self._output)
        self.identity = identity
        self._creating = threading.Lock()

    @staticmethod
    def recorded_budget(output: Path, spec: JobSpec | None = None) -> Budget | None:
        """The budget with which an earlier ledger's job was cut; None if there is no readable ledger.

        spec : if given, None also for a job with other parameters
        """
        job = _read(ledger_path(resolved(output)) / _JOB)
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

        ParameterError if it was another job, OutputError if the folder is not ours to remove later.
        """
        ledger = cls(output, identity)
        ledger.refuse_others()
        found = _read(ledger.folder / _JOB)
        if found is None:
            raise ParameterError(f"--resume: {ledger.folder} cannot be read; run again without --resume")
        for key, now in identity.items():
            then = found.get(key, _ABSENT)
            if then != now:
                is_version = key == "input" and isinstance(then, dict) and then.keys() == now.keys()
                if is_version and then["path"] == now["path"]:
                    raise ParameterError(
                        f"--resume: {now['path']} has changed since the interrupted run: then {_contents(then)}, now "
                        f"{_contents(now)}; run again without --resume, or restore the input"
                    )
                raise ParameterError(
                    f"--resume: {ledger.folder} is of another job ({_difference(key, then, now)}); "
                    "run again without --resume"
                )
        runs = found.get("runs")
        ledger.identity = {**identity, "runs": [str(run) for run in runs] if isinstance(runs, list) else []}
        return ledger

    @property
    def exists(self) -> bool:
        if isinstance(self.folder, ObjectPath):
            return (self.folder / _JOB).exists()
        return self.folder.is_dir() and not self.folder.is_symlink()

    @property
    def begun(self) -> bool:
        """Whether it has a `job.json`: a run killed while creating or removing the folder leaves none."""
        return self.exists and (isinstance(self.folder, ObjectPath) or os.path.lexists(self.folder / _JOB))

    @property
    def is_this_runs(self) -> bool:
        """Whether it exists, and no other run has taken it over or replaced it."""
        found = _read(self.folder / _JOB)
        return found is not None and found.get("runs") == self._runs

    def create(self) -> None:
        """Create the folder for a first run, in place of an older one."""
        self.remove()
        if not isinstance(self.folder, ObjectPath):
            with writing(self.folder), in_its_folder(self.folder) as here:
                here.mkdir()
                sync_folder(here.parent)
        self._begin_run([])

    def create_once(self) -> None:
        """Create the folder, unless it exists; from any thread."""
        with self._creating:
            if not self.exists:
                self.create()

    def go_on(self) -> None:
        """Begin another run that adds entries. It must own the output."""
        self._begin_run(self._runs)

    def go_on_with_iterates(self) -> None:
        """Begin a run on a new output: earlier runs' iterates are kept, and their entries do not count."""
        self._begin_run([])

    def _begin_run(self, earlier: Sequence[str]) -> None:
        self.identity = {**self.identity, "runs": [*earlier, secrets.token_hex(6)]}
        with writing(self.folder):
            _write(self.folder / _JOB, self.identity)

    def restart(self, identity: Mapping[str, Any]) -> None:
        """Remove all entries, because the job is cut anew."""
        self.remove()
        self.identity = identity

    def add(self, entry: Entry) -> None:
        """Add an entry durably. StorageError if the disk fails, OutputError if the ledger was removed."""
        with writing(self.folder):
            try:
                _write(self._path(entry.chunks[0]), vars(entry))
            except FileNotFoundError as error:
                raise OutputError(f"{self.folder}: was removed while the job ran; run the job again") from error

    def entries(self) -> list[Entry]:
        """Every entry, in the order of their first chunks.

        Damaged entries are skipped: their chunks are computed again. So are those whose chunks are in others: a worker
        that was given up was alive.
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

    def save_iterate(self, chunk: int, state: Mapping[str, Any]) -> None:
        """Write a chunk's state, arrays of the host or the device, atomically and durably.

        StorageError if the disk fails, OutputError if the ledger was removed.
        """

        def write(file: IO[bytes]) -> None:
            with zipfile.ZipFile(file, "w") as archive:  # one array at a time is copied from the device
                for name, array in state.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array.get() if hasattr(array, "get") else np.asarray(array))

        with writing(self.folder):
            try:
                _write_file(self.folder / _ITERATE.format(chunk=chunk), write)
            except FileNotFoundError as error:
                raise OutputError(f"{self.folder}: was removed while the job ran; run the job again") from error

    def iterate(self, chunk: int) -> Mapping[str, NDArray[Any]] | None:
        """A chunk's state; None if there is none, or it is damaged."""
        try:
            with (
                _opened(self.folder / _ITERATE.format(chunk=chunk)) as file,
                np.load(file, allow_pickle=False) as saved,
            ):
                return dict(saved)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None

    @property
    def has_iterates(self) -> bool:
        return any(self.folder.glob("iterate-*.npz"))

    def drop_iterates(self, chunks: Iterable[int]) -> None:
        """Remove those of finished chunks; harmless without."""
        with writing(self.folder):
            for chunk in chunks:
                with in_its_folder(self.folder / _ITERATE.format(chunk=chunk)) as here:
                    here.unlink(missing_ok=True)

    def within(self, chunks: Sequence[int]) -> list[Entry]:
        """This run's entries that hold only these chunks."""
        read = (_entry(self._path(chunk), self.identity["chunks"]) for chunk in chunks)
        return [entry for entry in read if entry is not None and set(chunks).issuperset(entry.chunks)]

    def conclude(self, receipt: Mapping[str, Any]) -> None:
        """Record the receipt of the sealed partial output, which is published next."""
        if not self.exists:
            self.create()
        with writing(self.folder):
            _write(self.folder / _RECEIPT, {"receipt": dict(receipt), "publishes": _seal(partial_path(self._output))})

    @staticmethod
    def concluded(output: Path) -> dict[str, Any] | None:
        """The receipt of a run that was killed after publishing; None if there is none."""
        final = resolved(output)
        found = _read(ledger_path(final) / _RECEIPT) or {}
        receipt, publishes = found.get("receipt"), found.get("publishes")
        if not isinstance(receipt, dict) or not isinstance(publishes, dict):
            return None
        try:
            return receipt if _seal(final) == publishes else None
        except OSError:
            return None

    def remove(self) -> None:
        """Remove the folder, if it exists. OutputError if something else has its name."""
        if isinstance(self.folder, ObjectPath):
            (self.folder / _JOB).unlink(missing_ok=True)
            self.folder.remove_below()
            return
        if not os.path.lexists(self.folder):
            return
        self.refuse_others()
        with writing(self.folder), in_its_folder(self.folder) as here:
            with in_its_folder(self.folder / _JOB) as job:
                job.unlink(missing_ok=True)  # first: without it the rest is no ledger
            _remove_tree(here)

    def refuse_others(self) -> None:
        """OutputError if something else has its name, or is in its folder."""
        if not self.exists:
            raise OutputError(f"{self.folder}: is not a Millrace ledger but has its name; remove or rename it")
        strange = next((path for path in self.folder.glob("*") if not _OURS.fullmatch(path.name)), None)
        if strange is not None:
            raise OutputError(f"{strange}: does not belong in the ledger's folder; remove or rename it")

    @property
    def _runs(self) -> list[str]:
        return list(self.identity.get("runs", []))

    def _path(self, first: int) -> Path:
        return self.folder / _ENTRY.format(first=first, run=self._runs[-1] if self._runs else "0")


def remove_leftovers(output: Path) -> None:
    """Remove what an interrupted run kept for resuming, and settle the older result if the run was killed while
    replacing it; harmless if there is nothing.

    No run may be using the output. OutputError if something else has the ledger's name.
    """
    final = resolved(output)
    ledger = Ledger(output, {})
    if not ledger.exists:
        return  # a file with the name of a partial output is then not ours
    if isinstance(final, ObjectPath):
        if not is_published(final):
            final.remove_below(ROOT)
        partial_objects(final).remove_below()
        ledger.remove()
        return
    for path in (partial_path(final), partial_path(samples_path(final))):
        with writing(final), in_its_folder(path) as here:
            shutil.rmtree(here) if here.is_dir() and not here.is_symlink() else here.unlink(missing_ok=True)
    settle_older(final)
    ledger.remove()


def _seal(output: Path) -> dict[str, Any]:
    """An identity that survives renaming, but not a change of the output."""
    if isinstance(output, ObjectPath):
        return {"metadata_sha256": hashlib.sha256((output / ROOT).read_bytes()).hexdigest()}
    return {"inode": output.stat().st_ino, **input_version(output)}


def _remove_tree(folder: Path) -> None:
    """Retries, since a worker cut off from its run may add an entry meanwhile."""
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
    """None if there is no entry, or it is damaged."""
    found = _read(path) or {}
    chunks, notes, device = (found.get(name) for name in ("chunks", "notes", "device"))
    if not isinstance(chunks, list) or not isinstance(notes, dict) or not isinstance(device, str) or not chunks:
        return None
    if not all(type(chunk) is int and 0 <= chunk < chunk_count for chunk in chunks):
        return None
    return Entry(chunks=tuple(chunks), notes=notes, device=device)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    _write_file(path, lambda file: file.write(json.dumps(content).encode()))


def _write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write atomically and durably: first the content, then the name in the folder."""
    if isinstance(path, ObjectPath):
        path.write_bytes(buffer_of(write))
        return
    with in_its_folder(path) as here:
        temporary = here.with_name(f".{path.name}.{threading.get_native_id()}")
        with open(temporary, "wb", opener=open_new) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(here)
        sync_folder(here.parent)


def _opened(path: Path) -> IO[bytes]:
    if isinstance(path, ObjectPath):
        return io.BytesIO(path.read_bytes())
    return open(path, "rb", opener=open_beneath)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with _opened(path) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _contents(version: Mapping[str, Any]) -> str:
    """An `input_version` in words. Of a folder, also the beginning of its listing's hash: older files may differ."""
    files, when = version["files"], datetime.fromtimestamp(version["mtime_ns"] / 10**9, UTC)
    several = f"{files:,} files ({version['listing_sha256'][:8]}), " if files > 1 else ""
    return f"{several}{counted(version['bytes'], 'byte')} of {when.isoformat(sep=' ', timespec='milliseconds')}"


def _difference(name: str, then: Any, now: Any) -> str:
    """Describe how two values differ; for objects, by the first member that differs."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        return f"{name}: then {_short(then)}, now {_short(now)}"
    pairs = ((key, then.get(key, _ABSENT), now.get(key, _ABSENT)) for key in (*now, *then))
    key, before, after = next(pair for pair in pairs if pair[1] != pair[2])
    return _difference(f"{name}.{key}", before, after)


def _short(value: Any) -> str:
    text = "not given" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
