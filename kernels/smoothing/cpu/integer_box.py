"""The exact mean over a box of integers, one tile at a time.

Down the rows of a tile, a running sum over the window's rows takes one addition and one subtraction per sample for any
window. Along each row, differences of a prefix sum are the window's sums, which are divided by the number of samples
and rounded. Rows are in the scratch array, so only the result has the image's size.

Samples are relative to the middle of their type's range, so the sums of every 2-D window fit an int32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled
from kernels.smoothing.cpu.rows import (
    Axis,
    Tile,
    add,
    as_float,
    beyond,
    clipped,
    copy_pixel,
    fill,
    inside,
    load,
    narrowed,
    nearest_product,
    pair_sum,
    row_start,
    sample,
    slide,
    store,
)
from kernels.smoothing.cpu.scan import scan, scan_4, scan_8

SCRATCH_ROWS = 2  # the running sums and their prefix sums


@compiled
def integer_box_tile(
    image: Any,
    border: Any,
    out: Any,
    scratch: Any,
    pitch: int,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    middle: int,
    restored: int,
    divisor: int,
    inverse: Any,
) -> None:
    """Sums over a box of rows.taps × columns.taps, divided by `divisor` and rounded; 0 leaves the sums.

    image    : integers, flat [planes, rows.length, columns.length, channels]
    border   : one row of the value beyond the edge, in the image's dtype
    out      : the same layout with the axes' out_length
    scratch  : int32 or int64, the sums' type: `SCRATCH_ROWS`, `pitch` samples each
    middle   : subtracted from every sample
    restored : added to the mean
    inverse  : 1 / divisor, in float32 for int32 sums, float64 for int64
    """
    width = tile.x1 - tile.x0 + columns.taps - 1
    count = (tile.x1 - tile.x0) * channels
    outside = beyond(columns, tile)
    for plane in range(tile.plane0, tile.plane1):
        fill(scratch, 0, width * channels, -middle * rows.taps)
        for j in range(rows.taps):
            enter(image, border, scratch, rows, columns, channels, tile, outside, plane, tile.y0 + rows.first + j)
        for y in range(tile.y0, tile.y1):
            if y > tile.y0:
                move(image, border, scratch, rows, columns, channels, tile, outside, plane, y + rows.first - 1)
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            _prefix_sums(scratch, 0, pitch, width, channels)
            if divisor == 0:
                _differences(scratch, pitch, columns.taps * channels, out, at, count)
            else:
                _means(scratch, pitch, columns.taps * channels, out, at, count, divisor, inverse, restored)


@compiled
def enter(
    image: Any,
    border: Any,
    total: Any,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    outside: Any,
    plane: int,
    position: int,
) -> None:
    """total += the row at `position`, for all columns that the tile sees."""
    row = row_start(plane, position, rows, columns, channels)
    begin, end = inside(columns, tile)
    start = tile.x0 + columns.first
    count = (end - begin) * channels
    if row < 0:
        add(border, 0, total, begin * channels, count)
    else:
        add(image, row + (start + begin) * channels, total, begin * channels, count)
    for column, source, _ in outside:
        for c in range(channels):
            total[column * channels + c] += sample(image, border, row, source, channels, c)


@compiled
def move(
    image: Any,
    border: Any,
    total: Any,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    outside: Any,
    plane: int,
    position: int,
) -> None:
    """Removes the row at `position` from the window and adds the row `rows.taps` farther on."""
    leaving = row_start(plane, position, rows, columns, channels)
    entering = row_start(plane, position + rows.taps, rows, columns, channels)
    begin, end = inside(columns, tile)
    start = tile.x0 + columns.first
    offset = (start + begin) * channels
    out_row, out_at = (border, 0) if leaving < 0 else (image, leaving + offset)
    in_row, in_at = (border, 0) if entering < 0 else (image, entering + offset)
    slide(in_row, in_at, out_row, out_at, total, begin * channels, (end - begin) * channels)
    for column, source, twin in outside:
        if twin >= 0:
            copy_pixel(total, twin * channels, column * channels, channels)
            continue
        for c in range(channels):
            change = np.int64(sample(image, border, entering, source, channels, c))
            change -= np.int64(sample(image, border, leaving, source, channels, c))
            total[column * channels + c] += change


@compiled
def _prefix_sums(array: Any, source: int, at: int, pixels: int, channels: int) -> None:
    """array[at + k * channels + c] = the sum of channel c of the first k pixels; sums may wrap, since only differences
    are used."""
    if channels == 1:
        scan(array, source, at, pixels)
    elif channels <= 4:
        scan_4(array, source, at, pixels, channels)
    elif channels <= 8:
        scan_8(array, source, at, pixels, channels)
    else:
        fill(array, at, channels, 0)
        for i in range(0, pixels * channels, channels):
            pair_sum(array, at + i, source + i, at + i + channels, channels)


@compiled
def _differences(array: Any, prefix: int, reach: int, out: Any, at: int, count: int) -> None:
    for i in range(count):
        store(out, at + i, load(array, prefix + reach + i) - load(array, prefix + i))


@compiled
def _means(
    array: Any, prefix: int, reach: int, out: Any, at: int, count: int, divisor: int, inverse: Any, restored: int
) -> None:
    """out = floor(sum / divisor + 1/2) + restored.

    The floating-point quotient is off by at most one: |sum / divisor| <= 2**15, and two roundings of relative 2**-24
    move it by less than 2**-7 before it is rounded. The exact remainder then corrects it.
    """
    upper = narrowed(array, (divisor + 1) // 2)  # a remainder of at least half the divisor rounds up,
    lower = narrowed(array, -(divisor // 2))  # and one below minus half of it rounds down
    restored, divisor = narrowed(array, restored), narrowed(array, divisor)
    for i in range(count):
        total = narrowed(array, load(array, prefix + reach + i) - load(array, prefix + i))
        quotient = nearest_product(as_float(total), inverse)
        remainder = narrowed(array, total - quotient * divisor)
        mean = narrowed(array, quotient + restored + (remainder >= upper) - (remainder < lower))
        store(out, at + i, clipped(out, mean))
