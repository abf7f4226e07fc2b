"""A segment, a run of consecutive chunks, on the one device that a worker process owns.

A worker opens a job once and keeps its ring, streams and threads from segment to segment; two segments at a time are
in its pipeline, so that it never drains between them. What a segment wrote is durable and in the ledger before it
counts as done: asked for again (its worker died before it could tell), it is found there and not computed twice.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from pipeline.engine.device import Device
from pipeline.engine.device_pipeline import DevicePipeline, slot_bytes
from pipeline.engine.identity import input_version
from pipeline.engine.ledger import Cut, Entry, Ledger
from pipeline.engine.placement import near_cores, stay_on
from pipeline.engine.run import open_device
from pipeline.errors import InputError, MillraceError, UserError
from pipeline.formats.partial import Opening
from pipeline.workloads import Chunk, JobSpec, Plan, workloads

# For each worker: enough that stealing balances them, few enough that their overhead does not count.
SEGMENTS_A_WORKER = 8


@dataclass(frozen=True, kw_only=True)
class WorkerDevice:
    """How a worker opens its device: the same names as the settings."""

    device: str
    threads: int | None


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """What planning must know of a worker's device, and which process of which host it is."""

    ring_depth: int
    chunk_range: tuple[int, int]
    description: Mapping[str, Any]
    host: str
    process: int


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """All that a worker needs to take part in a job. Paths are absolute: every worker sees the same files."""

    name: str
    spec: JobSpec
    cut: Cut
    held_bytes: int  # what the workload may keep besides the chunks
    ledger_identity: Mapping[str, Any]
    worker_device: WorkerDevice


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive chunks, by their numbers in the plan."""

    chunks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentReceipt:
    """What a finished segment tells: `stages` as (seconds, bytes, chunks) by name; empty where it was done before."""

    segment: Segment
    notes: Mapping[str, Any]
    stages: Mapping[str, tuple[float, int, int]]


def cut_segments(plan: Plan, workers: int) -> list[Segment]:
    """Runs of consecutive chunks, about `SEGMENTS_A_WORKER` for each worker, as even as whole chunks allow."""
    count = min(len(plan.chunks), SEGMENTS_A_WORKER * workers)
    bounds = [len(plan.chunks) * number // count for number in range(count + 1)]
    indices = [chunk.index for chunk in plan.chunks]
    return [Segment(chunks=tuple(indices[a:b])) for a, b in pairwise(bounds)]


# What runs on a worker


def profile(worker_device: WorkerDevice) -> DeviceProfile:
    """The device that this process owns."""
    device = _device(worker_device)
    return DeviceProfile(
        ring_depth=device.ring_depth,
        chunk_range=device.chunk_range,
        description=device.describe(),
        host=socket.gethostname(),
        process=os.getpid(),
    )


def run_segment(job: ClusterJob, segment: Segment) -> SegmentReceipt:
    """Compute and write the segment's chunks, and enter them in the ledger. Blocks until they are durable.

    Raises what the pipeline raises: MillraceError for what went wrong with the job.
    """
    ledger = Ledger(job.spec.output, job.ledger_identity)
    found = ledger.entry(segment.chunks[0])
    if found is not None:
        return SegmentReceipt(segment=segment, notes=found.notes, stages={})
    opened = _opened(job)
    try:
        record = opened.pipeline.stream([opened.chunks[index] for index in segment.chunks])
        opened.workload.flush()
    except BaseException:
        close_job(job.name)  # its pipeline is of no more use: the next segment opens another
        raise
    notes = opened.workload.audit_notes()
    ledger.add(Entry(chunks=segment.chunks, notes=notes, device=opened.device.name))
    stages = {name: (totals.seconds, totals.nbytes, totals.chunks) for name, totals in record.totals.items()}
    return SegmentReceipt(segment=segment, notes=notes, stages=stages)


def close_job(name: str) -> None:
    """Give back what this process holds for a job; harmless where it holds nothing."""
    with _opening:
        opened = _jobs.pop(name, None)
    if opened is not None:
        opened.close()


def close_job_soon(name: str) -> None:
    """`close_job` on a thread of its own: for a worker's event loop, which must not wait."""
    threading.Thread(target=close_job, args=(name,), name="close-job", daemon=True).start()


class _OpenJob:
    """A job's workload, joined to its output, and a running pipeline."""

    def __init__(self, job: ClusterJob, device: Device) -> None:
        """Raises UserError that names this host, where it does not see what the others see."""
        self.device = device
        try:
            _refuse_other_input(job)
            self.workload = workloads()[job.spec.workload](job.spec)
        except UserError as error:
            raise type(error)(f"{_here()}: {error}") from error
        try:
            plan = self.workload.plan(job.cut.budget_bytes, job.cut.target_bytes)
            self.chunks: Sequence[Chunk] = plan.chunks
            if len(plan.chunks) != job.ledger_identity["chunks"]:
                raise MillraceError(f"{_here()} cuts the job into {len(plan.chunks)} chunks, unlike the others")
            self.workload.hold_at_most(job.held_bytes)
            self._join()
            slots = min(device.ring_depth, len(plan.chunks))
            self.pipeline = DevicePipeline(device, self.workload, slot_bytes(plan.chunks), slots=slots)
            self.pipeline.__enter__()
        except BaseException:
            self.workload.discard()
            raise

    def _join(self) -> None:
        try:
            self.workload.start(Opening.JOIN)
        except UserError as error:
            raise type(error)(f"{_here()}: {error}") from error

    def close(self) -> None:
        self.pipeline.__exit__(None, None, None)
        self.workload.discard()


_jobs: dict[str, _OpenJob] = {}
_opening = threading.Lock()


def _opened(job: ClusterJob) -> _OpenJob:
    """The job as this process has it open. Another job's ring is given back first: two might not fit the device."""
    with _opening:
        found = _jobs.get(job.name)
        if found is None:
            for name in [name for name in _jobs if name != job.name]:
                _jobs.pop(name).close()
            found = _jobs[job.name] = _OpenJob(job, _device(job.worker_device))
        return found


@cache
def _device(worker_device: WorkerDevice) -> Device:
    device = open_device(worker_device.device, worker_device.threads)
    pci_address = device.describe().get("pci")
    if pci_address is not None:
        stay_on(near_cores(pci_address))
    return device


def _refuse_other_input(job: ClusterJob) -> None:
    """InputError where another file stands under the input's name here; times are compared as coarsely as any file
    system keeps them."""
    path, expected = job.spec.input, job.ledger_identity["input"]
    found = input_version(path) if path.exists() else expected  # its absence is the reader's to tell
    seconds = [version["mtime_ns"] // 10**9 for version in (found, expected)]
    if (found["bytes"], found["files"]) != (expected["bytes"], expected["files"]) or abs(seconds[0] - seconds[1]) > 2:
        raise InputError(
            f"{path}: is not the input that the job was started with; every worker must see the same files"
        )


def _here() -> str:
    return f"the worker process {os.getpid()} on {socket.gethostname()}"
