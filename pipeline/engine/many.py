"""Many files in one run: files of one kind share a job, and are published together; one damaged file stops no other.

While the run lasts, `FOLDER/.millrace` holds its lists of files (`pipeline.formats.image.file_list`), each with the
partial output, ledger and receipt of its job. At the end one table, `FOLDER/millrace.receipts.json`, records the
outcome of every file, and the folder is removed. `--resume` skips files that either of them reports as published,
unless they have changed since, and continues with unfinished lists. If the disk is full, the run publishes the files
that are written, and ends.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.engine.devices.device import CpuDevice, Device
from pipeline.engine.identity import input_version
from pipeline.engine.ledger import Ledger, remove_leftovers
from pipeline.engine.listing import Scan, Wanted, takes_images
from pipeline.engine.planned import PlannedDevice, PlannedJob
from pipeline.engine.run import RunEvents, RunOptions, Stream, plan_job, published_before, run_job, stream_on_device
from pipeline.engine.stages import StageRecord
from pipeline.errors import InputError, MillraceError, OutputError, ParameterError, StorageError, UserError, counted
from pipeline.formats.image.file_list import SUFFIX, FileList, ListedFile, StoredSamples, result_of
from pipeline.storage.output_lock import open_existing
from pipeline.storage.partial import PartialFile
from pipeline.storage.writable import writing
from pipeline.workloads import Chunk, JobSpec, Parameters, Plan, workload_named
from pipeline.workloads.many_files import LEFT_OUT, LeavesOut, NotTogether
from pipeline.workloads.paths import receipt_path

TABLE = "millrace.receipts.json"
_STATE = ".millrace"
_JOB, _ALONE = "job.json", "alone.jsonl"
# Files of one kind that are published together, with one sync.
GROUP_FILES, GROUP_BYTES = 16_384, 16 << 30

Listed = tuple[Wanted, ListedFile]


@dataclass(frozen=True, kw_only=True)
class ManyOptions:
    """What to run: `workload` with `parameters` for all inputs; their results are in `folder`."""

    workload: str
    parameters: Parameters
    folder: Path
    run: RunOptions


@dataclass(frozen=True, kw_only=True)
class ManyEvents:
    """Callbacks of a run: so many more files are written, or cannot be; from several threads."""

    on_files: Callable[[int], None] = lambda count: None


@dataclass
class Outcome:
    """What became of the files."""

    published: dict[str, list[Any]] = field(default_factory=dict)  # rows of the table by the result's name
    failed: dict[Wanted, str] = field(default_factory=dict)
    receipts: list[Mapping[str, Any]] = field(default_factory=list)
    refusals: list[UserError] = field(default_factory=list)
    skipped: int = 0  # published by an earlier run
    disk_error: StorageError | None = None  # that ended the run


class ManyFilesRun:
    """Runs a job for every one of many files."""

    def __init__(
        self, asked: ManyOptions, device: PlannedDevice, stream: Stream | None = None, events: ManyEvents | None = None
    ) -> None:
        self._asked, self._device, self._stream = asked, device, stream or stream_on_device
        if isinstance(device, CpuDevice):
            device.chunk_range = device.chunk_range_of_files
        self._events = events or ManyEvents()
        self._outcome = Outcome()
        self._number = 0
        self._state = asked.folder / _STATE
        self._counted = 0
        self._counting = threading.Lock()

    @property
    def published(self) -> int:
        """Files published so far, by earlier runs too."""
        return len(self._outcome.published)

    # The plan

    def describe(self, wanted: Sequence[Wanted]) -> dict[str, Any]:
        """For `--dry-run`: the plan of every group of files, and the files that cannot be used. Writes nothing."""
        scan, plans = self._scanned(wanted), []
        with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
            self._state = Path(folder)
            for group, stored in _groups(scan):
                try:
                    planned = self._planned(self._write_list(group, stored), resume=False)
                except NotTogether:
                    scan.alone.extend(file for file, _ in group)
                    continue
                except UserError as error:
                    scan.failed.update({file: self._about(error, group) for file, _ in group})
                    continue
                planned.output.discard()
                plan = {**planned.describe(), "input": str(group[0][0].input), "output": str(group[0][0].output)}
                plans.append({"files": len(group), **plan})
        for file in scan.alone:
            try:
                planned = plan_job(self._spec(file.input, file.output), self._device, self._asked.run)
            except UserError as error:
                scan.failed[file] = str(error)
                continue
            planned.output.discard()
            plans.append({"files": 1, **planned.describe()})
        failed = {str(file.input): why for file, why in scan.failed.items()}
        return {"files": len(wanted), "output": str(self._asked.folder), "plans": plans, "failed": failed}

    # The run

    def run(self, wanted: Sequence[Wanted]) -> dict[str, Any]:
        """Process every file and write the table; returns this run's part of it.

        Raises the first refusal if no file was published and each was refused by its plan; errors of the device or an
        audit, and of the disk if no file was published, end the run, which `resume` continues.
        """
        began, outcome = time.time(), self._outcome
        with self._owned():
            earlier = self._earlier() if self._asked.run.resume else {}
            left = [file for file in wanted if not self._is_published(file, earlier)]
            try:
                self._run_all(self._go_on(left) if self._asked.run.resume else left)
            except StorageError as error:
                if not outcome.published:
                    raise
                outcome.disk_error = error
            if outcome.refusals and not outcome.published:
                self._leave_nothing()
                raise outcome.refusals[0]
            receipt = self._receipt(wanted, began)
            self._write_table(receipt)
            shutil.rmtree(self._state)
        return receipt

    def _run_all(self, wanted: Sequence[Wanted]) -> None:
        scan = self._scanned(wanted)
        self._outcome.failed.update(scan.failed)
        for group, stored in _groups(scan):
            self._run_list(group, self._write_list(group, stored))
        for file in scan.alone:
            self._run_alone(file)

    def _scanned(self, wanted: Sequence[Wanted]) -> Scan:
        scan = Scan()
        if not takes_images(workload_named(self._asked.workload)):
            scan.alone.extend(wanted)
            return scan
        scan.add_all(wanted)
        self._tell(len(scan.failed))
        return scan

    def _write_list(self, group: Sequence[Listed], stored: StoredSamples | None) -> Path:
        self._number += 1
        path = self._state / f"{self._number:05d}{SUFFIX}"
        files = FileList(
            files=tuple(file for _, file in group), folder=str(self._asked.folder.absolute()), stored=stored
        )
        with writing(path):
            path.write_bytes(files.encoded())
        return path

    def _run_list(self, group: Sequence[Listed], listed: Path) -> None:
        """One job of a list. Files that cannot share chunks, or of which one fails at a late moment, are run alone."""
        outcome = self._outcome
        try:
            planned = self._planned(listed, resume=self._asked.run.resume)
        except NotTogether:
            listed.unlink()
            return self._run_each(group)
        except UserError as error:
            outcome.refusals.append(type(error)(self._about(error, group)))
            outcome.failed.update({file: str(outcome.refusals[-1]) for file, _ in group})
            self._tell(len(group))
            return None
        before, counted_before = published_before(planned) if self._asked.run.resume else None, self._counted
        try:
            events = RunEvents(on_written=lambda chunk: self._tell(chunk.region.shape[0]))
            receipt = before or run_job(planned, self._asked.run, events=events, stream=self._stream_what_fits)
        except InputError:
            listed.unlink()
            self._tell(counted_before - self._counted)
            return self._run_each(group)
        except MillraceError as error:
            error.args = (self._about(error, group), *error.args[1:])
            raise
        self._tell(counted_before + len(group) - self._counted)
        self._take(group, receipt)
        if outcome.disk_error is not None:
            raise type(outcome.disk_error)(self._about(outcome.disk_error, group))
        return None

    def _stream_what_fits(self, job: PlannedJob, plan: Plan, ledger: Ledger, events: RunEvents) -> StageRecord:
        """If the disk is full, leave out the files that are not written."""
        left, records = {chunk.index: chunk for chunk in plan.chunks}, list[StageRecord]()

        def written(chunk: Chunk) -> None:
            events.on_written(chunk)
            del left[chunk.index]

        try:
            return self._stream(job, plan, ledger, replace(events, on_written=written, on_begun=records.append))
        except StorageError as error:
            # Of a cluster, notes on damaged files may be on their way.
            if not isinstance(job.device, Device) or len(left) == len(job.plan.chunks):
                raise
            assert isinstance(job.job, LeavesOut)
            job.job.leave_out(
                [n for chunk in left.values() for n in range(chunk.region.start[0], chunk.region.stop[0])]
            )
            self._outcome.disk_error = error
            return records[-1]

    def _take(self, group: Sequence[Listed], receipt: Mapping[str, Any]) -> None:
        """Enter the files of a finished list."""
        failed = receipt["image"].get("failed", {})
        for number, (wanted, file) in enumerate(group):
            why = failed.get(str(number))
            if why is None:
                self._outcome.published[file.output] = _row(file)
            elif why != LEFT_OUT:
                self._outcome.failed[wanted] = why
        image = {name: value for name, value in receipt["image"].items() if name != "failed"}
        self._outcome.receipts.append({"files": len(group), **receipt, "image": image})

    def _run_each(self, group: Sequence[Listed]) -> None:
        for wanted, _ in group:
            self._run_alone(wanted)

    def _run_alone(self, wanted: Wanted) -> None:
        """One job of one file, with a receipt of its own beside the result."""
        spec = self._spec(wanted.input, wanted.output)
        try:
            planned = plan_job(spec, self._device, self._asked.run)
            if not (self._asked.run.resume and published_before(planned)):
                run_job(planned, self._asked.run, stream=self._stream)
        except UserError as error:
            self._outcome.failed[wanted] = str(error)
        else:
            version = planned.version
            row = [_absolute(wanted.input), version["bytes"], version["mtime_ns"], wanted.output.name]
            self._outcome.published[wanted.output.name] = row
            with writing(self._state), (self._state / _ALONE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self._tell(1)

    def _planned(self, listed: Path, *, resume: bool) -> PlannedJob:
        return plan_job(self._spec(listed, result_of(listed)), self._device, replace(self._asked.run, resume=resume))

    def _spec(self, source: Path, output: Path) -> JobSpec:
        return JobSpec(workload=self._asked.workload, input=source, output=output, parameters=self._asked.parameters)

    def _about(self, error: MillraceError, group: Sequence[Listed]) -> str:
        """An error of a list, in terms of its files."""
        first, text = group[0][0], str(error)
        others = f" and {counted(len(group) - 1, 'other file')} of its kind" if len(group) > 1 else ""
        listed = self._state / f"{self._number:05d}{SUFFIX}"
        for path, name in ((result_of(listed), first.output), (listed, first.input)):
            text = text.replace(str(path), f"{name}{others}")
        return text

    def _tell(self, count: int) -> None:
        if count:
            with self._counting:
                self._counted += count
            self._events.on_files(count)

    # What earlier runs did

    @contextmanager
    def _owned(self) -> Iterator[None]:
        """Makes both folders, and locks the second: one run at a time writes into the first."""
        folder, state = self._asked.folder, self._state
        if os.path.lexists(folder) and not folder.is_dir():
            raise OutputError(f"{folder}: is a file; name a folder for the results of several files")
        with writing(folder / _STATE):
            folder.mkdir(parents=True, exist_ok=True)
        with writing(state):
            state.mkdir(exist_ok=True)
        lock = open_existing(state, os.O_RDONLY | os.O_DIRECTORY, lock=True)
        try:
            self._begin()
            yield
        finally:
            os.close(lock)

    def _leave_nothing(self) -> None:
        """No file was begun."""
        shutil.rmtree(self._state)
        with suppress(OSError):  # it holds other files
            self._asked.folder.rmdir()

    def _begin(self) -> None:
        """Writes what the run is; refuses to resume another."""
        path = self._state / _JOB
        job = {
            "millrace": __version__,
            "workload": self._asked.workload,
            "parameters": json.loads(json.dumps(self._asked.parameters.in_force())),
        }
        if self._asked.run.resume:
            found = _read_json(path)
            if found not in (None, job):
                raise ParameterError(f"--resume: {self._state} is of another job; run again without --resume")
        else:
            for each in sorted(self._state.iterdir()):
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        with writing(path):
            path.write_text(json.dumps(job), encoding="utf-8")

    def _earlier(self) -> dict[str, list[Any]]:
        """The rows of files that earlier runs of the same job have published, by the result's name."""
        job, found = _read_json(self._state / _JOB), {}
        for run in (_read_json(self._asked.folder / TABLE) or {}).get("runs", []):
            if {name: run.get(name) for name in ("millrace", "workload", "parameters")} == job:
                self._outcome.receipts.extend(run["jobs"])
                found.update({row[3]: row[:4] for row in run["files"] if row[4] is None})
        with (self._state / _ALONE).open("a+", encoding="utf-8") as file:
            file.seek(0)
            for line in file:
                row = json.loads(line) if line.endswith("\n") else None  # the last one may be cut off
                if row is not None:
                    found[row[3]] = row[:4]
        for listed in self._lists():
            receipt = _read_json(receipt_path(result_of(listed)))
            if receipt is not None and result_of(listed).exists():
                failed = receipt["image"].get("failed", {})
                files = FileList.read(listed).files
                found.update({file.output: _row(file) for n, file in enumerate(files) if str(n) not in failed})
                self._outcome.receipts.append({"files": len(files), **receipt})
        return found

    def _lists(self) -> list[Path]:
        return sorted(each for each in self._state.glob(f"*{SUFFIX}") if each.stem.isdecimal())

    def _is_published(self, wanted: Wanted, earlier: Mapping[str, list[Any]]) -> bool:
        row = earlier.get(wanted.output.name)
        if row is None or not wanted.output.exists():
            return False
        if row[0] != _absolute(wanted.input) or tuple(row[1:3]) != _version(wanted.input):
            return False
        self._outcome.published[wanted.output.name] = row
        self._outcome.skipped += 1
        self._tell(1)
        return True

    def _go_on(self, left: Sequence[Wanted]) -> list[Wanted]:
        """Finishes the lists of an interrupted run whose files are all still wanted; returns the other files."""
        waiting = {wanted.output.name: wanted for wanted in left}
        for listed in self._lists():
            self._number = max(self._number, int(listed.stem))
            if receipt_path(result_of(listed)).exists():
                continue
            files = FileList.read(listed).files
            group = [(waiting[file.output], file) for file in files if _is_as_listed(waiting.get(file.output), file)]
            if len(group) < len(files):
                remove_leftovers(result_of(listed))
                listed.unlink()
                continue
            for wanted, _ in group:
                del waiting[wanted.output.name]
            number, self._number = self._number, int(listed.stem)
            self._run_list(group, listed)
            self._number = number
        return list(waiting.values())

    # The table

    def _receipt(self, wanted: Sequence[Wanted], began: float) -> dict[str, Any]:
        outcome, rows = self._outcome, []
        left = sum(file.output.name not in outcome.published and file not in outcome.failed for file in wanted)
        why_left = f"{counted(left, 'file')} not written: {outcome.disk_error}"
        for file in wanted:
            row = outcome.published.get(file.output.name)
            if row is None:
                row = [_absolute(file.input), None, None, file.output.name, outcome.failed.get(file, why_left)]
            else:
                row = [*row, None]
            rows.append(row)
        failed = sum(row[4] is not None for row in rows)
        return {
            "millrace": __version__,
            "workload": self._asked.workload,
            "parameters": json.loads(json.dumps(self._asked.parameters.in_force())),
            "request": self._asked.parameters.request(),
            "output": str(self._asked.folder.absolute()),
            "device": dict(self._device.describe()),
            "started": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_seconds": round(time.time() - began, 6),
            "published": len(rows) - failed,
            "skipped": outcome.skipped,
            "failed": failed,
            "jobs": outcome.receipts,
            "columns": ["input", "bytes", "mtime_ns", "output", "error"],
            "files": rows,
        }

    def _write_table(self, receipt: Mapping[str, Any]) -> None:
        """Adds this run to the table; files that it has made anew leave their older runs."""
        path = self._asked.folder / TABLE
        asked = {row[3] for row in receipt["files"]}
        made = {row[3] for row in receipt["files"] if row[4] is None}
        runs = []
        for run in (_read_json(path) or {}).get("runs", []):
            kept = [row for row in run["files"] if row[3] not in (made if row[4] is None else asked)]
            if kept:
                runs.append({**run, "files": kept})
        text = '{"runs": [\n' + ",\n".join(_with_rows(run) for run in (*runs, receipt)) + "\n]}\n"
        data = text.encode()
        file = PartialFile(path, len(data))
        try:
            file.write_at(0, data)
            file.publish()
        except MillraceError as error:
            raise StorageError(f"results are published, but not their table: {error}") from error
        finally:
            file.discard()


