"""Gaussians of 16-bit images along two neighbouring axes, one tile at a time, in pairs of 16-bit integers.
kernels/smoothing/words.py has the definition.

A word of the scratch array holds a pair: x - 2**15 and x >> 8 of a sample, or a and b of a sum down the rows. One
instruction multiplies the pairs of a vector of words by a pair of weights each, and adds the products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.runtime.compiled import compiled
from kernels.smoothing.cpu.floats import enter
from kernels.smoothing.cpu.rows import (
    Axis,
    Tile,
    address,
    as_float,
    beyond,
    floats_apart,
    fma,
    generated,
    load,
    reload,
    store,
    whole_blocks,
)
from kernels.smoothing.words import MIDDLE, first_weights, over_all_taps, second_weights

LANES = 32  # words of a step, whose sums stay in registers: four vectors of 256 bits down the rows, two and two across
MAGIC = np.float32(1.5 * 2**23)  # floats of this size are one apart


def _pair(low: Any, high: Any) -> Any:
    return np.array((low & 0xFFFF) | (high << 16)).astype(np.uint32).view(np.int32)


def row_parameters(half: tuple[float, ...]) -> tuple[Any, int]:
    """Pairs of weights at distance -radius … radius; where the sums start."""
    weights = first_weights(half)
    pairs = _pair(weights.upper, weights.lower)
    start = weights.bias + MIDDLE * over_all_taps(weights.upper)
    return np.concatenate((pairs[:0:-1], pairs)), int(np.array(start).astype(np.uint32).view(np.int32))


def column_parameters(half: tuple[float, ...]) -> tuple[Any, Any, int, int]:
    """Pairs of weights for A and for B at distance 0 … radius; where A and B start."""
    weights = second_weights(half)
    upper, lower = over_all_taps(weights.upper), over_all_taps(weights.lower)
    of_upper, of_lower = _pair(weights.upper, 0 * weights.upper), _pair(2 * weights.lower, weights.upper)
    return of_upper, of_lower, -512 * upper, -1024 * (lower + upper)


def scratch_rows(rows: Axis) -> int:
    """The ring, one row after the first axis, two after the second."""
    return rows.taps + 3


@compiled
def words_tile(
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
    row_start: int,
    column_weights: Any,
    column_lower: Any,
    column_start: int,
    lower_start: int,
    middle: int,
) -> None:
    """image, border, out, rows, columns, channels, tile : as in `gaussian_tile`, of uint16 or int16
    scratch  : int32, `scratch_rows`, `pitch` samples each
    row_*    : of `row_parameters`; column_* : of `column_parameters`
    middle   : added to samples: 2**15 if they are signed
    """
    width = whole_blocks((tile.x1 - tile.x0 + columns.taps - 1) * channels)
    count = (tile.x1 - tile.x0) * channels
    down, across, lower = rows.taps * pitch, (rows.taps + 1) * pitch, (rows.taps + 2) * pitch
    seen = np.empty(rows.taps, np.int64)
    radius = column_weights.size - 1
    below, above = np.empty(radius + 1, np.int64), np.empty(radius + 1, np.int64)
    for k in range(radius + 1):
        below[k], above[k] = down + (radius - k) * channels, down + (radius + k) * channels
    first = tile.y0 + rows.first
    outside = beyond(columns, tile)
    for plane in range(tile.plane0, tile.plane1):
        for j in range(rows.taps - 1):
            enter(image, border, scratch, j * pitch, rows, columns, channels, tile, outside, plane, first + j)
            _split_samples(scratch, middle, j * pitch, width)
        for y in range(tile.y0, tile.y1):
            oldest = (y - tile.y0) % rows.taps
            newest = (oldest + rows.taps - 1) % rows.taps * pitch
            position = y + rows.first + rows.taps - 1
            enter(image, border, scratch, newest, rows, columns, channels, tile, outside, plane, position)
            _split_samples(scratch, middle, newest, width)
            for k in range(rows.taps):
                seen[k] = (oldest + k) % rows.taps * pitch
            for i in range(0, width, LANES):
                _sum_down(scratch, i, down, seen, row_weights, rows.taps, row_start)
            for i in range(0, count, LANES // 2):
                _sum_across(
                    scratch,
                    i,
                    across,
                    lower,
                    below,
                    above,
                    column_weights,
                    column_lower,
                    radius,
                    column_start,
                    lower_start,
                )
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            _finish(scratch, across, lower, MAGIC + np.float32(middle), out, at, count)


@compiled
def _split_samples(array: Any, middle: int, at: int, count: int) -> None:
    """x becomes (x - 2**15, x >> 8)."""
    for i in range(count):
        x = (reload(array, at + i) + middle) & 0xFFFF
        store(array, at + i, (x ^ MIDDLE) | (x >> 8 << 16))


@compiled
def _finish(array: Any, upper: int, lower: int, down: Any, out: Any, at: int, count: int) -> None:
    """The rounded result of A and B, less down - 1.5 * 2**23."""
    for i in range(count):
        total = fma(as_float(load(array, lower + i)), np.float32(2.0**-11), as_float(load(array, upper + i)))
        store(out, at + i, floats_apart(fma(total, np.float32(2.0**-8), MAGIC + np.float32(MIDDLE + 32)), down))


class _Vectors:
    """Generates code for vectors of words, of a scratch array or of the numbers of each tap."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self.context, self.builder = context, builder
        self.words = ir.VectorType(ir.IntType(32), lanes)

    def number(self, array_type: Any, array: Any, at: Any) -> Any:
        return self.builder.load(address(self.context, self.builder, array_type, array, at))

    def pointer(self, array_type: Any, array: Any, at: Any) -> Any:
        return self.builder.bitcast(
            address(self.context, self.builder, array_type, array, at), ir.PointerType(self.words)
        )

    def load(self, array_type: Any, array: Any, at: Any) -> Any:
        return self.builder.load(self.pointer(array_type, array, at), align=4)

    def store(self, value: Any, array_type: Any, array: Any, at: Any) -> None:
        self.builder.store(value, self.pointer(array_type, array, at), align=4)

    def every(self, number: Any) -> Any:
        """A vector of one number."""
        nothing = ir.Constant(self.words, ir.Undefined)
        one = self.builder.insert_element(nothing, number, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(self.words, [0] * self.words.count))

    def constant(self, number: int) -> Any:
        return ir.Constant(self.words, [number] * self.words.count)

    def products(self, value: Any, weight: Any) -> Any:
        """Of both halves of each word by those of one weight, added."""
        builder, halves = self.builder, 2 * self.words.count
        wide = ir.VectorType(ir.IntType(32), halves)
        factors = [builder.bitcast(each, ir.VectorType(ir.IntType(16), halves)) for each in (value, self.every(weight))]
        both = builder.mul(*(builder.sext(each, wide) for each in factors))
        low, high = (ir.Constant(self.words, list(range(start, halves, 2))) for start in (0, 1))
        nothing = ir.Constant(wide, ir.Undefined)
        return builder.add(builder.shuffle_vector(both, nothing, low), builder.shuffle_vector(both, nothing, high))

    def sum(self, start: Any) -> Any:
        """A sum that starts at a number and stays in registers."""
        kept = cgutils.alloca_once(self.builder, self.words)
        self.builder.store(self.every(start), kept)
        return kept

    def add(self, kept: Any, value: Any) -> None:
        self.builder.store(self.builder.add(self.builder.load(kept), value), kept)


