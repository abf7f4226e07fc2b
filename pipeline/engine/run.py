"""One job on one device, in this process: plan, stream, audit, publish, receipt."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import metrics
from pipeline.config import format_bytes
from pipeline.engine.checkpoints import Checkpoints
from pipeline.engine.device_pipeline import DevicePipeline
from pipeline.engine.devices.device import CpuDevice, CudaDevice, Device
from pipeline.engine.devices.discovery import discover, unavailable
from pipeline.engine.identity import InputIdentity, input_version
from pipeline.engine.iterates import Iterates
from pipeline.engine.ledger import Entry, Ledger, remove_leftovers
from pipeline.engine.output import Output
from pipeline.engine.planned import NO_BOUNDS, Bounds, PlannedDevice, PlannedJob, unpacks
from pipeline.engine.receipt import make_receipt, write_receipt
from pipeline.engine.stages import StageRecord
from pipeline.errors import (
    AuditError,
    OutOfDeviceMemory,
    OutputError,
    ParameterError,
    StorageError,
    UserError,
)
from pipeline.formats.image.preview import write_preview as draw_image
from pipeline.storage.confinement import open_beneath
from pipeline.storage.objects import ObjectPath
from pipeline.storage.partial import Opening, PartialFile, behind_link, partial_path, samples_path
from pipeline.storage.partial_objects import is_published
from pipeline.workloads import Budget, Chunk, JobSpec, OpenJob, Plan, Workload, workload_named
from pipeline.workloads.many_files import open_job
from pipeline.workloads.paths import receipt_path
from pipeline.workloads.protocol import Audit, HoldsInput, KeepsIterates, NeedsWorkspace, Previews, StatesWork


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a job of any kind.

    memory_bytes : the most host memory for the ring of buffers
    chunk_bytes  : input and output of one chunk together; None: a good size for the device
    checksum     : record the input's SHA-256 in the receipt even if the file is large
    resume       : continue an interrupted run of the same job, if there is one
    start_over   : with `resume`, if the interrupted run cannot be continued (another job, damaged): start over instead
                   of raising
    job          : the service's name of the job, for the receipt and `finished_before`
    bounds       : on what the job may take of workers
    """

    memory_bytes: int
    chunk_bytes: int | None = None
    checksum: bool = False
    resume: bool = False
    start_over: bool = False
    job: str | None = None
    bounds: Bounds = NO_BOUNDS


@dataclass(frozen=True, kw_only=True)
class RunEvents:
    """Callbacks of a running job. `on_written` is called from several threads."""

    on_written: Callable[[Chunk], None] = lambda chunk: None
    # Streaming begins; the stages add to this record.
    on_begun: Callable[[StageRecord], None] = lambda record: None
    # The device ran out of memory: the chunks of this plan are written instead, from the start.
    on_recut: Callable[[Plan], None] = lambda plan: None
    # Every chunk is written and the audit has passed; an exception prevents publishing.
    on_computed: Callable[[], None] = lambda: None
    on_published: Callable[[], None] = lambda: None
    # Called regularly while chunks are streamed; an exception stops the job.
    check: Callable[[], None] = lambda: None
    # The most host memory that the workers of one host took for the job so far, and the most of one GPU; None: unknown.
    on_memory: Callable[[int | None, int | None], None] = lambda memory_bytes, gpu_memory_bytes: None
    # The job failed or was stopped; the first number of chunks, of the second, is kept for a resumed run.
    # None of them: only the state of a chunk's iterations.
    on_kept: Callable[[int, int], None] = lambda kept, chunks: None


# Streams the chunks of a plan, the job's own or the rest of it, to the output, and keeps the ledger.
Stream = Callable[[PlannedJob, Plan, Ledger, RunEvents], StageRecord]


def open_device(name: str, threads: int | None = None, overlap: int = 5) -> Device:
    """Open a device by name: auto, cpu, cuda or cuda:N. DeviceUnavailable gives the reason and the usable devices."""
    reports = discover()
    if name == "auto":
        name = reports[0].name
    if name == "cuda":
        name = "cuda:0"
    if name == "cpu":
        return CpuDevice(threads, overlap)
    for report in reports:
        if report.name == name and report.obstacle is None:
            return CudaDevice(int(name.removeprefix("cuda:")), overlap)
    raise unavailable(name, reports)


