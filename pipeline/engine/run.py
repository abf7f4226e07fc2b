"""One job on one device, in this process: plan, stream, audit, publish, receipt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
from pipeline.errors import DeviceUnavailable, OutputError, ParameterError
from pipeline.workloads import Chunk, JobSpec, Workload, workloads


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a job is run, whatever it computes.

    memory_bytes : at most this much for the ring of buffers on the host
    checksum     : SHA-256 of the input in the receipt even where the file is large
    """

    memory_bytes: int
    checksum: bool = False


def open_device(name: str, workers: int | None = None) -> Device:
    """The device a user named: auto, cpu, cuda or cuda:N. DeviceUnavailable says why not, and what could be used."""
    reports = discover()
    if name == "auto":
        name = reports[0].name
    if name == "cuda":
        name = "cuda:0"
    if name == "cpu":
        return CpuDevice(workers)
    for report in reports:
        if report.name == name and report.obstacle is None:
            return CudaDevice(int(name.removeprefix("cuda:")))
    obstacles = [report.obstacle for report in reports if report.obstacle and report.name in (name, "cuda")]
    usable = ", ".join(report.name for report in reports if report.obstacle is None)
    reason = obstacles[0] if obstacles else "there is no such device"
    raise DeviceUnavailable(f"--device {name}: {reason}; usable here: {usable}")


def plan_job(spec: JobSpec, device: Device, options: RunOptions) -> PlannedJob:
    """Check the job against its input and cut it so that the ring fits the memory."""
    workload = workloads()[spec.workload](spec)
    try:
        budget = _ring_bytes(workload, options.memory_bytes) // device.ring_depth
        plan = workload.plan(budget, min(budget, device.target_bytes(workload.job_bytes)))
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
    if preview.resolve() in (spec.input.resolve(), spec.output.resolve()):
        raise OutputError(f"--preview {preview} is also the input or the output: name another file")
    if not preview.parent.is_dir():
        raise OutputError(f"--preview {preview}: there is no folder {preview.parent}")


def run_job(
    job: PlannedJob, options: RunOptions, *, on_written: Callable[[Chunk], None] = lambda chunk: None
) -> dict[str, Any]:
    """Run it to its published output and the receipt beside it; on any error nothing is left but the error."""
    started = time.time()
    workload = job.workload
    identity = InputIdentity(job.spec.input, always_hash=options.checksum)
    try:
        workload.start()
        record = DevicePipeline(job.device, workload, job.plan, on_written=on_written).run()
        audit = workload.audit()
        metrics.audit_error_ratio.labels(workload.name).set(audit["worst_error"] / audit["tolerance"])
        receipt = make_receipt(job, record=record, audit=audit, identity=identity.result(), started=started)
        workload.publish()
    except BaseException:
        identity.abandon()
        raise
    finally:
        workload.discard()
    write_receipt(job.spec.output, receipt)
    return receipt
