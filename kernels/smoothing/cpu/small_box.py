"""The exact mean over a small box of integers, one tile at a time. With so few samples one multiplication gives the
mean, and sums of bytes fit 16 bits, so a register holds twice as many.

Sums down a tile's rows are running sums; along each row they are built by doubling.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled, ir, types
from kernels.smoothing.cpu.floats import sum_across
from kernels.smoothing.cpu.integer_box import enter, move
from kernels.smoothing.cpu.rows import Axis, Tile, beyond, clipped, convert, fill, generated, load, store

SCRATCH_ROWS = 3  # the running sums, and two for those along the row
MOST_SAMPLES = 255  # of a box, except for bytes: see `float_division`
MOST_COLUMNS = 9  # of a box, except for bytes: prefix sums cost less for wider ones (AVX-512: from 9 to 15 on)
WHOLE_FLOATS = 1.5 * 2**23  # floats of this size are one apart


@compiled
def small_box_tile(
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
    column_steps: Any,
    division: Any,
    divided: bool,
) -> None:
    """Means over a box of rows.taps × columns.taps.

    image, border, out : as in `integer_box_tile`
    scratch            : the sums' type, uint16 for bytes, else int32: `SCRATCH_ROWS`, `pitch` samples each
    middle             : subtracted from every sample
    column_steps       : `doublings` of the columns' taps
    division           : of `byte_division` or `float_division`
    divided            : False leaves the sums
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
            sums = sum_across(scratch, 0, column_steps, channels, width * channels, pitch)
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            if divided:
                _means(scratch, sums, division, out, at, count)
            else:
                convert(scratch, sums, out, at, count)


@compiled
def _means(array: Any, sums: int, division: Any, out: Any, at: int, count: int) -> None:
    first, second, third = division[0], division[1], division[2]
    for i in range(count):
        store(out, at + i, clipped(out, _mean(load(array, sums + i), first, second, third)))


@generated
def _mean(_typing: Any, total: Any, first: Any, second: Any, third: Any) -> Any:
    """The mean by `byte_division` of a uint16, or by `float_division` of an int32."""

    def of_bytes(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        total, half, multiplier, shift = args
        wide = ir.IntType(32)
        # The high half of a product is one instruction.
        product = builder.mul(builder.zext(builder.add(total, half), wide), builder.zext(multiplier, wide))
        return builder.lshr(builder.trunc(builder.lshr(product, wide(16)), total.type), shift)

    def of_floats(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        total, bias, inverse, whole = args
        product = builder.fma(builder.fadd(builder.sitofp(total, bias.type), bias), inverse, bias.type(WHOLE_FLOATS))
        return builder.sub(builder.bitcast(product, total.type), builder.bitcast(whole, total.type))

    return total(total, first, second, third), of_bytes if total == types.uint16 else of_floats


def byte_division(divisor: int) -> Any:
    """uint16 [3] of half, multiplier and shift, so that for every sum of `divisor` bytes
    floor(sum / divisor + 1/2) is (sum + half) * multiplier >> 16 + shift; None if 16 bits do not hold all of them.
    """
    half = divisor // 2
    most = 255 * divisor + half
    for shift in range(16 if most < 1 << 16 else 0):
        one = 1 << 16 + shift
        multiplier = -(-one // divisor)
        # Each quotient is at least 1 / divisor below the next integer; the multiplier's excess must add up to less.
        if multiplier < 1 << 16 and (multiplier * divisor - one) * most < one:
            return np.array((half, multiplier, shift), np.uint16)
    return None


def float_division(divisor: int, restored: int) -> Any:
    """float32 [3] of bias, inverse and whole, so that for every sum of `divisor` samples of 16 bits (at most 255),
    each relative to the middle of their range, floor(sum / divisor + 1/2) + restored is the number of floats by which
    (sum + bias) * inverse + WHOLE_FLOATS, rounded once, exceeds `whole`.

    Sums are less than 2**23, so adding a half is exact. It moves ties of an even divisor up and nothing else across;
    then every quotient is at least 1 / (2 divisor) from a tie, and the inverse's rounding, 2**-24 of at most 2**15,
    moves it by at most 2**-9.
    """
    return np.array((0.5 if divisor % 2 == 0 else 0, 1 / divisor, WHOLE_FLOATS - restored), np.float32)
