"""Takes jobs from the store, runs them on the workers of an executor, and tells the store what became of them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline import metrics
from pipeline.api_models import State
from pipeline.cluster.executor import Executor
from pipeline.engine.run import finished_before
from pipeline.errors import MillraceError, StorageError
from pipeline.service.cleanup import Cleanup
from pipeline.service.jobs import Action, Discard, Event, Failed, Job, LeaseLost, Published, Stop
from pipeline.service.roots import DataRoots
from pipeline.service.run import Run, UnderWay
from pipeline.service.store import Facts, Store

LOG = logging.getLogger("millrace.service")
LEASE_S = 30.0
# How often jobs that nobody announced are looked for.
POLL_S = 1.0
PRUNE_S = 600.0
# Before a server was killed: of jobs cancelled in this time it may not have removed everything.
LATELY_S = 600.0
# Until the next claim after one failure that is not a job's fault, and after many in a row.
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a service allows at once."""

    jobs_at_once: int = 2
    jobs_at_once_of_an_owner: int = 8
    memory_bytes: int = 512 << 20  # of the rings of all jobs together
    keep_s: float = float("inf")  # jobs that are over are forgotten after so long


class Backoff:
    """A pause in claiming after each failure that is not a job's fault, doubled until a job succeeds.

    Otherwise all waiting jobs would use up their attempts while a disk is full or a server is down. Thread-safe.
    """

    def __init__(self) -> None:
        self._failures = 0  # since a job succeeded
        self._until = 0.0  # on the monotonic clock
        self._lock = threading.Lock()

    def failed(self) -> None:
        with self._lock:
            self._until = time.monotonic() + min(FIRST_PAUSE_S * 2 ** min(self._failures, 16), MOST_PAUSE_S)
            self._failures += 1

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._until = 0, 0.0

    @property
    def is_over(self) -> bool:
        """Whether a job may be claimed."""
        return time.monotonic() >= self._until


