"""Runs a segment, a run of consecutive chunks, on the one device that a worker process owns.

A worker opens a job once and keeps its ring, streams and threads from segment to segment; two segments at a time are
in its pipeline, so that it never drains between them. Written chunks are durable and in the ledger before the segment
is done, and every few seconds before that. If its worker dies, the next one finds them there and does not repeat them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

from pipeline.cluster.job_memory import NO_SHARE, MemoryShare, meter
from pipeline.engine.checkpoints import Checkpoints
from pipeline.engine.device_pipeline import DevicePipeline, slot_bytes
from pipeline.engine.devices.device import Device
from pipeline.engine.devices.numa import near_cores, stay_on
from pipeline.engine.identity import input_version
from pipeline.engine.iterates import Iterates
from pipeline.engine.ledger import Ledger
from pipeline.engine.output import Output
from pipeline.engine.run import open_device, watch
from pipeline.engine.stages import StageCounts, StageRecord
from pipeline.errors import InputError, MillraceError, UserError, counted
from pipeline.storage.partial import Opening
from pipeline.workloads import Budget, Chunk, JobSpec, OpenJob, Plan, Workload, workload_named
from pipeline.workloads.many_files import open_job
from pipeline.workloads.protocol import HoldsInput, KeepsIterates

# Enough that work stealing balances the load, few enough that their overhead is negligible.
SEGMENTS_A_WORKER = 8
# How often a segment reports its progress.
REPORT_S = 0.5
# Number of ended jobs whose names a process keeps: late segments arrive within seconds.
ENDED_KEPT = 1000


@dataclass(frozen=True, kw_only=True)
class WorkerDevice:
    """How a worker opens its device; the names are those of the settings."""

    device: str
    threads: int | None


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A worker's device as planning needs it, and the process and host of the worker."""

    ring_depth: int
    lanes: Mapping[str, int]  # by stage, if it may have more than one
    chunk_range: tuple[int, int]
    description: Mapping[str, Any]
    host: str
    process: int


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A job as sent to workers. Paths are absolute: every worker sees the same files."""

    name: str  # unique to this run of the job
    spec: JobSpec
    budget: Budget
    held_bytes: int  # of input that the job may keep besides the chunks
    ledger_identity: Mapping[str, Any]
    worker_device: WorkerDevice
    share: MemoryShare = NO_SHARE
    gpu_memory_bytes: int | None = None  # of each GPU; None: no bound


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive chunks, by their numbers in the plan."""

    chunks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentReceipt:
    """The result of a segment; `stages` is empty if all its chunks were already in the ledger."""

    segment: Segment
    notes: tuple[Mapping[str, Any], ...]
    stages: StageCounts


