"""Rank filters of NumPy arrays: tiles, computed by our own threads with Numba-compiled code."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.rank.cpu import counts, extremes, networks, ordered, samples
from kernels.rank.keys import keys_of
from kernels.rank.task import Axis, Task, axis_of
from kernels.runtime.arrays import native
from kernels.runtime.threads import for_each
from kernels.smoothing.borders import border_indices

Array = NDArray[Any]

TILE_SAMPLES = 1 << 16  # of a tile with its halo, if the window is not larger than a quarter
# A thread costs more than it saves below these.
MIN_SAMPLES, MIN_SAMPLES_BY_ROWS = 1 << 14, 1 << 18
TILES_PER_WORKER = 4
MIN_INNER = 64  # samples
SECOND_CACHE_BYTES = 512 << 10  # of a core
MIN_COLUMNS, MOST_COLUMNS = 2048, 4096


def filtered(image: Array, task: Task, out: Array | None, *, workers: int | None = None) -> Array:
    """The task's rank of each window, in the task's shape.

    image   : of as many samples as the task has, any layout
    out     : C-contiguous array for the result; None allocates one
    workers : threads, default one per core; 1 computes in the calling thread
    """
    result = np.empty(task.out_shape, task.dtype) if out is None else out
    if task.samples == 1 and not task.may_miss and task.footprint is None:
        result.reshape(-1)[...] = native(image).reshape(-1)
        return result
    task = _lengthened(task)
    keys = keys_of(task)
    source, target = (array.reshape(-1).view(keys.bits) for array in (native(image), result))
    positions = tuple(_sources(axis) for axis in task.axes)
    lengths = np.array([axis.length for axis in task.axes], np.int64)
    out_lengths = np.array([axis.out_length for axis in task.axes], np.int64)
    window = np.ones(task.taps, np.bool_) if task.footprint is None else np.ascontiguousarray(task.footprint)
    ranks = task.ranks
    is_float = task.dtype.kind == "f"
    span = (keys.lowest, keys.highest, *keys.nodata, task.omit_nan)

    def compute_ordered(tile: Array) -> None:
        for within in range(tile[0, 4], tile[1, 4]):
            tile[:, 4] = within, within + 1
            ordered.ordered_tile(
                source, positions, lengths, task.inner, target, out_lengths, window, ranks, is_float, span,
                (keys.cval, keys.nan, keys.empty), tile,
            )  # fmt: skip

    @cache
    def runs_of(begin: int, end: int) -> Array:
        return samples.runs_of(positions[2][begin : end + task.taps[2] - 1])

    def compute_rows(tile: Array) -> None:
        """By whole rows; ordered if there is a NaN."""
        common = (source, positions, runs_of(tile[0, 3], tile[1, 3]), lengths, task.inner, target, out_lengths)
        further = (is_float, span[:2], keys.cval, tile)
        done = True
        if body is counts:
            counts.counted_tile(*common, task.taps, int(ranks[-1]), keys.cval, tile)
        elif body is networks:
            done = networks.network_tile(*common, networks.step_of(task), (0,) * task.taps[2], *further)
        else:
            is_minimum = task.whole_rank == 0
            done = extremes.extreme_band(*common, task.taps, is_minimum, *further, _extreme_lines(task, tile))
        if not done:
            for part in _cut(_ordered_steps(task), tile.tolist()):
                compute_ordered(part)

    threads = workers or len(os.sched_getaffinity(0))
    body = next((each for each in (networks, extremes, counts) if each.applies(task)), ordered)
    alone = MIN_SAMPLES_BY_ROWS if body in (networks, extremes) else MIN_SAMPLES
    threads = max(1, min(threads, result.size // alone))
    if body is ordered:
        compute, steps = compute_ordered, _ordered_steps(task)
    else:
        # Every loop over a row costs a call, so rows are long, but four windows of rows fit the second cache.
        strip = max(SECOND_CACHE_BYTES // (4 * math.prod(task.taps[:2]) * task.dtype.itemsize), MIN_COLUMNS)
        strip = {networks: strip, extremes: min(strip, MOST_COLUMNS), counts: counts.STRIP}[body]
        compute, steps = compute_rows, _row_steps(task, threads, strip)
    for_each(compute, _cut(steps, ((0,) * 5, task.out_shape)), threads)
    return result


def _lengthened(task: Task) -> Task:
    """The same task with its many inner samples, or its planes, as an axis, because tiles are cut along axes."""
    first, second, third = task.axes
    if first.length > 1 or first.taps > 1:
        return task
    if task.inner >= MIN_INNER:
        inner, mask = axis_of(task.inner, 1, "nearest"), task.footprint
        mask = None if mask is None else mask.reshape(second.taps, third.taps, 1)
        return replace(task, axes=(second, third, inner), inner=1, footprint=mask)
    if second.length == second.taps == 1:
        return replace(task, axes=(first, axis_of(task.planes, 1, "nearest"), third), planes=1)
    return task


@lru_cache(maxsize=64)
def _sources(axis: Axis) -> NDArray[np.int64]:
    """The index that each position of an axis and its halo comes from; -1: the value beyond the edge."""
    at = np.arange(axis.first, axis.first + axis.out_length + axis.taps - 1)
    return border_indices(at, axis.length, "nearest" if axis.mode == "valid" else axis.mode)


def _row_steps(task: Task, threads: int, strip: int) -> list[int]:
    """Sides of tiles of rows of about `strip` samples, enough for all threads."""
    planes, rows, columns = task.axes
    across = -(-columns.out_length * task.inner // strip)
    strip = -(-columns.out_length // across)
    deep = 1 if planes.taps == 1 else max(planes.taps, 8)
    lines = rows.out_length
    tiles = across * task.planes * -(-planes.out_length // deep) * -(-rows.out_length // lines)
    more = -(-TILES_PER_WORKER * threads // tiles)
    lines = max(min(lines, -(-rows.out_length // more)), min(2 * rows.taps, lines))
    return [1, deep, lines, strip, task.inner]


def _extreme_lines(task: Task, tile: Array) -> int:
    """Lines to compute at a time: as many as fit a core's cache with their halo, at least 8 or the window's rows."""
    (deep, _, columns), taps = (tile[1] - tile[0])[1:4], task.taps
    line = int(columns) * task.inner * task.dtype.itemsize * (int(deep) + taps[0] - 1)
    return max(SECOND_CACHE_BYTES // line - taps[1], taps[1], 8)


def _ordered_steps(task: Task) -> list[int]:
    """Sides of tiles that are sorted."""
    budget = max(TILE_SAMPLES, 4 * math.prod(task.taps))
    sides, volume = [axis.taps for axis in task.axes], math.prod(task.taps)
    # Long lines first: along the last axis windows slide.
    for index in (2, 1, 0):
        axis = task.axes[index]
        most = budget * sides[index] // volume
        even = max(most, sides[index]) if index == 0 else min(most, max(2 * sides[index], 256 >> (2 - index)))
        side = min(axis.out_length, max(1, even - axis.taps + 1)) + axis.taps - 1
        volume = volume // sides[index] * side
        sides[index] = side
    return [1, *(side - axis.taps + 1 for side, axis in zip(sides, task.axes, strict=True)), task.inner]


def _cut(steps: Sequence[int], part: Sequence[Sequence[int]]) -> Iterator[Array]:
    """int64 (2, 5), begin and end along planes, the axes and the inner samples: tiles that cover a part of the
    result."""
    first, last = part
    counts = [-(-(end - begin) // step) for begin, end, step in zip(first, last, steps, strict=True)]
    for at in np.ndindex(*counts):
        start = [begin + n * step for begin, n, step in zip(first, at, steps, strict=True)]
        stop = [min(begin + step, end) for begin, step, end in zip(start, steps, last, strict=True)]
        yield np.array((start, stop), np.int64)
