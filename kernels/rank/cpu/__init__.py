"""Rank filters of NumPy arrays: tiles, computed by our own threads with Numba-compiled code."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.rank.cpu import networks, ordered, samples
from kernels.rank.keys import keys_of
from kernels.rank.task import Axis, Task
from kernels.runtime.arrays import native
from kernels.runtime.threads import for_each
from kernels.smoothing.borders import border_indices

Array = NDArray[Any]

TILE_SAMPLES = 1 << 16  # of a tile with its halo, if the window is not larger than a quarter
MIN_SAMPLES_PER_WORKER = 1 << 14
TILES_PER_WORKER = 4
STRIP_SAMPLES = 1024  # of a row: all that a network keeps of it stays in a core's first cache
MIN_STRIP_ROWS = 16


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
    keys = keys_of(task)
    source, target = (array.reshape(-1).view(keys.bits) for array in (native(image), result))
    positions = tuple(_sources(axis) for axis in task.axes)
    lengths = np.array([axis.length for axis in task.axes], np.int64)
    out_lengths = np.array([axis.out_length for axis in task.axes], np.int64)
    window = np.ones(task.taps, np.bool_) if task.footprint is None else np.ascontiguousarray(task.footprint)
    ranks = task.ranks()
    is_float = task.dtype.kind == "f"
    span = (keys.lowest, keys.highest, *keys.nodata, task.omit_nan)

    def compute_ordered(tile: Array) -> None:
        for within in range(tile[0, 4], tile[1, 4]):
            tile[:, 4] = within, within + 1
            ordered.ordered_tile(
                source, positions, lengths, task.inner, target, out_lengths, window, ranks, is_float, span,
                (keys.cval, keys.nan, keys.empty), tile,
            )  # fmt: skip

    def compute_median(tile: Array) -> None:
        runs = samples.runs_of(positions[2][tile[0, 3] : tile[1, 3] + task.taps[2] - 1])
        row = task.axes[2].length * task.inner
        if not networks.median_tile(
            source, positions[1], runs, task.axes[1].length, row, task.inner, target, out_lengths, (0,) * task.taps[2],
            is_float, span[:2], keys.cval, tile,
        ):  # fmt: skip
            for part in _tiles(task, tile):
                compute_ordered(part)

    threads = workers or len(os.sched_getaffinity(0))
    if networks.applies(task):
        for_each(compute_median, _strips(task, threads), threads)
    else:
        threads = max(1, min(threads, result.size // MIN_SAMPLES_PER_WORKER))
        for_each(compute_ordered, _tiles(task), threads)
    return result


def _sources(axis: Axis) -> NDArray[np.int64]:
    """The index that each position of an axis and its halo comes from; -1: the value beyond the edge."""
    at = np.arange(axis.first, axis.first + axis.out_length + axis.taps - 1)
    return border_indices(at, axis.length, "nearest" if axis.mode == "valid" else axis.mode)


def _strips(task: Task, threads: int) -> Iterator[Array]:
    """Tiles of whole rows, or of parts that fit a core's cache, as of `_tiles`."""
    _, rows, columns = task.axes
    across = max(1, -(-columns.out_length * task.inner // STRIP_SAMPLES))
    down = min(-(-TILES_PER_WORKER * threads // (across * task.planes)), max(1, rows.out_length // MIN_STRIP_ROWS))
    if task.planes * math.prod(task.out_shape) < MIN_SAMPLES_PER_WORKER:
        down = 1
    for plane in range(task.planes):
        for y in range(down):
            for x in range(across):
                begin = (plane, 0, rows.out_length * y // down, columns.out_length * x // across, 0)
                end = (
                    plane + 1,
                    1,
                    rows.out_length * (y + 1) // down,
                    columns.out_length * (x + 1) // across,
                    task.inner,
                )
                yield np.array((begin, end), np.int64)


def _tiles(task: Task, part: Array | None = None) -> Iterator[Array]:
    """int64 (2, 5): first and end along planes, the axes and the inner samples, that cover a part of the result."""
    first, last = ((0,) * 5, task.out_shape) if part is None else part.tolist()
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
    steps = [1, *(side - axis.taps + 1 for side, axis in zip(sides, task.axes, strict=True)), 1]
    counts = [-(-(end - begin) // step) for begin, end, step in zip(first, last, steps, strict=True)]
    for at in np.ndindex(*counts):
        start = [begin + n * step for begin, n, step in zip(first, at, steps, strict=True)]
        stop = [min(begin + step, end) for begin, step, end in zip(start, steps, last, strict=True)]
        yield np.array((start, stop), np.int64)
