"""One job on one device, in this process: plan, stream, audit, publish, receipt."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import metrics
from pipeline.config import format_bytes
from pipeline.engine.device import CpuDevice, CudaDevice, Device
from pipeline.engine.device_pipeline import DevicePipeline
from pipeline.engine.discovery import discover
from pipeline.engine.identity import InputIdentity
from pipeline.engine.planned import PlannedJob
from pipeline.engine.receipt import make_receipt, write_receipt
from pipeline.engine.stages import StageRecord
from pipeline.errors import DeviceUnavailable, OutOfDeviceMemory, OutputError, ParameterError
from pipeline.formats.partial import PartialFile, partial_path
from pipeline.workloads import Chunk, JobSpec, Workload, workloads


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a job is run, whatever it computes.

    memory_bytes : at most this much for the ring of buffers on the host
    chunk_bytes  : input and output of one chunk together; None: what suits the device
    checksum     : SHA-256 of the input in the receipt even where the file is large
    """

    memory_bytes: int
    chunk_bytes: int | None = None
    checksum: bool = False


def open_device(name: str, workers: int | None = None, overlap: int = 5) -> Device:
    """The device a user named: auto, cpu, cuda or cuda:N. DeviceUnavailable says why not, and what could be used."""
    reports = discover()
    if name == "auto":
        name = reports[0].name
    if name == "cuda":
        name = "cuda:0"
    if name == "cpu":
        return CpuDevice(workers, overlap)
    for report in reports:
        if report.name == name and report.obstacle is None:
            return CudaDevice(int(name.removeprefix("cuda:")), overlap)
    obstacles = [report.obstacle for report in reports if report.obstacle and report.name in (name, "cuda")]
    usable = ", ".join(report.name for report in reports if report.obstacle is None)
    reason = obstacles[0] if obstacles else "there is no such device"
    raise DeviceUnavailable(f"--device {name}: {reason}; usable here: {usable}")


def plan_job(spec: JobSpec, device: Device, options: RunOptions) -> PlannedJob:
    """Check the job against its input and cut it so that the ring fits the memory."""
    workload = workloads()[spec.workload](spec)
    try:
        budget = _ring_bytes(workload, options.memory_bytes) // device.ring_depth
        target = options.chunk_bytes or device.target_bytes(workload.job_bytes)
        if target > budget and options.chunk_bytes is not None:
            raise ParameterError(
                f"--chunk-bytes {format_bytes(target)}: {device.ring_depth} such chunks do not fit --memory; "
                f"at most {format_bytes(budget)} do"
            )
        plan = workload.plan(budget, min(budget, target))
    except BaseException:
        workload.discard()
        raise
    return PlannedJob(spec=spec, workload=workload, plan=plan, device=device)


def _ring_bytes(workload: Workload, memory_bytes: int) -> int:
    """What of the memory is left for the ring besides what the workload itself must keep."""
    held = workload.hold_at_most(memory_bytes // 4)
    if held > memory_bytes // 2:
        raise ParameterError(
            f"{workload.spec.input} can only be decoded whole, which takes {format_bytes(held)} of memory; "
            f"raise --memory to {format_bytes(2 * held)}, or convert it to .tif or .npy"
        )
    return memory_bytes - held


def check_preview(spec: JobSpec, preview: Path) -> None:
    """OutputError where the preview could not be written, or would overwrite the input or the result."""
    if preview.suffix.lower() != ".png":
        raise OutputError(f"--preview {preview}: a preview is a PNG; name it with .png")
    taken = {os.path.realpath(path) for path in (spec.input, spec.output)}
    if {os.path.realpath(preview), os.path.realpath(partial_path(preview))} & taken:
        raise OutputError(f"--preview {preview} is also the input or the output: name another file")
    PartialFile(preview).discard()  # finds out now whether it can be written


def run_job(
    job: PlannedJob,
    options: RunOptions,
    *,
    on_written: Callable[[Chunk], None] = lambda chunk: None,
    on_published: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run it to its published output and the receipt beside it; on any error nothing is left but the error."""
    started = time.time()
    workload = job.workload
    identity = None
    try:
        identity = InputIdentity(job.spec.input, always_hash=options.checksum)
        workload.start()
        job, record = _stream(job, on_written)
        identity.check()
        audit = workload.audit()
        metrics.audit_error_ratio.labels(workload.name).set(audit["worst_error"] / audit["tolerance"])
        receipt = make_receipt(job, record=record, audit=audit, identity=identity.result(), started=started)
        workload.publish()
        on_published()
    except BaseException:
        if identity is not None:
            identity.abandon()
        raise
    finally:
        workload.discard()
    write_receipt(job.spec.output, receipt)
    return receipt


def _stream(job: PlannedJob, on_written: Callable[[Chunk], None]) -> tuple[PlannedJob, StageRecord]:
    """Every chunk through the device; with chunks of half the size, from the start, where they do not fit it."""
    while True:
        try:
            return job, DevicePipeline(job.device, job.workload, job.plan, on_written=on_written).run()
        except OutOfDeviceMemory as error:
            job = _halved(job, error)
        # The failed ring is part of a cycle (pipeline, error, traceback): free its memory before the next is allocated.
        gc.collect()


def _halved(job: PlannedJob, error: OutOfDeviceMemory) -> PlannedJob:
    """The same job in chunks of half the bytes; raises the error where there is nothing smaller."""
    half = max(chunk.input_bytes + chunk.output_bytes for chunk in job.plan.chunks) // 2
    try:
        plan = job.workload.plan(half, half)
    except ParameterError:
        plan = job.plan
    if len(plan.chunks) <= len(job.plan.chunks):
        raise error
    return replace(job, plan=plan, halvings=job.halvings + 1)
