"""Gaussians of 16-bit images along two neighbouring axes, one tile at a time, in pairs of 16-bit integers.
kernels/smoothing/words.py has the definition.

A word of the scratch array holds a pair: x - 2**15 and x >> 8 of a sample, or of the upper 16 bits of a sum down the
rows. One instruction multiplies the pairs of a vector of words by a pair of weights each, and adds the products. The
low bits of sums down the rows are apart, 16 bits each, and so are their weighted sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.compiled import cgutils, compiled, ir, types
from kernels.smoothing.cpu.rows import (
    Axis,
    Tile,
    address,
    beyond,
    copy_pixel,
    generated,
    inside,
    row_start,
    sample,
    whole_blocks,
)
from kernels.smoothing.weights import over_all_taps
from kernels.smoothing.words import MIDDLE, Integers, WordWeights, first_weights, second_weights

LANES = 32  # words of a step, four vectors of 256 bits, whose sums stay in registers


def pair(low: Any, high: Any) -> Any:
    return np.array((low & 0xFFFF) | (high << 16)).astype(np.uint32).view(np.int32)


def row_parameters(half: tuple[float, ...]) -> tuple[Any, Any, int, int, int]:
    """Pairs of weights at distance -radius … radius between two of zero; where groups of them begin and the last ends;
    where a group's sum starts, and 1 / 256 of the whole without the groups; the bits from that to 2 v."""
    weights = first_weights(half)
    pairs, largest = pair(weights.upper, weights.lower), _largest(weights)
    # Of the two neighbouring results that are computed together.
    largest = np.maximum([*largest[::-1], *largest[1:], 0], [0, *largest[::-1], *largest[1:]])
    pairs = np.concatenate(([0], pairs[:0:-1], pairs, [0])).astype(np.int32)
    return pairs, *_groups(weights, largest, 0 * largest), weights.finer


def column_parameters(half: tuple[float, ...]) -> tuple[Any, Any, Any, int, int, int]:
    """Pairs of weights at distance 0 … radius, and weights of low bits; where groups of distances from 1 on begin, of
    which the first has the centre too; the rest as of `row_parameters`."""
    weights = second_weights(half)
    lows = 127 * weights.top
    largest = _largest(weights) + 2 * lows
    largest[1:], lows[1:] = 2 * largest[1:], 2 * lows[1:]
    groups, *starts = _groups(weights, largest, lows)
    groups[0] = 1
    return pair(weights.upper, weights.lower), weights.top.astype(np.uint16), groups, *starts, 8 + weights.finer


def _largest(weights: WordWeights) -> Integers:
    """The largest that pairs can add, by distance."""
    return np.asarray(np.abs(weights.upper) * MIDDLE + np.abs(weights.lower) * 255)


def _groups(weights: WordWeights, largest: Integers, lows: Integers) -> tuple[Any, int, int]:
    """Where groups of products begin, and the last ends, whose sums fit 32 bits, and those of low bits 16; where a
    group's sum starts, and 1 / 256 of the whole without the groups."""
    start = weights.bias + MIDDLE * int(over_all_taps(weights.upper))  # since pairs hold x - 2**15
    groups, total, low = [0, len(largest)], 0, 0
    if not weights.finer:  # the whole sum fits 32 bits
        return np.array(groups), int(np.array(start).astype(np.uint32).view(np.int32)), 0
    for place, (size, low_size) in enumerate(zip(largest.tolist(), lows.tolist(), strict=True)):
        total, low = total + size, low + low_size
        if total > (1 << 31) - 512 or low >= 1 << 16:  # a group's sum starts at 2**31
            groups.insert(-1, place)
            total, low = size, low_size
    return np.array(groups), (start & 255) - (1 << 31), (start >> 8) - (len(groups) - 1 << 23)


def scratch_rows(rows: Axis) -> int:
    """The ring, two rows after the first axis, and their low bits."""
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
    down, low = ring * pitch, 2 * (ring + 2) * pitch
    lows, samples, results = scratch.view(np.uint16), image.view(np.uint16), out.view(np.uint16)
    edge = border.view(np.uint16)
    few = np.empty(LANES, np.uint16)
    row_weights, groups, row_start, row_upper, row_shift = row_sums
    column_weights, low_weights, low_groups, column_start, column_upper, column_shift = column_sums
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
                _enter(
                    samples, edge, scratch, at, rows, columns, channels, tile, outside, plane, first + entered, middle
                )
                entered += 1
            for k in range(ring):
                seen[k] = (y - tile.y0 + k) % ring * pitch
            for i in range(0, width, LANES):
                _sum_down(
                    scratch, lows, i, down, low, pitch, seen, row_weights, groups, groups.size - 1, row_start,
                    row_upper, row_shift,
                )  # fmt: skip
            for row in range(last - y):
                centre, low_centre = down + row * pitch + radius * channels, low + row * pitch + radius * channels
                at = ((plane * rows.out_length + y + row) * columns.out_length + tile.x0) * channels
                for i in range(0, count, LANES):
                    i = min(i, max(count - LANES, 0))
                    to, target = (results, at + i) if count >= LANES else (few, 0)
                    _sum_across(
                        scratch, lows, centre + i, low_centre + i, to, target, channels, column_weights, low_weights,
                        low_groups, low_groups.size - 1, column_start, column_upper, column_shift, middle,
                    )  # fmt: skip
                if count < LANES:
                    results[at : at + count] = few[:count]


