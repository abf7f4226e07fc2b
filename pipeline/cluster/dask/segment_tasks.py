"""Runs a job's segments as Dask tasks, on any worker that has room, and again if a worker dies."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from distributed import Client, Future, KilledWorker, Reschedule, Status, get_worker

from pipeline.cluster.dask.connection import scheduler_lost, submit
from pipeline.cluster.segments import (
    ClusterJob,
    Segment,
    SegmentReceipt,
    close_job,
    job_was_ended,
    leaving,
    run_segment,
)
from pipeline.errors import ClusterError, MillraceError, OperatorError
from pipeline.workloads import LOCAL_ONLY, runs_own_code

# Two segments at a time on each worker: one is read while the other is written.
TASKS_A_WORKER = 2
LIVENESS_SECONDS = 0.5
# When a job is stopped, chunks in hand have so long to finish; the caller waits a little longer.
FINISH_SECONDS = 4.0
CLOSE_SECONDS = 5.0
# How often a segment is tried. Each time Dask itself gives it up only after several workers have died: three of ours.
# A function that is not Millrace's is not tried again after these.
MOST_ATTEMPTS = 6
# The Dask topic of the workers' progress reports; the scheduler keeps the latest ones.
STAGES_TOPIC = "millrace-stages"


class SegmentTasks:
    """One pass of a job's segments over the workers."""

    def __init__(
        self,
        client: Client,
        job: ClusterJob,
        where: str,
        check: Callable[[], None],
        addresses: Callable[[], list[str]] | None = None,
    ) -> None:
        """addresses : of the workers that may run the segments; None: all"""
        self._client = client
        self._addresses = addresses
        self._job = job
        self._where = where
        self._check = check
        self._finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._running: dict[Future, Segment] = {}
        self._attempts: Counter[Segment] = Counter()

    def receipts(self, segments: Sequence[Segment]) -> Iterator[SegmentReceipt]:
        """The receipts of the segments, as they finish."""
        try:
            waiting = deque(segments)
            while waiting or self._running:
                while waiting and len(self._running) < self._most_at_once():
                    self._submit(waiting.popleft())
                future = self._next_finished()
                segment = self._running.pop(future)
                receipt = self._outcome(future, segment)
                if receipt is None:
                    waiting.appendleft(segment)
                else:
                    yield receipt
        finally:
            self._end()

    def _most_at_once(self) -> int:
        """With all workers, the scheduler holds the tasks; with some, only as many as they run can be bound to them:
        one that dies is replaced by another."""
        return sys.maxsize if self._addresses is None else TASKS_A_WORKER * max(len(self._addresses()), 1)

    def _submit(self, segment: Segment) -> None:
        self._attempts[segment] += 1
        # If all of these die, others may take it: otherwise it would wait forever.
        addresses = self._addresses() if self._addresses is not None else []
        bound = {"workers": addresses, "allow_other_workers": True} if addresses else {}
        future = submit(
            self._client,
            self._where,
            _run_segment,
            self._job,
            segment,
            # One task group: the scheduler assigns its tasks as workers have room instead of all at once.
            key=(f"segment-{self._job.name}", segment.chunks[0], self._attempts[segment]),
            pure=False,
            retries=0,
            **bound,
        )
        self._running[future] = segment
        future.add_done_callback(self._finished.put)

    def _next_finished(self) -> Future:
        while True:
            self._check()
            with suppress(queue.Empty):
                future = self._finished.get(timeout=LIVENESS_SECONDS)
                if future in self._running:
                    return future
            if self._client.status != "running":
                raise scheduler_lost(self._where)

    def _outcome(self, future: Future, segment: Segment) -> SegmentReceipt | None:
        """The receipt; None if the segment has to run again because its worker died."""
        if self._client.status != "running":
            raise scheduler_lost(self._where)
        chunks = _named(segment)
        try:
            error = future.exception()
            if error is None:
                receipt: SegmentReceipt = future.result()
                return receipt
            worker_died = isinstance(error, KilledWorker)
        except MillraceError:  # its worker died before reporting its failure, and another one failed
            raise
        except Exception as lost:
            # Its report is lost with its worker or the scheduler; its work is in the ledger.
            error, worker_died = lost, True
        if self._client.status != "running":
            raise scheduler_lost(self._where) from error
        if isinstance(error, MillraceError):
            raise error
        if not worker_died:
            raise ClusterError(
                f"a worker of {self._where} failed at {chunks}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(error, KilledWorker) and runs_own_code(self._job.spec.workload):
            suspects = " or ".join(sorted((chunks, *self._killed_too()), key=len))
            raise chunks_failed(
                self._job,
                f"{suspects} took down {error.allowed_failures + 1} workers of {self._where}, one after another: "
                "see their logs",
            ) from error
        if self._attempts[segment] == MOST_ATTEMPTS:
            raise chunks_failed(
                self._job, f"{chunks} took down one worker after another of {self._where}: see their logs"
            ) from error
        return None

    def _killed_too(self) -> list[str]:
        """The chunks of other segments that ran on the same workers and are given up at the same moment."""
        found, until = [], time.monotonic() + LIVENESS_SECONDS
        with suppress(queue.Empty):
            while True:
                future = self._finished.get(timeout=max(until - time.monotonic(), 0.0))
                if future in self._running and isinstance(future.exception(), KilledWorker):
                    found.append(_named(self._running[future]))
        return found

    def _end(self) -> None:
        """Cancel the remaining tasks, and have the workers close the job.

        If segments are running, wait up to CLOSE_SECONDS until their chunks in hand are in the ledger.
        """
        stopped = bool(self._running)

        def close() -> None:
            with suppress(Exception):  # a lost cluster holds nothing
                if self._client.status == "running":
                    self._client.cancel(list(self._running), force=True)
                    self._client.run(_close_job, self._job.name, stopped, on_error="ignore")

        closing = threading.Thread(target=close, name="close-job", daemon=True)
        closing.start()
        if stopped:
            closing.join(CLOSE_SECONDS)


def chunks_failed(job: ClusterJob, what: str) -> MillraceError:
    """The error of chunks that end or hang one worker after another: an OperatorError if they run a user's function."""
    spec = job.spec
    if not runs_own_code(spec.workload):
        return ClusterError(what)
    name = getattr(spec.parameters, "function", "") if spec.workload in LOCAL_ONLY else spec.workload
    return OperatorError(f"{name}: {what}")


def _named(segment: Segment) -> str:
    return f"chunks {segment.chunks[0]} to {segment.chunks[-1]}"


async def _close_job(name: str, wait: bool) -> None:
    """Close the job on another thread: a worker's event loop must not wait."""
    closing = asyncio.get_running_loop().run_in_executor(None, close_job, name, FINISH_SECONDS)
    if wait:
        await asyncio.wait({closing}, timeout=CLOSE_SECONDS)


def _run_segment(job: ClusterJob, segment: Segment) -> SegmentReceipt:
    worker = get_worker()
    key = worker.get_current_task()

    def check() -> None:
        """A worker that hung while the job ended may have missed `_close_job`, but its task is cancelled."""
        task = worker.state.tasks.get(key)
        if task is None or task.state == "cancelled" or worker.status in (Status.closing, Status.closed):
            raise job_was_ended()

    try:
        if leaving.is_set():
            raise ClusterError("this worker is shutting down")
        return run_segment(
            job, segment, lambda stages: worker.log_event(STAGES_TOPIC, (job.name, segment.chunks[0], stages)), check
        )
    except MillraceError:
        if not leaving.is_set() and worker.status not in (Status.closing, Status.closed):
            raise
        raise Reschedule from None  # another worker finds in the ledger what was done here
