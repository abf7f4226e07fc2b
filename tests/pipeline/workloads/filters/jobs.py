"""Runs a filter on samples as a job of this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.engine.devices.device import CpuDevice, Device
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.workloads import JobSpec, workload_named
from tests.images import read_image, write_image


def filtered(
    folder: Path,
    name: str,
    samples: Any,
    letters: str,
    *,
    chunk_bytes: int | None = None,
    device: Device | None = None,
    **parameters: Any,
) -> tuple[dict[str, Any], Any]:
    """The receipt and the result."""
    write_image(folder / "in.npy", samples, letters)
    spec = JobSpec(
        workload=name, input=folder / "in.npy", output=folder / "out.npy",
        parameters=workload_named(name).Parameters(**parameters),
    )  # fmt: skip
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=chunk_bytes)
    receipt = run_job(plan_job(spec, device or CpuDevice(2), options), options)
    return receipt, read_image(folder / "out.npy")
