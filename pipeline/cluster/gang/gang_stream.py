"""Streams jobs whose ranks share the work of every chunk: one gang for each run of chunks.

In a `SharedJob` each rank computes its shards over the whole run of chunks; the partial results are combined in an
order that depends on the shards alone; then every rank writes some of the chunks. In a `JointJob` the ranks compute
one chunk after another together, with all-reduces, and rank 0 writes it. Written chunks are durable and in the ledger
before the next run of chunks begins.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from pipeline import metrics
from pipeline.cluster.gang.gang import GangLimits, GangResult, GangWorkers, run_gang
from pipeline.cluster.gang.member import Member
from pipeline.cluster.gang.rank_device import RankDevice
from pipeline.cluster.job_memory import meter
from pipeline.cluster.segments import ClusterJob, EndedJobs, bounded, join_output, metered, own_device
from pipeline.engine.iterates import Iterates
from pipeline.engine.ledger import Entry, Ledger
from pipeline.engine.output import Output
from pipeline.engine.planned import PlannedJob
from pipeline.engine.run import RunEvents
from pipeline.engine.stages import StageCounts, StageRecord
from pipeline.errors import OutOfDeviceMemory
from pipeline.formats.image.base import Region
from pipeline.workloads import Chunk, OpenJob, Plan, Workload
from pipeline.workloads.gang_protocols import JointJob, SharedJob, SharedWorkload
from pipeline.workloads.protocol import KeepsIterates, Progress

# Ranks wait for the slowest, which may have many shards to compute; they learn of a dead rank at once.
COLLECTIVE_SECONDS = 24 * 3600.0
LIMITS = GangLimits(collective_s=COLLECTIVE_SECONDS, lock_s=None)
SHARDS_A_RANK = 2
# How often a rank is asked for its progress.
ASK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive chunks of the plan whose regions together are one region."""

    chunks: tuple[Chunk, ...]
    region: Region

    @property
    def size(self) -> int:
        return math.prod(self.region.shape)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """A rank's result of a run: the chunks it wrote, their notes, and its stages' totals."""

    chunks: tuple[int, ...]
    notes: Mapping[str, Any]
    share_notes: Mapping[str, Any]
    stages: StageCounts
    device: str


