"""The audits of operators: against a reference, or parts of the result computed again, cut otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import AuditError, StorageError, counted
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.workloads.common.image_plan import within
from pipeline.workloads.protocol import Audit, Chunk, random_places

PLACES = 100
# Integers are rounded to nearest; what the function sums in float32 before may be a little off.
INTEGER_TOLERANCE = 0.51
# Times eps of the result's dtype, relative to the largest magnitude among the samples looked at and the result.
FLOAT_TOLERANCE = 256
# Without a reference: the number of chunks with a recomputed box, and the longest side of a box in samples.
CHUNKS = 8
BOX = 32


class AuditedJob(Protocol):
    """What an audit asks of an operator's job."""

    axes: tuple[int, ...]  # that the function works along
    header: ImageHeader  # of the output

    @property
    def definition(self) -> Any: ...

    @property
    def tolerance(self) -> float | None: ...

    def around(self, region: Region) -> Region: ...

    def samples(self, region: Region) -> NDArray[Any]: ...

    def windows(self, region: Region) -> NDArray[Any]: ...

    def computed(self, samples: Any, region: Region) -> Any: ...

    def defined(self, samples: NDArray[np.float64], region: Region) -> NDArray[np.float64]: ...


class _OperatorAudit:
    def __init__(self, job: AuditedJob, integer_tolerance: float) -> None:
        self._job = job
        dtype, stated = job.header.dtype, job.tolerance
        self._is_float = dtype.kind == "f"
        usual = FLOAT_TOLERANCE * float(np.finfo(dtype).eps) if self._is_float else integer_tolerance
        self.tolerance = usual if stated is None else float(stated)

    def begin(self, chunks: int) -> None:
        """The job is cut into so many chunks."""

    def computed_with(self, module: Any) -> None:
        """Chunks are computed here with that module, `numpy` or `cupy`."""

    def note(self, chunk: Chunk, output: NDArray[Any]) -> Callable[[], Any] | None:
        return None

    def add_note(self, chunk: int, note: Any) -> None:
        """Notes of other processes do not matter here."""

    def _error(self, written: Any, expected: NDArray[Any], samples: NDArray[Any]) -> float:
        """The largest difference, in sample values or relative to the largest magnitude; inf where one has a NaN."""
        if self._is_float:
            with np.errstate(over="ignore"):  # what is beyond the dtype is written as inf
                expected = expected.astype(self._job.header.dtype)
        written, expected = np.asarray(written, np.float64), expected.astype(np.float64)
        same = (written == expected) | (np.isnan(written) & np.isnan(expected))
        if same.all():
            return 0.0
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, np.abs(written - expected))
        if self._is_float:
            finite = [each[np.isfinite(each)] for each in (samples.astype(np.float64), expected)]
            largest = max(float(np.abs(each).max(initial=0.0)) for each in finite)
            difference = difference / max(largest, float(np.finfo(self._job.header.dtype).smallest_normal))
        return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max())

    def _outcome(self, samples: int, worst: float) -> Audit:
        unit = "relative to the largest value" if self._is_float else "sample values"
        return Audit(samples=samples, worst_error=worst, tolerance=self.tolerance, unit=unit)

    def _spanning(self, start: Sequence[int], stop: Sequence[int]) -> Region:
        """The box, with all channels if the function works along them: no chunk parts them either."""
        header = self._job.header
        whole = [axis for axis in self._job.axes if header.axes[axis] in "CS"]
        return Region(
            tuple(0 if axis in whole else int(first) for axis, first in enumerate(start)),
            tuple(header.shape[axis] if axis in whole else int(last) for axis, last in enumerate(stop)),
        )


