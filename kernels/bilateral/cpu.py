"""The bilateral filter on the CPU: rows of results, tap by tap, in our own threads with Numba-compiled code."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from kernels.bilateral import NUMBERS, Task
from kernels.runtime.arrays import native
from kernels.runtime.compiled import compiled
from kernels.runtime.threads import for_each
from kernels.smoothing.borders import border_indices
from kernels.smoothing.cpu.rows import fma, load, reload, store

MIN_SAMPLES = 1 << 12  # of a thread
LINES = 16  # of a part
NONE, ONE = np.float32(0), np.float32(1)


def filtered(image: Any, task: Task, out: Any = None, *, workers: int | None = None) -> Any:
    out = np.empty(task.out_shape, task.dtype) if out is None else out
    source, target = native(image).reshape(-1), out.reshape(-1)
    positions = tuple(
        border_indices(
            np.arange(axis.first, axis.first + axis.out_length + axis.taps - 1),
            axis.length,
            "nearest" if axis.mode == "valid" else axis.mode,
        )
        for axis in task.axes
    )
    lengths = np.array([axis.length for axis in task.axes], np.int64)
    taps = np.array([axis.taps for axis in task.axes], np.int64)
    real = task.taps.dtype.type
    scales = real(task.scale), real(1) / real(task.scale)
    is_float = task.dtype.kind == "f"
    cval = np.array([task.cval], task.dtype)

    def compute(first: int) -> None:
        bilateral_rows(
            source, positions, lengths, task.inner, target, taps, task.taps.reshape(-1), scales, cval, is_float,
            first, min(first + LINES, lines),
        )  # fmt: skip

    lines = math.prod(task.out_shape[:3])
    threads = max(1, min(workers or len(os.sched_getaffinity(0)), out.size // MIN_SAMPLES))
    for_each(compute, range(0, lines, LINES), threads)
    return out


@compiled
def bilateral_rows(
    source: Any,
    positions: Any,
    lengths: Any,
    inner: int,
    target: Any,
    taps: Any,
    numbers: Any,
    scales: Any,
    cval: Any,
    is_float: bool,
    first: int,
    last: int,
) -> None:
    """Fill the rows first … last of the result, of [planes, two axes], with all inner samples.

    positions : of each axis, the index that each position of result and halo comes from; -1: beyond the edge
    numbers   : of each tap: float32, or float64 for float64 images
    scales    : of samples, and its inverse
    """
    sources0, sources1, sources2 = positions
    outs0, outs1 = len(sources0) - taps[0] + 1, len(sources1) - taps[1] + 1
    width = len(sources2) * inner
    count = width - (taps[2] - 1) * inner
    row, centre = np.empty(width, numbers.dtype), np.empty(width, numbers.dtype)
    total, weights = np.empty((2, count), numbers.dtype)
    middle = taps[2] // 2 * inner
    centre_tap = taps[0] * taps[1] * taps[2] // 2
    scale, inverse = scales
    for line in range(first, last):
        y, rest = line % outs1, line // outs1
        z, plane = rest % outs0, rest // outs0
        base = plane * lengths[0]
        from0, from1 = sources0[z + taps[0] // 2], sources1[y + taps[1] // 2]
        _gather(source, base, lengths, from0, from1, sources2, inner, cval, centre)
        _scale(centre, scale, width)
        total[:] = 0
        weights[:] = 1
        for dz in range(taps[0]):
            for dy in range(taps[1]):
                _gather(source, base, lengths, sources0[z + dz], sources1[y + dy], sources2, inner, cval, row)
                _scale(row, scale, width)
                for dx in range(taps[2]):
                    tap, at = (dz * taps[1] + dy) * taps[2] + dx, dx * inner
                    if tap == centre_tap:
                        continue
                    if numbers.itemsize == 4:
                        _add_tap(total, weights, row, at, centre, middle, numbers, tap, count)
                    else:
                        _add_tap_exactly(total, weights, row, at, centre, middle, numbers, tap, count)
        to = line * count
        if is_float:
            own = (((base + from0) * lengths[1] + from1) * lengths[2] + sources2[taps[2] // 2]) * inner
            for i in range(count):
                target[to + i] = fma(total[i] / weights[i], inverse, source[own + i])
        else:
            for i in range(count):
                target[to + i] = np.rint((total[i] / weights[i] + centre[middle + i]) * inverse)


@compiled
def _gather(
    source: Any, base: int, lengths: Any, from0: int, from1: int, sources2: Any, inner: int, cval: Any, row: Any
) -> None:
    """A row of samples, with what lies beyond the edges."""
    line = ((base + from0) * lengths[1] + from1) * lengths[2]
    for x in range(len(sources2)):
        beyond = from0 < 0 or from1 < 0 or sources2[x] < 0
        for within in range(inner):
            row[x * inner + within] = cval[0] if beyond else source[(line + sources2[x]) * inner + within]


# These loops are compiled to plain SIMD.


@compiled
def _scale(row: Any, scale: Any, count: int) -> None:
    for i in range(count):
        store(row, i, reload(row, i) * scale)


@compiled
def _add_tap(
    total: Any, weights: Any, row: Any, at: int, centre: Any, middle: int, numbers: Any, tap: int, count: int
) -> None:
    """One tap of a row of results in float32, by the operations of bilateral.cu."""
    tap *= NUMBERS
    c0, c1, c2, c3 = numbers[tap], numbers[tap + 1], numbers[tap + 2], numbers[tap + 3]
    c4, c5, c6 = numbers[tap + 4], numbers[tap + 5], numbers[tap + 6]
    for i in range(count):
        apart = load(row, at + i) - load(centre, middle + i)
        s = fma(-apart, apart, ONE)
        s = s if s > NONE else NONE
        v1 = fma(s, c0, c1)
        v2 = fma(s, v1, c2)
        v4 = fma(v2, fma(v1, v2, c3), c4)
        v5 = fma(v4, v4, c5)
        w = fma(v5, v5, c6)
        w = w if w > NONE else NONE
        store(total, i, fma(w, apart, reload(total, i)))
        store(weights, i, reload(weights, i) + w)


@compiled
def _add_tap_exactly(
    total: Any, weights: Any, row: Any, at: int, centre: Any, middle: int, numbers: Any, tap: int, count: int
) -> None:
    """The same in float64."""
    for i in range(count):
        apart = load(row, at + i) - load(centre, middle + i)
        w = 2.0 ** -(apart * apart + numbers[tap])
        store(total, i, fma(w, apart, reload(total, i)))
        store(weights, i, reload(weights, i) + w)
