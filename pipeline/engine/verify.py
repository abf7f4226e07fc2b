"""`millrace verify`: chunks of a published result, computed again from its input and receipt, and compared with it.

A chunk agrees with the result if these hold:

- Integers have the same bits.
- Floats have the same bits, or the same digits in text formats. If they differ:
  - If the job's reference can define any sample (`KnowsEveryPlace`), the samples that differ most relative to their
    size, at most 100 of each chunk, are within the audit's tolerance of the definition.
  - Otherwise each sample is within the job's own tolerance (`Result.tolerance`; MRI: a thousandth), or else twice that
    of the audit in the receipt, times the largest magnitude of the chunk (MRI: of the image).

Text formats round: half a unit of the last stored digit comes on top of each tolerance.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline.engine.device_pipeline import DevicePipeline, slot_bytes
from pipeline.engine.devices.device import Device
from pipeline.engine.identity import InputIdentity
from pipeline.engine.output import Output
from pipeline.engine.planned import PlannedJob
from pipeline.engine.run import RunOptions, halved, plan_job
from pipeline.errors import AuditError, InputError, OutOfDeviceMemory, ResultError, counted
from pipeline.formats.image import open_image
from pipeline.formats.image.base import Region
from pipeline.storage.objects import ObjectPath, path_named
from pipeline.storage.partial_objects import ROOT
from pipeline.storage.positional import reading
from pipeline.workloads import Chunk, JobSpec, OpenJob, Plan, Workload, workload_named
from pipeline.workloads.paths import receipt_path
from pipeline.workloads.protocol import KnowsEveryPlace, Parameters, ReadsResult, Result

# Samples of a chunk that are compared with the definition: no more than the audit compares, if that is costly.
FEWEST_JUDGED, JUDGED = 8, 100
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """The job of a published result, as its receipt has it.

    identity  : of its input
    tolerance : of the audit that it passed
    """

    spec: JobSpec
    identity: Mapping[str, Any]
    tolerance: float


def recorded_job(output: Path, moved_input: Path | None = None) -> RecordedJob:
    """Read the receipt beside a result. Raises InputError if there is none of use, or a further input has changed.

    moved_input : where the input is now; default where the receipt says
    """
    path = receipt_path(output)
    with reading(output):
        (output / ROOT if isinstance(output, ObjectPath) else output).stat()
    with reading(path):
        content = path.read_bytes()
    try:
        receipt = json.loads(content)
        identity, name, in_force = receipt["input"], receipt["workload"], receipt["parameters"]
        source, tolerance = path_named(identity["path"]), float(receipt["audit"]["tolerance"])
        request = receipt.get("request")
        _ = dict(in_force), dict(request or {}), int(identity["bytes"]), float(identity["mtime"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: is damaged, or not a receipt of Millrace; without one, the result cannot be verified"
        ) from error
    try:
        workload = workload_named(name)
    except KeyError as error:
        raise InputError(f"{path}: there is no workload {name!r} here; install the package that has it") from error
    parameters = _parameters(workload, in_force if request is None else request, path, is_old=request is None)
    _refuse_changed_parameters(output, in_force, parameters)
    spec = JobSpec(workload=name, input=moved_input or source, output=output, parameters=parameters)
    return RecordedJob(spec=spec, identity=identity, tolerance=tolerance)


def _parameters(workload: Workload, given: Mapping[str, Any], receipt: Path, *, is_old: bool) -> Parameters:
    try:
        parameters = workload.Parameters(**given)
    except ValidationError as error:
        if not is_old:
            raise InputError(
                f"{receipt}: its parameters do not fit this version of {workload.name}; verify it with the version "
                "that made it"
            ) from error
        parameters = None
    # What older receipts say of further files is more than their names.
    if parameters is None or (is_old and not all(path.exists() for path in parameters.further_files)):
        raise InputError(f"{receipt}: is of an older version, which does not record all that verifying needs")
    return parameters


def _refuse_changed_parameters(output: Path, recorded: Mapping[str, Any], parameters: Parameters) -> None:
    """The parameters contain the sizes and times of further files."""
    for name, now in parameters.in_force().items():
        before = recorded.get(name, now)
        if json.dumps(before) != json.dumps(now):
            raise InputError(f"{output}: was made with {name} {before}, which is {now} now: restore it to verify")


def refuse_changed_input(path: Path, version: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """InputError unless a file has the recorded SHA-256, or else (and folders) the recorded sizes and times.

    version : as `input_version` gives it
    """
    sha256, listing = recorded.get("sha256"), recorded.get("listing_sha256")
    same = version["bytes"] == recorded["bytes"]
    if same and sha256 is not None and not isinstance(path, ObjectPath) and path.is_file():
        with reading(path), path.open("rb") as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    elif same and listing is not None:
        same = version["listing_sha256"] == listing
    elif same:
        same = version["mtime_ns"] / 10**9 == recorded["mtime"]
    if not same:
        raise InputError(
            f"{path}: is not the input that the result was made from, {recorded['bytes']:,} bytes by the receipt; "
            "restore it, or name where it is with --input"
        )


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A chunk of the result that is not what its job computes."""

    region: Region
    axes: str
    what: str

    def __str__(self) -> str:
        return f"samples {self.region.start} to {self.region.stop} ({self.axes}): {self.what}"

    def describe(self) -> dict[str, Any]:
        return {"start": list(self.region.start), "stop": list(self.region.stop), "what": self.what}


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What came of a verification.

    identical   : every compared chunk has the same bits, or digits
    worst_error : the largest difference relative to the largest magnitude of its chunk, beyond rounding to digits
    """

    output: Path
    device: str
    chunks: int
    regions: Sequence[Region]
    identical: bool
    in_digits: bool
    worst_error: float
    differences: Sequence[Difference]

    def line(self) -> str:
        """One line at the end."""
        found = f"identical {'digits' if self.in_digits else 'bits'}"
        if not self.identical:
            found = f"equal within the tolerance: worst difference {self.worst_error:.3g} of the largest value"
        chunks = counted(self.chunks, "chunk")
        return f"{self.output}: {len(self.regions):,} of {chunks} computed again on {self.device}, {found}"

    def refuse_differences(self) -> None:
        """ResultError, which names the first one."""
        if self.differences:
            count = (
                f"{len(self.differences):,} of {counted(len(self.regions), 'chunk')} computed again on {self.device}"
            )
            verb = "differs" if len(self.differences) == 1 else "differ"
            raise ResultError(
                f"{self.output}: {count} {verb}; the first: {self.differences[0]}; make the result again, or restore it"
            )

    def describe(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "output": str(self.output),
            "device": self.device,
            "chunks": self.chunks,
            "verified": [[list(region.start), list(region.stop)] for region in self.regions],
            "identical": self.identical,
            "worst_error": self.worst_error if np.isfinite(self.worst_error) else None,
            "differences": [each.describe() for each in self.differences],
        }


class Verification:
    """Between opening a recorded job and closing it; writes nothing.

    plan : the chunks that `run` computes
    """

    def __init__(self, recorded: RecordedJob, device: Device, options: RunOptions, count: int | None) -> None:
        """Raises InputError if the input is not the recorded one, ResultError if the result has another shape or dtype.

        count : so many chunks, chosen at random; None: all
        """
        self._recorded = recorded
        self._device = device
        self._count = count
        self._planned = plan_job(recorded.spec, device, options)
        try:
            refuse_changed_input(self.job.spec.input, self._planned.version, recorded.identity)
            self._result = _result_of(self.job)
            self._result.reader.hold_at_most(options.memory_bytes // 8)
        except BaseException:
            self._planned.output.discard()
            raise
        self.plan = self._chosen()

    @property
    def job(self) -> OpenJob:
        return self._planned.job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._result.reader.close()
        self._planned.output.discard()

    def _chosen(self) -> Plan:
        chunks = self._planned.plan.chunks
        if self._count is not None and self._count < len(chunks):
            chunks = tuple(chunks[index] for index in sorted(random.sample(range(len(chunks)), self._count)))
        return Plan(chunks=chunks)

    def run(
        self,
        on_written: Callable[[Chunk], None] = lambda chunk: None,
        on_recut: Callable[[Plan], None] = lambda plan: None,
    ) -> Verified:
        """Compute the chunks and compare them. InputError if the input changes meanwhile."""
        while True:
            try:
                comparison = self._streamed(on_written)
                break
            except OutOfDeviceMemory as error:
                self._planned = halved(self._planned, error)
            gc.collect()  # the failed ring is part of a cycle: free its memory before the next is allocated
            self.plan = self._chosen()
            on_recut(self.plan)
        differences = comparison.judged()
        InputIdentity(self.job.spec.input, self._planned.version).check()  # of an input that changed no result is right
        return Verified(
            output=self.job.spec.output,
            device=self._device.name,
            chunks=len(self._planned.plan.chunks),
            regions=[chunk.region for chunk in self.plan.chunks],
            identical=comparison.identical,
            in_digits=self._result.half_unit is not None,
            worst_error=comparison.worst_error,
            differences=differences,
        )

    def _streamed(self, on_written: Callable[[Chunk], None]) -> _Comparison:
        comparison = _Comparison(self._planned, self._result, self._recorded.tolerance)
        chunks = self.plan.chunks
        slots = min(self._device.ring_depth, len(chunks))
        with DevicePipeline(self._device, comparison, slot_bytes(chunks), slots=slots) as pipeline:
            pipeline.stream(chunks, on_written)
        return comparison


@dataclass(frozen=True, kw_only=True)
class _Suspects:
    """Samples of a chunk whose floats differ: the first is the worst.

    places   : in the output, (n, axes)
    held     : what the output has there, as near to `computed` as its digits allow
    """

    region: Region
    places: NDArray[np.int64]
    held: NDArray[Any]
    computed: NDArray[Any]


class _Comparison(Output):
    """Compares chunks with the published result instead of storing them."""

    def __init__(self, planned: PlannedJob, result: Result, audit_tolerance: float) -> None:
        super().__init__(planned.workload, planned.job)
        self.identical = True
        self.worst_error = 0.0
        self._result = result
        self._tolerance = 2 * audit_tolerance if result.tolerance is None else result.tolerance
        self._differences: dict[tuple[int, ...], Difference] = {}  # by where the region starts
        self._suspects: list[_Suspects] = []
        self._compared = threading.Lock()

    def write(
        self, chunk: Chunk, outputs: Sequence[NDArray[Any]], encoded: Sequence[NDArray[np.uint8]] | None = None
    ) -> None:
        computed = self._result.stored(outputs[0])
        try:
            held = _read(self._result, chunk.region, self.job.summary.shape)
        except InputError as error:
            self._differs(chunk.region, str(error))
            return
        if held.dtype.kind not in "fc":
            if not np.array_equal(held, computed):
                place = np.argwhere(held != computed)[0]
                self._differs(chunk.region, _sample(chunk.region, place, held, computed))
        elif self._result.half_unit is not None or held.tobytes() != np.ascontiguousarray(computed).tobytes():
            self._compare_floats(chunk.region, held, computed)

    def _compare_floats(self, region: Region, held: NDArray[Any], computed: NDArray[Any]) -> None:
        half_unit = self._result.half_unit
        with np.errstate(all="ignore"):
            off = computed - held.astype(np.promote_types(held.dtype, np.float64))
            rounded: NDArray[np.float64] = np.zeros(held.shape) if half_unit is None else half_unit(held) * 1.001
            apart: NDArray[np.float64] = np.maximum(np.abs(off) - rounded, 0.0)
            apart[(held == computed) | (np.isnan(held) & np.isnan(computed))] = 0.0
        apart[np.isnan(apart)] = np.inf
        sizes = np.abs(computed).astype(np.float64)
        sizes[~np.isfinite(sizes)] = 0.0
        largest, worst = float(sizes.max()), float(apart.max())
        if worst == 0.0:
            if half_unit is None:  # 0 and -0, or one NaN and another
                self.identical = False
            return
        with self._compared:
            self.identical = False
            self.worst_error = max(self.worst_error, worst / largest if largest else np.inf)
        reference = self.job.reference()
        if isinstance(reference, KnowsEveryPlace):
            most = min(JUDGED, max(FEWEST_JUDGED, len(reference.places)))
            ranks: NDArray[np.float64] = (apart / (sizes + max(float(sizes.mean()), _TINY))).reshape(-1)
            first = min(most, int(np.count_nonzero(apart)))
            chosen = np.argpartition(ranks, -first)[-first:]
            chosen = chosen[np.argsort(ranks[chosen])[::-1]]
            within = np.stack(np.unravel_index(chosen, region.shape), axis=1)
            at = tuple(within.T)
            nearest = held[at] if half_unit is None else held[at] + np.clip(off[at], -rounded[at], rounded[at])
            places = within + np.array(region.start)
            with self._compared:
                self._suspects.append(_Suspects(region=region, places=places, held=nearest, computed=computed[at]))
        elif not worst <= self._tolerance * largest:
            place = np.array(np.unravel_index(int(np.argmax(apart)), region.shape))
            off_by = f" (off by {worst:.3g}, tolerated: {self._tolerance * largest:.3g})"
            self._differs(region, _sample(region, place, held, computed) + off_by)

    def judged(self) -> list[Difference]:
        """What differs, in the order of the output. Raises as `Reference.audit` does, but for AuditError."""
        reference = self.job.reference()
        for each in self._suspects:
            assert isinstance(reference, KnowsEveryPlace)
            try:
                reference.at(each.places).audit(range(len(each.places)), each.held.astype(np.float64))
            except AuditError as error:
                where = tuple(each.places[0].tolist())
                self._differs(
                    each.region,
                    f"{where} holds {each.held[0]:.9g}, computed again {each.computed[0]:.9g} (off by "
                    f"{error.worst_error:.3g}, tolerated: {error.tolerance:.3g}, as the audit has it)",
                )
        return [self._differences[start] for start in sorted(self._differences)]

    def _differs(self, region: Region, what: str) -> None:
        with self._compared:
            self.identical = False
            self._differences[region.start] = Difference(region=region, axes=self.job.summary.axes, what=what)


def _sample(region: Region, within: NDArray[np.int64], held: NDArray[Any], computed: NDArray[Any]) -> str:
    place = tuple((within + np.array(region.start)).tolist())
    digits = "" if held.dtype.kind in "iub" else ".9g"
    one, other = (format(samples[tuple(within)].item(), digits) for samples in (held, computed))
    return f"{place} holds {one}, computed again {other}"


def _result_of(job: OpenJob) -> Result:
    """The published output, opened. ResultError if it is damaged, or not as the job makes it."""
    output, summary = job.spec.output, job.summary
    try:
        if isinstance(job, ReadsResult):
            return job.result()
        reader = open_image(output)
    except InputError as error:
        raise ResultError(str(error)) from error
    found = reader.header
    without_ones = ([n for n in shape if n > 1] for shape in (found.shape, summary.shape))
    if found.dtype.name != summary.dtype or next(without_ones) != next(without_ones):
        reader.close()
        raise ResultError(
            f"{output}: holds {' × '.join(map(str, found.shape))} {found.dtype.name}, and its job makes "
            f"{' × '.join(map(str, summary.shape))} {summary.dtype}: it is another job's result, or was changed"
        )
    return Result(reader=reader)


def _read(result: Result, region: Region, shape: tuple[int, ...]) -> NDArray[Any]:
    """A region of an output of that shape, whose file may have more or fewer axes of length 1."""
    header = result.reader.header
    spans = zip(region.start, region.stop, strict=True)
    long = iter([span for span, n in zip(spans, shape, strict=True) if n > 1])
    there = Region(*zip(*((0, 1) if n == 1 else next(long) for n in header.shape), strict=True))
    found = np.empty(there.shape, header.dtype)
    result.reader.read(there, found)
    return found.reshape(region.shape)
