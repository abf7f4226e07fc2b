"""One claim of a job, at work on its thread: what it does, how far it has come, and what became of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import metrics
from pipeline.cluster.executor import Executor
from pipeline.engine.run import RunEvents, RunOptions, finished_before, plan_job, run_job, write_preview
from pipeline.engine.stages import StageRecord, StageTotals
from pipeline.errors import AuditError, MillraceError, OperatorError, UserError, counted, shortage
from pipeline.service.cleanup import Leftovers
from pipeline.service.jobs import ACTIVE, Computed, Event, Failed, Job, Planned, Progressed, Published, Recut, Stopped
from pipeline.service.parameters import parameters_of
from pipeline.service.roots import DataRoots
from pipeline.service.store import Facts, StoredJob
from pipeline.workloads import Chunk, JobSpec, OpenJob, Plan

LOG = logging.getLogger("millrace.service")
# How often the store hears of a job's chunks.
PROGRESS_S = 0.5


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """What a run has done so far: the stages' totals of its seconds, and the chunks that it or an earlier one wrote."""

    seconds: float
    stages: Mapping[str, StageTotals]
    chunks_done: int


class _StopRequested(Exception):
    """The run was asked to stop, or its job is not its own any more."""


@dataclass(kw_only=True, eq=False)
class Run:
    """Between the claim of a job and what became of it; any thread may ask it to stop, or how far it has come."""

    claimed: StoredJob
    place: Executor
    roots: DataRoots
    leftovers: Leftovers
    memory_bytes: int  # of its rings
    tell: Callable[[Event], Job]  # the store, which gives the job after the event
    log: Callable[[str], None]  # into the job's log
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    _job: OpenJob | None = field(default=None, init=False)  # once planned
    _record: StageRecord | None = field(default=None, init=False)  # once chunks move
    _began: float = field(default=0.0, init=False)
    _written: int = field(default=0, init=False)
    _told_at: float = field(default=0.0, init=False)

    @property
    def epoch(self) -> int:
        return self.claimed.job.epoch

    def under_way(self) -> UnderWay | None:
        """None where its chunks do not move yet."""
        record = self._record
        if record is None:
            return None
        stages, unfinished = record.now(), list(record.under_way.values())
        written = self._written + sum(told["write"][2] for told in unfinished)
        return UnderWay(seconds=time.monotonic() - self._began, stages=stages, chunks_done=written)

    def outcome(self) -> tuple[Event, Facts]:
        """Runs the job, and says what became of it; never raises but for the store."""
        epoch = self.epoch
        try:
            output = self.roots.writable(self.claimed.asked.output)
            self.leftovers.wait_until_removed(output)
            self._check()
            receipt = self._finished_before(output) or self._carry_out()
            return Published(epoch), Facts(receipt=receipt)
        except _StopRequested:
            return Stopped(epoch), Facts()
        except (UserError, AuditError, OperatorError) as error:
            for line in error.trace.splitlines() if isinstance(error, OperatorError) else ():
                self.log(line)
            metrics.count_error(error)
            return Failed(epoch, str(error), transient=False), Facts()
        except MillraceError as error:
            metrics.count_error(error)
            return Failed(epoch, str(error), transient=True), Facts()
        except Exception as error:
            LOG.exception("job %s", self.claimed.job.id)
            metrics.count_error(error)
            short = shortage(error)
            what = short or f"internal error: {type(error).__name__}: {error}"
            return Failed(epoch, what, transient=short is not None), Facts()

    def _carry_out(self) -> Mapping[str, Any]:
        options = RunOptions(memory_bytes=self.memory_bytes, resume=True, start_over=True, job=self.claimed.job.id)
        planned = plan_job(self._spec(), self.place.device, options)
        self._job = planned.job
        try:
            self._go_on_after(Planned(self.epoch, len(planned.plan.chunks)))
        except BaseException:
            planned.output.discard()
            raise
        events = RunEvents(
            on_written=self._count,
            on_begun=self._begin,
            on_recut=self._begin_anew,
            on_computed=lambda: self._go_on_after(Computed(self.epoch)),
            on_kept=lambda kept, chunks: self.log(f"{kept} of {counted(chunks, 'chunk')} kept"),
            check=self._check,
        )
        return run_job(planned, options, events=events, stream=self.place.stream)

    def _finished_before(self, output: Path) -> Mapping[str, Any] | None:
        """The receipt of an earlier run of this job that was killed after it had published."""
        if self.epoch == 1:
            return None
        receipt = finished_before(output, self.claimed.job.id)
        if receipt is not None:
            self._go_on_after(Planned(self.epoch, receipt["chunks"]))
            self._go_on_after(Computed(self.epoch))
        return receipt

    def _spec(self) -> JobSpec:
        """Checked again: folders and links may have changed since the job was accepted."""
        asked = self.claimed.asked
        return JobSpec(
            workload=asked.workload,
            input=self.roots.readable(asked.input),
            output=self.roots.writable(asked.output),
            parameters=parameters_of(asked, self.roots),
        )

    def _begin(self, record: StageRecord) -> None:
        self._record, self._began = record, time.monotonic()

    def _count(self, chunk: Chunk) -> None:
        self._written += 1
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_S:
            self._told_at = now
            self.tell(Progressed(self.epoch, self._written))

    def _begin_anew(self, plan: Plan) -> None:
        """What was written in larger chunks counts no more."""
        self._written, self._record = 0, None
        self._go_on_after(Recut(self.epoch, len(plan.chunks)))

    def _check(self) -> None:
        if self.stopping.is_set():
            raise _StopRequested

    def _go_on_after(self, event: Event) -> None:
        """Tells the store, and stops where the job is another run's by now, or nobody's."""
        job = self.tell(event)
        if job.epoch != self.epoch or job.state not in ACTIVE or job.cancelling:
            raise _StopRequested

    def draw_preview(self, preview: Path) -> None:
        """A picture that cannot be drawn is no reason to fail: the result is there."""
        if self._job is None:  # an earlier run had published
            return
        try:
            write_preview(self._job, preview)
        except MillraceError as error:
            self.log(f"no preview: {error}")
