"""Takes jobs from the store, runs them on the workers of one place, and tells the store what became of them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline import metrics
from pipeline.cluster.place import Place
from pipeline.config import explain
from pipeline.engine.ledger import remove_leftovers
from pipeline.engine.run import RunEvents, RunOptions, finished_before, plan_job, run_job
from pipeline.engine.stages import StageRecord, StageTotals
from pipeline.errors import AuditError, MillraceError, ParameterError, StorageError, UserError, counted
from pipeline.service.backoff import Backoff
from pipeline.service.jobs import (
    ACTIVE,
    Action,
    Computed,
    Discard,
    Event,
    Failed,
    Job,
    LeaseLost,
    Planned,
    Progressed,
    Published,
    Recut,
    State,
    Stop,
    Stopped,
)
from pipeline.service.roots import DataRoots
from pipeline.service.store import Facts, Store, StoredJob
from pipeline.workloads import Chunk, JobSpec, Plan, Workload, workloads

LOG = logging.getLogger("millrace.service")
LEASE_S = 30.0
# How often the store hears of a job's chunks, and how often jobs that nobody announced are looked for.
PROGRESS_S = 0.5
POLL_S = 1.0
PRUNE_S = 600.0
# Before a server was killed: of jobs cancelled in this time it may not have removed everything.
LATELY_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a service allows at once."""

    jobs_at_once: int = 2
    jobs_at_once_of_an_owner: int = 8
    memory_bytes: int = 512 << 20  # of the rings of all jobs together
    keep_s: float = float("inf")  # jobs that are over are forgotten after so long


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """What a run has done so far: the stages' totals of its seconds, and the chunks that it or an earlier one wrote."""

    seconds: float
    stages: Mapping[str, StageTotals]
    chunks_done: int


class _StopRequested(Exception):
    """The run was asked to stop, or its job is not its own any more."""


@dataclass(kw_only=True, eq=False)
class _Run:
    """One claim of a job, at work."""

    claimed: StoredJob
    stopping: threading.Event = field(default_factory=threading.Event)
    written: int = 0
    told_at: float = 0.0
    thread: threading.Thread | None = None
    workload: Workload | None = None  # once planned
    record: StageRecord | None = None  # once chunks move
    began: float = 0.0

    @property
    def epoch(self) -> int:
        return self.claimed.job.epoch

    def check(self) -> None:
        if self.stopping.is_set():
            raise _StopRequested

    def begin(self, record: StageRecord) -> None:
        self.record, self.began = record, time.monotonic()


