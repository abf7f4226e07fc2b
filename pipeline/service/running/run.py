"""One claim of a job, running on its own thread: its progress and its outcome."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import metrics
from pipeline.api_models import JobLimits
from pipeline.cluster.executor import Executor
from pipeline.config import format_bytes, format_seconds
from pipeline.engine.planned import Bounds, PlannedJob
from pipeline.engine.run import RunEvents, RunOptions, finished_before, plan_job, run_job, write_preview
from pipeline.engine.stages import StageRecord, StageTotals
from pipeline.errors import (
    AuditError,
    Crowded,
    LimitExceeded,
    MillraceError,
    OperatorError,
    OutOfDeviceMemory,
    ServiceRefused,
    StorageError,
    UserError,
    counted,
    shortage,
)
from pipeline.formats.image.preview import write_preview as draw_image
from pipeline.service.jobs import (
    ACTIVE,
    Computed,
    Died,
    Event,
    Failed,
    Job,
    Planned,
    Preempted,
    Progressed,
    Published,
    Recut,
    Stopped,
)
from pipeline.service.roots import DataRoots
from pipeline.service.running.cleanup import Cleanup
from pipeline.service.running.job_process import JobProcesses, Lease, ProcessDied
from pipeline.service.running.parameters import parameters_of
from pipeline.service.store import Facts, StoredJob, Used
from pipeline.workloads import Chunk, JobSpec, OpenJob, Plan, workload_named
from pipeline.workloads.paths import refuse_existing_results
from pipeline.workloads.protocol import Previews

LOG = logging.getLogger("millrace.service")
# How often progress is stored.
PROGRESS_S = 0.5
# How often a planned job looks for a place.
PLACE_S = 0.25
# A step after planning in the job's process (opening the output, the audit, publishing, the preview) may take so long,
# and so long without using the CPU; both longer by the time that the result's bytes take on a slow disk.
STEP_S, IDLE_STEP_S, SLOW_BYTES_A_SECOND = 12 * 3600.0, 1200.0, 10e6
# What drawing a preview may allocate.
PREVIEW_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """Progress of a run: its seconds with the stages' totals, and the chunks that it or an earlier run wrote."""

    seconds: float
    stages: Mapping[str, StageTotals]
    chunks_done: int


def estimate_of(planned: PlannedJob) -> tuple[dict[str, int], int]:
    """What the job will take, as `api_models.Estimate` without seconds; and its work."""
    plan = planned.plan
    estimate = {
        "chunks": len(plan.chunks), "read_bytes": plan.input_bytes, "written_bytes": plan.output_bytes,
        "memory_bytes": planned.ring_bytes,
    }  # fmt: skip
    return estimate, sum(chunk.work for chunk in plan.chunks)


def _check_step(output: Path, nbytes: int, took_s: float, idle_s: float) -> None:
    """StorageError if a step after planning hangs."""
    writing_s = nbytes / SLOW_BYTES_A_SECOND
    if took_s > STEP_S + writing_s or idle_s > IDLE_STEP_S + writing_s:
        raise StorageError(
            f"{output}: opening, checking or publishing it takes more than {format_seconds(took_s)}, the last "
            f"{format_seconds(idle_s)} without using the CPU: see whether the file systems of input and output answer"
        )


class StopRequested(Exception):
    """The run was asked to stop, or no longer owns its job."""


