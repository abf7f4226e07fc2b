"""Who works, and how it is: each worker's device, memory and load, and where its metrics are served.

A worker tells with Dask's own heartbeats, about twice a second; whoever asks is told what was heard last, without
waiting. Dask loads this module into each worker of ours when it starts (a `preload`); into a worker that somebody else
starts, `dask worker --preload pipeline.cluster.dask.worker_states` loads it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pipeline import metrics
from pipeline.cluster import segments
from pipeline.engine.planned import PlannedDevice
from pipeline.workloads import workloads

# How often a worker was started anew, told to it by the process that starts it.
RESTARTS = "MILLRACE_WORKER_RESTARTS"
LOOK_S = 1.0
_TOLD = "millrace"  # our part of what a worker's heartbeats carry
_HOST_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@runtime_checkable
class Workers(Protocol):
    """What `DaskWorkers` offers of it."""

    devices: dict[str, Mapping[str, Any]]  # what is known of each worker's device, by the worker's name

    def identities(self) -> Mapping[str, Mapping[str, Any]]:
        """What the scheduler knows of each worker, by address; ClusterError where it does not answer."""


# On a worker


def dask_setup(worker: Any) -> None:
    """Called by Dask as a worker starts."""
    from pipeline.cluster.dask.scheduler import forget_keys  # imports Dask, which whoever only asks for states need not

    forget_keys(worker)
    # It tells in a traceback that a scheduler which ends closes its connections.
    logging.getLogger("distributed.batched").setLevel(logging.WARNING)
    logging.getLogger("distributed.worker").addFilter(in_one_line)
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if device.startswith(("GPU-", "MIG-")) and "," not in device:
        metrics.gpus.watch(device)  # it has not opened it yet
    metrics.worker_restarts.inc(int(os.environ.get(RESTARTS, "0")))
    zero_counters()
    worker.metrics[_TOLD] = _heartbeat


def in_one_line(record: logging.LogRecord) -> bool:
    """Takes from a record of a lost connection the traceback that Dask adds: one that ends as its worker leaves is no
    fault."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, OSError):
        record.msg, record.args, record.exc_info = f"{record.getMessage().removesuffix('.')}: {error}", (), None
    return True


def zero_counters() -> None:
    """Each workload's chunks stand at 0 from the start: what first appears as 1 is no increase to Prometheus."""
    for name, workload in workloads().items():
        metrics.work_of(name, workload.unit)


def _heartbeat(worker: Any) -> dict[str, Any]:
    return {
        "device": dict(segments.opened_device),
        "gpus": metrics.gpus.states(),
        "host": socket.gethostname(),
        "host_memory_bytes": _HOST_MEMORY_BYTES,
    }


# Where jobs are handed out


def worker_states(
    workers: Mapping[str, Mapping[str, Any]], devices: dict[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each worker as a plain dict, from what the scheduler knows.

    devices : by worker's name, what is known of its device; kept for when the worker is back after its death

    Every dict has `name` (of the device; of the worker where the device is not known yet), `worker` (its name), `host`,
    `metrics_address` (HOST:PORT, or None), `cores_busy` (1.0 is one core), `load` (0 to 1: of the GPU, or of the cores
    that the worker computes with), `memory_used_bytes` and `memory_total_bytes` (of the GPU; on the CPU the process's
    and the host's), and what else the receipt says of the device and NVML of the GPU.
    """
    states = []
    for found in workers.values():
        heard = found["metrics"]
        told = heard.get(_TOLD, {})
        name = str(found["name"])
        if told.get("device"):
            devices[name] = told["device"]
        host, port = found["host"], found["services"].get("dashboard")
        ours = {
            "name": name,
            **devices.get(name, {}),
            "worker": name,
            "host": told.get("host", host),
            "metrics_address": None if port is None else f"{f'[{host}]' if ':' in host else host}:{port}",
        }
        used, total = heard.get("memory"), told.get("host_memory_bytes")
        states.append(ours | _busy(ours.get("threads"), heard.get("cpu", 0.0) / 100, used, total, told.get("gpus", ())))
    return sorted(states, key=lambda state: (len(state["worker"]), state["worker"]))


def _busy(
    threads: int | None, cores: float, used: int | None, total: int | None, gpus: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """How busy a worker's device is: its GPU where it has one, else its process among the host's."""
    found: dict[str, Any] = {"cores_busy": round(cores, 2)}
    if not gpus:
        load = None if threads is None else min(cores / threads, 1.0)
        return found | {"load": load, "memory_used_bytes": used, "memory_total_bytes": total}
    gpu = dict(gpus[0])  # a worker has one
    found |= {"load": gpu.pop("utilization_ratio"), "process_memory_bytes": used}
    return found | {name: value for name, value in gpu.items() if not name.startswith("pcie")}


@contextmanager
def watched(device: PlannedDevice) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Yields a function that says at once how the workers of a place were a second ago, as `worker_states` does.

    Where jobs run in this process, it is the one worker. Where no scheduler answers, there are none.
    """
    look = _Remote(device) if isinstance(device, Workers) else _Here(device)
    found, ended = look(), threading.Event()

    def look_on() -> None:
        nonlocal found
        while not ended.wait(LOOK_S):
            found = look()

    thread = threading.Thread(target=look_on, name="worker-states", daemon=True)
    thread.start()
    try:
        yield lambda: found
    finally:
        ended.set()


class _Remote:
    """Workers of a Dask scheduler."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def __call__(self) -> list[dict[str, Any]]:
        try:
            return worker_states(self._workers.identities(), self._workers.devices)
        except Exception:  # besides ClusterError, whatever a client raises that is being closed
            return []


class _Here:
    """This process."""

    def __init__(self, device: PlannedDevice) -> None:
        self._described = dict(device.describe())
        self._before = time.monotonic(), time.process_time()

    def __call__(self) -> list[dict[str, Any]]:
        before, self._before = self._before, (time.monotonic(), time.process_time())
        elapsed, busy = (after - earlier for after, earlier in zip(self._before, before, strict=True))
        ours = self._described | {"worker": "service", "host": socket.gethostname(), "metrics_address": None}
        cores, gpus = busy / elapsed if elapsed > 0 else 0.0, metrics.gpus.states()
        return [ours | _busy(ours.get("threads"), cores, _resident_bytes(), _HOST_MEMORY_BYTES, gpus)]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
