"""One claim of a job, running on its own thread: its progress and its outcome."""

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
from pipeline.service.cleanup import Cleanup
from pipeline.service.job_process import JobProcesses, Lease, ProcessDied
from pipeline.service.jobs import (
    ACTIVE,
    Computed,
    Died,
    Event,
    Failed,
    Job,
    Planned,
    Progressed,
    Published,
    Recut,
    Stopped,
)
from pipeline.service.parameters import parameters_of
from pipeline.service.roots import DataRoots
from pipeline.service.store import Facts, StoredJob, Used
from pipeline.workloads import Chunk, JobSpec, OpenJob, Plan

LOG = logging.getLogger("millrace.service")
# How often progress is stored.
PROGRESS_S = 0.5


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """Progress of a run: its seconds with the stages' totals, and the chunks that it or an earlier run wrote."""

    seconds: float
    stages: Mapping[str, StageTotals]
    chunks_done: int


class _StopRequested(Exception):
    """The run was asked to stop, or no longer owns its job."""


@dataclass(kw_only=True, eq=False)
class Run:
    """From the claim of a job to its outcome; any thread may ask it to stop, or for its progress."""

    claimed: StoredJob
    executor: Executor
    roots: DataRoots
    cleanup: Cleanup
    memory_bytes: int  # of its rings
    tell: Callable[[Event], Job]  # stores the event and returns the changed job
    log: Callable[[str], None]  # into the job's log
    processes: JobProcesses | None = None  # where the job is opened; None: here
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    _job: OpenJob | None = field(default=None, init=False)  # once planned
    _lease: Lease | None = field(default=None, init=False)
    _record: StageRecord | None = field(default=None, init=False)  # once chunks move
    _began: float = field(default=0.0, init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False)
    _written: int = field(default=0, init=False)
    _told_at: float = field(default=0.0, init=False)

    @property
    def epoch(self) -> int:
        return self.claimed.job.epoch

    def under_way(self) -> UnderWay | None:
        """Progress; None before the first chunk."""
        record = self._record
        if record is None:
            return None
        stages, unfinished = record.now(), list(record.under_way.values())
        written = self._written + sum(told["write"][2] for told in unfinished)
        return UnderWay(seconds=time.monotonic() - self._began, stages=stages, chunks_done=written)

    def used(self, seconds: float) -> Used:
        """What the run used in its `seconds`: they count for every device that it could use, also if others did too."""
        described = self.executor.device.describe()
        names = [str(each["name"]) for each in described.get("workers", [described])]
        stages = self._record.now() if self._record is not None else {}
        read, written = (stages[name].nbytes if name in stages else 0 for name in ("read", "write"))
        gpus = sum(name.startswith("cuda") for name in names)
        return Used(
            device_seconds=seconds * len(names), gpu_seconds=seconds * gpus, read_bytes=read, written_bytes=written
        )

    def outcome(self) -> tuple[Event, Facts]:
        """Runs the job and returns how it ended; raises only if the store fails."""
        epoch = self.epoch
        try:
            output = self.roots.writable(self.claimed.asked.output)
            self.cleanup.wait_until_removed(output)
            self._check()
            receipt = self._finished_before(output) or self._carry_out()
            return Published(epoch), Facts(receipt=receipt)
        except _StopRequested:
            return Stopped(epoch), Facts()
        except ProcessDied as error:
            metrics.count_error(error)
            if self.stopping.is_set():
                return Stopped(epoch), Facts()
            self.log(str(error))
            return Died(epoch, "the process that reads the input"), Facts()
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
        spec, open_job = self._spec(), None
        if self.processes is not None:
            self._lease = self.processes.lease(self._check)
            open_job = self._lease.open
        planned = plan_job(spec, self.executor.device, options, open_job)
        if self._lease is not None:
            self._lease.settle()
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
            on_kept=lambda kept, chunks: self.log(
                f"{kept} of {counted(chunks, 'chunk')} kept" if kept else "the last iterate kept"
            ),
            check=self._check,
        )
        return run_job(planned, options, events=events, stream=self.executor.stream)

    def _finished_before(self, output: Path) -> Mapping[str, Any] | None:
        """The receipt, if an earlier run of this job was killed after publishing."""
        if self.epoch == 1:
            return None
        receipt = finished_before(output, self.claimed.job.id)
        if receipt is not None:
            self._go_on_after(Planned(self.epoch, receipt["chunks"]))
            self._go_on_after(Computed(self.epoch))
        return receipt

    def _spec(self) -> JobSpec:
        """The spec, checked again: folders and symlinks may have changed since submission."""
        asked = self.claimed.asked
        return JobSpec(
            workload=asked.workload,
            input=self.roots.readable(asked.input),
            output=self.roots.writable(asked.output),
            parameters=parameters_of(asked, self.roots),
            confinement=self.roots.confine(),
        )

    def _begin(self, record: StageRecord) -> None:
        self._record, self._began = record, time.monotonic()

    def _count(self, chunk: Chunk) -> None:
        now = time.monotonic()
        with self._counting:  # several threads write
            self._written += 1
            # Chunks of an earlier run, which come before the record, are no progress of this one.
            written, is_due = self._written, self._record is not None and now - self._told_at >= PROGRESS_S
            if is_due:
                self._told_at = now
        if is_due:
            self.tell(Progressed(self.epoch, written))

    def _begin_anew(self, plan: Plan) -> None:
        """Starts counting again: the larger chunks are void."""
        with self._counting:
            self._written, self._record = 0, None
        self._go_on_after(Recut(self.epoch, len(plan.chunks)))

    def _check(self) -> None:
        if self.stopping.is_set():
            raise _StopRequested

    def _go_on_after(self, event: Event) -> None:
        """Stores the event, and stops if this run no longer owns the job."""
        job = self.tell(event)
        if job.epoch != self.epoch or job.state not in ACTIVE or job.cancelling:
            raise _StopRequested

    def release(self) -> None:
        """Gives back what the run holds; call it last."""
        if self._lease is not None:
            self._lease.release()

    def draw_preview(self, preview: Path) -> None:
        """Draws a preview; failing to do so does not fail the job."""
        if self._job is None:  # published by an earlier run
            return
        try:
            write_preview(self._job, preview)
        except MillraceError as error:
            self.log(f"no preview: {error}")
