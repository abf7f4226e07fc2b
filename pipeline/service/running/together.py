"""Jobs of one array that run together: small images of one kind are one run, as in `pipeline.engine.many`.

A run together can only succeed: every job that is not published (its file is damaged or of another
kind, a limit, a lost worker) is queued again and then runs alone, which decides what becomes of it. So are cancelled
jobs, which the state machine then ends.

While it lasts, a folder `.millrace-ARRAY-NUMBER` beside the results holds the list of files and unpublished results.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.engine.identity import sha256_of_file
from pipeline.engine.listing import Wanted, alike, takes_images
from pipeline.engine.planned import PlannedJob
from pipeline.engine.receipt import to_json
from pipeline.engine.run import RunEvents, run_job
from pipeline.errors import MillraceError, UserError
from pipeline.formats.image.file_list import SUFFIX, FileList, ListedFile, StoredSamples, result_of, sha256_of
from pipeline.formats.image.preview import write_preview
from pipeline.service.jobs import ACTIVE, Computed, Event, Job, Planned
from pipeline.service.running.job_process import JobProcesses
from pipeline.service.running.parameters import parameters_of
from pipeline.service.running.run import PREVIEW_BYTES, Run, StopRequested, estimate_of
from pipeline.service.store import MOST_COMPANY, Facts, StoredJob
from pipeline.storage.confinement import Subfolders, in_its_folder, put_within
from pipeline.storage.objects import ObjectPath
from pipeline.storage.partial import partial_path, samples_path, sync_file_system
from pipeline.storage.positional import OpenFolder
from pipeline.storage.writable import writing
from pipeline.workloads import JobSpec, Parameters, workload_named
from pipeline.workloads.many_files import LeavesOut
from pipeline.workloads.paths import ledger_path, receipt_path, refuse_same_file

# Larger images gain little from company. Of the samples; files may be a little longer, or compressed.
MOST_BYTES = 8 << 20
MOST_FILE_BYTES = MOST_BYTES + (1 << 20)
MOST_BYTES_TOGETHER = 1 << 30
# What reading their headers may allocate.
MOST_SCAN_BYTES = 1 << 30
# How many jobs of an array run together: so many at first, then as many as take about so long.
FIRST_COMPANY, TOGETHER_S, GROWTH = 16, 8.0, 8
_ARRAYS_KEPT = 1000
# For drawing a preview that somebody waits for.
LATE_PREVIEW_S = 20.0


class Sizes:
    """How many jobs of an array should run together, by the time that earlier ones took."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # by array

    def of(self, array_id: str) -> int:
        return self._sizes.get(array_id, FIRST_COMPANY)

    def took(self, array_id: str, count: int, seconds: float) -> None:
        self._keep(array_id, max(1, min(int(count * TOGETHER_S / max(seconds, 1e-3)), GROWTH * count, MOST_COMPANY)))

    def failed(self, array_id: str, count: int) -> None:
        """They failed together: the next ones are fewer, so that one bad file does not keep many from running."""
        self._keep(array_id, max(1, count // GROWTH))

    def _keep(self, array_id: str, size: int) -> None:
        self._sizes.pop(array_id, None)
        self._sizes[array_id] = size
        if len(self._sizes) > _ARRAYS_KEPT:
            del self._sizes[next(iter(self._sizes))]


@dataclass(frozen=True)
class Member:
    """One of the jobs, and its file."""

    claimed: StoredJob
    file: ListedFile

    @property
    def job(self) -> Job:
        return self.claimed.job


@dataclass(frozen=True)
class Company:
    """Jobs to run together, the run's own first."""

    members: Sequence[Member]
    stored: StoredSamples | None  # how every file holds its samples
    folder: Path  # of the results


def may_have_company(claimed: StoredJob) -> bool:
    """Whether this job was claimed for the first time, and others of its array may run together with it."""
    asked = claimed.asked
    is_first = asked.array_id is not None and claimed.job.epoch == 1 and not asked.no_clobber
    return is_first and takes_images(workload_named(asked.workload))


def gathered(
    run: Run,
    most: int,
    waiting: Callable[[int], Sequence[StoredJob]],
    claim: Callable[[Sequence[StoredJob]], Sequence[StoredJob]],
) -> Company | None:
    """Up to `most` jobs to run together; None: the run's job runs alone.

    waiting : returns up to that many further jobs
    claim   : claims jobs; returns those that were still waiting

    Raises StopRequested; ProcessDied if reading the headers takes down the process.
    """
    try:
        parameters = parameters_of(run.claimed.asked, run.roots)
        first = _wanted(run, run.claimed, parameters)
    except (UserError, OSError):  # running alone finds what is wrong
        return None
    if first is None:
        return None
    found = {first: run.claimed}
    most = min(most, MOST_BYTES_TOGETHER // max(first.input.stat().st_size, 1))
    for each in waiting(most - 1) if most > 1 else ():
        with suppress(UserError, OSError):
            wanted = _wanted(run, each, parameters)
            if wanted is not None and wanted.output.parent == first.output.parent:
                found[wanted] = each
    if len(found) < 2:
        return None
    lease, listed = run.leased(run.check_planning), (list(found), MOST_BYTES)
    if lease is None:
        stored, files = alike(first.input, *listed)
    else:
        stored, files = lease.call(alike, first.input, *listed, known=run.roots.confine(), most_bytes=MOST_SCAN_BYTES)
    if len(files) < 2:
        return None
    jobs = [found[wanted] for wanted, _ in files]
    claimed = {each.job.id: each for each in (run.claimed, *claim(jobs[1:]))}
    members = [
        Member(claimed[each.job.id], file)
        for each, (_, file) in zip(jobs, files, strict=True)
        if each.job.id in claimed
    ]
    return Company(members, stored, first.output.parent) if len(members) > 1 else None


def _wanted(run: Run, stored: StoredJob, parameters: Parameters) -> Wanted | None:
    """The file of a job; None if it is large or no file, or something is left of an earlier run on its output.

    Raises UserError or OSError if the job cannot run.
    """
    asked = stored.asked
    read, written = run.roots.within(asked.input), run.roots.writable(asked.output)
    if isinstance(read, ObjectPath) or isinstance(written, ObjectPath):
        return None
    found = read.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_FILE_BYTES:
        return None
    if os.path.lexists(partial_path(written)) or os.path.lexists(ledger_path(written)):
        return None
    # The input exists: what does not exist is another file.
    if any(map(os.path.lexists, (written, receipt_path(written), partial_path(samples_path(written))))):
        if os.path.lexists(written) and not written.is_file():
            return None
        refuse_same_file(JobSpec(workload=asked.workload, input=read, output=written, parameters=parameters))
    return Wanted(read, written)


class Together:
    """One run of several jobs."""

    def __init__(
        self, run: Run, company: Company, tell_all: Callable[[Sequence[tuple[str, Event, Facts]]], list[Job]]
    ) -> None:
        """`tell_all`: stores events, and returns the changed jobs"""
        self._run, self._company, self._tell_all = run, company, tell_all
        self._members = company.members
        self._state = company.folder / f".millrace-{run.claimed.asked.array_id}-{run.claimed.number}"
        self._kept: list[int] = list(range(len(self._members)))  # numbers of the files to publish

    def carry_out(self) -> dict[str, Mapping[str, Any]]:
        """Runs the jobs; returns the receipts of those that are published. Raises as `run_job`, or StopRequested."""
        run = self._run
        options = replace(run.options, job=None, resume=False)
        with self._folder(), ThreadPoolExecutor(1, "input-sha256") as hashing:
            planned = run.planned(self._spec(), options, self._check_planning)
            try:
                self._planned(planned)
            except BaseException:
                planned.output.discard()
                raise
            digests = hashing.submit(self._digests)
            events = RunEvents(
                on_begun=run.begin, on_computed=partial(self._computed, planned), on_memory=run.note_memory,
                check=self._check,
            )  # fmt: skip
            receipt = run_job(planned, options, events=events, stream=run.executor.stream)
            return self._published(receipt, digests.result())

    def _spec(self) -> JobSpec:
        """The job of the list of files, which this writes."""
        company, asked = self._company, self._run.claimed.asked
        files = FileList(
            files=tuple(each.file for each in company.members), folder=str(company.folder), stored=company.stored
        )
        path, text = self._state / f"1{SUFFIX}", files.encoded()
        with writing(path), in_its_folder(path) as here:
            here.write_bytes(text)
        return JobSpec(
            workload=asked.workload, input=path, output=result_of(path),
            parameters=parameters_of(asked, self._run.roots), confinement=self._run.roots.confine(),
            list_sha256=sha256_of(text),
        )  # fmt: skip

    @contextmanager
    def _folder(self) -> Iterator[None]:
        with writing(self._state), in_its_folder(self._state) as here:
            here.mkdir(mode=0o700)
        try:
            yield
        finally:
            _remove(self._state)

    def _check_planning(self) -> None:
        self._check()
        self._run.check_planning()

    def _planned(self, planned: PlannedJob) -> None:
        self._run.wait_for_place()
        count, (estimate, work) = len(self._members), estimate_of(planned)
        share = {name: value // count for name, value in estimate.items()} | {
            "chunks": 1, "memory_bytes": estimate["memory_bytes"]
        }  # fmt: skip
        self._go_on_after(lambda epoch: Planned(epoch, 1), Facts(estimate=share, work=work // count))
        self._check()

    def _computed(self, planned: PlannedJob) -> None:
        """Every chunk is written, and the audit has passed: those that are to be published go on."""
        self._check()
        failed = planned.job.summary.remarks.get("failed", {})
        self._kept = [number for number in self._kept if str(number) not in failed]
        self._go_on_after(Computed)
        assert isinstance(planned.job, LeavesOut), "it is of a list of files"
        planned.job.leave_out(sorted(set(range(len(self._members))) - set(self._kept)))

    def _go_on_after(self, event: Callable[[int], Event], facts: Facts | None = None) -> None:
        """Stores the event of those that are kept; keeps those that this run still owns, and that are not cancelled."""
        asked = [self._members[number].job for number in self._kept]
        jobs = self._tell_all([(each.id, event(each.epoch), facts or Facts()) for each in asked])
        self._kept = [
            number for number, before, job in zip(self._kept, asked, jobs, strict=True)
            if job.epoch == before.epoch and job.state in ACTIVE and not job.cancelling
        ]  # fmt: skip
        if not self._kept:
            raise StopRequested

    def _check(self) -> None:
        self._run.check()
        if all(self._members[number].job.id in self._run.cancelled for number in self._kept):
            raise StopRequested

    def _digests(self) -> dict[int, str | None]:
        """The SHA-256 of each input, by number; None if it has changed since."""
        found: dict[int, str | None] = {}
        for number, member in enumerate(self._members):
            if self._run.stopping.is_set():
                break
            path = Path(member.file.path)
            found[number] = None
            with suppress(OSError):
                digest, now = sha256_of_file(path), path.stat()
                if (now.st_size, now.st_mtime_ns) == (member.file.nbytes, member.file.mtime_ns):
                    found[number] = digest
        return found

    def _published(self, receipt: Mapping[str, Any], digests: Mapping[int, str | None]) -> dict[str, Mapping[str, Any]]:
        """Writes the receipts of the published files."""
        found: dict[str, Mapping[str, Any]] = {}
        folder, shared = self._company.folder, self._shared(receipt)
        text = to_json(shared)
        with writing(folder / "_"), closing(OpenFolder(folder)) as opened, opened.in_use() as descriptor:
            folders = Subfolders(descriptor)
            try:
                for number in self._kept:
                    member = self._members[number]
                    own = self._own(member, digests.get(number))
                    found[member.job.id] = {**own, **shared}
                    name = receipt_path(Path(member.file.output)).name
                    # The JSON of both: of hundreds of jobs it is mostly the same.
                    whole = f"{to_json(own).removesuffix('}').rstrip()},{text.removeprefix('{')}\n"
                    put_within(folders, name, [whole.encode()], f"{self._state.name}/receipt")
                sync_file_system(descriptor)
            finally:
                folders.close()
        return found

    def _shared(self, receipt: Mapping[str, Any]) -> dict[str, Any]:
        """What every job's receipt says: the device, the times, the stages and the audit are of all jobs together."""
        count = len(self._members)
        image = {name: value for name, value in receipt["image"].items() if name != "failed"}
        return {
            **{name: value for name, value in receipt.items() if name not in ("job", "input", "output")},
            "image": image | {"shape": image["shape"][1:], "axes": image["axes"][1:]},
            "chunks": 1,
            "chunk_shape": receipt["chunk_shape"][1:],
            "halo": receipt["halo"][1:],
            "read_bytes": receipt["read_bytes"] // count,
            "written_bytes": receipt["written_bytes"] // count,
            "together": count,
        }

    def _own(self, member: Member, digest: str | None) -> dict[str, Any]:
        file = member.file
        return {
            "job": member.job.id,
            "input": {"path": file.path, "bytes": file.nbytes, "mtime": file.mtime_ns / 10**9, "sha256": digest},
            "output": str(self._company.folder / file.output),
        }


def draw_late_preview(
    stored: StoredJob, output: Path, picture: Path, processes: JobProcesses, confinement: object
) -> None:
    """Draws the preview of a job that ran together with others, when it is first asked for: drawing all of them would
    take longer than the jobs. Draws none if the output cannot be drawn, or was changed since."""
    if stored.receipt is None or "together" not in stored.receipt or picture.is_file():
        return
    with suppress(MillraceError, OSError):
        if output.stat().st_mtime <= (stored.finished_at or 0.0):
            processes.look(
                output, write_preview, picture, known=confinement, most_bytes=PREVIEW_BYTES, most_s=LATE_PREVIEW_S
            )


def remove_what_is_left(folder: Path, array_id: str) -> None:
    """Removes what runs of an array's jobs have left in the folder of their results as the server was killed; none may
    be under way."""
    with suppress(OSError):
        for each in folder.glob(f".millrace-{array_id}-*"):
            _remove(each)


def _remove(folder: Path) -> None:
    with suppress(OSError), in_its_folder(folder) as here:
        shutil.rmtree(here, ignore_errors=True)
