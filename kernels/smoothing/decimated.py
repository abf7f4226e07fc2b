"""A Gaussian of which some axes are decimated, from passes along one axis each that a device provides.

    level 0        along each axis in ascending order: decimated by its first stage, or smoothed directly
    level 1, 2 …   along each axis that has such a stage: decimated further
    coarse grid    smoothed along every decimated axis
    levels back    interpolated, along each axis in ascending order; the last pass rounds integers, ties to even
All sums are float32 (float64 for float64 images), a = w[0] x[0]; a = fma(w[k], x[k], a) for the following taps in
ascending order. Only level 0 meets the image's edges: coarse grids are computed as far beyond them as needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kernels.smoothing.axis_rounding import filtered_constant, fma
from kernels.smoothing.decimation import Stage
from kernels.smoothing.window import Window


class Passes(Protocol):
    """What a device does along one axis of an array. Results are new arrays of the working precision."""

    def decimate(self, values: Any, axis: int, first: int, count: int, stage: Stage, mode: str, fill: Any) -> Any:
        """Coarse sample j, 0 … count - 1, has tap k at position first + j * factor + k; `fill` lies beyond the edge in
        mode constant."""

    def smooth(self, values: Any, windows: Sequence[Window], fill: Any) -> Any:
        """The direct Gaussian of a float array."""

    def interpolate(self, values: Any, axis: int, first: int, count: int, stage: Stage, out: Any) -> Any:
        """Sample i, 0 … count - 1, has its taps at (first + i) // factor + 0 …, and phase (first + i) % factor.

        out : array for the result, whose integers are rounded to nearest, ties to even; None: a new array
        """


def smooth(image: Any, windows: Sequence[Window], cval: float, out: Any, passes: Passes) -> None:
    """image   : array of one of `kernels.smoothing.DTYPES`, C-contiguous
    windows : as of `cpu.smooth`, at least one decimated
    out     : C-contiguous array for the result
    """
    precision = np.dtype(np.float64 if image.dtype == np.float64 else np.float32)
    values, fill = image, precision.type(cval)
    grids = {window.axis: _Grid(window, out.shape[window.axis]) for window in windows if window.decimation}
    for window in windows:
        if window.axis in grids:
            values = grids[window.axis].decimate(values, 0, window.mode, fill, passes)
            fill = _decimated_constant(grids[window.axis].stages[0], fill)
        else:
            values = passes.smooth(values.astype(precision, copy=False), [window], fill)
            fill = filtered_constant(window, fill)
    levels = max(len(grid.stages) for grid in grids.values())
    for level in range(1, levels):
        for grid in grids.values():
            values = grid.decimate(values, level, "valid", fill, passes)
    values = passes.smooth(values, [grid.coarse_window for grid in grids.values()], fill)
    order = [(grid, level) for level in reversed(range(levels)) for grid in grids.values() if level < len(grid.stages)]
    for grid, level in order:
        values = grid.interpolate(values, level, out if (grid, level) == order[-1] else None, passes)


class _Grid:
    """The spans of samples along one axis, in absolute coordinates."""

    def __init__(self, window: Window, outputs: int) -> None:
        assert window.decimation is not None
        assert window.half_weights is not None
        self.stages = window.decimation.stages
        self._axis = window.axis
        self._offset = window.offset
        first = window.offset + (window.before if window.mode == "valid" else 0)
        self._down = window.decimation.decimated(first, first + outputs - 1)
        self._up = window.decimation.interpolated(first, first + outputs - 1)
        radius = len(window.half_weights) - 1
        self.coarse_window = dataclasses.replace(
            window, before=radius, after=radius, mode="valid", decimation=None, offset=0
        )

    def decimate(self, values: Any, level: int, mode: str, fill: Any, passes: Passes) -> Any:
        if level >= len(self.stages):
            return values
        stage, (low, high) = self.stages[level], self._down[level + 1]
        held = self._offset if level == 0 else self._down[level][0]  # the coordinate of the first of `values`
        first = low * stage.factor - stage.reach - held
        return passes.decimate(values, self._axis, first, high - low + 1, stage, mode, fill)

    def interpolate(self, values: Any, level: int, out: Any, passes: Passes) -> Any:
        stage, (low, high) = self.stages[level], self._up[level]
        first = low - low // stage.factor * stage.factor
        return passes.interpolate(values, self._axis, first, high - low + 1, stage, out)


def _decimated_constant(stage: Stage, value: Any) -> Any:
    """What `decimate` makes of samples equal to `value`."""
    weights = [value.dtype.type(weight) for weight in stage.down]
    total = weights[0] * value
    for weight in weights[1:]:
        total = fma(weight, value, total)
    return total