class Runner:
    """Runs jobs, some at a time, between `start` and `drain`."""

    def __init__(
        self,
        store: Store,
        place: Place,
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
        self._place = place
        self._roots = roots
        self._limits = limits
        self._previews = previews
        self._has_workers = has_workers
        self._backoff = Backoff()
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()
        self._clearing: set[Path] = set()  # outputs of which leftovers are being removed
        self._cleared = threading.Condition(self._lock)
        self._news = threading.Event()
        self._draining = threading.Event()
        self._dispatcher = threading.Thread(target=self._dispatch, name="dispatcher", daemon=True)

    def start(self) -> None:
        """Takes over what a server that was killed had begun. No other runner may be alive on this store."""
        cancelled = self._store.lately_cancelled(LATELY_S)
        for job, epoch in self._store.lost(self.name, now=time.time(), others_too=True):
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
        self._news.set()

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
                    self._discard(job)
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
        record = run.record if run is not None else None
        if run is None or record is None:
            return None
        stages, unfinished = record.now(), list(record.under_way.values())
        written = run.written + sum(told["write"][2] for told in unfinished)
        return UnderWay(seconds=time.monotonic() - run.began, stages=stages, chunks_done=written)

    @property
    def running(self) -> int:
        with self._lock:
            return len(self._runs)

    def _discard(self, job: str) -> None:
        """Removes what a cancelled job has kept, unless by now a retry goes on with it or another job's run has it."""
        output = self._roots.writable(self._store.job(job).asked.output)
        with self._lock:
            self._cleared.wait_for(lambda: output not in self._clearing)
            self._clearing.add(output)
        try:
            if self._store.abandoned(job):
                remove_leftovers(output)
        finally:
            with self._lock:
                self._clearing.remove(output)
                self._cleared.notify_all()

    # The dispatcher

    def _dispatch(self) -> None:
        renewed = pruned = 0.0
        while not self._draining.is_set():
            self._news.clear()
            try:
                now = time.time()
                if now - renewed > LEASE_S / 3:
                    with self._lock:
                        at_work = list(self._runs)
                    self._store.renew(self.name, at_work, now=now, lease_s=LEASE_S)
                    renewed = now
                    for job, epoch in self._store.lost(self.name, now=now, others_too=False):
                        self._tell(job, LeaseLost(epoch))
                while self._may_claim() and self._claim():
                    pass
                if now - pruned > PRUNE_S and not self._prune(now):
                    pruned = now
            except MillraceError as error:
                LOG.error("%s", error)  # the disk may come back; what was accepted stays where it is
                metrics.count_error(error)
            except Exception:
                LOG.exception("the dispatcher goes on")
            self._news.wait(POLL_S)

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
        run = _Run(claimed=claimed)
        run.thread = threading.Thread(target=self._run, args=(run,), name=f"job-{claimed.job.id}", daemon=True)
        with self._lock:
            self._runs[claimed.job.id] = run
        if self._draining.is_set():  # since the claim began
            run.stopping.set()
        try:
            run.thread.start()
        except RuntimeError as error:  # this machine has no thread left
            with self._lock:
                del self._runs[claimed.job.id]
            LOG.error("job %s waits: %s; see the limits on threads and memory", claimed.job.id, error)
            metrics.count_error(error)
            self._tell(claimed.job.id, LeaseLost(run.epoch))
            self._draining.wait(POLL_S)  # else the next claim would follow at once
            return False
        return True

    # One run, on its thread

    def _run(self, run: _Run) -> None:
        began, job = time.monotonic(), run.claimed.job.id
        try:
            event, facts = self._outcome(run)
            if isinstance(event, Failed) and event.transient:
                self._backoff.failed()
            elif isinstance(event, Published):
                self._backoff.succeeded()
            self._tell(job, event, replace(facts, device_seconds=time.monotonic() - began))
            if isinstance(event, Published):
                self._draw_preview(run)
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

    def _outcome(self, run: _Run) -> tuple[Event, Facts]:
        """What became of the run; never raises but for the store."""
        epoch = run.epoch
        try:
            output = self._roots.writable(run.claimed.asked.output)
            with self._lock:  # since its claim nobody begins to remove anything
                self._cleared.wait_for(lambda: output not in self._clearing)
            run.check()
            receipt = self._finished_before(run, output) or self._carry_out(run)
            return Published(epoch), Facts(receipt=receipt)
        except _StopRequested:
            return Stopped(epoch), Facts()
        except (UserError, AuditError) as error:
            metrics.count_error(error)
            return Failed(epoch, str(error), transient=False), Facts()
        except MillraceError as error:
            metrics.count_error(error)
            return Failed(epoch, str(error), transient=True), Facts()
        except Exception as error:
            LOG.exception("job %s", run.claimed.job.id)
            metrics.count_error(error)
            return Failed(epoch, f"internal error: {type(error).__name__}: {error}", transient=False), Facts()

    def _carry_out(self, run: _Run) -> Mapping[str, Any]:
        job, epoch = run.claimed.job.id, run.epoch
        options = RunOptions(
            memory_bytes=self._limits.memory_bytes // self._limits.jobs_at_once, resume=True, start_over=True, job=job
        )
        planned = plan_job(self._spec(run.claimed), self._place.device, options)
        run.workload = planned.workload
        try:
            self._tell_own(run, Planned(epoch, len(planned.plan.chunks)))
        except BaseException:
            planned.workload.discard()
            raise
        events = RunEvents(
            on_written=lambda chunk: self._count(run, chunk),
            on_begun=run.begin,
            on_recut=lambda plan: self._begin_anew(run, plan),
            on_computed=lambda: self._tell_own(run, Computed(epoch)),
            on_kept=lambda kept, chunks: self._log(job, f"{kept} of {counted(chunks, 'chunk')} kept"),
            check=run.check,
        )
        return run_job(planned, options, events=events, stream=self._place.stream)

    def _finished_before(self, run: _Run, output: Path) -> Mapping[str, Any] | None:
        """The receipt of an earlier run of this job that was killed after it had published."""
        if run.epoch == 1:
            return None
        receipt = finished_before(output, run.claimed.job.id)
        if receipt is not None:
            self._tell_own(run, Planned(run.epoch, receipt["chunks"]))
            self._tell_own(run, Computed(run.epoch))
        return receipt

    def _spec(self, claimed: StoredJob) -> JobSpec:
        """Checked again: folders and links may have changed since the job was accepted."""
        asked = claimed.asked
        if asked.workload not in workloads():
            raise ParameterError(f"there is no workload {asked.workload}; there are {', '.join(workloads())}")
        try:
            parameters = workloads()[asked.workload].Parameters(**asked.parameters)
        except ValidationError as error:
            fault = error.errors()[0]
            where = f"{fault['loc'][0]}: " if fault["loc"] else ""
            raise ParameterError(f"{where}{explain(fault)}") from error
        self._roots.check_further(parameters.further_files)
        return JobSpec(
            workload=asked.workload,
            input=self._roots.readable(asked.input),
            output=self._roots.writable(asked.output),
            parameters=parameters,
        )

    def _count(self, run: _Run, chunk: Chunk) -> None:
        run.written += 1
        now = time.monotonic()
        if now - run.told_at >= PROGRESS_S:
            run.told_at = now
            self._tell(run.claimed.job.id, Progressed(run.epoch, run.written))

    def _begin_anew(self, run: _Run, plan: Plan) -> None:
        """What was written in larger chunks counts no more."""
        run.written, run.record = 0, None
        self._tell_own(run, Recut(run.epoch, len(plan.chunks)))

    # Telling

    def _tell_own(self, run: _Run, event: Event) -> None:
        """Tells the store, and stops where the job is another run's by now, or nobody's."""
        job = self._tell(run.claimed.job.id, event)
        if job.epoch != run.epoch or job.state not in ACTIVE or job.cancelling:
            raise _StopRequested

    def _tell(self, job: str, event: Event, facts: Facts | None = None) -> Job:
        after, actions = self._store.apply(job, event, now=time.time(), facts=facts or Facts())
        self.act(job, actions)
        return after

    def _log(self, job: str, message: str) -> None:
        with suppress(StorageError):
            self._store.log(job, message, now=time.time())

    def _draw_preview(self, run: _Run) -> None:
        """A picture that cannot be drawn is no reason to fail: the result is there."""
        if self._previews is None or run.workload is None:
            return
        try:
            run.workload.write_preview(self._previews / f"{run.claimed.job.id}.png")
        except MillraceError as error:
            self._log(run.claimed.job.id, f"no preview: {error}")


def _join(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Waits for their ends, until that moment of the monotonic clock."""
    for thread in threads:
        if thread.is_alive():
            thread.join(max(deadline - time.monotonic(), 0.0))
