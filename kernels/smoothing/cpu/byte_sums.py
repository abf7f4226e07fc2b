"""Gaussians of bytes along one axis or two neighbouring ones, one tile at a time. kernels/smoothing/byte_sums.py has
the definition.

Sums along the first axis are float32, which holds them exactly. A word of the scratch array then has v as a pair of
16-bit integers (h, l): one instruction multiplies the pairs of a vector of words by a pair of weights (W, a) each, and
adds the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.runtime.compiled import cgutils, compiled, ir, types
from kernels.smoothing.byte_sums import byte_weights
from kernels.smoothing.cpu.floats import enter
from kernels.smoothing.cpu.rows import Axis, Tile, beyond, convert, generated
from kernels.smoothing.cpu.words import LANES, Vectors, pair

HALF = 1 << 15  # of a step of the result, in units of the sums


def row_parameters(half: tuple[float, ...]) -> Any:
    """Weights in units of 2**-16, whose sums of bytes float32 holds exactly."""
    return byte_weights(half).whole.astype(np.float32)


def column_parameters(half: tuple[float, ...]) -> tuple[Any, int]:
    """Pairs of weights of which the first two add up to those of the centre, which may have more than 15 bits; the
    others are at distance 1 … radius. Where the sum starts."""
    weights = byte_weights(half)
    parts = [
        np.concatenate(([each[0] // 2, each[0] - each[0] // 2], each[1:])) for each in (weights.whole, weights.upper)
    ]
    return pair(*parts), weights.bias


def scratch_rows(rows: Axis) -> int:
    """The ring, and one row after each axis."""
    return rows.taps + 2


@compiled
def bytes_tile(
    image: Any, border: Any, out: Any, scratch: Any, pitch: int, rows: Axis, columns: Axis, channels: int, tile: Tile,
    first_weights: Any, second_weights: Any, start: int,
) -> None:  # fmt: skip
    """image, border, out, rows, columns, channels, tile : as in `gaussian_tile`, of uint8
    scratch        : float32, `scratch_rows`, `pitch` samples each
    first_weights  : of `row_parameters`, along the only axis, or down the rows
    second_weights, start : of `column_parameters`; empty and 0 if only one axis is smoothed
    """
    both = second_weights.size > 0
    width = (tile.x1 - tile.x0 + columns.taps - 1) * channels
    count = (tile.x1 - tile.x0) * channels
    down, across = rows.taps * pitch, (rows.taps + 1) * pitch
    radius, reach = first_weights.size - 1, (columns.taps - 1) // 2
    words, found = scratch.view(np.int32), scratch.view(np.uint8)
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
            for k in range(radius + 1):
                if rows.taps > 1:
                    below[k] = (oldest + radius - k) % rows.taps * pitch
                    above[k] = (oldest + radius + k) % rows.taps * pitch
                else:
                    below[k] = (radius - k) * channels
                    above[k] = (radius + k) * channels
            if both:
                for i in range(0, width, LANES):
                    _sum_to_pairs(scratch, i, below, above, first_weights, radius, words, down + i)
                for i in range(0, count, LANES):
                    centre = down + reach * channels + i
                    _sum_pairs(words, centre, channels, second_weights, reach, start, found, 4 * across + i)
            else:
                for i in range(0, count, LANES):
                    _sum_to_bytes(scratch, i, below, above, first_weights, radius, found, 4 * across + i)
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            convert(found, 4 * across, out, at, count)


def _sum_of_samples(finish: Callable[[Vectors, Any], Any]) -> Callable[..., Any]:
    """Code for LANES sums of samples i … of rows, which float32 holds exactly, as `finish` leaves them."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder, LANES)
        array, i, below, above, weights, radius, out, to = args
        one = ir.Constant(i.type, 1)
        real = ir.VectorType(ir.FloatType(), LANES)
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(real, [real] * 3), f"llvm.fma.v{LANES}f32")

        def samples(which: int, starts: Any, k: Any) -> Any:
            at = builder.add(vectors.number(signature.args[which], starts, k), i)
            return builder.bitcast(vectors.load(signature.args[0], array, at), real)

        def weight(k: Any) -> Any:
            bits = builder.bitcast(vectors.number(signature.args[4], weights, k), ir.IntType(32))
            return builder.bitcast(vectors.every(bits), real)

        total = cgutils.alloca_once(builder, real)
        zero = ir.Constant(i.type, 0)
        builder.store(builder.fmul(weight(zero), samples(2, below, zero)), total)
        with cgutils.for_range(builder, radius) as loop:
            k = builder.add(loop.index, one)
            both = builder.fadd(samples(2, below, k), samples(3, above, k))
            builder.store(builder.call(fma, [weight(k), both, builder.load(total)]), total)
        whole = builder.fptosi(builder.load(total), vectors.words)
        vectors.store(finish(vectors, whole), signature.args[6], out, to)
        return context.get_dummy_value()

    return code


def _pairs(vectors: Vectors, total: Any) -> Any:
    """The pairs (h, l) of v."""
    builder = vectors.builder
    low = builder.and_(builder.shl(total, vectors.constant(8)), vectors.constant(0xFF0000))
    return builder.or_(low, builder.lshr(total, vectors.constant(16)))


def _bytes(vectors: Vectors, total: Any) -> Any:
    """The third byte of each sum."""
    shifted = vectors.builder.lshr(total, vectors.constant(16))
    return vectors.builder.trunc(shifted, ir.VectorType(ir.IntType(8), LANES))


@generated
def _sum_to_pairs(
    _typing: Any, array: Any, i: Any, below: Any, above: Any, weights: Any, radius: Any, words: Any, to: Any
) -> Any:
    parameters = array, types.intp, below, above, weights, types.intp, words, types.intp
    return types.void(*parameters), _sum_of_samples(_pairs)


@generated
def _sum_to_bytes(
    _typing: Any, array: Any, i: Any, below: Any, above: Any, weights: Any, radius: Any, found: Any, to: Any
) -> Any:
    def rounded(vectors: Vectors, total: Any) -> Any:
        return _bytes(vectors, vectors.builder.add(total, vectors.constant(HALF)))

    parameters = array, types.intp, below, above, weights, types.intp, found, types.intp
    return types.void(*parameters), _sum_of_samples(rounded)


@generated
def _sum_pairs(
    _typing: Any, words: Any, centre: Any, channels: Any, weights: Any, radius: Any, start: Any, found: Any, to: Any
) -> Any:
    """LANES results from words centre … along the row. Pairs at one distance have the same weights and are added first,
    which does not carry from one half to the other."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = Vectors(context, builder, LANES)
        array, centre, channels, weights, radius, start, found, to = args
        total = vectors.sum(start)

        def of(at: Any) -> Any:
            return vectors.load(signature.args[0], array, at)

        def add(value: Any, which: Any) -> None:
            vectors.add(total, vectors.products(value, vectors.number(signature.args[3], weights, which)))

        zero, one = (ir.Constant(centre.type, number) for number in (0, 1))
        for which in (zero, one):
            add(of(centre), which)
        with cgutils.for_range(builder, radius) as loop:
            distance = builder.add(loop.index, one)
            away = builder.mul(distance, channels)
            both = builder.add(of(builder.sub(centre, away)), of(builder.add(centre, away)))
            add(both, builder.add(distance, one))
        vectors.store(_bytes(vectors, builder.load(total)), signature.args[6], found, to)
        return context.get_dummy_value()

    numbers = types.intp, types.intp
    return types.void(words, *numbers, weights, types.intp, types.int32, found, types.intp), code
