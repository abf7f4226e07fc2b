"""Audits a smoothing job: recomputes random outputs in float64 by the plain definition."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.borders import border_indices
from kernels.smoothing.window import Window
from pipeline.codecs.parallel import for_each
from pipeline.errors import AuditError, InputError
from pipeline.formats.image.base import ImageHeader, ImageReader, Region
from pipeline.workloads.common.crop import CroppedReader
from pipeline.workloads.common.gaussians import NARROW_ERROR, is_narrow
from pipeline.workloads.common.halo import read_with_borders
from pipeline.workloads.common.statistics import ImageStatistics
from pipeline.workloads.protocol import Audit, random_places
from pipeline.workloads.smoothing.parameters import SmoothingParameters

SAMPLES = 100
# Integers are rounded to nearest at the end. The Gaussian's fixed-point weights err by up to 0.29 (16 bits, the widest
# kernel), its float32 sums by a little: the promise is one step, and the worst error of a search for bad images 0.573.
INTEGER_TOLERANCE = {"box": 0.5, "gaussian": 1.0}
# Relative to the largest magnitude in the window: 3 axes × 49 roundings at most (box) or 127 fused steps (Gaussian).
FLOAT_TOLERANCE = 256
# Of the audit's own float64 sums, relative to the largest magnitude in the window: the mean of an even number of
# integers may end in a half, which is rounded up.
DEFINITION_TOLERANCE = 1e-13
DECIMATED_FLOAT_TOLERANCE = 1e-5  # weights err by 1.2e-6 in all along each axis
# Windows are read a piece at a time, and fewer places are looked at if windows are large.
PIECE_SAMPLES = 1 << 22
MOST_SAMPLES = 1 << 28
FEWEST_PLACES = 4


class SmoothingAudit:
    """The `Reference` of a smoothing job: the weighted mean of each place's window."""

    def __init__(
        self,
        reader: ImageReader,
        header: ImageHeader,
        within: np.dtype[Any],
        windows: Sequence[Window],
        sigmas: Sequence[float],
        orders: Sequence[int],
        parameters: SmoothingParameters,
        statistics: ImageStatistics | None,
        nodata: float | None = None,
    ) -> None:
        """
        header : of the result
        within : the dtype that is computed in
        nodata : written where no sample of the window counts
        """
        self._reader = reader
        self._header, self._within = header, within
        self._windows = windows
        self._sigmas = sigmas or [0.0] * len(windows)
        self._orders = orders or [0] * len(windows)
        self._derived = any(orders)
        self._parameters = parameters
        self._statistics = statistics
        self._nodata = None if nodata is None else float(self._header.dtype.type(nodata))
        # A window that is longer than the image reads each sample of that once.
        window_samples = math.prod(min(window.taps, 2 * reader.header.shape[window.axis]) for window in windows)
        count = min(SAMPLES, max(FEWEST_PLACES, MOST_SAMPLES // window_samples))
        self.places = random_places(self._header.shape, count)

    def at(self, places: NDArray[np.int64]) -> SmoothingAudit:
        other = SmoothingAudit(
            self._reader, self._header, self._within, self._windows, self._sigmas, self._orders, self._parameters,
            None, self._nodata,
        )  # fmt: skip
        other.places = places
        return other

    def audit(self, which: Sequence[int], written: NDArray[np.float64]) -> Audit:
        """InputError if sums have passed the range of the dtype, StorageError if a chunk's statistics are missing."""
        if self._statistics is not None:
            self._statistics.check()
        is_float = self._header.dtype.kind == "f"
        tolerance = self._float_tolerance if is_float else self._integer_tolerance
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

    @property
    def _precision(self) -> np.dtype[np.floating[Any]]:
        """The float dtype of the result, or the one in which integers are computed."""
        found = self._header.dtype if self._header.dtype.kind == "f" else self._within
        return np.dtype(found if found.kind == "f" else np.float32)

    @property
    def _integer_tolerance(self) -> float:
        if self._within.kind == "f":  # only the last rounding; `_error` allows for the others
            return 0.5
        if self._parameters.filter == "gaussian" and is_narrow(self._windows, self._within):
            return NARROW_ERROR
        return INTEGER_TOLERANCE[self._parameters.filter]

    @property
    def _float_tolerance(self) -> float:
        # The sums of a box take two roundings for each doubling of its size, and up to 9 more; a Gaussian's, one a tap.
        longest = max((window.taps for window in self._windows if window.decimation is None), default=1)
        gaussian = self._parameters.filter == "gaussian"
        computed = np.float64 if self._precision == np.float64 else np.float32
        tolerance = max(FLOAT_TOLERANCE, 3 * longest * gaussian) * float(np.finfo(computed).eps)
        if self._precision == np.float16:
            tolerance += float(np.finfo(np.float16).eps) / 2
        decimated = any(window.decimation for window in self._windows)
        return max(tolerance, DECIMATED_FLOAT_TOLERANCE) if decimated else tolerance

    def _error(self, place: NDArray[np.int64], written: float) -> float:
        """The error of a result: in sample values for integers, relative to the window's largest for floats, and for
        derivatives to the largest that its weights could make of that."""
        expected, largest, any_counted = self._definition(place)
        if written == self._nodata and (not any_counted or math.isnan(expected)):
            return 0.0
        if self._header.dtype.kind != "f":
            allowed = (self._float_tolerance if self._within.kind == "f" else DEFINITION_TOLERANCE) * largest
            return max(abs(written - expected) - allowed, 0.0) if any_counted else math.inf
        limits = np.finfo(self._precision)
        for window, sigma, order in zip(self._windows, self._sigmas, self._orders, strict=True):
            largest *= float(np.abs(_weights(window, sigma, order)).sum())
        if not np.isfinite(largest) or not any_counted:
            return 0.0 if not np.isfinite(written) else float("inf")
        if largest > limits.max / math.prod(window.taps for window in self._windows) and not np.isfinite(written):
            raise InputError(
                f"{self._reader.path}: holds values as large as {largest:.3g} near {tuple(place.tolist())}, whose sums "
                f"pass the range of {self._precision.name}; nothing was published; divide the image by a number "
                "first, or make NaN of what marks missing samples (--nan-policy)"
            )
        # Below the normal range, precision is a fixed step instead of a share of the value.
        return abs(written - expected) / max(largest, float(limits.smallest_normal))

    def _definition(self, place: NDArray[np.int64]) -> tuple[float, float, bool]:
        """The weighted mean of the window (of a derivative, the sum), its largest magnitude, and whether any of its
        samples counts."""
        total, weight, largest, any_counted = 0.0, 0.0, 0.0, False
        omits = self._parameters.nan_policy == "omit"
        for reader, region, weights in self._pieces(place):
            samples = np.empty(region.shape, reader.header.dtype)
            read_with_borders(reader, region, self._parameters.mode, self._parameters.cval, samples)
            values = samples.astype(np.float64)
            counted = ~np.isnan(values) if omits else np.ones(values.shape, bool)
            values = np.where(counted, values, 0.0)
            any_counted |= bool(counted.any())
            largest = float(np.maximum(largest, np.abs(values).max()))  # NaN stays
            with np.errstate(invalid="ignore"):
                total += float((values * weights).sum())
            weight += float((weights * counted).sum())
        if self._derived:
            return total, largest, any_counted
        return (total / weight if weight else math.nan), largest, any_counted

    def _pieces(self, place: NDArray[np.int64]) -> Iterator[tuple[ImageReader, Region, NDArray[np.float64]]]:
        """The window in pieces along its longest axis, each with its weights, which sum to one over all pieces. Along
        axes that it covers, each sample of the image is read once, with the sum of all weights that fall on it."""
        start, stop = place.copy(), place + 1
        along: list[NDArray[np.float64]] = [np.ones(1)] * len(place)
        for window, sigma, order in zip(self._windows, self._sigmas, self._orders, strict=True):
            start[window.axis] -= window.before
            stop[window.axis] += window.after
            along[window.axis] = _weights(window, sigma, order)
        reader = self._reader
        if isinstance(reader, CroppedReader):  # what lies around a part of an image is the image
            moved = reader.moved(Region(tuple(start.tolist()), tuple(stop.tolist())))
            reader, start, stop = reader.whole, np.array(moved.start), np.array(moved.stop)
        for axis, length in enumerate(reader.header.shape):
            if start[axis] <= 0 and stop[axis] >= length:
                sources = border_indices(np.arange(start[axis], stop[axis]), length, self._parameters.mode)
                first = int(sources.min())  # OUTSIDE is the place before the first
                along[axis] = np.bincount(sources - first, along[axis], length - first).astype(np.float64)
                start[axis], stop[axis] = first, length
        lengths = stop - start
        longest = int(np.argmax(lengths))
        step = max(1, PIECE_SAMPLES * int(lengths[longest]) // math.prod(lengths.tolist()))
        for low in range(0, int(lengths[longest]), step):
            part = list(along)
            part[longest] = along[longest][low : low + step]
            begin, end = start.copy(), stop.copy()
            begin[longest], end[longest] = start[longest] + low, start[longest] + low + len(part[longest])
            weights = functools.reduce(np.multiply.outer, part)
            yield reader, Region(tuple(begin.tolist()), tuple(end.tolist())), weights


def _weights(window: Window, sigma: float, order: int) -> NDArray[np.float64]:
    """Along a window's axis, of the Gaussian's derivative of that order; a box's if `sigma` is 0. Those of order 0 sum
    to one. Each derivative is the one before, times -x / sigma**2, less what the product rule takes off."""
    distance = np.arange(-window.before, window.after + 1, dtype=np.float64)
    weights = np.ones_like(distance) if not sigma else np.exp(-0.5 * (distance / sigma) ** 2)
    before, found = np.zeros_like(distance), weights / weights.sum()
    for step in range(order):
        before, found = found, (distance * found - step * before) / sigma**2
    return np.asarray(found)