@dataclass(kw_only=True, eq=False)
class Run:
    """From the claim of a job to its outcome; any thread may ask it to stop, or for its progress."""

    claimed: StoredJob
    executor: Executor
    roots: DataRoots
    cleanup: Cleanup
    memory_bytes: int  # of its rings
    tell: Callable[..., Job]  # (event, facts=None): stores the event and returns the changed job
    log: Callable[[str], None]  # into the job's log
    processes: JobProcesses | None = None  # where the job is opened; None: here
    stopping: threading.Event = field(default_factory=threading.Event)
    preempted: threading.Event = field(default_factory=threading.Event)  # stop for a more urgent job
    on_crowded: Callable[[], None] = lambda: None  # others on its workers need its memory
    planning_s: float = float("inf")  # how long it may be opened and planned
    may_run: Callable[[], bool] = lambda: True  # once it is planned; it may have given up its place meanwhile
    placed: bool = True  # it counts among the jobs that run at once
    planning: bool = True
    started: float = field(default_factory=time.monotonic, init=False)
    thread: threading.Thread | None = None
    company: tuple[StoredJob, ...] = ()  # other jobs that run together with this one
    cancelled: set[str] = field(default_factory=set)  # those of all these jobs that are being cancelled
    _job: OpenJob | None = field(default=None, init=False)  # once planned
    _lease: Lease | None = field(default=None, init=False)
    _record: StageRecord | None = field(default=None, init=False)  # once chunks move
    _began: float = field(default=0.0, init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False)
    _written: int = field(default=0, init=False)
    _told_at: float = field(default=0.0, init=False)
    _memory_bytes: int | None = field(default=None, init=False)  # the most so far
    _gpu_memory_bytes: int | None = field(default=None, init=False)

    @property
    def epoch(self) -> int:
        return self.claimed.job.epoch

    @property
    def has_progressed(self) -> bool:
        """Whether the store knows of a chunk that this run finished."""
        return self._told_at > 0

    def under_way(self) -> UnderWay | None:
        """Progress; None before the first chunk."""
        record = self._record
        if record is None:
            return None
        stages, unfinished = record.now(), list(record.under_way.values())
        written = self._written + sum(told["write"][2] for told in unfinished)
        return UnderWay(seconds=time.monotonic() - self._began, stages=stages, chunks_done=written)

    @property
    def jobs(self) -> list[StoredJob]:
        """Its job and those that run together with it."""
        return [self.claimed, *self.company]

    def used(self, seconds: float) -> Used:
        """What the run used in its `seconds`: they count for every device that it could use, also if others did too."""
        described = self.executor.device.describe()
        names = [str(each["name"]) for each in described.get("workers", [described])][: self.limits.gpus]
        stages = self._record.now() if self._record is not None else {}
        read, written = (stages[name].nbytes if name in stages else 0 for name in ("read", "write"))
        gpus = sum(name.startswith("cuda") for name in names)
        return Used(
            device_seconds=seconds * len(names), gpu_seconds=seconds * gpus, read_bytes=read, written_bytes=written
        )

    def outcome(self) -> tuple[Event, Facts]:
        """Runs the job and returns how it ended; raises only if the store fails."""
        event, receipt = self._outcome()
        return event, self.facts(receipt)

    def facts(self, receipt: Mapping[str, Any] | None) -> Facts:
        """Facts of the end of the run, without its time."""
        return Facts(receipt=receipt, memory_bytes=self._memory_bytes, gpu_memory_bytes=self._gpu_memory_bytes)

    def _outcome(self) -> tuple[Event, Mapping[str, Any] | None]:
        epoch = self.epoch
        try:
            output = self.roots.writable(self.claimed.asked.output)
            self.cleanup.wait_until_removed(output)
            self.check()
            receipt = self._finished_before(output) or self._carry_out()
            if (remark := receipt["image"].get("not_converged")) is not None:
                self.log(f"warning: {remark}")
            return Published(epoch), receipt
        except StopRequested:
            return self.stopped(), None
        except ProcessDied as error:
            metrics.count_error(error)
            if self.stopping.is_set() or self.preempted.is_set():
                return self.stopped(), None
            self.log(str(error))
            return Died(epoch, "the process that reads the input"), None
        except Crowded as error:
            self.log(str(error))
            self.on_crowded()
            return Stopped(epoch), None
        except OutOfDeviceMemory as error:
            metrics.count_error(error)
            limit_bytes = self.limits.gpu_memory_bytes
            if limit_bytes is None:
                return Failed(epoch, str(error), transient=True), None
            said = f"needs more than the {format_bytes(limit_bytes)} of GPU memory that it may take"
            return Failed(epoch, f"{said}: submit it again with a larger --gpu-memory ({error})", transient=False), None
        except (LimitExceeded, UserError, AuditError, OperatorError) as error:
            for line in error.trace.splitlines() if isinstance(error, OperatorError) else ():
                self.log(line)
            metrics.count_error(error)
            return Failed(epoch, str(error), transient=False), None
        except MillraceError as error:
            metrics.count_error(error)
            return Failed(epoch, str(error), transient=True), None
        except Exception as error:
            LOG.exception("job %s", self.claimed.job.id)
            metrics.count_error(error)
            short = shortage(error)
            what = short or f"internal error: {type(error).__name__}: {error}"
            return Failed(epoch, what, transient=short is not None), None

    def stopped(self) -> Event:
        is_preempted = self.preempted.is_set() and not self.stopping.is_set()
        return Preempted(self.epoch) if is_preempted else Stopped(self.epoch)

    @property
    def limits(self) -> JobLimits:
        return self.claimed.asked.limits

    @property
    def options(self) -> RunOptions:
        """How the job is run."""
        limits, memory_bytes = self.limits, self.memory_bytes
        if limits.memory_bytes is not None:
            memory_bytes = min(memory_bytes, limits.memory_bytes // 2)  # decoders and kernels take memory too
        bounds = Bounds(
            memory_bytes=limits.memory_bytes, gpu_memory_bytes=limits.gpu_memory_bytes, workers=limits.gpus,
            opening_s=self.planning_s,
        )  # fmt: skip
        return RunOptions(
            memory_bytes=memory_bytes, resume=True, start_over=True, job=self.claimed.job.id, bounds=bounds
        )

    def estimate(self, within_s: float) -> tuple[dict[str, int], int]:
        """Plans only: `estimate_of` the plan. Raises UserError; ServiceRefused if it takes longer."""
        end = time.monotonic() + within_s

        def check() -> None:
            if time.monotonic() > end:
                raise ServiceRefused(
                    f"planning takes more than {within_s:g} s: the estimate will be there once it runs"
                )

        try:
            planned = self.planned(self._spec(), self.options, check)
            planned.output.discard()
            return estimate_of(planned)
        except ProcessDied as error:
            raise ServiceRefused(f"{self.claimed.asked.input}: {error}") from error
        finally:
            self.release()

    def planned(self, spec: JobSpec, options: RunOptions, check: Callable[[], None]) -> PlannedJob:
        """The job of this spec, opened in a process that `check` can end, and planned."""
        open_job, lease = None, self.leased(check)
        if lease is not None:
            open_job = partial(lease.open, most_bytes=self.limits.memory_bytes)
        planned = plan_job(spec, self.executor.device, options, open_job)
        if lease is not None:
            lease.settle(partial(_check_step, spec.output, planned.plan.output_bytes))
        return planned

    def leased(self, check: Callable[[], None]) -> Lease | None:
        """The process of this run, until `release`; None: jobs are opened here."""
        if self._lease is None and self.processes is not None:
            self._lease = self.processes.lease(check)
        return self._lease

    def _carry_out(self) -> Mapping[str, Any]:
        options = self.options
        planned = self.planned(self._spec(), options, self.check_planning)
        self._job = planned.job
        try:
            self.wait_for_place()
            self._refuse_older()
            estimate, work = estimate_of(planned)
            facts = Facts(estimate=estimate, work=work)
            self._go_on_after(Planned(self.epoch, len(planned.plan.chunks)), facts)
        except BaseException:
            planned.output.discard()
            raise
        events = RunEvents(
            on_written=self._count,
            on_begun=self.begin,
            on_recut=self._begin_anew,
            on_computed=self._finish,
            on_memory=self.note_memory,
            on_kept=lambda kept, chunks: self.log(
                f"{kept} of {counted(chunks, 'chunk')} kept" if kept else "the last iterate kept"
            ),
            check=self.check,
        )
        return run_job(planned, options, events=events, stream=self.executor.stream)

    def check_planning(self) -> None:
        self.check()
        if time.monotonic() - self.started > self.planning_s:
            raise LimitExceeded(
                f"{self.claimed.asked.input}: opening it and planning the job take more than "
                f"{format_seconds(self.planning_s)}; check the file, or have the service's planning_s raised"
            )

    def wait_for_place(self) -> None:
        """Returns once a job that was planned slowly has a place again; the wait does not count as its time."""
        began = time.monotonic()
        if not self.may_run():
            self.log("planned, and waits for a place: others took its place while it was planned")
        while not self.may_run():
            if self.stopping.wait(PLACE_S):
                raise StopRequested
        self.started += time.monotonic() - began

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

    def begin(self, record: StageRecord) -> None:
        self._record, self._began = record, time.monotonic()

    def _count(self, chunk: Chunk) -> None:
        now = time.monotonic()
        with self._counting:  # several threads write
            self._written += 1
            # Chunks of an earlier run, which come before the record, do not count as progress.
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

    def _finish(self) -> None:
        self.check()
        self._refuse_older()
        self._go_on_after(Computed(self.epoch))

    def _refuse_older(self) -> None:
        if self.claimed.asked.no_clobber:
            refuse_existing_results(workload_named(self.claimed.asked.workload), self._spec())

    def note_memory(self, memory_bytes: int | None, gpu_memory_bytes: int | None) -> None:
        if memory_bytes is not None:
            self._memory_bytes = max(memory_bytes, self._memory_bytes or 0)
        if gpu_memory_bytes is not None:
            self._gpu_memory_bytes = max(gpu_memory_bytes, self._gpu_memory_bytes or 0)

    def check(self) -> None:
        if self.stopping.is_set() or self.preempted.is_set():
            raise StopRequested
        limit_s, ran_s = self.limits.time_s, self.claimed.used.seconds + time.monotonic() - self.started
        if limit_s is not None and ran_s > limit_s:
            raise LimitExceeded(
                f"ran for {format_seconds(ran_s)}, and may run for {format_seconds(limit_s)}: submit it again with a "
                "larger --time, or retry it; its finished chunks are kept"
            )

    def _go_on_after(self, event: Event, facts: Facts | None = None) -> None:
        """Stores the event, and stops if this run no longer owns the job."""
        job = self.tell(event, facts)
        if job.epoch != self.epoch or job.state not in ACTIVE or job.cancelling:
            raise StopRequested

    def release(self) -> None:
        """Gives back what the run holds; call it last."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def draw_preview(self, preview: Path) -> None:
        """Draws a preview; failing to do so does not fail the job."""
        if self._job is None:  # published by an earlier run
            return
        try:
            if self._lease is None or isinstance(self._job, Previews):
                write_preview(self._job, preview)
            else:  # the file may be another one by now
                output = self._job.spec.output
                self._lease.call(draw_image, output, preview, known=self.roots.confine(), most_bytes=PREVIEW_BYTES)
        except MillraceError as error:
            self.log(f"no preview: {error}")
