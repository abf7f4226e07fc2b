"""Takes jobs from the store, runs them on the workers of an executor, and tells the store what became of them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline import metrics
from pipeline.api_models import State
from pipeline.cluster.executor import Executor
from pipeline.engine.run import finished_before
from pipeline.errors import Crowded, MillraceError, ServiceRefused, StorageError, UserError, counted
from pipeline.service.jobs import (
    Action,
    Died,
    Discard,
    Event,
    Failed,
    Job,
    LeaseLost,
    Progressed,
    Published,
    Stop,
    Stopped,
)
from pipeline.service.roots import DataRoots
from pipeline.service.running.caution import Backoff, ClockCheck
from pipeline.service.running.cleanup import Cleanup
from pipeline.service.running.job_process import JobProcesses, ProcessDied
from pipeline.service.running.places import Places
from pipeline.service.running.run import Run, StopRequested, UnderWay
from pipeline.service.running.together import Company, Sizes, Together, gathered, may_have_company, remove_what_is_left
from pipeline.service.store import Facts, Store, StoredJob

LOG = logging.getLogger("millrace.service")
LEASE_S = 30.0
_Told = TypeVar("_Told")
# How often the queue is checked without being woken.
POLL_S = 1.0
PRUNE_S = 600.0
# Partial outputs of jobs cancelled so shortly before a kill may remain.
LATELY_S = 600.0
# Planning for an estimate may take so long.
ESTIMATE_S = 20.0
# A run is not preempted sooner, so that each run makes progress.
LEAST_RUN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on what a service runs and keeps."""

    jobs_at_once: int = 2
    jobs_at_once_of_an_owner: int = 8
    memory_bytes: int = 512 << 20  # ring buffers of all jobs together
    planning_s: float = 600.0  # opening and planning a job
    keep_s: float = float("inf")  # records of finished jobs