@generated
def _sum_down(_typing: Any, array: Any, i: Any, to: Any, rows: Any, weights: Any, taps: Any, start: Any) -> Any:
    """LANES sums V of words i … of the rows, as pairs (a, b) in the row `to`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type, rows_type, weights_type = signature.args[0], signature.args[3], signature.args[4]
        vectors = _Vectors(context, builder, LANES)
        kept = vectors.sum(args[6])
        with cgutils.for_range(builder, args[5]) as loop:
            at = builder.add(vectors.number(rows_type, args[3], loop.index), args[1])
            weight = vectors.number(weights_type, args[4], loop.index)
            vectors.add(kept, vectors.products(vectors.load(array_type, args[0], at), weight))
        v = builder.lshr(builder.load(kept), vectors.constant(11))
        low = builder.shl(builder.and_(v, vectors.constant(2047)), vectors.constant(16))
        pairs = builder.or_(low, builder.lshr(v, vectors.constant(11)))
        vectors.store(pairs, array_type, args[0], builder.add(args[2], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, rows, weights, types.intp, types.int32), code


@generated
def _sum_across(
    _typing: Any,
    array: Any,
    i: Any,
    to: Any,
    lower_to: Any,
    below: Any,
    above: Any,
    weights: Any,
    lower_weights: Any,
    radius: Any,
    start: Any,
    lower_start: Any,
) -> Any:
    """LANES / 2 sums A and B of words i … along the row. Pairs at one distance have the same weights and are added
    first, which does not carry from one half to the other."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = _Vectors(context, builder, LANES // 2)

        def number(which: int, k: Any) -> Any:
            return vectors.number(signature.args[which], args[which], k)

        def words(which: int, k: Any) -> Any:
            return vectors.load(signature.args[0], args[0], builder.add(number(which, k), args[1]))

        def add(value: Any, k: Any) -> None:
            vectors.add(upper, vectors.products(value, number(6, k)))
            vectors.add(lower, vectors.products(value, number(7, k)))

        upper, lower = vectors.sum(args[9]), vectors.sum(args[10])
        add(words(4, ir.Constant(args[1].type, 0)), ir.Constant(args[1].type, 0))
        with cgutils.for_range(builder, args[8]) as loop:
            k = builder.add(loop.index, ir.Constant(args[1].type, 1))
            add(builder.add(words(4, k), words(5, k)), k)
        for kept, target in ((upper, args[2]), (lower, args[3])):
            vectors.store(builder.load(kept), signature.args[0], args[0], builder.add(target, args[1]))
        return context.get_dummy_value()

    numbers = (types.intp,) * 3
    return types.void(array, *numbers, below, above, weights, lower_weights, types.intp, types.int32, types.int32), code
