"""Replaces workers that hang: those that send no heartbeat, and those whose chunk takes far too long.

A stopped process (SIGSTOP) does neither. A GPU or a file system that hangs stops a chunk but not the heartbeats, which
have a thread of their own. A function that holds the GIL stops the heartbeats but not the chunk: it uses the CPU.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from pipeline.cluster.dask.segment_tasks import chunks_failed
from pipeline.cluster.dask.worker_states import REPORT
from pipeline.cluster.segments import ClusterJob
from pipeline.cluster.silence import Silence, cpu_seconds
from pipeline.engine.stages import StageRecord
from pipeline.errors import ClusterError

LOG = logging.getLogger("millrace.workers")
LOOK_S = 1.0
# A local worker without a heartbeat for so long is replaced: one that does nothing, and any.
IDLE_S, SILENT_S = 20.0, 300.0
# Share of a core below which a silent process does nothing. Its threads may still poll for the GIL.
IDLE_CORES = 0.05
# A chunk may be in one stage so many times as long as the job's chunks took for all stages on average, or so long if
# that is more. Before the first chunk is finished nothing is known: some chunks take hours.
CHUNK_TIMES, CHUNK_LEAST_S, FIRST_CHUNK_S = 20.0, 300.0, 12 * 3600.0
# A chunk that hung on so many workers fails the job.
MOST_HANGS = 3


class ChunkWatch:
    """Ends workers on which a chunk of one job, or its opening, hangs; call it regularly while its segments run."""

    def __init__(
        self,
        identities: Callable[[], Mapping[str, Mapping[str, Any]]],
        end_worker: Callable[[str], None],
        job: ClusterJob,
        record: StageRecord,
        where: str,
        opening_s: float | None = None,
    ) -> None:
        """identities : what the scheduler knows of each worker, by address
        end_worker : ends the process of the worker at an address
        opening_s  : how long a worker may open the job; None: as its first chunk
        """
        self._identities = identities
        self._end_worker = end_worker
        self._job = job
        self._record = record
        self._where = where
        self._silence = Silence()
        self._looked_at = time.monotonic()
        self._ended: set[str] = set()
        self._hangs: Counter[str] = Counter()
        self._opening_s = FIRST_CHUNK_S if opening_s is None else max(opening_s, CHUNK_LEAST_S)

    def __call__(self) -> None:
        """Raises OperatorError or ClusterError at the third worker on which the same chunk, or the opening, hangs."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            workers = self._identities()
        except ClusterError:  # the job's tasks notice a lost scheduler
            return
        silent_s = self._silence.seconds({address: found["last_seen"] for address, found in workers.items()})
        limit_s, job = self._limit_s(), self._job.name
        for address in workers.keys() - self._ended:
            name, report = str(workers[address]["name"]), workers[address]["metrics"].get(REPORT, {})
            opening_s, in_hand = report.get("opening", {}).get(job), report.get("in_hand", {}).get(job)
            if opening_s is not None:
                if opening_s + silent_s[address] > self._opening_s:
                    self._fail_over(address, name, "the opening", self._opening_s)
            elif in_hand is not None and in_hand[1] + silent_s[address] > limit_s:
                self._fail_over(address, name, f"chunk {in_hand[0]}", limit_s)

    def _limit_s(self) -> float:
        stages = self._record.now().values()
        if not all(stage.chunks for stage in stages):
            return FIRST_CHUNK_S
        return max(CHUNK_LEAST_S, CHUNK_TIMES * sum(stage.seconds / stage.chunks for stage in stages))

    def _fail_over(self, address: str, name: str, what: str, limit_s: float) -> None:
        LOG.warning(
            "worker %s is ended: %s of %s was in one stage for more than %.0f s",
            name, what, self._job.spec.input, limit_s,
        )  # fmt: skip
        self._ended.add(address)
        self._hangs[what] += 1
        self._end_worker(address)
        if self._hangs[what] == MOST_HANGS:
            raise chunks_failed(
                self._job,
                f"{what} hung on {MOST_HANGS} workers of {self._where}, one after another, each time for more "
                f"than {limit_s:.0f} s: see what it waits for (a lock, a GPU, a file system)",
            )


class LocalWorkers:
    """The processes of workers of this machine, by the address of each."""

    def __init__(self, nannies: Callable[[], Iterable[Any]]) -> None:
        self._nannies = nannies

    def process(self, address: str) -> int | None:
        """The process of a worker; None if there is none at that address."""
        with suppress(AttributeError, ValueError):  # it is just being replaced
            return next((nanny.pid for nanny in self._nannies() if nanny.worker_address == address), None)
        return None

    def end(self, address: str) -> None:
        """Kill a worker's process; its nanny starts another one."""
        process = self.process(address)
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class SilentWorkers:
    """Ends local workers that send no heartbeats."""

    def __init__(self, heard: Callable[[], Mapping[str, float]], local: LocalWorkers) -> None:
        """heard : when the scheduler last heard of each worker, by address"""
        self._heard = heard
        self._local = local
        self._silence = Silence()
        self._cpu_s: dict[str, float] = {}  # of each worker, at its last heartbeat
        self._ended: set[str] = set()

    def look(self) -> None:
        """Call it every `LOOK_S`. ClusterError if the scheduler does not answer."""
        for address, silent_s in self._silence.seconds(self._heard()).items():
            process = self._local.process(address)
            if process is None or address in self._ended:
                continue
            cpu_s = cpu_seconds(process)
            if silent_s == 0.0:
                self._cpu_s[address] = cpu_s
            is_idle = cpu_s - self._cpu_s.setdefault(address, cpu_s) < IDLE_CORES * silent_s
            if silent_s > (IDLE_S if is_idle else SILENT_S):
                LOG.warning("worker process %d is replaced: no heartbeat for %.0f s", process, silent_s)
                self._ended.add(address)
                self._local.end(address)


@contextmanager
def silent_replaced(heard: Callable[[], Mapping[str, float]], local: LocalWorkers) -> Iterator[None]:
    """In the context, local workers that send no heartbeats are replaced."""
    silent, ended = SilentWorkers(heard, local), threading.Event()

    def look_on() -> None:
        while not ended.wait(LOOK_S):
            with suppress(ClusterError):
                silent.look()

    threading.Thread(target=look_on, name="silent-workers", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