def _groups(scan: Scan) -> Iterator[tuple[Sequence[Listed], StoredSamples | None]]:
    """Files of one kind, as many as are published together."""
    for (kind, _), files in scan.kinds.items():
        count = max(1, min(GROUP_FILES, GROUP_BYTES // kind.nbytes))
        for first in range(0, len(files), count):
            yield files[first : first + count], kind.stored


def _row(file: ListedFile) -> list[Any]:
    return [file.path, file.nbytes, file.mtime_ns, file.output]


def _is_as_listed(wanted: Wanted | None, file: ListedFile) -> bool:
    if wanted is None or _absolute(wanted.input) != file.path:
        return False
    return _version(wanted.input) == (file.nbytes, file.mtime_ns)


def _version(path: Path) -> tuple[int, int] | None:
    """An input's bytes, and the time of its last change; None if it is gone."""
    try:
        if path.is_dir():
            version = input_version(path)
            return version["bytes"], version["mtime_ns"]
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _absolute(path: Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - a link stays one


def _with_rows(run: Mapping[str, Any]) -> str:
    """JSON with each file on a line of its own."""
    head = json.dumps({name: value for name, value in run.items() if name != "files"})
    rows = ",\n".join(json.dumps(row) for row in run["files"])
    return f'{head[:-1]}, "files": [\n{rows}\n]}}'


def _read_json(path: Path) -> Any:
    """None if there is none, or it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