class Runner:
    """Runs jobs, several at a time, between `start` and `drain`."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        roots: DataRoots,
        limits: Limits,
        *,
        previews: Path | None = None,
        has_workers: Callable[[], bool] = lambda: True,
        processes: JobProcesses | None = None,
    ) -> None:
        """previews    : folder for previews of results; None: no previews
        has_workers : whether jobs can run; if not, none is claimed
        processes   : where jobs are opened; None: in this process, as the executor's chunks must then be computed here
        """
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._store = store
        self._executor = executor
        self._roots = roots
        self._limits = limits
        self._previews = previews
        self._has_workers = has_workers
        self._processes = processes
        self._cleanup = Cleanup(store, roots)
        self._backoff = Backoff()
        self._places = Places(limits.jobs_at_once)
        self._sizes = Sizes()
        self._gathering = threading.Lock()
        self._estimating = threading.Lock()
        self._woken = threading.Event()
        self._draining = threading.Event()
        self._dispatcher = threading.Thread(target=self._dispatch, name="dispatcher", daemon=True)

    def start(self, *, crashed: bool = False) -> None:
        """Starts, taking over the jobs of a killed server. No other runner may use this store.

        crashed : that server ended by itself, maybe because of a job
        """
        newest = self._store.newest_event()  # before others are written by this clock
        self._clock = ClockCheck(time.time() if newest is None else newest, time.monotonic())
        cancelled = self._store.lately_cancelled(LATELY_S)
        lost = self._store.lost(self.name, now=time.time(), lease_s=LEASE_S, others_too=True)
        self._remove_what_is_left([job for job, _ in lost])
        for job, epoch in lost:
            self._take_over(job, epoch, crashed)
        for job in cancelled:  # the kill may have interrupted the removal
            self.act(job, (Discard(),))
        self._dispatcher.start()

    def _take_over(self, job: str, epoch: int, crashed: bool) -> None:
        receipt, found = None, self._store.job(job)
        if found.job.state is State.PUBLISHING:
            with suppress(MillraceError):
                receipt = finished_before(self._roots.of(found.asked.group).writable(found.asked.output), job)
        if receipt is not None:  # the result is published, which is too late for a cancellation
            self._tell(job, Published(epoch), Facts(receipt=receipt))
        else:
            self._tell(job, Died(epoch, "the server") if crashed else LeaseLost(epoch))

    def _remove_what_is_left(self, jobs: Sequence[str]) -> None:
        """Removes what runs of several jobs together have left."""
        folders = set()
        for job in jobs:
            asked = self._store.job(job).asked
            if asked.array_id is not None:
                with suppress(MillraceError):
                    folders.add((self._roots.of(asked.group).writable(asked.output).parent, asked.array_id))
        for folder, array_id in folders:
            remove_what_is_left(folder, array_id)

    def wake(self) -> None:
        """Looks for claimable jobs now."""
        self._woken.set()

    def act(self, job: str, actions: tuple[Action, ...]) -> None:
        """Performs actions of the state machine."""
        for action in actions:
            if isinstance(action, Stop):
                run = self._places.run_with(job)
                if run is None or not any(each.job.id == job and each.job.epoch == action.epoch for each in run.jobs):
                    continue
                if run.company:
                    run.cancelled.add(job)
                else:
                    run.stopping.set()
            elif isinstance(action, Discard):
                with suppress(MillraceError):
                    self._cleanup.remove(job)
        self.wake()

    def drain(self, timeout_s: float) -> bool:
        """Stops claiming; runs finish and keep their current chunks. Returns whether all ended in time."""
        self._draining.set()
        self.wake()
        deadline = time.monotonic() + timeout_s
        self._stop_all()
        _join([self._dispatcher], deadline)
        threads = self._stop_all()  # again: the dispatcher may have been claiming a job
        _join(threads, deadline)
        return not any(thread.is_alive() for thread in (self._dispatcher, *threads))

    def _stop_all(self) -> list[threading.Thread]:
        """Asks every run to stop; returns their threads."""
        runs = self._places.runs()
        for run in runs:
            run.stopping.set()
        return [run.thread for run in runs if run.thread is not None]

    def under_way(self, job: str) -> UnderWay | None:
        """Progress of a job's run; None without a run here, or before its first chunk."""
        run = self._places.run_with(job)
        return run.under_way() if run is not None else None

    @property
    def running(self) -> int:
        """Runs; jobs that run together are one."""
        return len(self._places.runs())

    def _choice(self) -> dict[str, Any]:
        """Which jobs may be claimed: arguments of the store's `claim` and `most_urgent`."""
        return {
            "owner_cap": self._limits.jobs_at_once_of_an_owner,
            "but": self._places.slow_planners(),
            "together": Counter(each.asked.owner for run in self._places.runs() for each in run.company),
        }

    # The dispatcher

    def _dispatch(self) -> None:
        renewed = pruned = float("-inf")  # on the monotonic clock, which is never set back
        while not self._draining.is_set():
            self._woken.clear()
            try:
                now, tick = time.time(), time.monotonic()
                if tick - renewed > LEASE_S / 3:
                    at_work = [each.job.id for run in self._places.runs() for each in run.jobs]
                    self._store.renew(self.name, at_work, now=now, lease_s=LEASE_S)
                    renewed = tick
                    for job, epoch in self._store.lost(self.name, now=now, lease_s=LEASE_S, others_too=False):
                        self._tell(job, LeaseLost(epoch))
                while self._may_claim() and self._claim():
                    pass
                self._preempt(now)
                if tick - pruned > PRUNE_S and not (self._clock.is_believed(now, tick) and self._prune(now)):
                    pruned = tick
            except MillraceError as error:
                LOG.error("%s", error)  # the disk may recover; accepted jobs stay in the store
                metrics.count_error(error)
            except Exception:
                LOG.exception("dispatcher: unexpected error, continuing")
            self._woken.wait(POLL_S)

    def _prune(self, now: float) -> bool:
        """Forgets some old jobs; returns whether there may be more."""
        forgotten = self._store.prune(now=now, keep_s=self._limits.keep_s)
        for job in forgotten:
            if self._previews is not None:
                (self._previews / f"{job}.png").unlink(missing_ok=True)
        if forgotten:
            self.wake()  # for the rest, after more urgent work
        return bool(forgotten)

    def _may_claim(self) -> bool:
        return (
            not self._draining.is_set()
            and self._places.has_free()
            and not self._places.is_blocked()
            and self._backoff.is_over
            and self._has_workers()
        )

    def _preempt(self, now: float) -> None:
        """If a job of an operator waits since all places are taken, has a less urgent job give up its place."""
        if not self._backoff.is_over or not self._has_workers():
            return
        runs = self._places.runs()
        if self._places.has_free() or any(run.preempted.is_set() or run.stopping.is_set() for run in runs):
            return
        priority = self._store.most_urgent(now=now, **self._choice())
        if priority is None or priority <= 0:  # only operators may submit above 0
            return
        tick = time.monotonic()
        victims = [
            run
            for run in runs
            if run.claimed.asked.priority < priority
            and tick - run.started >= LEAST_RUN_S
            and self._store.job(run.claimed.job.id).job.preemptible
        ]
        if victims:
            victim = min(victims, key=lambda run: (run.claimed.asked.priority, -run.started))
            self._log(victim.claimed.job.id, f"preempted by a job of priority {priority}; finished chunks are kept")
            victim.preempted.set()

    def _claim(self) -> bool:
        """Claims and starts a job; returns whether there may be another to claim."""
        claimed = self._store.claim(self.name, now=time.time(), lease_s=LEASE_S, **self._choice())
        return claimed is not None and self._begin(self._run_of(claimed))

    def estimate(self, stored: StoredJob) -> None:
        """Plans a waiting job, and stores what it will take. One at a time.

        Raises UserError if it cannot be planned, ServiceRefused if another one is being planned or it takes too long.
        """
        if not self._estimating.acquire(blocking=False):
            raise ServiceRefused("another job is being planned; ask again")
        try:
            estimate, work = self._run_of(stored).estimate(ESTIMATE_S)
        finally:
            self._estimating.release()
        self._store.note_estimate(stored.job.id, estimate, work, now=time.time())

    def _run_of(self, claimed: StoredJob) -> Run:
        job, stopping = claimed.job.id, threading.Event()
        return Run(
            claimed=claimed,
            executor=self._executor,
            roots=self._roots.of(claimed.asked.group),
            cleanup=self._cleanup,
            memory_bytes=self._limits.memory_bytes // self._limits.jobs_at_once,
            planning_s=self._limits.planning_s,
            processes=self._processes,
            # Without the run itself: in a circle it would outlive its end.
            tell=partial(self._tell_until_stored, claimed.job, stopping),
            stopping=stopping,
            log=partial(self._log, job),
            on_crowded=partial(self._places.let_alone, job),
            may_run=partial(self._places.may_run, job),
        )

    def _begin(self, run: Run) -> bool:
        """Starts a run on its own thread; returns False if the system refuses a thread."""
        job = run.claimed.job.id
        run.thread = threading.Thread(target=self._run, args=(run,), name=f"job-{job}", daemon=True)
        self._places.add(run)
        if self._draining.is_set():  # since the claim
            run.stopping.set()
        try:
            run.thread.start()
        except RuntimeError as error:  # no thread left
            self._places.remove(run)
            LOG.error("job %s waits: %s; check the limits on threads and memory", job, error)
            metrics.count_error(error)
            self._tell(job, LeaseLost(run.epoch))
            self._draining.wait(POLL_S)  # otherwise the next claim would follow at once
            return False
        return True

    def _run(self, run: Run) -> None:
        """The body of the run's thread."""
        job = run.claimed.job.id
        try:
            company = self._company_of(run)
            if company is not None:
                self._run_together(run, company)
                return
            event, facts = run.outcome()
            seconds = time.monotonic() - run.started
            if isinstance(event, Failed) and event.transient:
                self._backoff.failed()
            elif isinstance(event, Published):
                self._backoff.succeeded()
            self._tell_until_stored(
                run.claimed.job, run.stopping, event, replace(facts, used=run.used(seconds), run_seconds=seconds)
            )
            if isinstance(event, Published) and self._previews is not None:
                run.draw_preview(self._previews / f"{job}.png")
        except StopRequested:
            self._tell_until_stored(run.claimed.job, run.stopping, run.stopped())
        except MillraceError as error:
            LOG.error("job %s: %s", job, error)  # the lease expires, and the job runs again
            metrics.count_error(error)
        except Exception as error:
            LOG.exception("job %s", job)
            metrics.count_error(error)
        finally:
            run.release()
            self._places.remove(run)
            self.wake()

    def _company_of(self, run: Run) -> Company | None:
        """Jobs that run together with the run's own, claimed. Raises StopRequested."""
        claimed = run.claimed
        array_id, job = claimed.asked.array_id, claimed.job.id
        if array_id is None or not may_have_company(claimed) or self._sizes.of(array_id) < 2:
            return None
        while not self._gathering.acquire(timeout=POLL_S):  # otherwise two runs would choose the same jobs
            run.check()
        try:
            company = gathered(
                run,
                self._sizes.of(array_id),
                lambda most: self._store.company(job, most=most),
                partial(self._claim_company, run),
            )
        except ProcessDied:
            self._sizes.failed(array_id, 1)
            run.release()
            return None
        except MillraceError as error:  # running alone shows whether it lasts
            metrics.count_error(error)
            return None
        finally:
            self._gathering.release()
        return company

    def _claim_company(self, run: Run, wanted: Sequence[StoredJob]) -> Sequence[StoredJob]:
        job = run.claimed.job.id
        run.company = tuple(self._store.claim_company(job, wanted, self.name, now=time.time(), lease_s=LEASE_S))
        return run.company

    def _run_together(self, run: Run, company: Company) -> None:
        began, array_id = time.monotonic(), str(run.claimed.asked.array_id)
        count = len(company.members)
        ending: Event = Stopped(run.epoch)  # all are of the same epoch, the first
        receipts: Mapping[str, Mapping[str, Any]] = {}
        try:
            receipts = Together(run, company, partial(self._tell_all_until_stored, run.stopping)).carry_out()
            self._sizes.took(array_id, count, time.monotonic() - began)
            self._backoff.succeeded()
        except StopRequested:
            ending = run.stopped()
        except Exception as error:  # running alone tells whose fault it is
            self._sizes.failed(array_id, count)
            metrics.count_error(error)
            if isinstance(error, Crowded):
                self._places.let_alone(run.claimed.job.id)
            elif not isinstance(error, UserError):
                self._backoff.failed()
            if not isinstance(error, MillraceError):
                LOG.exception("job %s", run.claimed.job.id)
            self._log(run.claimed.job.id, f"it and {counted(count - 1, 'other job')} run one by one now: {error}")
        seconds = (time.monotonic() - began) / count
        used, facts = run.used(seconds), run.facts(None)
        used = replace(used, read_bytes=used.read_bytes // count, written_bytes=used.written_bytes // count)
        changes: list[tuple[str, Event, Facts]] = []
        for each in run.jobs:
            receipt = receipts.get(each.job.id)
            event = ending if receipt is None else Published(each.job.epoch)
            changes.append((each.job.id, event, replace(facts, receipt=receipt, used=used, run_seconds=seconds)))
        self._tell_all_until_stored(run.stopping, changes)

    def _tell(self, job: str, event: Event, facts: Facts | None = None) -> Job:
        after, actions = self._store.apply(job, event, now=time.time(), facts=facts or Facts())
        self.act(job, actions)
        return after

    def _tell_all(self, changes: Sequence[tuple[str, Event, Facts]]) -> list[Job]:
        """As `_tell`, for several jobs at once."""
        outcomes = self._store.apply_all(changes, now=time.time())
        for (job, _, _), (_, actions) in zip(changes, outcomes, strict=True):
            self.act(job, actions)
        return [after for after, _ in outcomes]

    def _tell_until_stored(self, job: Job, stopping: threading.Event, event: Event, facts: Facts | None = None) -> Job:
        """As `_tell`, but waits while the store fails: what is not stored would be done again. Progress may be lost."""
        if not isinstance(event, Progressed):
            return self._until_stored(stopping, job.id, lambda: self._tell(job.id, event, facts))
        try:
            return self._tell(job.id, event, facts)
        except StorageError:
            return job

    def _tell_all_until_stored(
        self, stopping: threading.Event, changes: Sequence[tuple[str, Event, Facts]]
    ) -> list[Job]:
        return self._until_stored(stopping, changes[0][0], lambda: self._tell_all(changes))

    def _until_stored(self, stopping: threading.Event, job: str, tell: Callable[[], _Told]) -> _Told:
        is_first = True
        while True:
            try:
                return tell()
            except StorageError as error:
                if stopping.is_set():
                    raise
                if is_first:
                    LOG.error("job %s waits: %s", job, error)
                    metrics.count_error(error)
                is_first = False
            stopping.wait(POLL_S)

    def _log(self, job: str, message: str) -> None:
        with suppress(StorageError):
            self._store.log(job, message, now=time.time())


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Waits for threads until `deadline` on the monotonic clock."""
    for thread in threads:
        if thread.is_alive():
            thread.join(max(deadline - time.monotonic(), 0.0))