class Runner:
    """Runs jobs, some at a time, between `start` and `drain`."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        roots: DataRoots,
        limits: Limits,
        *,
        previews: Path | None = None,
        has_workers: Callable[[], bool] = lambda: True,
    ) -> None:
        """previews    : a folder for small pictures of results, by job; None: none are drawn
        has_workers : whether a job could run; where none can, none is claimed
        """
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._store = store
        self._executor = executor
        self._roots = roots
        self._limits = limits
        self._previews = previews
        self._has_workers = has_workers
        self._cleanup = Cleanup(store, roots)
        self._backoff = Backoff()
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._draining = threading.Event()
        self._dispatcher = threading.Thread(target=self._dispatch, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Takes over what a server that was killed had begun. No other runner may be alive on this store."""
        cancelled = self._store.lately_cancelled(LATELY_S)
        for job, epoch in self._store.lost(self.name, now=time.time(), lease_s=LEASE_S, others_too=True):
            self._take_over(job, epoch)
        for job in cancelled:  # it may have been killed before it had removed all
            self.act(job, (Discard(),))
        self._dispatcher.start()

    def _take_over(self, job: str, epoch: int) -> None:
        receipt, found = None, self._store.job(job)
        if found.job.state is State.PUBLISHING and found.job.cancelling:
            with suppress(MillraceError):
                receipt = finished_before(self._roots.writable(found.asked.output), job)
        if receipt is not None:  # too late for the cancellation: the result stands under its name
            self._tell(job, Published(epoch), Facts(receipt=receipt))
        else:
            self._tell(job, LeaseLost(epoch))

    def wake(self) -> None:
        """Something may have become claimable."""
        self._woken.set()

    def act(self, job: str, actions: tuple[Action, ...]) -> None:
        """Does what the state machine asks of a runner."""
        for action in actions:
            if isinstance(action, Stop):
                with self._lock:
                    run = self._runs.get(job)
                if run is not None and run.epoch == action.epoch:
                    run.stopping.set()
            elif isinstance(action, Discard):
                with suppress(MillraceError):
                    self._cleanup.remove(job)
        self.wake()

    def drain(self, timeout_s: float) -> bool:
        """No more claims; every run stops after the chunks in hand, which are kept. Whether all have ended in time."""
        self._draining.set()
        self.wake()
        deadline = time.monotonic() + timeout_s
        self._stop_all()
        _join([self._dispatcher], deadline)
        threads = self._stop_all()  # with that of a job which the dispatcher has just been claiming
        _join(threads, deadline)
        return not any(thread.is_alive() for thread in (self._dispatcher, *threads))

    def _stop_all(self) -> list[threading.Thread]:
        """Asks every run to stop; returns their threads."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            run.stopping.set()
        return [run.thread for run in runs if run.thread is not None]

    def under_way(self, job: str) -> UnderWay | None:
        """How far the run of a job has come; None where none is under way here, or its chunks do not move yet."""
        with self._lock:
            run = self._runs.get(job)
        return run.under_way() if run is not None else None

    @property
    def running(self) -> int:
        with self._lock:
            return len(self._runs)

    # The dispatcher

    def _dispatch(self) -> None:
        renewed = pruned = float("-inf")  # on the monotonic clock: the other one may be set back
        while not self._draining.is_set():
            self._woken.clear()
            try:
                now, tick = time.time(), time.monotonic()
                if tick - renewed > LEASE_S / 3:
                    with self._lock:
                        at_work = list(self._runs)
                    self._store.renew(self.name, at_work, now=now, lease_s=LEASE_S)
                    renewed = tick
                    for job, epoch in self._store.lost(self.name, now=now, lease_s=LEASE_S, others_too=False):
                        self._tell(job, LeaseLost(epoch))
                while self._may_claim() and self._claim():
                    pass
                if tick - pruned > PRUNE_S and not self._prune(now):
                    pruned = tick
            except MillraceError as error:
                LOG.error("%s", error)  # the disk may come back; what was accepted stays where it is
                metrics.count_error(error)
            except Exception:
                LOG.exception("the dispatcher goes on")
            self._woken.wait(POLL_S)

    def _prune(self, now: float) -> bool:
        """Forgets some jobs that have been over for long; whether there may be more."""
        forgotten = self._store.prune(now=now, keep_s=self._limits.keep_s)
        for job in forgotten:
            if self._previews is not None:
                (self._previews / f"{job}.png").unlink(missing_ok=True)
        if forgotten:
            self.wake()  # the rest, after whatever is more urgent
        return bool(forgotten)

    def _may_claim(self) -> bool:
        return (
            not self._draining.is_set()
            and self.running < self._limits.jobs_at_once
            and self._backoff.is_over
            and self._has_workers()
        )

    def _claim(self) -> bool:
        """Claims a job and begins to run it; whether there may be another one to claim."""
        claimed = self._store.claim(
            self.name, now=time.time(), lease_s=LEASE_S, owner_cap=self._limits.jobs_at_once_of_an_owner
        )
        if claimed is None:
            return False
        job = claimed.job.id
        run = Run(
            claimed=claimed,
            executor=self._executor,
            roots=self._roots,
            cleanup=self._cleanup,
            memory_bytes=self._limits.memory_bytes // self._limits.jobs_at_once,
            tell=partial(self._tell, job),
            log=partial(self._log, job),
        )
        return self._begin(run)

    def _begin(self, run: Run) -> bool:
        """Begins a run on its thread; whether this machine has one more."""
        job = run.claimed.job.id
        run.thread = threading.Thread(target=self._run, args=(run,), name=f"job-{job}", daemon=True)
        with self._lock:
            self._runs[job] = run
        if self._draining.is_set():  # since the claim began
            run.stopping.set()
        try:
            run.thread.start()
        except RuntimeError as error:  # it has none left
            with self._lock:
                del self._runs[job]
            LOG.error("job %s waits: %s; see the limits on threads and memory", job, error)
            metrics.count_error(error)
            self._tell(job, LeaseLost(run.epoch))
            self._draining.wait(POLL_S)  # else the next claim would follow at once
            return False
        return True

    def _run(self, run: Run) -> None:
        """On the run's own thread."""
        began, job = time.monotonic(), run.claimed.job.id
        try:
            event, facts = run.outcome()
            if isinstance(event, Failed) and event.transient:
                self._backoff.failed()
            elif isinstance(event, Published):
                self._backoff.succeeded()
            self._tell(job, event, replace(facts, device_seconds=time.monotonic() - began))
            if isinstance(event, Published) and self._previews is not None:
                run.draw_preview(self._previews / f"{job}.png")
        except MillraceError as error:
            LOG.error("job %s: %s", job, error)  # the store failed: the lease ends, and the job is run again
            metrics.count_error(error)
        except Exception as error:
            LOG.exception("job %s", job)
            metrics.count_error(error)
        finally:
            with self._lock:
                if self._runs.get(job) is run:  # and not a run that a retry has begun meanwhile
                    del self._runs[job]
            self.wake()

    # Telling

    def _tell(self, job: str, event: Event, facts: Facts | None = None) -> Job:
        after, actions = self._store.apply(job, event, now=time.time(), facts=facts or Facts())
        self.act(job, actions)
        return after

    def _log(self, job: str, message: str) -> None:
        with suppress(StorageError):
            self._store.log(job, message, now=time.time())


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Waits for their ends, until that moment of the monotonic clock."""
    for thread in threads:
        if thread.is_alive():
            thread.join(max(deadline - time.monotonic(), 0.0))
