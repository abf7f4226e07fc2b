"""Audits a smoothing job: recomputes random outputs in float64 by the plain definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.window import Window
from pipeline.codecs.parallel import for_each
from pipeline.errors import AuditError, InputError
from pipeline.formats.image.base import ImageReader, Region
from pipeline.workloads.common.halo import read_with_borders
from pipeline.workloads.common.statistics import ImageStatistics
from pipeline.workloads.protocol import Audit, random_places
from pipeline.workloads.smoothing.parameters import SmoothingParameters

SAMPLES = 100
# Integers are rounded to nearest at the end. The Gaussian's fixed-point weights err by up to 0.29 (16 bits, the widest
# kernel), its float32 sums by a little: the promise is one step, and the worst error of a search for bad images 0.573.
# Sums of uint8 are exact, but rounded to quarters between axes: off by at most 0.81 along two axes, and by 0.23 more
# along each further one.
INTEGER_TOLERANCE = {"box": 0.5, "gaussian": 1.0}
FURTHER_AXIS = 0.25
# Relative to the largest magnitude in the window: 3 axes × 8 doublings (box) or 127 fused steps (Gaussian).
FLOAT_TOLERANCE = 256


class SmoothingAudit:
    """The `Reference` of a smoothing job: the weighted mean of each place's window."""

    def __init__(
        self,
        reader: ImageReader,
        windows: Sequence[Window],
        sigmas: Sequence[float],
        parameters: SmoothingParameters,
        statistics: ImageStatistics | None,
    ) -> None:
        self._reader = reader
        self._header = reader.header
        self._windows = windows
        self._sigmas = sigmas
        self._parameters = parameters
        self._statistics = statistics
        self.places = random_places(self._header.shape, SAMPLES)

    def at(self, places: NDArray[np.int64]) -> SmoothingAudit:
        other = SmoothingAudit(self._reader, self._windows, self._sigmas, self._parameters, None)
        other.places = places
        return other

    def audit(self, which: Sequence[int], written: NDArray[np.float64]) -> Audit:
        """InputError if sums have passed the range of the dtype, StorageError if a chunk's statistics are missing."""
        if self._statistics is not None:
            self._statistics.check()
        is_float = self._header.dtype.kind == "f"
        tolerance = INTEGER_TOLERANCE[self._parameters.filter]
        if any(window.exact for window in self._windows):
            tolerance += FURTHER_AXIS * max(sum(window.taps > 1 for window in self._windows) - 2, 0)
        if is_float:
            tolerance = FLOAT_TOLERANCE * float(np.finfo(self._header.dtype).eps)
        values, errors = written.tolist(), [0.0] * len(which)

        def compare(index: int) -> None:
            errors[index] = self._error(self.places[which[index]], values[index])

        # Most places are in a block of the file that is no longer in memory: several threads read and decode them.
        for_each(compare, range(len(which)))
        worst = 0.0
        for number, value, error in zip(which, values, errors, strict=True):
            if not error <= tolerance:
                place = tuple(self.places[number].tolist())
                raise AuditError(
                    f"audit failed at sample {place}: wrote {value:g}, off by {error:g} (tolerated: {tolerance:g}); "
                    "nothing was published; please report this",
                    worst_error=error,
                    tolerance=tolerance,
                )
            worst = max(worst, error)
        unit = "relative to the window's largest value" if is_float else "sample values"
        return Audit(samples=len(which), worst_error=worst, tolerance=tolerance, unit=unit)

    def _error(self, place: NDArray[np.int64], written: float) -> float:
        start, stop = place.copy(), place + 1
        for window in self._windows:
            start[window.axis] -= window.before
            stop[window.axis] += window.after
        region = Region(tuple(start.tolist()), tuple(stop.tolist()))
        samples = np.empty(region.shape, self._header.dtype)
        read_with_borders(self._reader, region, self._parameters.mode, self._parameters.cval, samples)
        try:
            return self._difference(written, samples.astype(np.float64))
        except OverflowError as error:
            raise InputError(
                f"{self._reader.path}: holds {error} near {tuple(place.tolist())}, whose sums pass the range of "
                f"{self._header.dtype.name}; nothing was published; divide the image by a number first, or make NaN of "
                "what marks missing samples (--nan-policy)"
            ) from error

    def _difference(self, written: float, samples: NDArray[np.float64]) -> float:
        """The error of a result: in sample values for integers, relative to the window's largest for floats."""
        expected = self._definition(samples)
        if self._header.dtype.kind != "f":
            return abs(written - expected)
        limits = np.finfo(self._header.dtype)
        counted = samples[~np.isnan(samples)] if self._parameters.nan_policy == "omit" else samples
        largest = float(np.abs(counted).max(initial=0.0))
        if not np.isfinite(largest) or counted.size == 0:
            return 0.0 if not np.isfinite(written) else float("inf")
        if largest > limits.max / samples.size:
            if not np.isfinite(written):
                raise OverflowError(f"values as large as {largest:.3g}")
            return abs(written / largest - self._definition(samples / largest))
        # Below the normal range, precision is a fixed step instead of a share of the value.
        return abs(written - expected) / max(largest, float(limits.smallest_normal))

    def _definition(self, samples: NDArray[np.float64]) -> float:
        """The weighted mean of the window."""
        weights = np.ones(samples.shape)
        for window, sigma in zip_longest(self._windows, self._sigmas):
            distance = np.arange(-window.before, window.after + 1, dtype=np.float64)
            along = np.ones_like(distance) if sigma is None else np.exp(-0.5 * (distance / sigma) ** 2)
            weights *= along.reshape([-1 if axis == window.axis else 1 for axis in range(samples.ndim)])
        if self._parameters.nan_policy == "omit":
            weights = np.where(np.isnan(samples), 0.0, weights)
            samples = np.nan_to_num(samples, nan=0.0, posinf=np.inf, neginf=-np.inf)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return float((samples * weights).sum() / weights.sum())
