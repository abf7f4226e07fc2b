"""Gaussians of 16-bit images along two neighbouring axes, one tile at a time, in pairs of 16-bit integers.
kernels/smoothing/words.py has the definition.

A word of the scratch array holds a pair: x - 2**15 and x >> 8 of a sample, or a and b of a sum down the rows. One
instruction multiplies the pairs of a vector of words by a pair of weights each, and adds the products.
"""

from __future__ import annotations

from operator import add
from typing import Any

import numpy as np

from kernels.runtime.compiled import cgutils, compiled, ir, types
from kernels.smoothing.cpu.floats import enter
from kernels.smoothing.cpu.rows import (
    Axis,
    Tile,
    address,
    beyond,
    convert,
    generated,
    whole_blocks,
)
from kernels.smoothing.weights import over_all_taps
from kernels.smoothing.words import MIDDLE, first_weights, second_weights

LANES = 32  # words of a step, four vectors of 256 bits, whose sums stay in registers: of two rows, or A and B


def pair(low: Any, high: Any) -> Any:
    return np.array((low & 0xFFFF) | (high << 16)).astype(np.uint32).view(np.int32)


def row_parameters(half: tuple[float, ...]) -> tuple[Any, Any, int, int, int]:
    """Pairs of weights at distance -radius … radius between two of zero; where groups of them begin and the last ends;
    where a group's sum starts, and V / 256 without the groups; the bits from V / 256 to v."""
    weights = first_weights(half)
    pairs = pair(weights.upper, weights.lower)
    pairs = np.concatenate(([0], pairs[:0:-1], pairs, [0])).astype(np.int32)
    start = weights.bias + MIDDLE * int(over_all_taps(weights.upper))
    groups = [0, pairs.size - 1]
    if not weights.finer:  # V fits 32 bits
        return pairs, np.array(groups), int(np.array(start).astype(np.uint32).view(np.int32)), 0, 3
    # Sums of a group that start at 2**31 fit 32 bits, for the two neighbouring results that are computed together.
    largest = (np.abs(weights.upper) * MIDDLE + np.abs(weights.lower) * 255).tolist()
    largest = [0, *largest[:0:-1], *largest, 0]
    sums = [0, 0]
    for tap in range(groups[-1]):
        added = largest[tap + 1], largest[tap]
        if max(map(add, sums, added)) > (1 << 31) - 512:
            groups.insert(-1, tap)
            sums = [0, 0]
        sums = list(map(add, sums, added))
    return pairs, np.array(groups), (start & 255) - (1 << 31), (start >> 8) - (len(groups) - 1 << 23), 3 + weights.finer


def column_parameters(half: tuple[float, ...]) -> tuple[Any, Any, int, int]:
    """Pairs of weights for A and for B at distance 0 … radius; where A and B start."""
    weights = second_weights(half)
    upper, lower = int(over_all_taps(weights.upper)), int(over_all_taps(weights.lower))
    of_upper, of_lower = pair(weights.upper, 0 * weights.upper), pair(weights.lower, weights.upper)
    return of_upper, of_lower, -1024 * upper, -1024 * lower - 512 * upper


def scratch_rows(rows: Axis) -> int:
    """The ring, two rows after the first axis, one after the second."""
    return rows.taps + 4


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
    row_sums: Any,
    column_sums: Any,
    middle: int,
) -> None:
    """image, border, out, rows, columns, channels, tile : as in `gaussian_tile`, of uint16 or int16
    scratch  : int32, `scratch_rows`, `pitch` samples each
    row_sums, column_sums : of `row_parameters` and `column_parameters`
    middle   : added to samples: 2**15 if they are signed
    """
    width = whole_blocks((tile.x1 - tile.x0 + columns.taps - 1) * channels)
    count = (tile.x1 - tile.x0) * channels
    ring = rows.taps + 1
    down, across = ring * pitch, (ring + 2) * pitch
    row_weights, groups, row_start, row_upper, row_shift = row_sums
    column_weights, column_lower, column_start, lower_start = column_sums
    radius = column_weights.size - 1
    seen = np.empty(ring, np.int64)
    first = tile.y0 + rows.first
    outside = beyond(columns, tile)
    for plane in range(tile.plane0, tile.plane1):
        entered = 0
        for y in range(tile.y0, tile.y1, 2):
            last = min(y + 2, tile.y1)
            while entered < last - tile.y0 + rows.taps - 1:
                at = entered % ring * pitch
                enter(image, border, scratch, at, rows, columns, channels, tile, outside, plane, first + entered)
                for i in range(at, at + width, LANES):
                    _split_samples(scratch, i, middle)
                entered += 1
            for k in range(ring):
                seen[k] = (y - tile.y0 + k) % ring * pitch
            for i in range(0, width, LANES):
                _sum_down(
                    scratch, i, down, pitch, seen, row_weights, groups, groups.size - 1, row_start, row_upper, row_shift
                )
            for row in range(last - y):
                centre = down + row * pitch + radius * channels
                for i in range(0, count, LANES):
                    _sum_across(
                        scratch, centre + i, across + i, channels, column_weights, column_lower, radius, column_start,
                        lower_start, middle,
                    )  # fmt: skip
                at = ((plane * rows.out_length + y + row) * columns.out_length + tile.x0) * channels
                convert(scratch, across, out, at, count)