def watch(device: Device) -> None:
    """Include the device's state in the metrics, if it is a GPU."""
    uuid = device.describe().get("uuid")
    if uuid is not None:
        metrics.gpus.watch(uuid)


def plan_job(
    spec: JobSpec, device: PlannedDevice, options: RunOptions, opening: Callable[[JobSpec], OpenJob] | None = None
) -> PlannedJob:
    """Check the job against its input and cut it into chunks so that the ring fits the memory.

    opening : instead of the workload's `open`
    """
    workload = workload_named(spec.workload)
    job = open_job(workload, spec) if opening is None else opening(spec)
    try:
        # A GPU decodes blocks for each chunk anew; the others are few.
        part = 8 if unpacks(device, job) else 2
        ring_bytes, held_bytes = _shares(job, options.memory_bytes, part)
        target, limit = device.target_bytes(job.summary.nbytes), int(ring_bytes / _slots(device, job))
        if isinstance(device, Device) and unpacks(device, job):
            # A chunk whose codecs are on a GPU takes some 5 ms besides its bytes: H200, Zarr of 2 MiB chunks.
            while device.readers > 1 and 2 * limit < target * (device.readers + device.writers):
                device = device.with_fewer_lanes()
                limit = ring_bytes // device.ring_depth
            limit -= limit // 3  # see PlannedJob.slot_bytes
        target = options.chunk_bytes or target
        if target > limit and options.chunk_bytes is not None:
            raise ParameterError(
                f"--chunk-bytes {format_bytes(target)}: {device.ring_depth} such chunks do not fit --memory; "
                f"at most {format_bytes(limit)} do"
            )
        budget = Budget(budget_bytes=limit, target_bytes=min(limit, target))
        earlier = Ledger.recorded_budget(spec.output, spec if options.start_over else None) if options.resume else None
        if earlier is not None:
            budget = _same_cut(earlier, budget, options)
        plan, version = job.plan(budget), input_version(job.spec.input)
    except BaseException:
        job.close()
        raise
    planned = PlannedJob(
        output=Output(workload, job), version=version, plan=plan, device=device, budget=budget, held_bytes=held_bytes,
        bounds=options.bounds,
    )  # fmt: skip
    if isinstance(job, HoldsInput) and held_bytes == (ring_bytes + held_bytes) // part:  # and what the ring leaves
        return replace(planned, held_bytes=job.hold_at_most(ring_bytes + held_bytes - planned.ring_bytes))
    return planned


def _same_cut(earlier: Budget, budget: Budget, options: RunOptions) -> Budget:
    """An interrupted run's budget, if this run has the memory for it."""
    if options.chunk_bytes not in (None, earlier.target_bytes):
        raise ParameterError(
            f"--resume continues with chunks of {format_bytes(earlier.target_bytes)}: leave --chunk-bytes out"
        )
    if earlier.target_bytes > budget.budget_bytes:
        if options.start_over:
            return budget
        raise ParameterError(
            f"--resume continues with chunks of {format_bytes(earlier.target_bytes)}, too large for --memory: raise it"
        )
    return earlier


def _slots(device: PlannedDevice, job: OpenJob) -> float:
    """Chunks that take as much memory as the ring and, on a CPU, what is computed beside it: all slots but two at once.
    A GPU computes in its own memory."""
    slots = device.ring_depth
    if isinstance(job, StatesWork) and device.name.endswith("cpu"):
        return slots + max(slots - 2, 1) * job.work_ratio
    return slots


