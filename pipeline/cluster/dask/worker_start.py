"""How this machine starts worker processes: forked from one process, one for each GPU or several on the CPU.

The fork server has imported everything that workers need, so a worker starts, or restarts, in a fraction of the seconds
that the imports take. It has one thread and never touches CUDA.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.cluster.segments import WorkerDevice
from pipeline.engine.devices.discovery import cuda_properties
from pipeline.engine.devices.numa import near_interface

METHOD = "forkserver"


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker process of this machine.

    device      : the device that it opens
    environment : variables added to this process's environment
    interface   : the network interface on which it serves other hosts; None: the one that leads to the scheduler
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
    """`count` CPU workers with `threads` compute threads each; None: an equal share of the cores."""
    each = threads or max(1, len(os.sched_getaffinity(0)) // count)
    return [WorkerSpec(device=WorkerDevice(device="cpu", threads=each), environment={})] * count


def start_fork_server(modules: Sequence[str] = ()) -> None:
    """Start the fork server; no effect if it runs. Its imports overlap with this process's own: call it early.

    modules : further modules to import, if they are installed
    """
    multiprocessing.get_context(METHOD).set_forkserver_preload(["pipeline.cluster.dask.worker_imports", *modules])
    # Ctrl-C and a closed terminal signal every process of the terminal's job. This process handles the signal and ends
    # the others, which must not see it. (The tracker ignores Ctrl-C by itself, but unblocks it here.)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
