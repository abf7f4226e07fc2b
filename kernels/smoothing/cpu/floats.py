"""The Gaussian of any image and the box of float images, one tile at a time, in float32 or float64.

Rows are converted and extended beyond the image's edges once, when they enter the tile, into a ring in the scratch
array. Every sum along an axis is then a sum of rows of the ring.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled
from kernels.smoothing.cpu.rows import (
    Axis,
    Tile,
    beyond,
    convert,
    copy_pixel,
    first_taps,
    inside,
    more_taps,
    one_tap,
    pair_sum,
    rounded,
    row_start,
    sample,
    scaled,
    triple_sum,
    whole_blocks,
)


def doublings(taps: int) -> Any:
    """How window sums grow to `taps` samples: int64 [steps, 2] of (m, odd); a step goes from m samples to 2 m + odd."""
    steps: list[tuple[int, int]] = []
    while taps > 1:
        steps.insert(0, (taps // 2, taps % 2))
        taps //= 2
    return np.array(steps, np.int64).reshape(-1, 2)


@compiled
def enter(
    image: Any,
    border: Any,
    scratch: Any,
    at: int,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    outside: Any,
    plane: int,
    position: int,
) -> None:
    """Copies the image's row at `position`, for all columns that the tile sees, into the scratch array."""
    row = row_start(plane, position, rows, columns, channels)
    begin, end = inside(columns, tile)
    start = tile.x0 + columns.first
    count = (end - begin) * channels
    if row < 0:
        convert(border, 0, scratch, at + begin * channels, count)
    else:
        convert(image, row + (start + begin) * channels, scratch, at + begin * channels, count)
    for column, source, twin in outside:
        if twin >= 0 and row >= 0:
            copy_pixel(scratch, at + twin * channels, at + column * channels, channels)
            continue
        for c in range(channels):
            scratch[at + column * channels + c] = sample(image, border, row, source, channels, c)


def gaussian_scratch_rows(rows: Axis) -> int:
    """The ring, and one row after each axis."""
    return rows.taps + 2


@compiled
def gaussian_tile(
    image: Any,
    border: Any,
    out: Any,
    scratch: Any,
    pitch: int,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    row_weights: Any,
    column_weights: Any,
    after: Any,
    whole: bool,
) -> None:
    """image    : any supported dtype, flat [planes, rows.length, columns.length, channels]
    border   : one row of the value beyond the edge, in the image's dtype
    out      : the same layout with the axes' out_length
    scratch  : float32 or float64, the precision of the arithmetic: `gaussian_scratch_rows`, `pitch` samples each
    *_weights: at distance 0 … radius, in that precision; a single weight if the axis is not filtered
    after    : rounding of the result to integers
    whole    : whether the result is rounded to integers
    """
    width = (tile.x1 - tile.x0 + columns.taps - 1) * channels
    count = (tile.x1 - tile.x0) * channels
    down, across = rows.taps * pitch, (rows.taps + 1) * pitch
    radius = max(row_weights.size, column_weights.size) - 1
    below, above = np.empty(radius + 1, np.int64), np.empty(radius + 1, np.int64)
    first = tile.y0 + rows.first
    outside = beyond(columns, tile)
    for plane in range(tile.plane0, tile.plane1):
        for j in range(rows.taps - 1):
            enter(image, border, scratch, j * pitch, rows, columns, channels, tile, outside, plane, first + j)
        for y in range(tile.y0, tile.y1):
            oldest = (y - tile.y0) % rows.taps
            newest = (oldest + rows.taps - 1) % rows.taps
            position = y + rows.first + rows.taps - 1
            enter(image, border, scratch, newest * pitch, rows, columns, channels, tile, outside, plane, position)
            row = newest * pitch
            if row_weights.size > 1:
                for k in range(row_weights.size):
                    below[k] = (oldest + row_weights.size - 1 - k) % rows.taps * pitch
                    above[k] = (oldest + row_weights.size - 1 + k) % rows.taps * pitch
                _weighted_sum(scratch, below, above, row_weights, down, whole_blocks(width))
                row = down
            if column_weights.size > 1:
                for k in range(column_weights.size):
                    below[k] = row + (column_weights.size - 1 - k) * channels
                    above[k] = row + (column_weights.size - 1 + k) * channels
                _weighted_sum(scratch, below, above, column_weights, across, whole_blocks(count))
                row = across
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            if whole:
                rounded(scratch, row, after, out, at, count)
            else:
                convert(scratch, row, out, at, count)