class Vectors:
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
        pointer = self.builder.bitcast(self.pointer(array_type, array, at), ir.PointerType(value.type))
        self.builder.store(value, pointer, align=array_type.dtype.bitwidth // 8)

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
def _split_samples(_typing: Any, array: Any, i: Any, middle: Any) -> Any:
    """LANES samples x become pairs (x - 2**15, x >> 8)."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder, LANES)
        x = builder.add(vectors.load(signature.args[0], args[0], args[1]), vectors.every(args[2]))
        x = builder.and_(x, vectors.constant(0xFFFF))
        high = builder.and_(builder.shl(x, vectors.constant(8)), vectors.constant(0xFF0000))
        pairs = builder.or_(builder.xor(x, vectors.constant(MIDDLE)), high)
        vectors.store(pairs, signature.args[0], args[0], args[1])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int32), code


@generated
def _sum_down(
    _typing: Any,
    array: Any,
    i: Any,
    to: Any,
    pitch: Any,
    rows: Any,
    weights: Any,
    groups: Any,
    count: Any,
    start: Any,
    upper: Any,
    shift: Any,
) -> Any:
    """LANES sums V of words i … of the rows, as pairs (a, b) in the row `to`, and those of the next results in the
    row after it, so that each word is loaded once for both. The sum of a group of taps has 32 bits; all but 8 of them
    are then added up."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder, LANES)
        one = ir.Constant(args[1].type, 1)
        sums = [vectors.sum(args[8]) for _ in range(2)]
        uppers = [vectors.sum(args[9]) for _ in range(2)]

        def number(which: int, at: Any) -> Any:
            return vectors.number(signature.args[which], args[which], at)

        with cgutils.for_range(builder, args[7]) as group:
            begin, end = number(6, group.index), number(6, builder.add(group.index, one))
            with cgutils.for_range(builder, builder.sub(end, begin)) as loop:
                tap = builder.add(begin, loop.index)
                word = vectors.load(signature.args[0], args[0], builder.add(number(4, tap), args[1]))
                vectors.add(sums[0], vectors.products(word, number(5, builder.add(tap, one))))
                vectors.add(sums[1], vectors.products(word, number(5, tap)))
            for kept, whole in zip(sums, uppers, strict=True):
                found = builder.load(kept)
                vectors.add(whole, builder.lshr(found, vectors.constant(8)))
                rest = builder.and_(found, vectors.constant(255))
                builder.store(builder.or_(rest, vectors.constant(1 << 31)), kept)
        for row, whole in enumerate(uppers):
            v = builder.lshr(builder.load(whole), vectors.every(args[10]))
            low = builder.shl(builder.and_(v, vectors.constant(1023)), vectors.constant(16))
            pairs = builder.or_(low, builder.lshr(v, vectors.constant(10)))
            at = builder.add(args[2], args[1])
            vectors.store(pairs, signature.args[0], args[0], builder.add(at, args[3]) if row else at)
        return context.get_dummy_value()

    numbers = (types.intp,) * 3
    return types.void(array, *numbers, rows, weights, groups, types.intp, *(types.int32,) * 3), code


@generated
def _sum_across(
    _typing: Any,
    array: Any,
    centre: Any,
    to: Any,
    channels: Any,
    weights: Any,
    lower_weights: Any,
    radius: Any,
    start: Any,
    lower_start: Any,
    middle: Any,
) -> Any:
    """LANES results of words centre … along the row. Pairs at one distance have the same weights and are added
    first, which does not carry from one half to the other."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder, LANES)
        upper, lower = vectors.sum(args[7]), vectors.sum(args[8])

        def words(at: Any) -> Any:
            return vectors.load(signature.args[0], args[0], at)

        def add(value: Any, distance: Any) -> None:
            for kept, which in ((upper, 4), (lower, 5)):
                weight = vectors.number(signature.args[which], args[which], distance)
                vectors.add(kept, vectors.products(value, weight))

        add(words(args[1]), ir.Constant(args[1].type, 0))
        with cgutils.for_range(builder, args[6]) as loop:
            distance = builder.add(loop.index, ir.Constant(args[1].type, 1))
            away = builder.mul(distance, args[3])
            add(builder.add(words(builder.sub(args[1], away)), words(builder.add(args[1], away))), distance)
        real = ir.VectorType(ir.FloatType(), LANES)
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(real, [real] * 3), f"llvm.fma.v{LANES}f32")
        large, small = (builder.sitofp(builder.load(kept), real) for kept in (upper, lower))
        total = builder.call(fma, [small, ir.Constant(real, [2.0**-10] * LANES), large])
        # Floats of the size of 1.5 * 2**23 are one apart, so this rounds.
        shifted = ir.Constant(real, [1.5 * 2**23 + MIDDLE + 16] * LANES)
        rounded = builder.call(fma, [total, ir.Constant(real, [2.0**-9] * LANES), shifted])
        origin = int(np.float32(1.5 * 2**23).view(np.int32))
        result = builder.sub(builder.bitcast(rounded, vectors.words), vectors.constant(origin))
        vectors.store(builder.sub(result, vectors.every(args[9])), signature.args[0], args[0], args[2])
        return context.get_dummy_value()

    numbers = (types.intp,) * 3
    starts = (types.int32,) * 3
    return types.void(array, *numbers, weights, lower_weights, types.intp, *starts), code
