"""Minima and maxima of boxes: along each axis in turn, whole rows at once, by doubling: M(2m)[i] is the smaller, or
larger, of M(m)[i] and M(m)[i + m]; the last step overlaps. The cost grows with the logarithm of the window's sides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.rank.cpu.samples import gather_row, scatter_row
from kernels.rank.task import Task
from kernels.runtime.compiled import compiled
from kernels.smoothing.cpu.rows import load, reload, store

BLOCK = 64  # samples: rows are computed in whole blocks, so that no loop ends in single samples


def applies(task: Task) -> bool:
    """Whether a task is the minimum or the maximum of a box."""
    is_extreme = task.whole_rank in (0, task.samples - 1)
    return is_extreme and task.footprint is None and task.nodata is None


@compiled
def extreme_tile(
    source: Any,
    sources: Any,
    runs: Any,
    lengths: Any,
    inner: int,
    target: Any,
    out_lengths: Any,
    taps: Any,
    is_minimum: bool,
    is_float: bool,
    ends: Any,
    cval: int,
    tile: Any,
) -> bool:
    """Fill a tile of minima or maxima, of all inner samples. Returns whether it did: not if it met a NaN.

    taps   : of the window along the three axes
    ends   : the lowest and the highest key of numbers
    others : as of `ordered.ordered_tile` and `networks.network_tile`
    """
    outs0, outs1, outs2 = tile[1, 1] - tile[0, 1], tile[1, 2] - tile[0, 2], tile[1, 3] - tile[0, 3]
    side0, side1 = outs0 + taps[0] - 1, outs1 + taps[1] - 1
    count = (outs2 * inner + BLOCK - 1) // BLOCK * BLOCK
    pitch = count + taps[2] * inner
    work = np.empty((side0 * side1 + 1) * pitch, source.dtype)
    plane, spare = tile[0, 0], side0 * side1 * pitch
    for z in range(side0):
        for y in range(side1):
            from0, from1 = sources[0][tile[0, 1] + z], sources[1][tile[0, 2] + y]
            row = (z * side1 + y) * pitch
            at = -1
            if from0 >= 0 and from1 >= 0:
                at = ((plane * lengths[0] + from0) * lengths[1] + from1) * lengths[2] * inner
            if not gather_row(source, at, runs, inner, cval, is_float, ends, work, row):
                return False
            # Between the row and the spare one, so that no loop reads what it writes.
            here, there, span = row, spare, 1
            while span < taps[2]:
                step = min(span, taps[2] - span)
                _pairs(work, here, here + step * inner, there, count + (taps[2] - span - step) * inner, is_minimum)
                here, there, span = there, here, span + step
            if here != row:
                _pairs(work, here, here, row, count, is_minimum)
    _fold(work, taps[1], side0, side1 * pitch, side1, pitch, count, is_minimum)
    _fold(work, taps[0], outs1, pitch, side0, side1 * pitch, count, is_minimum)
    for z in range(outs0):
        for y in range(outs1):
            to = ((plane * out_lengths[0] + tile[0, 1] + z) * out_lengths[1] + tile[0, 2] + y) * out_lengths[2]
            row = (z * side1 + y) * pitch
            scatter_row(work, row, is_float, target, (to + tile[0, 3]) * inner, outs2 * inner)
    return True


@compiled
def extreme_band(
    source: Any,
    sources: Any,
    runs: Any,
    lengths: Any,
    inner: int,
    target: Any,
    out_lengths: Any,
    taps: Any,
    is_minimum: bool,
    is_float: bool,
    ends: Any,
    cval: int,
    tile: Any,
    lines: int,
) -> bool:
    """As `extreme_tile`, for a few lines at a time, which fit a core's cache. The loop is compiled because a call from
    Python costs as much as a tile."""
    part = tile.copy()
    for first in range(tile[0, 2], tile[1, 2], lines):
        part[0, 2], part[1, 2] = first, min(first + lines, tile[1, 2])
        if not extreme_tile(
            source, sources, runs, lengths, inner, target, out_lengths, taps, is_minimum, is_float, ends, cval, part
        ):
            return False
    return True


@compiled
def _fold(work: Any, taps: int, lines: int, apart: int, length: int, pitch: int, count: int, is_minimum: bool) -> None:
    """Along an axis of `length` rows, `pitch` apart, for `lines` of them, `apart` from each other."""
    span = 1
    while span < taps:
        step = min(span, taps - span)
        for line in range(lines):
            for i in range(length - span - step + 1):
                at = line * apart + i * pitch
                _into(work, at, at + step * pitch, count, is_minimum)
        span += step


@compiled
def _pairs(work: Any, a: int, b: int, to: int, count: int, is_minimum: bool) -> None:
    if is_minimum:
        for i in range(count):
            store(work, to + i, min(load(work, a + i), load(work, b + i)))
    else:
        for i in range(count):
            store(work, to + i, max(load(work, a + i), load(work, b + i)))


@compiled
def _into(work: Any, at: int, other: int, count: int, is_minimum: bool) -> None:
    if is_minimum:
        for i in range(count):
            store(work, at + i, min(reload(work, at + i), load(work, other + i)))
    else:
        for i in range(count):
            store(work, at + i, max(reload(work, at + i), load(work, other + i)))
