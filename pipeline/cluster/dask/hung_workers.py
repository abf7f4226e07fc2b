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
from pathlib import Path
from typing import Any

from pipeline.cluster.dask.segment_tasks import chunks_failed
from pipeline.cluster.dask.worker_states import REPORT
from pipeline.cluster.segments import ClusterJob
from pipeline.cluster.silence import Silence
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
_TICKS_S = os.sysconf("SC_CLK_TCK")


class ChunkWatch:
    """Ends workers on which a chunk of one job hangs; call it regularly while the job's segments run."""

    def __init__(
        self,
        identities: Callable[[], Mapping[str, Mapping[str, Any]]],
        end_worker: Callable[[str], None],
        job: ClusterJob,
        record: StageRecord,
        where: str,
    ) -> None:
        """identities : what the scheduler knows of each worker, by address
        end_worker : ends the process of the worker at an address
        """
        self._identities = identities
        self._end_worker = end_worker
        self._job = job
        self._record = record
        self._where = where
        self._silence = Silence()
        self._looked_at = time.monotonic()
        self._ended: set[str] = set()
        self._hangs: Counter[int] = Counter()

    def __call__(self) -> None:
        """Raises OperatorError or ClusterError at the third worker on which the same chunk hangs."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            workers = self._identities()
        except ClusterError:  # the job's tasks notice a lost scheduler
            return
        silent_s = self._silence.seconds({address: found["last_seen"] for address, found in workers.items()})
        limit_s = self._limit_s()
        for address, found in workers.items():
            in_hand = found["metrics"].get(REPORT, {}).get("in_hand", {}).get(self._job.name)
            if in_hand is not None and in_hand[1] + silent_s[address] > limit_s and address not in self._ended:
                self._fail_over(address, str(found["name"]), in_hand[0], limit_s)

    def _limit_s(self) -> float:
        stages = self._record.now().values()
        if not all(stage.chunks for stage in stages):
            return FIRST_CHUNK_S
        return max(CHUNK_LEAST_S, CHUNK_TIMES * sum(stage.seconds / stage.chunks for stage in stages))

    def _fail_over(self, address: str, name: str, chunk: int, limit_s: float) -> None:
        LOG.warning(
            "worker %s is ended: chunk %d of %s was in one stage for more than %.0f s",
            name, chunk, self._job.spec.input, limit_s,
        )  # fmt: skip
        self._ended.add(address)
        self._hangs[chunk] += 1
        self._end_worker(address)
        if self._hangs[chunk] == MOST_HANGS:
            raise chunks_failed(
                self._job,
                f"chunk {chunk} hung on {MOST_HANGS} workers of {self._where}, one after another, each time for more "
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
            cpu_s = _cpu_seconds(process)
            if silent_s == 0.0:
                self._cpu_s[address] = cpu_s
            is_idle = cpu_s - self._cpu_s.setdefault(address, cpu_s) < IDLE_CORES * silent_s
            if silent_s > (IDLE_S if is_idle else SILENT_S):
                LOG.warning("worker process %d is replaced: no heartbeat for %.0f s", process, silent_s)
                self._ended.add(address)
                self._local.end(address)


def _cpu_seconds(process: int) -> float:
    """CPU time of a process so far; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


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
