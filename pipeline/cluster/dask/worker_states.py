"""The state of each worker: its device, memory and load, and the address of its metrics.

Workers report in Dask's heartbeats, about twice a second; a query returns the last report without waiting. Our workers
load this module as they start (a `preload`); for others, use
`dask worker --preload pipeline.cluster.dask.worker_states`.
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
from pipeline.cluster import job_memory, segments
from pipeline.cluster.silence import Silence
from pipeline.engine.planned import PlannedDevice
from pipeline.workloads import workloads

# The environment variable with which a nanny passes on how often its worker was restarted.
RESTARTS = "MILLRACE_WORKER_RESTARTS"
LOOK_S = 1.0
REPORT = "millrace"  # the key of our report in a worker's heartbeats
_HOST_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@runtime_checkable
class Workers(Protocol):
    """The part of `DaskWorkers` that is used here."""

    devices: dict[str, Mapping[str, Any]]  # descriptions by worker's name

    def identities(self) -> Mapping[str, Mapping[str, Any]]:
        """What the scheduler knows of each worker, by address; ClusterError if it does not answer."""


# On a worker


def dask_setup(worker: Any) -> None:
    """Called by Dask as a worker starts."""
    from pipeline.cluster.dask.scheduler import forget_keys  # imports Dask, which is needed on workers only

    forget_keys(worker)
    # It logs a traceback if a scheduler that ends closes its connections.
    logging.getLogger("distributed.batched").setLevel(logging.WARNING)
    logging.getLogger("distributed.worker").addFilter(in_one_line)
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if device.startswith(("GPU-", "MIG-")) and "," not in device:
        metrics.gpus.watch(device)  # the worker has not opened it yet
    metrics.worker_restarts.inc(int(os.environ.get(RESTARTS, "0")))
    zero_counters()
    worker.metrics[REPORT] = _heartbeat


def in_one_line(record: logging.LogRecord) -> bool:
    """A log filter that strips tracebacks from Dask's records of lost connections: workers may leave."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, OSError):
        record.msg, record.args, record.exc_info = f"{record.getMessage().removesuffix('.')}: {error}", (), None
    return True


def zero_counters() -> None:
    """Start each workload's counters at 0: Prometheus sees no increase in a counter that first appears as 1."""
    for name, workload in workloads().items():
        metrics.work_of(name, workload.unit)


def _heartbeat(worker: Any) -> dict[str, Any]:
    return {
        "device": dict(segments.opened_device),
        "gpus": metrics.gpus.states(),
        "host": socket.gethostname(),
        "host_memory_bytes": _HOST_MEMORY_BYTES,
        "in_hand": segments.in_hand(),
        "opening": segments.opening(),
        job_memory.REPORT: job_memory.meter.report(),
    }


# On the side of the client


def worker_states(
    workers: Mapping[str, Mapping[str, Any]], devices: dict[str, Mapping[str, Any]], silent_s: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Each worker as a plain dict, from what the scheduler knows.

    devices  : descriptions by worker's name; updated, and used until a restarted worker reports again
    silent_s : the age of each worker's last heartbeat, by address

    Every dict has `name` (of the device; of the worker until the device is known), `worker` (its name), `host`,
    `heartbeat_age_s`, `metrics_address` (HOST:PORT, or None), `cores_busy` (1.0 is one core), `load` (0 to 1: of the
    GPU, or of the cores that the worker computes with), `memory_used_bytes` and `memory_total_bytes` (of the GPU; on
    the CPU the process's and the host's), and the further facts of the receipt's description of the device and of NVML.
    """
    states = []
    for address, found in workers.items():
        heard = found["metrics"]
        report = heard.get(REPORT, {})
        name = str(found["name"])
        if report.get("device"):
            devices[name] = report["device"]
        host, port = found["host"], found["services"].get("dashboard")
        ours = {
            "name": name,
            **devices.get(name, {}),
            "worker": name,
            "host": report.get("host", host),
            "heartbeat_age_s": round(silent_s[address], 1),
            "metrics_address": None if port is None else f"{f'[{host}]' if ':' in host else host}:{port}",
        }
        used, total = heard.get("memory"), report.get("host_memory_bytes")
        states.append(
            ours | _busy(ours.get("threads"), heard.get("cpu", 0.0) / 100, used, total, report.get("gpus", ()))
        )
    return sorted(states, key=lambda state: (len(state["worker"]), state["worker"]))


def _busy(
    threads: int | None, cores: float, used: int | None, total: int | None, gpus: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Load and memory of a worker's GPU if it has one, else of its process."""
    found: dict[str, Any] = {"cores_busy": round(cores, 2)}
    if not gpus:
        load = None if threads is None else min(cores / threads, 1.0)
        return found | {"load": load, "memory_used_bytes": used, "memory_total_bytes": total}
    gpu = dict(gpus[0])  # a worker has only one
    found |= {"load": gpu.pop("utilization_ratio"), "process_memory_bytes": used}
    return found | {name: value for name, value in gpu.items() if not name.startswith("pcie")}


@contextmanager
def watched(device: PlannedDevice) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Yields a function that returns the workers' states, at most about a second old, without waiting.

    The result is as of `worker_states`: this process alone if jobs run in it, empty if no scheduler answers.
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
    """The workers of a Dask scheduler."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._silence = Silence()

    def __call__(self) -> list[dict[str, Any]]:
        try:
            found = self._workers.identities()
            silent_s = self._silence.seconds({address: worker["last_seen"] for address, worker in found.items()})
            return worker_states(found, self._workers.devices, silent_s)
        except Exception:  # a client that is being closed raises anything
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
