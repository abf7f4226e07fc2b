"""A job that has been checked and cut into chunks, but not run: what `--dry-run` shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.engine.device_pipeline import slot_bytes
from pipeline.engine.devices.device import Device
from pipeline.engine.ledger import job_identity
from pipeline.engine.output import Output
from pipeline.workloads.protocol import Budget, JobSpec, OpenJob, Plan, ReadsPacked, Workload


class PlannedDevice(Protocol):
    """A device, or a cluster of them, as planning needs it."""

    @property
    def name(self) -> str: ...

    @property
    def ring_depth(self) -> int:
        """Slots of the ring."""

    def target_bytes(self, job_bytes: int) -> int:
        """Bytes of input and output together that make a good chunk."""

    def describe(self) -> Mapping[str, Any]:
        """The description for the receipt."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a job may take of workers; None: no bound.

    memory_bytes     : host memory on each host, above that of the idle workers
    gpu_memory_bytes : memory of each GPU
    workers          : how many compute it
    opening_s        : how long a worker may take to open it
    """

    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None
    workers: int | None = None
    opening_s: float | None = None


NO_BOUNDS = Bounds()


def unpacks(device: PlannedDevice, job: OpenJob) -> bool:
    """Whether this process's device decodes the job's input."""
    return getattr(device, "decodes", False) and isinstance(job, ReadsPacked) and job.packs


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job, its device and its chunks."""

    output: Output
    plan: Plan
    device: PlannedDevice
    budget: Budget  # with which it was cut
    held_bytes: int = 0  # of input that it may keep besides the chunks
    version: Mapping[str, Any]  # of the input, as `input_version` gives it
    # How often chunks were halved because the device ran out of memory.
    halvings: int = 0
    bounds: Bounds = NO_BOUNDS

    @property
    def workload(self) -> Workload:
        return self.output.workload

    @property
    def job(self) -> OpenJob:
        return self.output.job

    @property
    def spec(self) -> JobSpec:
        return self.output.job.spec

    @property
    def identity(self) -> dict[str, Any]:
        """The identity that an interrupted run's ledger must have to be resumed."""
        return job_identity(self.spec, self.version, self.budget, self.plan)

    @property
    def slots(self) -> int:
        return min(self.device.ring_depth, len(self.plan.chunks))

    @property
    def ring_bytes(self) -> int:
        """Host memory of the ring of slots: all that grows with `--memory`."""
        return self.slots * sum(self.slot_bytes(self.plan))

    def slot_bytes(self, plan: Plan) -> tuple[int, int]:
        """Bytes of a slot's input and output for this plan, the job's own or the rest of it.

        Packed blocks get half as much again: a chunk needs whole ones of its neighbours too.
        """
        inputs, outputs = slot_bytes(plan.chunks)
        if not unpacks(self.device, self.job):
            return inputs, outputs
        inputs += inputs // 2
        return inputs, max(inputs, outputs)

    def describe(self) -> dict[str, Any]:
        """For `--dry-run` and the receipt: numbers in bytes."""
        first, device = self.plan.chunks[0], self.device
        codec_bytes = device.codec_bytes(*self.slot_bytes(self.plan)) if isinstance(device, Device) else 0
        return {
            "workload": self.spec.workload,
            "input": str(self.spec.input),
            "output": str(self.spec.output),
            "parameters": self.spec.parameters.in_force(),
            "image": self.job.summary.describe(),
            "device": dict(self.device.describe()),
            "chunks": len(self.plan.chunks),
            "chunk_shape": list(first.region.shape),
            "halo": [list(halo) for halo in first.halo],
            "read_bytes": self.plan.input_bytes,
            "written_bytes": self.plan.output_bytes,
            "slots": self.slots,
            "ring_bytes": self.ring_bytes,
            **({"codec_bytes": codec_bytes} if codec_bytes else {}),
            "halvings": self.halvings,
        }