class ReferenceAudit(_OperatorAudit):
    """Random samples of the result against the operator's `reference`, in float64."""

    def __init__(self, job: AuditedJob) -> None:
        super().__init__(job, INTEGER_TOLERANCE)
        self.places = random_places(job.header.shape, PLACES)

    def audit(self, which: Sequence[int], written: NDArray[np.float64]) -> Audit:
        worst = 0.0
        for number, value in zip(which, written.tolist(), strict=True):
            place = self.places[number]
            region = self._spanning(place, place + 1)
            samples = self._job.windows(region)
            expected = self._job.defined(samples.astype(np.float64), region)[tuple(place - region.start)]
            error = self._error(value, expected, samples)
            if not error <= self.tolerance:
                raise AuditError(
                    f"audit failed at sample {tuple(place.tolist())}: operator {self._job.definition.name} wrote "
                    f"{value:g}, its reference says {expected:g}, off by {error:g} (tolerated: {self.tolerance:g}); "
                    "nothing was published",
                    worst_error=error,
                    tolerance=self.tolerance,
                )
            worst = max(worst, error)
        return self._outcome(len(which), worst)


class RecomputedAudit(_OperatorAudit):
    """A box in each of some random chunks, computed again on the device of the chunk, with a halo of its own.

    It differs if the halo is too small, or if the result depends on more than the samples around each place.
    """

    places = np.empty((0, 1), np.int64)

    def __init__(self, job: AuditedJob) -> None:
        super().__init__(job, 0.0)
        self._module: Any = np
        self._lock = threading.Lock()
        self.begin(0)

    def begin(self, chunks: int) -> None:
        chosen = np.random.default_rng(0).choice(chunks, min(chunks, CHUNKS), replace=False) if chunks else ()
        with self._lock:
            self._chosen = {int(chunk) for chunk in chosen}
            self._found: dict[int, dict[str, Any]] = {}

    def computed_with(self, module: Any) -> None:
        self._module = module

    def note(self, chunk: Chunk, output: NDArray[Any]) -> Callable[[], Any] | None:
        if chunk.index not in self._chosen:
            return None
        region = self._box(chunk)
        around = self._job.around(region)
        samples = self._job.samples(around)
        again = self._job.computed(self._module.asarray(samples), around)[within(region, around)]
        written = output[within(region, chunk.region)]
        error = self._error(written, again if self._module is np else again.get(), samples)
        # JSON has no infinity.
        found = {"start": region.start, "stop": region.stop, "error": min(error, float(np.finfo(np.float64).max))}
        self.add_note(chunk.index, found)
        return lambda: found

    def add_note(self, chunk: int, note: Mapping[str, Any]) -> None:
        start, stop = (tuple(int(at) for at in note[name]) for name in ("start", "stop"))
        found = {"start": start, "stop": stop, "error": float(note["error"])}
        with self._lock:
            self._found[chunk] = found

    def audit(self, which: Sequence[int], written: NDArray[np.float64]) -> Audit:
        with self._lock:
            missing, found = len(self._chosen - self._found.keys()), [*self._found.values()]
        if missing:
            raise StorageError(
                f"the audit of {counted(missing, 'chunk')} is missing: entries of the ledger cannot be read: "
                "run again without --resume"
            )
        worst = max(found, key=lambda each: each["error"])
        error = worst["error"]
        if not error <= self.tolerance:
            raise AuditError(
                f"audit failed among samples {worst['start']} to {worst['stop']}: operator "
                f"{self._job.definition.name} gives other values if the image is cut otherwise, off by {error:g} "
                f"(tolerated: {self.tolerance:g}): its halo is too small, or its result depends on more than the "
                "block; nothing was published",
                worst_error=error,
                tolerance=self.tolerance,
            )
        samples = sum(int(np.prod(Region(each["start"], each["stop"]).shape)) for each in found)
        return self._outcome(samples, error)

    def _box(self, chunk: Chunk) -> Region:
        """Smaller than the chunk along each axis of the function, one sample long along the others."""
        random = np.random.default_rng(chunk.index)
        start, stop = [], []
        for axis, (first, length) in enumerate(zip(chunk.region.start, chunk.region.shape, strict=True)):
            extent = min(max(length // 2, 1), BOX) if axis in self._job.axes else 1
            start.append(first + int(random.integers(0, length - extent + 1)))
            stop.append(start[-1] + extent)
        return self._spanning(start, stop)
