"""Memory of jobs on workers: each worker measures its process, and the side of the client holds it against the limits.

A process's memory shows no job. What it takes above its idle size counts for a job that is alone in it. If several jobs
share it and together take more than they may, all but one of them have to make room, so that the next look is exact.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import format_bytes
from pipeline.errors import ClusterError, Crowded, LimitExceeded

LOOK_S = 1.0
REPORT = "memory"  # in a worker's heartbeats, within Millrace's report
# What a job without a limit may take besides twice its ring before it counts as crowding others.
UNLIMITED_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class MemoryShare:
    """What a job may take of a host's memory.

    limit_bytes : None: no limit
    ring_bytes  : of its buffers, by the plan
    """

    limit_bytes: int | None = None
    ring_bytes: int = 0

    @property
    def expected_bytes(self) -> int:
        return 2 * self.ring_bytes + UNLIMITED_BYTES if self.limit_bytes is None else self.limit_bytes


NO_SHARE = MemoryShare()


# On a worker


class MemoryMeter:
    """This process's memory above its idle size, and the jobs that are open in it. Thread-safe."""

    def __init__(self, resident: Callable[[], int]) -> None:
        self._resident = resident
        self._lock = threading.Lock()
        self._open: dict[str, MemoryShare] = {}
        self._gpu_bytes: dict[str, int] = {}
        self._idle_bytes = self._most_bytes = 0

    def opened(self, job: str, share: MemoryShare) -> None:
        """Call it before the job takes memory."""
        with self._lock:
            if not self._open:
                _give_back()
                self._idle_bytes = self._resident()
            self._open[job] = share
            self._most_bytes = 0

    def closed(self, job: str) -> None:
        """Call it once the job's memory is free; harmless a second time."""
        with self._lock:
            _give_back()
            self._open.pop(job, None)
            self._gpu_bytes.pop(job, None)
            self._most_bytes = 0  # it was the other job's

    def note_gpu(self, job: str, nbytes: int) -> None:
        """The job has so much GPU memory now."""
        with self._lock:
            self._gpu_bytes[job] = max(nbytes, self._gpu_bytes.get(job, 0))

    def look(self) -> None:
        """Call it often while jobs are open: a peak between two looks is missed."""
        with self._lock:
            if self._open:
                self._most_bytes = max(self._most_bytes, self._resident() - self._idle_bytes)

    def report(self) -> dict[str, Any]:
        """The most since the last report, and the open jobs."""
        self.look()
        with self._lock:
            most, self._most_bytes = self._most_bytes, 0
            jobs = {job: (share.expected_bytes, share.limit_bytes is not None) for job, share in self._open.items()}
            return {"bytes": most, "jobs": jobs, "gpu_bytes": dict(self._gpu_bytes)}


def _resident() -> int:
    """Memory that files do not back: pages of mapped inputs can be dropped at any time."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(status.split(f"{name}:")[1].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def _give_back() -> None:
    """Freed memory goes back to the system, or it would count for the next job."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


meter = MemoryMeter(_resident)


# On the side of the client


class MemoryWatch:
    """Holds what the workers report against the limit of one job; call it regularly while the job runs."""

    def __init__(
        self,
        identities: Callable[[], Mapping[str, Mapping[str, Any]]],
        report_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        job: str,
        share: MemoryShare,
        on_memory: Callable[[int | None, int | None], None],
    ) -> None:
        """identities : what the scheduler knows of each worker, by address
        report_of  : extracts Millrace's report from what the scheduler knows of a worker; empty without one
        job        : its name on the workers
        """
        self._identities = identities
        self._report_of = report_of
        self._job = job
        self._share = share
        self._on_memory = on_memory
        self._looked_at = time.monotonic()

    def __call__(self) -> None:
        """Raises LimitExceeded if the job alone takes more than it may, Crowded if it has to make room for another."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            workers = self._identities()
        except ClusterError:  # the job's tasks notice a lost scheduler
            return
        hosts = defaultdict(list)
        for worker in workers.values():
            report = self._report_of(worker)
            if self._job in report.get(REPORT, {}).get("jobs", {}):
                hosts[report["host"]].append(report[REPORT])
        for host, reports in hosts.items():
            self._look_at(host, reports)

    def _look_at(self, host: str, reports: list[Mapping[str, Any]]) -> None:
        nbytes = sum(report["bytes"] for report in reports)
        jobs = {name: said for report in reports for name, said in report["jobs"].items()}
        gpu_bytes = max((report["gpu_bytes"].get(self._job, 0) for report in reports), default=0)
        self._on_memory(nbytes if len(jobs) == 1 else None, gpu_bytes or None)
        limit_bytes = self._share.limit_bytes
        if len(jobs) == 1:
            if limit_bytes is not None and nbytes > limit_bytes:
                raise LimitExceeded(
                    f"took {format_bytes(nbytes)} of memory on {host}, and may take {format_bytes(limit_bytes)}: "
                    "submit it again with a larger --memory; its finished chunks are kept"
                )
            return
        expected = sum(expected_bytes for expected_bytes, _ in jobs.values())
        if nbytes > expected and any(limited for _, limited in jobs.values()) and self._job == max(jobs):
            raise Crowded("makes room for another job on its workers, since they take too much memory together")
