"""The bilateral filter on the CPU: rows of results, tap by tap, in our own threads with Numba-compiled code."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from kernels.bilateral import POWERS, Task
from kernels.runtime.arrays import native
from kernels.runtime.compiled import compiled, ir, types
from kernels.runtime.threads import for_each
from kernels.smoothing.borders import border_indices
from kernels.smoothing.cpu.rows import fma, generated, load, reload, store

P0, P1, P2, P3, P4 = (np.float32(power) for power in POWERS)
MIN_SAMPLES = 1 << 12  # of a thread
LINES = 16  # of a part
ONE = np.float32(1)
MOST = np.float32(127)  # binary exponent, of weight 0
WHOLE = np.float32(1.5 * 2**23)  # added to a smaller number, it leaves the nearest whole one in the lowest bits


def filtered(image: Any, task: Task, *, workers: int | None = None) -> Any:
    out = np.empty(task.out_shape, task.dtype)
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
    real = task.spatial.dtype.type
    is_float = task.dtype.kind == "f"
    cval = np.array([task.cval], task.dtype)

    def compute(first: int) -> None:
        bilateral_rows(
            source, positions, lengths, task.inner, target, taps, task.spatial, real(task.scale), cval, is_float,
            first, min(first + LINES, lines),
        )  # fmt: skip

    lines = math.prod(task.out_shape[:3])
    threads = max(1, min(workers or len(os.sched_getaffinity(0)), out.size // MIN_SAMPLES))
    for_each(compute, range(0, lines, LINES), threads)
    return out


@generated
def _scaled(_typing: Any, number: Any, shifted: Any) -> Any:
    """number * 2**n, of shifted = WHOLE + n, by adding to the bits of the exponent."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.IntType(32)
        bits, exponent = (builder.bitcast(each, kind) for each in args)
        return builder.bitcast(builder.add(bits, builder.shl(exponent, kind(23))), ir.FloatType())

    return types.float32(types.float32, types.float32), code


@compiled
def bilateral_rows(
    source: Any,
    positions: Any,
    lengths: Any,
    inner: int,
    target: Any,
    taps: Any,
    spatial: Any,
    scale: Any,
    cval: Any,
    is_float: bool,
    first: int,
    last: int,
) -> None:
    """Fill the rows first … last of the result, of [planes, two axes], with all inner samples.

    positions : of each axis, the index that each position of result and halo comes from; -1: beyond the edge
    spatial   : float32, or float64 for float64 images
    """
    sources0, sources1, sources2 = positions
    outs0, outs1 = len(sources0) - taps[0] + 1, len(sources1) - taps[1] + 1
    width = len(sources2) * inner
    count = width - (taps[2] - 1) * inner
    row, centre = np.empty(width, spatial.dtype), np.empty(width, spatial.dtype)
    total, weights, weight = np.empty((3, count), spatial.dtype)
    middle = taps[2] // 2 * inner
    for line in range(first, last):
        y, rest = line % outs1, line // outs1
        z, plane = rest % outs0, rest // outs0
        base = plane * lengths[0]
        _gather(
            source, base, lengths, sources0[z + taps[0] // 2], sources1[y + taps[1] // 2], sources2, inner, cval, centre
        )
        total[:] = 0
        weights[:] = 0
        for dz in range(taps[0]):
            for dy in range(taps[1]):
                _gather(source, base, lengths, sources0[z + dz], sources1[y + dy], sources2, inner, cval, row)
                for dx in range(taps[2]):
                    exponent = spatial[(dz * taps[1] + dy) * taps[2] + dx]
                    if spatial.itemsize == 4:
                        _weigh(weight, row, dx * inner, centre, middle, exponent, scale, count)
                    else:
                        _weigh_exactly(weight, row, dx * inner, centre, middle, exponent, scale, count)
                    _add_product(total, weight, row, dx * inner, count)
                    _add(weights, weight, count)
        to = line * count
        if is_float:
            for i in range(count):
                target[to + i] = total[i] / weights[i]
        else:
            for i in range(count):
                target[to + i] = np.rint(total[i] / weights[i])


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


# Each of these loops writes one row, and is compiled to plain SIMD.


@compiled
def _weigh(weight: Any, row: Any, at: int, centre: Any, middle: int, exponent: Any, scale: Any, count: int) -> None:
    """The weights of a tap in float32, by the operations of bilateral.cu."""
    for i in range(count):
        apart = load(row, at + i) - load(centre, middle + i)
        power = fma(apart * apart, scale, exponent)
        power = power if power < MOST else MOST
        shifted = WHOLE - power
        f = power + (shifted - WHOLE)
        store(weight, i, _scaled(fma(fma(fma(fma(fma(P4, f, P3), f, P2), f, P1), f, P0), f, ONE), shifted))


@compiled
def _weigh_exactly(
    weight: Any, row: Any, at: int, centre: Any, middle: int, exponent: Any, scale: Any, count: int
) -> None:
    """The same in float64."""
    for i in range(count):
        apart = load(row, at + i) - load(centre, middle + i)
        store(weight, i, 2.0 ** -(apart * apart * scale + exponent))


@compiled
def _add_product(total: Any, weight: Any, row: Any, at: int, count: int) -> None:
    for i in range(count):
        store(total, i, fma(load(weight, i), load(row, at + i), reload(total, i)))


@compiled
def _add(weights: Any, weight: Any, count: int) -> None:
    for i in range(count):
        store(weights, i, reload(weights, i) + load(weight, i))
