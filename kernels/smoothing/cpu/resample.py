"""The passes of a decimated Gaussian on NumPy arrays: decimation and interpolation along one axis.

An array is seen as [outer, length, inner]. If `inner` is long, a pass sums whole rows of it. Otherwise a line's samples
are first sorted by phase, so that the sums run along contiguous memory too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled
from kernels.runtime.threads import for_each
from kernels.smoothing.borders import border_indices
from kernels.smoothing.cpu.rows import convert, fma, load, reload, rounded, store
from kernels.smoothing.decimated import Resampling
from kernels.smoothing.scalars import WHOLES
from kernels.smoothing.window import Window

Array = NDArray[Any]

ROW = 32  # samples of `inner` from which rows are summed
COLUMNS = 4096  # samples of a row that one call sums: they stay in the cache
PARTS_PER_WORKER = 4


class CpuPasses:
    """`kernels.smoothing.decimated.Passes` on NumPy arrays."""

    def __init__(self, smooth: Callable[..., Array], workers: int) -> None:
        self._smooth = smooth
        self._workers = workers

    def decimate(self, values: Array, steps: Sequence[Resampling]) -> Array:
        for step in steps:
            values = self._decimate(values, step)
        return values

    def _decimate(self, values: Array, step: Resampling) -> Array:
        outer, length, inner = _view(values, step.axis)
        count, stage, fill = step.count, step.stage, step.fill
        positions = np.arange(step.first, step.first + (count - 1) * stage.factor + len(stage.down))
        at = positions if step.mode == "valid" else border_indices(positions, length, step.mode)
        precision = np.float64 if values.dtype == np.float64 else np.float32
        out = np.empty((*values.shape[: step.axis], count, *values.shape[step.axis + 1 :]), precision)
        weights, source, target = np.array(stage.down, out.dtype), values.reshape(-1), out.reshape(-1)
        beyond = np.full(inner, fill, out.dtype)

        def rows(part: tuple[int, int, int, int]) -> None:
            _decimate_rows(source, at, beyond, target, weights, stage.factor, length, count, inner, *part)

        def lines(part: tuple[int, int, int, int]) -> None:
            _decimate_lines(source, at, beyond, target, weights, stage.factor, length, count, inner, *part[:2])

        for_each(rows if inner >= ROW else lines, _parts(outer, count, inner, self._workers), self._workers)
        return out

    def smooth(self, values: Array, windows: Sequence[Window], fill: Any) -> Array:
        return self._smooth(values, windows, fill, None, workers=self._workers)

    def interpolate(self, values: Array, steps: Sequence[Resampling], out: Array | None) -> Array:
        for step in steps:
            values = self._interpolate(values, step, out if step is steps[-1] else None)
        return values

    def _interpolate(self, values: Array, step: Resampling, out: Array | None) -> Array:
        outer, length, inner = _view(values, step.axis)
        first, count, stage = step.first, step.count, step.stage
        if out is None:
            out = np.empty((*values.shape[: step.axis], count, *values.shape[step.axis + 1 :]), values.dtype)
        weights, source, target = np.array(stage.up, values.dtype), values.reshape(-1), out.reshape(-1)
        whole = out.dtype.kind != "f"
        rounding = np.array((WHOLES, WHOLES), values.dtype)

        def rows(part: tuple[int, int, int, int]) -> None:
            _interpolate_rows(source, target, weights, rounding, whole, first, length, count, inner, *part)

        def lines(part: tuple[int, int, int, int]) -> None:
            _interpolate_lines(source, target, weights, rounding, whole, first, length, count, inner, *part[:2])

        for_each(rows if inner >= ROW else lines, _parts(outer, count, inner, self._workers), self._workers)
        return out


def _view(values: Array, axis: int) -> tuple[int, int, int]:
    return math.prod(values.shape[:axis]), values.shape[axis], math.prod(values.shape[axis + 1 :])


def _parts(outer: int, count: int, inner: int, workers: int) -> list[tuple[int, int, int, int]]:
    """Of rows: (first, last) of outer * count, then of inner; of lines: (first, last) of outer."""
    lines = outer * count if inner >= ROW else outer
    pieces = max(1, min(lines, PARTS_PER_WORKER * workers if workers > 1 else 1))
    cuts = [lines * i // pieces for i in range(pieces + 1)]
    columns = range(0, inner, COLUMNS) if inner >= ROW else (0,)
    return [
        (low, high, column, min(column + COLUMNS, inner))
        for low, high in itertools.pairwise(cuts)
        for column in columns
    ]


@compiled
def _decimate_rows(
    source: Any, at: Any, beyond: Any, out: Any, weights: Any, factor: int, length: int, count: int, inner: int,
    low: int, high: int, column: int, end: int,
) -> None:  # fmt: skip
    """at: the index of each position along the axis, OUTSIDE for the samples of `beyond`"""
    width = end - column
    place = np.empty(weights.size, np.int64)
    for row in range(low, high):
        plane, first = row // count * length, row % count * factor
        inside = True
        for k in range(weights.size):
            inside = inside and at[first + k] >= 0
            place[k] = (plane + at[first + k]) * inner + column
        if inside:
            _weighted(source, place, weights, out, row * inner + column, width)
            continue
        for k in range(weights.size):
            if at[first + k] < 0:
                _one_tap(beyond, 0, weights[k], k == 0, out, row * inner + column, width)
            else:
                _one_tap(source, place[k], weights[k], k == 0, out, row * inner + column, width)


@compiled
def _decimate_lines(
    source: Any, at: Any, beyond: Any, out: Any, weights: Any, factor: int, length: int, count: int, inner: int,
    low: int, high: int,
) -> None:  # fmt: skip
    pitch = (at.size // factor + 1) * inner
    phases, place = np.empty(factor * pitch, out.dtype), np.empty(weights.size, np.int64)
    for k in range(weights.size):
        place[k] = k % factor * pitch + k // factor * inner
    for line in range(low, high):
        for phase in range(factor):
            to = phase * pitch
            for position in range(phase, at.size, factor):
                begin = (line * length + at[position]) * inner
                for c in range(inner):
                    phases[to + c] = beyond[c] if at[position] < 0 else source[begin + c]
                to += inner
        _weighted(phases, place, weights, out, line * count * inner, count * inner)


@compiled
def _interpolate_rows(
    source: Any, out: Any, weights: Any, rounding: Any, whole: bool, first: int, length: int, count: int, inner: int,
    low: int, high: int, column: int, end: int,
) -> None:  # fmt: skip
    factor, order = weights.shape
    width = end - column
    place, total = np.empty(order, np.int64), np.empty(width, source.dtype)
    for row in range(low, high):
        position = first + row % count
        begin = (row // count * length + position // factor) * inner + column
        for tap in range(order):
            place[tap] = begin + tap * inner
        _weighted(source, place, weights[position % factor], total, 0, width)
        _finish(total, 0, rounding, whole, out, row * inner + column, width)


@compiled
def _interpolate_lines(
    source: Any, out: Any, weights: Any, rounding: Any, whole: bool, first: int, length: int, count: int, inner: int,
    low: int, high: int,
) -> None:  # fmt: skip
    factor, order = weights.shape
    steps = (first + count - 1) // factor + 1
    place, total = np.empty(order, np.int64), np.empty(steps * inner, source.dtype)
    results = np.empty(steps * inner, out.dtype)
    for line in range(low, high):
        for phase in range(factor):
            for tap in range(order):
                place[tap] = (line * length + tap) * inner
            _weighted(source, place, weights[phase], total, 0, steps * inner)
            _finish(total, 0, rounding, whole, results, 0, steps * inner)
            begin, end = -((phase - first) // factor), -((phase - first - count) // factor)
            for c in range(inner):
                to = (line * count + begin * factor + phase - first) * inner + c
                for i in range(begin * inner + c, end * inner, inner):
                    out[to] = results[i]
                    to += factor * inner


@compiled
def _finish(total: Any, at: int, rounding: Any, whole: bool, out: Any, to: int, count: int) -> None:
    if whole:
        rounded(total, at, rounding, out, to, count)
    else:
        convert(total, at, out, to, count)


@compiled
def _weighted(source: Any, place: Any, weights: Any, out: Any, to: int, count: int) -> None:
    """out = w[0] x[0]; out = fma(w[k], x[k], out) for k = 1, 2, …: x[k] starts at place[k] of `source`."""
    k = 0
    if weights.size >= 4:
        _first_taps(source, place, weights, out, to, count)
        k = 4
    while k + 4 <= weights.size:
        _more_taps(source, place, weights, k, out, to, count)
        k += 4
    while k < weights.size:
        _one_tap(source, place[k], weights[k], k == 0, out, to, count)
        k += 1


@compiled
def _first_taps(source: Any, place: Any, weights: Any, out: Any, to: int, count: int) -> None:
    real = type(weights[0])
    at_0, at_1, at_2, at_3 = place[0], place[1], place[2], place[3]
    weight_0, weight_1, weight_2, weight_3 = weights[0], weights[1], weights[2], weights[3]
    for i in range(count):
        a = weight_0 * real(load(source, at_0 + i))
        a = fma(weight_1, real(load(source, at_1 + i)), a)
        a = fma(weight_2, real(load(source, at_2 + i)), a)
        store(out, to + i, fma(weight_3, real(load(source, at_3 + i)), a))


@compiled
def _more_taps(source: Any, place: Any, weights: Any, k: int, out: Any, to: int, count: int) -> None:
    real = type(weights[0])
    at_0, at_1, at_2, at_3 = place[k], place[k + 1], place[k + 2], place[k + 3]
    weight_0, weight_1, weight_2, weight_3 = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
    for i in range(count):
        a = fma(weight_0, real(load(source, at_0 + i)), reload(out, to + i))
        a = fma(weight_1, real(load(source, at_1 + i)), a)
        a = fma(weight_2, real(load(source, at_2 + i)), a)
        store(out, to + i, fma(weight_3, real(load(source, at_3 + i)), a))


@compiled
def _one_tap(source: Any, at: int, weight: Any, is_first: bool, out: Any, to: int, count: int) -> None:
    real = type(weight)
    if is_first:
        for i in range(count):
            store(out, to + i, weight * real(load(source, at + i)))
    else:
        for i in range(count):
            store(out, to + i, fma(weight, real(load(source, at + i)), reload(out, to + i)))