def _shares(job: OpenJob, memory_bytes: int, part: int) -> tuple[int, int]:
    """The memory left for the ring besides the job's workspace and the input that it holds; and of that input, if
    possible one `part` of the memory."""
    if isinstance(job, NeedsWorkspace):
        memory_bytes -= job.workspace_bytes(memory_bytes)
    held = job.hold_at_most(memory_bytes // part) if isinstance(job, HoldsInput) else 0
    if held > memory_bytes // 2:
        raise ParameterError(
            f"{job.spec.input} must be held whole, which takes {format_bytes(held)} of memory; "
            f"raise --memory to {format_bytes(2 * held)}, or give it in a format that can be read in parts"
        )
    return memory_bytes - held, held


def check_preview(spec: JobSpec, preview: Path) -> None:
    """OutputError if the preview cannot be written, or would overwrite the input or the result."""
    if preview.suffix.lower() != ".png":
        raise OutputError(f"--preview {preview}: a preview is a PNG; name it with .png")
    final, taken = Path(os.path.realpath(preview)), {Path(os.path.realpath(path)) for path in (spec.input, spec.output)}
    written = (final, partial_path(final), partial_path(samples_path(final)))
    if not taken.isdisjoint(written):
        raise OutputError(
            f"--preview {preview} is also the input or the output, or its temporary file is: name another file"
        )
    if not taken.isdisjoint(final.parents):
        raise OutputError(f"--preview {preview} lies within the input or the output: name a file elsewhere")
    PartialFile(behind_link(preview)).discard()  # fails now if it cannot be written


def run_job(
    job: PlannedJob, options: RunOptions, *, events: RunEvents | None = None, stream: Stream | None = None
) -> dict[str, Any]:
    """Run a job, publish its output and write the receipt. `stream`: default `stream_on_device`.

    On an error nothing is left; but if the ledger has entries and the error is neither the user's nor the audit's, the
    partial output and the ledger are kept for a run with `resume`.
    """
    events, started = events or RunEvents(), time.time()
    try:
        with (
            InputIdentity(job.spec.input, job.version, always_hash=options.checksum) as identity,
            _entered(job, options, events) as (ledger, entries),
        ):
            job, record = _stream(job, ledger, entries, stream or stream_on_device, events)
            audit = _audited(job, identity)
            receipt = make_receipt(
                job, entries=entries, record=record, audit=audit, identity=identity.confirmed(), started=started
            )
            if options.job is not None:
                receipt = {"job": options.job, **receipt}
            events.on_computed()
            if options.job is not None or ledger.exists:
                job.output.publish(lambda: ledger.conclude(receipt))
            else:
                job.output.publish()
    finally:
        job.output.discard()
    events.on_published()
    write_receipt(job.spec.output, receipt)
    ledger.remove()
    return receipt


@contextmanager
def _entered(job: PlannedJob, options: RunOptions, events: RunEvents) -> Iterator[tuple[Ledger, list[Entry]]]:
    """Opens the output and the job's ledger, and yields the ledger with the entries of an interrupted run.

    After a failure, the ledger's chunks and iterates are kept, unless the next run would fail in the same way.
    """
    new = Ledger(job.spec.output, job.identity)
    found = _resumed(job, new, options) if options.resume and new.begun else None
    if found is None:
        job.output.open(Opening.NEW)
    ledger, entries = found or (new, [])
    try:
        # Now that the output is locked:
        if entries:
            ledger.go_on()
        elif found is not None and ledger.has_iterates:
            ledger.go_on_with_iterates()
        else:
            ledger.remove()
        yield ledger, entries
    except BaseException as error:
        try:
            kept = sum(len(entry.chunks) for entry in ledger.entries())
        except StorageError:  # an object store that does not answer may hold some
            job.output.keep()
            raise error from None
        if (kept or ledger.has_iterates) and not isinstance(error, UserError | AuditError):
            job.output.keep()
            events.on_kept(kept, ledger.identity["chunks"])  # current: chunks may have been halved
        else:
            ledger.remove()
        raise


def _resumed(job: PlannedJob, ledger: Ledger, options: RunOptions) -> tuple[Ledger, list[Entry]] | None:
    """An interrupted run's ledger and its entries, with the output open for them; None to start over, if allowed."""
    try:
        ledger = Ledger.resumed(job.spec.output, ledger.identity)
        entries = ledger.entries()
        job.output.open(Opening.RESUME if entries else Opening.NEW)
    except (ParameterError, OutputError, StorageError):
        if not options.start_over:
            raise
        return None
    return ledger, entries


def _audited(job: PlannedJob, identity: InputIdentity) -> Audit:
    """Audit the output and record its error in the metrics; InputError if it fails because the input has changed."""
    try:
        audit = job.output.audit()
    except AuditError as error:
        identity.check_untouched()  # no result of a changed input is right
        _count_audit(job.workload, error.worst_error, error.tolerance)
        raise
    _count_audit(job.workload, audit.worst_error, audit.tolerance)
    return audit


def _count_audit(workload: Workload, worst_error: float, tolerance: float) -> None:
    ratio = worst_error / tolerance if tolerance else (math.inf if worst_error else 0.0)
    # Alerts compare with a limit, and NaN exceeds none.
    metrics.audit_error_ratio.labels(workload.name).set(math.inf if math.isnan(ratio) else ratio)


def published_before(job: PlannedJob) -> dict[str, Any] | None:
    """The receipt of a run of the same job that was killed after publishing; finishes its cleanup.

    None if there is none: the job must be run. ParameterError if it was another job.
    """
    output = job.spec.output
    receipt = Ledger.concluded(output)
    if receipt is None or not Ledger(output, job.identity).begun:
        return None
    job.output.discard()
    Ledger.resumed(output, job.identity)
    write_receipt(output, receipt)
    remove_leftovers(output)
    return receipt


def finished_before(output: Path, job: str) -> dict[str, Any] | None:
    """The receipt of a run of this job that was killed after publishing; finishes its cleanup.

    No run may be using the output.
    """
    receipt = _receipt_beside(output)
    if receipt is None or receipt.get("job") != job:
        receipt = Ledger.concluded(output)
        if receipt is None or receipt.get("job") != job:
            return None
        write_receipt(output, receipt)
    remove_leftovers(output)
    return receipt


def _receipt_beside(output: Path) -> dict[str, Any] | None:
    try:
        path = receipt_path(output)
        if isinstance(path, ObjectPath):
            receipt = json.loads(path.read_bytes())
        else:
            with open(path, encoding="utf-8", opener=open_beneath) as file:
                receipt = json.load(file)
    except (OSError, ValueError):
        return None
    exists = is_published(output) if isinstance(output, ObjectPath) else output.exists()
    return receipt if isinstance(receipt, dict) and exists else None


def stream_on_device(job: PlannedJob, plan: Plan, ledger: Ledger, events: RunEvents) -> StageRecord:
    """Stream the plan's chunks through this process's one device, updating the ledger every few seconds."""
    assert isinstance(job.device, Device), "a cluster streams by itself"
    device = job.device.for_job(job.job)

    def note(chunk: Chunk) -> None:
        checkpoints.note(chunk)
        events.on_written(chunk)
        events.check()

    iterating = job.output.job if isinstance(job.output.job, KeepsIterates) else None
    if iterating is not None:
        iterating.keep_iterates(Iterates(ledger))
    with Checkpoints(ledger, job.output, device.name, has_iterates=iterating is not None) as checkpoints:
        slots = min(device.ring_depth, len(plan.chunks))
        pipeline = DevicePipeline(device, job.output, job.slot_bytes(plan), slots=slots)
        with pipeline:
            record = StageRecord()
            events.on_begun(record)
            return pipeline.stream(plan.chunks, note, record=record)


def _stream(
    job: PlannedJob, ledger: Ledger, entries: list[Entry], stream: Stream, events: RunEvents
) -> tuple[PlannedJob, StageRecord]:
    """Stream the unfinished chunks; if the device runs out of memory, restart with chunks of half the size."""
    for entry in entries:
        try:
            job.output.add_notes(entry.notes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"{ledger.folder}: the entry of chunk {entry.chunks[0]} is damaged; run again without --resume"
            ) from error
        metrics.work_of(job.workload.name, job.workload.unit).kept(len(entry.chunks))
        for index in entry.chunks:
            events.on_written(job.plan.chunks[index])
    plan = job.plan.without({chunk for entry in entries for chunk in entry.chunks})
    while plan is not None:
        try:
            return job, stream(job, plan, ledger, events)
        except OutOfDeviceMemory as error:
            job = halved(job, error)
        plan = job.plan
        job.output.forget()
        ledger.restart(job.identity)
        # The failed ring is in a reference cycle (pipeline, error, traceback): free it before allocating the next.
        gc.collect()
        events.on_recut(plan)
    return job, StageRecord()


def halved(job: PlannedJob, error: OutOfDeviceMemory) -> PlannedJob:
    """The same job in chunks of half the bytes; raises the error if they cannot be smaller."""
    half = max(chunk.input_bytes + chunk.output_bytes for chunk in job.plan.chunks) // 2
    budget = Budget(budget_bytes=half, target_bytes=half)
    try:
        plan = job.job.plan(budget)
    except ParameterError:
        plan = job.plan
    if len(plan.chunks) <= len(job.plan.chunks):
        raise error
    return replace(job, plan=plan, budget=budget, halvings=job.halvings + 1)


def write_preview(job: OpenJob, preview: Path) -> None:
    """Draw the published output as a small PNG; called after everything is closed."""
    if isinstance(job, Previews):
        job.write_preview(preview)
    else:
        draw_image(job.spec.output, preview)
