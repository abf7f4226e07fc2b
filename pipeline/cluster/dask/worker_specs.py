"""The worker processes that a machine starts: one for each GPU, or so many on its CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.cluster.segments import WorkerDevice
from pipeline.engine.discovery import cuda_properties
from pipeline.engine.numa import near_interface


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker process of this machine.

    device      : what it opens
    environment : besides ours
    interface   : the network interface on which it serves other hosts; None: whichever leads to the scheduler
    """

    device: WorkerDevice
    environment: dict[str, str]
    interface: str | None = None


def gpu_workers(ordinals: Sequence[int]) -> list[WorkerSpec]:
    """One worker for each GPU, which sees no other."""
    found = [cuda_properties(ordinal) for ordinal in ordinals]
    return [
        WorkerSpec(
            device=WorkerDevice(device="cuda:0", threads=None),
            environment={"CUDA_VISIBLE_DEVICES": gpu["uuid"]},
            interface=near_interface(gpu["pci"]),
        )
        for gpu in found
    ]


def cpu_workers(count: int, threads: int | None = None) -> list[WorkerSpec]:
    """Worker processes that share the cores evenly, unless told how many threads each computes with."""
    each = threads or max(1, len(os.sched_getaffinity(0)) // count)
    return [WorkerSpec(device=WorkerDevice(device="cpu", threads=each), environment={})] * count