@compiled
def _weighted_sum(scratch: Any, below: Any, above: Any, weights: Any, at: int, count: int) -> None:
    """a = w[0] x; a = fma(w[k], x[-k] + x[+k], a) for k = 1, 2, …, four k in one sweep over the row if possible."""
    k = 1
    if weights.size > 4:
        first_taps(scratch, below, above, weights, at, count)
        k = 5
    else:
        scaled(scratch, below[0], weights[0], scratch, at, count)
    while k + 4 <= weights.size:
        more_taps(scratch, below, above, weights, k, at, count)
        k += 4
    while k < weights.size:
        one_tap(scratch, below[k], above[k], weights[k], at, count)
        k += 1


def float_box_scratch_rows(rows: Axis) -> int:
    """Three rows, and a ring for each intermediate window length."""
    return 3 + sum(int(taps) + 2 for taps in doublings(rows.taps)[:, 0])


@compiled
def float_box_tile(
    image: Any,
    border: Any,
    out: Any,
    scratch: Any,
    pitch: int,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    row_steps: Any,
    column_steps: Any,
    factor: Any,
) -> None:
    """Window sums by doubling, times `factor`.

    image, border, out, scratch : as in `gaussian_tile`, all of one float dtype
    *_steps                     : `doublings` of the axis's taps
    """
    width = (tile.x1 - tile.x0 + columns.taps - 1) * channels
    count = (tile.x1 - tile.x0) * channels
    first = tile.y0 + rows.first
    outside = beyond(columns, tile)
    for plane in range(tile.plane0, tile.plane1):
        for position in range(first, tile.y1 + rows.first + rows.taps - 1):
            newest = (3 + (position - first) % 3) * pitch if row_steps.shape[0] else 0
            enter(image, border, scratch, newest, rows, columns, channels, tile, outside, plane, position)
            row = sum_down(scratch, newest, row_steps, position - first, width, pitch)
            y = position - rows.first - rows.taps + 1
            if y >= tile.y0:
                row = sum_across(scratch, row, column_steps, channels, width, pitch)
                at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
                scaled(scratch, row, factor, out, at, count)


@compiled
def sum_down(scratch: Any, newest: int, steps: Any, arrived: int, width: int, pitch: int) -> int:
    """Adds row number `arrived` (from 0): appends the window sum that it completes to every ring.

    The rings follow three spare rows. Ring s holds the sums over steps[s, 0] rows: the sum that starts at row i is in
    slot i modulo the ring's length, so ring 0 holds the rows themselves. Returns the place of the sum over the whole
    window, once there is one.
    """
    ring = 3 * pitch
    for s in range(steps.shape[0]):
        taps, odd = steps[s]
        slots = taps + 2
        start = arrived - 2 * taps - odd + 1
        if start < 0:
            return newest
        first, second = ring + start % slots * pitch, ring + (start + taps) % slots * pitch
        ring += slots * pitch
        at = ring + start % (2 * taps + odd + 2) * pitch if s < steps.shape[0] - 1 else 0
        if odd:
            triple_sum(scratch, first, second, newest, at, whole_blocks(width))
        else:
            pair_sum(scratch, first, second, at, whole_blocks(width))
    return 0


@compiled
def sum_across(scratch: Any, row: int, steps: Any, channels: int, width: int, pitch: int) -> int:
    """The window sums along one row, alternately in the two spare rows. Returns their place."""
    source, target, spare = row, pitch, 2 * pitch
    length = width
    for s in range(steps.shape[0]):
        taps, odd = steps[s]
        length -= (taps + odd) * channels
        if odd:
            third = row + 2 * taps * channels
            triple_sum(scratch, source, source + taps * channels, third, target, whole_blocks(length))
        else:
            pair_sum(scratch, source, source + taps * channels, target, whole_blocks(length))
        source, target, spare = target, spare, target
    return source