@compiled
def _enter(
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
    middle: int,
) -> None:
    """Writes pairs of the row at `position`, as `enter` of floats.py writes samples."""
    row = row_start(plane, position, rows, columns, channels)
    begin, end = inside(columns, tile)
    count, start = (end - begin) * channels, at + begin * channels
    source, source_at = (border, 0) if row < 0 else (image, row + (tile.x0 + columns.first + begin) * channels)
    for i in range(0, count - LANES + 1, LANES):
        _split_samples(source, source_at + i, scratch, start + i, middle, columns.length * channels)
    for i in range(count // LANES * LANES, count):
        scratch[start + i] = _pair(source[source_at + i], middle)
    for column, twin_column, twin in outside:
        if twin >= 0 and row >= 0:
            copy_pixel(scratch, at + twin * channels, at + column * channels, channels)
            continue
        for c in range(channels):
            scratch[at + column * channels + c] = _pair(sample(image, border, row, twin_column, channels, c), middle)


@compiled
def _pair(x: int, middle: int) -> int:
    x ^= middle
    return (x ^ MIDDLE) | (x >> 8) << 16


class Vectors:
    """Generates code for vectors of words, of a scratch array or of the numbers of each tap."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self.context, self.builder = context, builder
        self.words, self.halves = (ir.VectorType(ir.IntType(bits), lanes) for bits in (32, 16))

    def number(self, array_type: Any, array: Any, at: Any) -> Any:
        return self.builder.load(address(self.context, self.builder, array_type, array, at))

    def pointer(self, array_type: Any, array: Any, at: Any) -> Any:
        return self.builder.bitcast(
            address(self.context, self.builder, array_type, array, at), ir.PointerType(self.words)
        )

    def load(self, array_type: Any, array: Any, at: Any) -> Any:
        return self.builder.load(self.pointer(array_type, array, at), align=4)

    def load_halves(self, array_type: Any, array: Any, at: Any) -> Any:
        pointer = address(self.context, self.builder, array_type, array, at)
        return self.builder.load(self.builder.bitcast(pointer, ir.PointerType(self.halves)), align=2)

    def store(self, value: Any, array_type: Any, array: Any, at: Any) -> None:
        pointer = self.builder.bitcast(self.pointer(array_type, array, at), ir.PointerType(value.type))
        self.builder.store(value, pointer, align=array_type.dtype.bitwidth // 8)

    def prefetch(self, array_type: Any, array: Any, at: Any, to_write: int) -> None:
        """The address may lie outside of the array."""
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), *3 * [number]])
        data = self.context.make_array(array_type)(self.context, self.builder, array).data
        pointer = self.builder.bitcast(self.builder.gep(data, [at]), kind.args[0])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        self.builder.call(function, [pointer, number(to_write), number(2), number(1)])  # to L2, of data

    def every(self, number: Any) -> Any:
        """A vector of one number, of 32 or 16 bits."""
        nothing = ir.Constant(ir.VectorType(number.type, self.words.count), ir.Undefined)
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

    def end_group(self, kept: Any, whole: Any) -> None:
        """Adds all but 8 bits of a group's sum to that of all groups; the next one starts at 2**31 and the rest."""
        found = self.builder.load(kept)
        self.add(whole, self.builder.lshr(found, self.constant(8)))
        rest = self.builder.and_(found, self.constant(255))
        self.builder.store(self.builder.or_(rest, self.constant(1 << 31)), kept)

    def pairs(self, words: Any, first: int) -> Any:
        """Pairs (x - 2**15, x >> 8) of the two bytes x from byte `first` of each word on."""
        number = 4 * self.words.count
        every = ir.VectorType(ir.IntType(8), number)
        order = [
            at for word in range(0, number, 4) for at in (word + first, word + first + 1, word + first + 1, number)
        ]
        shuffled = self.builder.shuffle_vector(
            self.builder.bitcast(words, every),
            ir.Constant(every, [0] * number),
            ir.Constant(ir.VectorType(ir.IntType(32), number), order),
        )
        return self.builder.xor(self.builder.bitcast(shuffled, self.words), self.constant(MIDDLE))


@generated
def _split_samples(_typing: Any, samples: Any, i: Any, array: Any, to: Any, middle: Any, next_row: Any) -> Any:
    """LANES samples x become pairs (x - 2**15, x >> 8). The samples `next_row` behind them are fetched."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder, LANES)
        x = vectors.load_halves(signature.args[0], args[0], args[1])
        x = builder.xor(builder.zext(x, vectors.words), vectors.every(args[4]))
        vectors.store(vectors.pairs(x, 0), signature.args[2], args[2], args[3])
        vectors.prefetch(signature.args[0], args[0], builder.add(args[1], args[5]), to_write=0)
        return context.get_dummy_value()

    return types.void(samples, types.intp, array, types.intp, types.int32, types.intp), code


@generated
def _sum_down(
    _typing: Any,
    array: Any,
    lows: Any,
    i: Any,
    to: Any,
    low_to: Any,
    pitch: Any,
    rows: Any,
    weights: Any,
    groups: Any,
    count: Any,
    start: Any,
    upper: Any,
    shift: Any,
) -> Any:
    """LANES sums v of words i … of the rows: pairs in the row `to`, low bits in the row `low_to`. Those of the next
    results go to the rows after these, so that each word is loaded once for both. The sum of a group of taps has 32
    bits; all but 8 of them are then added up."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder, LANES)
        one = ir.Constant(args[2].type, 1)
        sums = [vectors.sum(args[10]) for _ in range(2)]
        uppers = [vectors.sum(args[11]) for _ in range(2)]

        def number(which: int, at: Any) -> Any:
            return vectors.number(signature.args[which], args[which], at)

        with cgutils.for_range(builder, args[9]) as group:
            begin, end = number(8, group.index), number(8, builder.add(group.index, one))
            with cgutils.for_range(builder, builder.sub(end, begin)) as loop:
                tap = builder.add(begin, loop.index)
                word = vectors.load(signature.args[0], args[0], builder.add(number(6, tap), args[2]))
                vectors.add(sums[0], vectors.products(word, number(7, builder.add(tap, one))))
                vectors.add(sums[1], vectors.products(word, number(7, tap)))
            for kept, whole in zip(sums, uppers, strict=True):
                vectors.end_group(kept, whole)
        for row, whole in enumerate(uppers):
            double = builder.lshr(builder.load(whole), vectors.every(args[12]))
            low = builder.trunc(builder.and_(double, vectors.constant(255)), vectors.halves)
            low = builder.lshr(low, ir.Constant(vectors.halves, [1] * LANES))
            for which, value, begin in ((0, vectors.pairs(double, 1), args[3]), (1, low, args[4])):
                at = builder.add(begin, args[2])
                vectors.store(value, signature.args[which], args[which], builder.add(at, args[5]) if row else at)
        return context.get_dummy_value()

    numbers = (types.intp,) * 4
    return types.void(array, lows, *numbers, rows, weights, groups, types.intp, *(types.int32,) * 3), code


@generated
def _sum_across(
    _typing: Any,
    array: Any,
    lows: Any,
    centre: Any,
    low_centre: Any,
    results: Any,
    to: Any,
    channels: Any,
    weights: Any,
    low_weights: Any,
    groups: Any,
    count: Any,
    start: Any,
    upper: Any,
    shift: Any,
    middle: Any,
) -> Any:
    """LANES results of words centre … along the row, by groups as in `_sum_down`. Low bits at one distance have the
    same weight and are added first."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder, LANES)
        one = ir.Constant(args[2].type, 1)
        total, whole = vectors.sum(args[11]), vectors.sum(args[12])

        def number(which: int, at: Any) -> Any:
            return vectors.number(signature.args[which], args[which], at)

        def low(at: Any) -> Any:
            return vectors.load_halves(signature.args[1], args[1], at)

        def add_words(at: Any, distance: Any) -> None:
            vectors.add(total, vectors.products(vectors.load(signature.args[0], args[0], at), number(7, distance)))

        def weighted(value: Any, distance: Any) -> Any:
            return builder.mul(value, vectors.every(number(8, distance)))

        centre = ir.Constant(args[2].type, 0)
        add_words(args[2], centre)
        kept = cgutils.alloca_once(builder, vectors.halves)
        builder.store(weighted(low(args[3]), centre), kept)
        with cgutils.for_range(builder, args[10]) as group:
            begin, end = number(9, group.index), number(9, builder.add(group.index, one))
            with cgutils.for_range(builder, builder.sub(end, begin)) as loop:
                distance = builder.add(begin, loop.index)
                away = builder.mul(distance, args[6])
                for move in (builder.sub, builder.add):
                    add_words(move(args[2], away), distance)
                both = builder.add(*(low(move(args[3], away)) for move in (builder.sub, builder.add)))
                builder.store(builder.add(builder.load(kept), weighted(both, distance)), kept)
            vectors.add(total, builder.shl(builder.zext(builder.load(kept), vectors.words), vectors.constant(1)))
            builder.store(ir.Constant(vectors.halves, [0] * LANES), kept)
            vectors.end_group(total, whole)
        result = builder.xor(builder.lshr(builder.load(whole), vectors.every(args[13])), vectors.every(args[14]))
        vectors.store(builder.trunc(result, vectors.halves), signature.args[4], args[4], args[5])
        behind = builder.add(args[5], ir.Constant(args[5].type, 2 * LANES))
        vectors.prefetch(signature.args[4], args[4], behind, to_write=1)
        return context.get_dummy_value()

    numbers = (types.intp, types.intp)
    parameters = (weights, low_weights, groups, types.intp, *(types.int32,) * 4)
    return types.void(array, lows, *numbers, results, *numbers, *parameters), code
