"""Gaussians of which some axes are decimated, and derivatives, from passes along one axis each that a device provides.

    level 0        along each axis in ascending order: decimated by its first stage, or smoothed or derived directly
    level 1, 2 …   along each axis that has such a stage: decimated further
    coarse grid    smoothed along every decimated axis, then derived along those of a derivative
    levels back    interpolated, along each axis in ascending order; the last pass rounds integers, ties to even
All sums are float32 (float64 for float64 images), a = w[0] x[0]; a = fma(w[k], x[k], a) for the following taps in
ascending order. Only level 0 meets the image's edges: coarse grids are computed as far beyond them as needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from kernels.smoothing.decimation import Stage
from kernels.smoothing.scalars import filtered_constant, fma
from kernels.smoothing.window import Window

COARSE_UNIT = 4  # the coarsest grid's samples along an axis are a multiple of this, so that rows of float32 are aligned


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """One axis's decimation or interpolation.

    first : decimation: the position of the first tap of coarse sample 0; that of sample j is j * factor farther.
            Interpolation: sample i has its taps at (first + i) // factor + 0 …, and phase (first + i) % factor
    count : samples of the result
    fill  : decimation: the value beyond the edge in mode constant
    """

    axis: int
    first: int
    count: int
    stage: Stage
    mode: str = "valid"
    fill: Any = 0


def shape_after(shape: Sequence[int], steps: Sequence[Resampling]) -> tuple[int, ...]:
    """The shape of the results of these steps."""
    counts = {step.axis: step.count for step in steps}
    return tuple(counts.get(axis, length) for axis, length in enumerate(shape))


class Passes(Protocol):
    """What a device does. Results are new arrays of the working precision, but for `out`."""

    def decimate(self, values: Any, steps: Sequence[Resampling]) -> Any:
        """Along each step's axis, one after another; ascending axes."""

    def smooth(self, values: Any, windows: Sequence[Window], fill: Any) -> Any:
        """The direct Gaussian of a float array."""

    def interpolate(self, values: Any, steps: Sequence[Resampling], out: Any) -> Any:
        """Along each step's axis, one after another; ascending axes.

        out : array for the result, whose integers are rounded to nearest, ties to even; None: a new array
        """


def smooth(image: Any, windows: Sequence[Window], cval: float, out: Any, passes: Passes) -> None:
    """image   : array of one of `kernels.smoothing.DTYPES`, C-contiguous
    windows : as of `cpu.smooth`, at least one decimated or a derivative
    out     : C-contiguous array for the result
    """
    precision = np.dtype(np.float64 if image.dtype == np.float64 else np.float32)
    values, fill = image, precision.type(cval)
    grids = {window.axis: _Grid(window, out.shape[window.axis]) for window in windows if window.decimation}
    steps: list[Resampling] = []
    for window in windows:
        if window.axis in grids:
            steps.append(grids[window.axis].decimation(0, window.mode, fill))
            fill = _decimated_constant(steps[-1].stage, fill)
            continue
        if window.derivative is not None:
            steps.append(_derivation(window, out.shape[window.axis], fill))
            fill = _decimated_constant(steps[-1].stage, fill)
            continue
        values = passes.decimate(values, steps).astype(precision, copy=False)
        values, steps = passes.smooth(values, [window], fill), []
        fill = filtered_constant(window, fill)
    values = passes.decimate(values, steps)
    if not grids:
        out[...] = values
        return
    levels = max(len(grid.stages) for grid in grids.values())
    for level in range(1, levels):
        steps = [grid.decimation(level) for grid in grids.values() if level < len(grid.stages)]
        values = passes.decimate(values, steps)
    coarse = [grid.coarse_window for grid in grids.values()]
    smoothed = [window for window in coarse if window.derivative is None]
    if smoothed:
        values = passes.smooth(values, smoothed, fill)
    derived = [window for window in coarse if window.derivative is not None]
    lengths = values.shape
    values = passes.decimate(
        values, [_derivation(window, lengths[window.axis] - window.taps + 1, 0) for window in derived]
    )
    for level in reversed(range(levels)):
        steps = [grid.interpolation(level) for grid in grids.values() if level < len(grid.stages)]
        values = passes.interpolate(values, steps, out if level == 0 else None)


class _Grid:
    """The spans of samples along one axis, in absolute coordinates."""

    def __init__(self, window: Window, outputs: int) -> None:
        assert window.decimation is not None
        assert window.half_weights is not None
        self.stages = window.decimation.stages
        self._axis = window.axis
        self._offset = window.offset
        first = window.offset + (window.before if window.mode == "valid" else 0)
        self._down = window.decimation.decimated(first, first + outputs - 1, multiple=COARSE_UNIT)
        self._up = window.decimation.interpolated(first, first + outputs - 1)
        radius = len(window.half_weights) - 1
        # The smoothed grid keeps the length of the decimated one, and so its alignment: `margin` samples at its ends,
        # which lack neighbours, are not used.
        self._margin = 0 if window.derivative else radius
        self.coarse_window = dataclasses.replace(
            window, before=radius, after=radius, mode="valid" if window.derivative else "nearest", decimation=None,
            offset=0,
        )  # fmt: skip

    def decimation(self, level: int, mode: str = "valid", fill: Any = 0) -> Resampling:
        stage, (low, high) = self.stages[level], self._down[level + 1]
        held = self._offset if level == 0 else self._down[level][0]  # the coordinate of the first sample
        first = low * stage.factor - stage.reach - held
        if level == 0 and mode == "valid":
            mode = "nearest"  # the samples that only fill up the last unit may need any from beyond the edge
        return Resampling(axis=self._axis, first=first, count=high - low + 1, stage=stage, mode=mode, fill=fill)

    def interpolation(self, level: int) -> Resampling:
        stage, (low, high) = self.stages[level], self._up[level]
        first = low % stage.factor + (self._margin * stage.factor if level == len(self.stages) - 1 else 0)
        return Resampling(axis=self._axis, first=first, count=high - low + 1, stage=stage)


def _derivation(window: Window, count: int, fill: Any) -> Resampling:
    """A derivative as a decimation by 1."""
    assert window.derivative is not None
    stage = Stage(factor=1, order=0, down=window.derivative, up=())
    first = 0 if window.mode == "valid" else -window.before
    return Resampling(axis=window.axis, first=first, count=count, stage=stage, mode=window.mode, fill=fill)


def _decimated_constant(stage: Stage, value: Any) -> Any:
    """What `decimate` makes of samples equal to `value`."""
    return _weighted_constant(stage.down, value, math.copysign(1, value))


@lru_cache(maxsize=64)
def _weighted_constant(taps: tuple[float, ...], value: Any, sign: float) -> Any:
    """`sign` tells zeros apart in the cache's key."""
    weights = [value.dtype.type(weight) for weight in taps]
    total = weights[0] * value
    for weight in weights[1:]:
        total = fma(weight, value, total)
    return total