def cut_segments(plan: Plan, workers: int) -> list[Segment]:
    """Runs of consecutive chunks, about `SEGMENTS_A_WORKER` for each worker, as even as whole chunks allow."""
    count = min(len(plan.chunks), SEGMENTS_A_WORKER * workers)
    bounds = [len(plan.chunks) * number // count for number in range(count + 1)]
    indices = [chunk.index for chunk in plan.chunks]
    return [Segment(chunks=tuple(indices[a:b])) for a, b in pairwise(bounds)]


# What runs on a worker


def profile(worker_device: WorkerDevice) -> DeviceProfile:
    """The device that this process owns."""
    device = own_device(worker_device)
    return DeviceProfile(
        ring_depth=device.ring_depth,
        lanes={"read": device.readers, "compute": device.lanes, "write": device.writers},
        chunk_range=device.chunk_range,
        description=device.describe(),
        host=socket.gethostname(),
        process=os.getpid(),
    )


def run_segment(
    job: ClusterJob, segment: Segment, report: Callable[[StageCounts], None], check: Callable[[], None] = lambda: None
) -> SegmentReceipt:
    """Compute and write the segment's chunks, and enter them in the ledger. Blocks until they are durable.

    report : called about twice a second with the stages' totals so far
    check  : called before the first chunk and after each; raises if the segment is no longer wanted

    Raises as the pipeline does: MillraceError if the job itself fails.
    """
    check()
    ledger = Ledger(job.spec.output, job.ledger_identity)
    found = ledger.within(segment.chunks)
    finished = {chunk for entry in found for chunk in entry.chunks}
    left = [chunk for chunk in segment.chunks if chunk not in finished]
    notes = tuple(entry.notes for entry in found)
    if not left:
        return SegmentReceipt(segment=segment, notes=notes, stages={})
    record, reported_at = StageRecord(), time.monotonic()

    def written(chunk: Chunk) -> None:
        nonlocal reported_at
        checkpoints.note(chunk)
        check()
        meter.look()
        if time.monotonic() - reported_at >= REPORT_S:
            reported_at = time.monotonic()
            report(record.counts())

    with (
        _noted(job, left[0]) as running,
        _using(job, running) as opened,
        _checkpoints(ledger, opened) as checkpoints,
    ):
        opened.pipeline.stream([opened.chunks[index] for index in left], written, record=record)
    notes += tuple(entry.notes for entry in checkpoints.saved)
    return SegmentReceipt(segment=segment, notes=notes, stages=record.counts())


def _checkpoints(ledger: Ledger, opened: _OpenJob) -> Checkpoints:
    iterating = opened.output.job if isinstance(opened.output.job, KeepsIterates) else None
    if iterating is not None:
        iterating.keep_iterates(Iterates(ledger, joined=True))
    return Checkpoints(ledger, opened.output, opened.device.name, joined=True, has_iterates=iterating is not None)


@dataclass(kw_only=True, eq=False)
class _Running:
    """A running segment; times are of the monotonic clock."""

    job: str
    first: int  # of its chunks
    began: float | None = None  # once other jobs are opened, for which it waits
    pipeline: DevicePipeline | None = None  # once the job is open

    def in_hand(self) -> tuple[int, float]:
        assert self.began is not None
        chunk, since = self.pipeline.oldest_step if self.pipeline is not None else (None, 0.0)
        return (self.first, max(since, self.began)) if chunk is None else (chunk, since)


_running: set[_Running] = set()


@contextmanager
def _noted(job: ClusterJob, first: int) -> Iterator[_Running]:
    segment = _Running(job=job.name, first=first)
    _running.add(segment)
    try:
        yield segment
    finally:
        _running.discard(segment)


def in_hand() -> dict[str, tuple[int, float]]:
    """For each job with running segments, the chunk that has been in one stage longest, and for how many seconds.

    While the job is opened, or chunks are made durable, it is the segment's first chunk.
    """
    now = time.monotonic()
    found = {segment.job: segment.in_hand() for segment in list(_running) if segment.began is not None}
    return {job: (chunk, now - since) for job, (chunk, since) in found.items()}


def opening() -> dict[str, float]:
    """Seconds since each job began to be opened, planned and given its ring here."""
    now = time.monotonic()
    return {
        segment.job: now - segment.began
        for segment in list(_running)
        if segment.began is not None and segment.pipeline is None
    }


# Set when this process is about to end.
leaving = threading.Event()


def leave() -> None:
    """Before this process ends: stop running segments after the chunks in hand, which are entered in the ledger."""
    leaving.set()
    with _opening:
        names = list(_jobs)
    for name in names:
        close_job(name)


def close_job(name: str, within_s: float | None = None) -> None:
    """Release what this process holds for a job, and refuse its further segments; harmless if it holds nothing.

    Running segments end after the chunks in hand, which are entered in the ledger; chunks that take longer than
    `within_s` are given up.
    """
    with _opening:
        _ended.add(name)
        opened = _jobs.pop(name, None)
        idle = opened is not None and opened.users == 0
    if opened is None:
        return
    if idle:
        opened.close()
        return
    opened.stop(job_was_ended(), within_s)
    opened.closed.wait()


def job_was_ended() -> MillraceError:
    """The error of work on a job that has ended."""
    return MillraceError("the job was ended")


class EndedJobs:
    """The latest jobs that ended here. A late segment must not reopen one: it would write into an output that is being
    removed, or into the next one of that name. Not thread-safe."""

    def __init__(self) -> None:
        self._names: deque[str] = deque(maxlen=ENDED_KEPT)

    def add(self, name: str) -> None:
        """Remember an ended job."""
        if name not in self._names:
            self._names.append(name)

    def refuse(self, name: str) -> None:
        """MillraceError if the job has ended."""
        if name in self._names:
            raise job_was_ended()


class _OpenJob:
    """A job, joined to its output, and a running pipeline; `users`: the segments that use it."""

    def __init__(self, job: ClusterJob, device: Device) -> None:
        """Raises as `join_output`; MillraceError if this process cuts the job into other chunks."""
        self.name = job.name
        self.users = 0
        self.closed = threading.Event()
        self._stopping = threading.Lock()
        self._stopped = False
        self.output = join_output(job, lambda workload: open_job(workload, job.spec))
        self.device = bounded(device, job, self.output.job)
        try:
            plan = self.output.job.plan(job.budget)
            self.chunks: Sequence[Chunk] = plan.chunks
            if len(plan.chunks) != job.ledger_identity["chunks"]:
                cut = counted(len(plan.chunks), "chunk")
                raise MillraceError(f"{_here()} cuts the job into {cut}, unlike the others")
            slots = min(device.ring_depth, len(plan.chunks))
            self.pipeline = DevicePipeline(self.device, self.output, slot_bytes(plan.chunks), slots=slots)
            self.pipeline.__enter__()
        except BaseException:
            self.output.discard()
            raise

    def stop(self, error: MillraceError | None = None, within_s: float | None = None) -> None:
        """End the pipeline: with an error, after the chunks in hand, and `stream` raises it; else after all chunks."""
        with self._stopping:
            if not self._stopped:
                if error is not None:
                    self.pipeline.end(error, within_s)
                else:
                    self.pipeline.__exit__(None, None, None)
                self._stopped = True

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self.output.discard()
            del self.pipeline  # with its ring
            meter.closed(self.name)
            self.closed.set()


_jobs: dict[str, _OpenJob] = {}
_ended = EndedJobs()
_opening = threading.Lock()


@contextmanager
def _using(job: ClusterJob, running: _Running) -> Iterator[_OpenJob]:
    """The job as this process has it open; it stays open while it is in use. MillraceError if it has ended."""
    with _opening:
        running.began = time.monotonic()
        _ended.refuse(job.name)
        opened = _jobs.get(job.name)
        if opened is None:
            _close_idle()
            with metered(job):
                opened = _jobs[job.name] = _OpenJob(job, own_device(job.worker_device))
        opened.users += 1
    running.pipeline = opened.pipeline
    failed = True
    try:
        yield opened
        failed = False
    finally:
        with _opening:
            if failed and _jobs.get(job.name) is opened:
                del _jobs[job.name]  # its pipeline has failed: the next segment opens another
            opened.users -= 1
            last = opened.users == 0 and _jobs.get(job.name) is not opened
        if last:
            opened.close()


def _close_idle() -> None:
    """Free unused rings before another is allocated: two might not fit the device."""
    for name in [name for name, opened in _jobs.items() if opened.users == 0]:
        _jobs.pop(name).close()


# The description of this process's device for the receipt, once it is open.
opened_device: dict[str, Any] = {}


@cache
def own_device(worker_device: WorkerDevice) -> Device:
    """The device of this process, opened once."""
    device = open_device(worker_device.device, worker_device.threads)
    watch(device)
    opened_device.update(device.describe())
    pci_address = opened_device.get("pci")
    if pci_address is not None:
        stay_on(near_cores(pci_address))
    return device


@contextmanager
def metered(job: ClusterJob) -> Iterator[None]:
    """Opens a job; its memory is measured until `meter.closed`."""
    meter.opened(job.name, job.share)
    try:
        yield
    except BaseException:
        meter.closed(job.name)
        raise


def bounded(device: Device, job: ClusterJob, opened: OpenJob) -> Device:
    """The device within the job's bounds on GPU memory, if it has any."""
    measured: Callable[[int], None] = lambda nbytes: None  # noqa: E731
    if job.gpu_memory_bytes is not None:
        measured = partial(meter.note_gpu, job.name)
    return device.for_job(opened, job.gpu_memory_bytes, measured)


def join_output(job: ClusterJob, open_job: Callable[[Workload], OpenJob]) -> Output:
    """Open the job in this process and join the output that all its processes write.

    Raises UserError that names this host if it does not see the same files, MillraceError if the job has ended.
    """
    try:
        refuse_other_input(job)
        workload = workload_named(job.spec.workload)
        output = Output(workload, open_job(workload))
        try:
            if isinstance(output.job, HoldsInput):
                output.job.hold_at_most(job.held_bytes)
            output.open(Opening.JOIN)
            # A worker that stood still while it opened the job may have joined the output of a later one.
            if not Ledger(job.spec.output, job.ledger_identity).is_this_runs:
                raise job_was_ended()
        except BaseException:
            output.discard()
            raise
    except UserError as error:
        raise type(error)(f"{_here()}: {error}") from error
    return output


def refuse_other_input(job: ClusterJob) -> None:
    """InputError if the input differs here; times may differ by 2 s, the resolution of the coarsest file systems."""
    path, expected = job.spec.input, job.ledger_identity["input"]
    found = input_version(path) if path.exists() else expected  # the reader reports a missing file
    seconds = [version["mtime_ns"] // 10**9 for version in (found, expected)]
    if (found["bytes"], found["files"]) != (expected["bytes"], expected["files"]) or abs(seconds[0] - seconds[1]) > 2:
        raise InputError(
            f"{path}: is not the input that the job was started with; every worker must see the same files"
        )


def _here() -> str:
    return f"the worker process {os.getpid()} on {socket.gethostname()}"