class GangStream:
    """A `SharedJob` or a `JointJob` over the workers of a cluster."""

    def __init__(
        self, workers: GangWorkers, cluster_job: ClusterJob, job: PlannedJob, *, ranks: int, memory_bytes: int
    ) -> None:
        """`memory_bytes`: host memory for all ranks together, which may be on one host."""
        self._workers = workers
        self._cluster_job = cluster_job
        self._job = job
        self._ranks = ranks
        self._memory_bytes = memory_bytes

    @property
    def is_better(self) -> bool:
        """Whether sharing chunks beats a segment for each worker, and the memory allows it."""
        job, chunks = self._job.job, self._job.plan.chunks
        if isinstance(job, JointJob):
            return job.joint_parts(chunks, self._ranks) > 0
        if not isinstance(job, SharedJob) or job.shards < max(2, SHARDS_A_RANK * self._ranks):
            return False
        return max(math.prod(chunk.region.shape) for chunk in chunks) <= self._most_samples(job)

    def stream(self, plan: Plan, ledger: Ledger, events: RunEvents, record: StageRecord) -> None:
        """Stream the plan's chunks, run by run, each on all workers together. Raises as `run_gang`."""
        for totals in record.totals.values():
            totals.lanes = self._ranks  # all threads of a rank compute the same frame, and one reads
        with record.timed():
            self._stream(plan, ledger, events, record)

    def _stream(self, plan: Plan, ledger: Ledger, events: RunEvents, record: StageRecord) -> None:
        job, output = self._job.job, self._job.output
        try:
            if isinstance(job, JointJob):
                self._stream_jointly(job, plan, ledger, events, record)
                return
            assert isinstance(job, SharedJob)
            for run in cut_runs(plan.chunks, self._most_samples(job)):
                events.check()
                arguments = (self._cluster_job, job.facts(), run)
                found = run_gang(self._workers, compute_run, job.shards, *arguments, limits=LIMITS, check=events.check)
                _take_in(found, output, ledger, record)
                for chunk in run.chunks:
                    events.on_written(chunk)
        finally:
            with suppress(Exception):  # lost workers hold nothing
                self._workers.tell(list(self._workers.last_heard()), _close_soon, self._cluster_job.name)

    def _stream_jointly(
        self, job: JointJob, plan: Plan, ledger: Ledger, events: RunEvents, record: StageRecord
    ) -> None:
        parts = job.joint_parts(self._job.plan.chunks, self._ranks)
        with self._followed(job):
            for chunk in plan.chunks:
                events.check()
                arguments = (self._cluster_job, chunk.index)
                found = run_gang(self._workers, compute_jointly, parts, *arguments, limits=LIMITS, check=events.check)
                _take_in(found, self._job.output, ledger, record)
                ledger.drop_iterates([chunk.index])
                events.on_written(chunk)

    @contextmanager
    def _followed(self, job: JointJob) -> Iterator[None]:
        """Passes the progress of one rank on to the job: all ranks are at the same iteration."""
        ended = threading.Event()

        def ask() -> None:
            while not ended.wait(ASK_SECONDS):
                with suppress(Exception):  # the gang reports failed workers
                    answered = threading.Event()
                    there = sorted(self._workers.last_heard())[0]
                    call = self._workers.start_on(there, progress_of, self._cluster_job.name, on_done=answered.set)
                    if answered.wait(ASK_SECONDS):
                        job.take_progress(call.result())

        asking = threading.Thread(target=ask, name="gang-progress", daemon=True)
        asking.start()
        try:
            yield
        finally:
            ended.set()
            asking.join(2 * ASK_SECONDS)

    def _most_samples(self, job: SharedJob) -> int:
        """The most samples in a run such that the partial results of all ranks fit the memory."""
        held = -(-job.shards // self._ranks)
        return self._memory_bytes // self._ranks // job.share_bytes(held)


def cut_runs(chunks: Sequence[Chunk], most_samples: int) -> list[Run]:
    """Join chunks along the first axis into boxes, each as long as the memory allows."""
    runs: list[Run] = []
    for chunk in chunks:
        last = runs[-1] if runs else None
        joined = _joined(last.region, chunk.region) if last is not None else None
        if last is not None and joined is not None and math.prod(joined.shape) <= most_samples:
            runs[-1] = Run(chunks=(*last.chunks, chunk), region=joined)
        else:
            runs.append(Run(chunks=(chunk,), region=chunk.region))
    return runs


def _joined(first: Region, second: Region) -> Region | None:
    """Both as one region if they adjoin along the first axis."""
    alike = (first.start[1:], first.stop[1:]) == (second.start[1:], second.stop[1:])
    return Region(first.start, second.stop) if alike and first.stop[0] == second.start[0] else None


def _take_in(found: GangResult, output: Output, ledger: Ledger, record: StageRecord) -> None:
    """Take over the ranks' reports; the ledger only after all of them."""
    for report in found.values:
        record.include(report.stages)
        output.add_notes(report.notes)
        if isinstance(output.job, SharedJob):
            output.job.add_share_notes(report.share_notes)
    for report in found.values:
        if report.chunks:
            ledger.add(Entry(chunks=report.chunks, notes=report.notes, device=report.device))


# What runs on a worker


_at_work = metrics.AtWork({})


@_at_work
def compute_run(member: Member, job: ClusterJob, facts: Any, run: Run) -> RankReport:
    """Compute this rank's shards of a run, combine those of all ranks, and write this rank's chunks durably."""
    output = _opened(job, facts)
    shared, device = output.job, bounded(own_device(job.worker_device), job, output.job)
    device.enter()
    rank = RankDevice(device, member)
    assert isinstance(shared, SharedJob)
    try:
        with device.allocating():
            member.compute(lambda shard: shared.share(run.region, shard, rank))
            total = member.reduce(shared.reduction, deterministic=True)
        member.communicator.confirm()  # chunks written from a bad sum would be noted for the audit
        mine = run.chunks[member.rank :: member.size]
        if mine:
            _write(output, shared.whole, mine, run.region, total, rank.record)
    except MemoryError as error:  # CuPy's too is one
        raise OutOfDeviceMemory(f"{device.name}: {error}; lower --memory") from error
    return _report(output, rank.record, mine, device.name, shared.share_notes())


def _write(
    output: Output,
    whole: Callable[[Region, Any], NDArray[Any]],
    chunks: Sequence[Chunk],
    region: Region,
    total: Any,
    record: StageRecord,
) -> None:
    """Bring this rank's chunks of the result from the device to the disk."""
    began = time.perf_counter()
    values = whole(region, total)
    brought = time.perf_counter()
    for chunk in chunks:
        output.write(chunk, [_part(values, region, chunk.region)])
    output.flush()
    nbytes = sum(chunk.output_bytes for chunk in chunks)
    record.add("download", chunks[0].index, began, brought, nbytes)
    record.add("write", chunks[0].index, brought, time.perf_counter(), nbytes)


@_at_work
def compute_jointly(member: Member, job: ClusterJob, number: int) -> RankReport:
    """Do this rank's part of one chunk; rank 0 writes it durably."""
    output = _opened(job, None)
    joint, device = output.job, bounded(own_device(job.worker_device), job, output.job)
    device.enter()
    rank = RankDevice(device, member)
    assert isinstance(joint, JointJob)
    if isinstance(joint, KeepsIterates):
        joint.keep_iterates(Iterates(Ledger(job.spec.output, job.ledger_identity), joined=True))
    record, began = rank.record, time.perf_counter()
    try:
        chunk = joint.plan(job.budget).chunks[number]
        with device.allocating():
            outputs = joint.compute_jointly(chunk, member, rank)
    except MemoryError as error:  # CuPy's too is one
        raise OutOfDeviceMemory(f"{device.name}: {error}; split the coils over more workers") from error
    computed = time.perf_counter()
    mine = (chunk,) if outputs is not None else ()
    nbytes = chunk.output_bytes * len(mine)
    # Reading is on this thread too.
    record.add("compute", number, began + record.totals["read"].seconds, computed, nbytes)
    if outputs is not None:
        output.write(chunk, outputs)
        output.flush()
        record.add("write", number, computed, time.perf_counter(), nbytes)
    return _report(output, record, mine, device.name, {})


def _report(
    output: Output, record: StageRecord, chunks: Sequence[Chunk], device: str, share_notes: Mapping[str, Any]
) -> RankReport:
    """Also counts the bytes read and the chunks written in this process's metrics."""
    count = metrics.work_of(output.workload.name, output.workload.unit)
    count.read(record.totals["read"].nbytes)
    for chunk in chunks:
        count.written(chunk.output_bytes, chunk.work)
    numbers = tuple(chunk.index for chunk in chunks)
    notes = output.take_notes(numbers)
    return RankReport(chunks=numbers, notes=notes, share_notes=share_notes, stages=record.counts(), device=device)


def progress_of(name: str) -> str:
    """The job's progress in this process, in a few words; empty if unknown."""
    with _opening:
        found = _open.get(name)
    return found.job.progress_note() if found is not None and isinstance(found.job, Progress) else ""


def _part(values: NDArray[Any], region: Region, part: Region) -> NDArray[Any]:
    bounds = zip(part.start, part.stop, region.start, strict=True)
    return values[tuple(slice(start - first, stop - first) for start, stop, first in bounds)]


_open: dict[str, Output] = {}
_ended = EndedJobs()
_opening = threading.Lock()


def _opened(job: ClusterJob, facts: Any) -> Output:
    """The job as this process has it open; any other is closed first. MillraceError if the job has ended."""

    def open_job(workload: Workload) -> OpenJob:
        return workload.join(job.spec, facts) if isinstance(workload, SharedWorkload) else workload.open(job.spec)

    with _opening:
        _ended.refuse(job.name)
        if job.name not in _open:
            for name in list(_open):
                _open.pop(name).discard()
                meter.closed(name)
            with metered(job):
                _open[job.name] = join_output(job, open_job)
        return _open[job.name]


def _close(name: str) -> None:
    with _opening:
        _ended.add(name)
        found = _open.pop(name, None)
    if found is not None:
        found.discard()
        meter.closed(name)


def _close_soon(name: str, address: str) -> None:
    """Close the job on another thread: a worker's event loop must not wait. In tests, workers share a process."""
    threading.Thread(target=_close, args=(name,), name="close-job", daemon=True).start()
