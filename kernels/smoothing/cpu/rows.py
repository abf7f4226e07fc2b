"""Loops over one row of samples, each compiled to plain SIMD, from which the CPU bodies of the filters are built.

Rows are in flat arrays and are identified by the index of their first sample. Every loop here reads some rows and
writes one other row; `store` and `load` tell LLVM so, and it vectorises without testing at run time which rows overlap.
This holds for a single loop, so `store` prevents its function from being inlined into others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from kernels.runtime.compiled import compiled, intrinsic, ir, types
from kernels.smoothing.borders import OUTSIDE

BLOCK = 32  # samples: LLVM unrolls these loops at most this far
CACHE_LINE = 16  # samples of 32 bits
SQUARE, QUAD = 8, 4  # rows and columns that `transpose` exchanges; samples of `copy_quad`


def generated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that generates its own LLVM instructions; callers leave out the first parameter."""
    return cast("Callable[..., Any]", intrinsic(function))


class Axis(NamedTuple):
    """One axis of a sweep: output i is computed from the positions first + i … first + i + taps - 1."""

    length: int  # input samples
    out_length: int
    first: int
    taps: int
    low: Any  # int64 array: the indices that positions -len(low) … -1 come from (OUTSIDE: the border value)
    high: Any  # the same for positions length, length + 1, …


class Tile(NamedTuple):
    """The part of the output that one call computes: rows y0 … y1, columns x0 … x1 of planes plane0 … plane1."""

    plane0: int
    plane1: int
    y0: int
    y1: int
    x0: int
    x1: int


@generated
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return a(a, a, a), code


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index], inbounds=True)


def written_row(builder: Any) -> Any:
    """An LLVM alias scope for the row that a loop writes."""
    domain = builder.module.add_metadata(["smoothing"])
    return builder.module.add_metadata([builder.module.add_metadata(["written row", domain])])


@generated
def load(_typing: Any, array: Any, index: Any) -> Any:
    """array[index], from a row that the loop does not write; without bounds checks or negative indices."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(address(context, builder, signature.args[0], *args))
        value.set_metadata("noalias", written_row(builder))
        return value

    return array.dtype(array, types.intp), code


@generated
def reload(_typing: Any, array: Any, index: Any) -> Any:
    """array[index], from the row that the loop writes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(address(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), code


@generated
def store(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, truncated to the array's type."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        array_type, _, value_type = signature.args
        stored = builder.store(
            context.cast(builder, args[2], value_type, array_type.dtype),
            address(context, builder, array_type, args[0], args[1]),
        )
        stored.set_metadata("alias.scope", written_row(builder))
        return context.get_dummy_value()

    return types.void(array, types.intp, value), code


@generated
def transpose(_typing: Any, array: Any, source: Any, step: Any, out: Any, at: Any, out_step: Any) -> Any:
    """Copies SQUARE samples each of SQUARE rows `step` apart to as many columns of rows `out_step` apart."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type, _, _, out_type, *_ = signature.args
        array, source, step, out, at, out_step = args
        whole = ir.VectorType(context.get_data_type(array_type.dtype), SQUARE)
        align = array_type.dtype.bitwidth // 8

        def row(of_type: Any, of: Any, start: Any, by: Any, i: int) -> Any:
            index = builder.add(start, builder.mul(by, ir.Constant(by.type, i)))
            return builder.bitcast(address(context, builder, of_type, of, index), whole.as_pointer())

        rows = [builder.load(row(array_type, array, source, step, i), align=align) for i in range(SQUARE)]
        for bit in (4, 2, 1):  # swap this bit of the row index and the column index
            for i in (i for i in range(SQUARE) if not i & bit):
                pair = rows[i], rows[i + bit]
                for j in (0, bit):
                    chosen = [(k & ~bit) + j + (SQUARE if k & bit else 0) for k in range(SQUARE)]
                    rows[i + j] = builder.shuffle_vector(
                        *pair, ir.Constant(ir.VectorType(ir.IntType(32), SQUARE), chosen)
                    )
        for i in range(SQUARE):
            builder.store(rows[i], row(out_type, out, at, out_step, i), align=align)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, out, types.intp, types.intp), code


@generated
def copy_quad(_typing: Any, array: Any, source: Any, out: Any, at: Any) -> Any:
    """Copies QUAD samples."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type, _, out_type, _ = signature.args
        whole = ir.VectorType(context.get_data_type(array_type.dtype), QUAD).as_pointer()
        align = array_type.dtype.bitwidth // 8
        source = builder.bitcast(address(context, builder, array_type, *args[:2]), whole)
        target = builder.bitcast(address(context, builder, out_type, *args[2:]), whole)
        builder.store(builder.load(source, align=align), target, align=align)
        return context.get_dummy_value()

    return types.void(array, types.intp, out, types.intp), code


@generated
def floats_apart(_typing: Any, a: Any, b: Any) -> Any:
    """How many floats lie between `b` and `a`: int32 for float32, int64 for float64."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.IntType(_integer(a).bitwidth)
        return builder.sub(*(builder.bitcast(each, kind) for each in args))

    return _integer(a)(a, b), code


@generated
def nearest_product(_typing: Any, a: Any, b: Any) -> Any:
    """The integer nearest to the exact product (|a * b| < 2**22), ties to even.

    A float of the shift's size has no fraction bits, so adding it rounds a small number to an integer, which is then in
    the low bits of the sum. This takes one instruction; a conversion would take two.
    """
    shift = 1.5 * 2**23 if a == types.float32 else 1.5 * 2**52

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.IntType(_integer(a).bitwidth)
        constant = context.get_constant(a, shift)
        shifted = builder.bitcast(builder.fma(*args, constant), kind)
        return builder.sub(shifted, builder.bitcast(constant, kind))

    return _integer(a)(a, b), code


def _integer(real: Any) -> Any:
    return types.int32 if real == types.float32 else types.int64


@generated
def as_float(_typing: Any, value: Any) -> Any:
    """An int32 as the nearest float32, an int64 as the nearest float64."""
    real, kind = (types.float32, ir.FloatType()) if value == types.int32 else (types.float64, ir.DoubleType())

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sitofp(args[0], kind)

    return real(value), code


@generated
def narrowed(_typing: Any, array: Any, value: Any) -> Any:
    """`value` in the array's type: Numba computes in int64, but with narrowed values LLVM keeps everything in int32."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[1], signature.args[1], signature.return_type)

    return array.dtype(array, value), code


@generated
def clipped(_typing: Any, array: Any, value: Any) -> Any:
    """`value` limited to the range of an integer array of 8 or 16 bits; unchanged for any other array.

    Our values exceed the range by a rounding error at most, but the limits let LLVM use one saturating instruction
    after all arithmetic.
    """
    narrow = isinstance(array.dtype, types.Integer) and array.dtype.bitwidth < 32

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if not narrow:
            return args[1]
        least, most = (ir.Constant(args[1].type, bound) for bound in (array.dtype.minval, array.dtype.maxval))
        above = builder.select(builder.icmp_signed("<", args[1], least), least, args[1])
        return builder.select(builder.icmp_signed(">", above, most), most, above)

    return value(array, value), code


@compiled
def source_index(position: int, axis: Axis) -> int:
    """The index along the axis from which the sample at `position` comes."""
    if position < 0:
        return axis.low[position + axis.low.size]  # type: ignore[no-any-return]
    if position >= axis.length:
        return axis.high[position - axis.length]  # type: ignore[no-any-return]
    return position


def row_pitch(samples: int) -> int:
    """The distance between scratch rows, in samples: room for whole blocks, and an odd number of cache lines, so that
    the samples of a column are in different sets of the cache."""
    lines = -(-samples // CACHE_LINE) + BLOCK // CACHE_LINE
    return (lines | 1) * CACHE_LINE


@compiled
def whole_blocks(samples: int) -> int:
    """Scratch rows are summed in whole blocks, so that no loop ends in single samples; values beyond a row's end are
    never used."""
    return -(-samples // BLOCK) * BLOCK


@compiled
def row_start(plane: int, position: int, rows: Axis, columns: Axis, channels: int) -> int:
    """Index of the first sample of the row at `position`, or OUTSIDE for a row of border values."""
    row = source_index(position, rows)
    return OUTSIDE if row < 0 else (plane * rows.length + row) * columns.length * channels


@compiled
def inside(columns: Axis, tile: Tile) -> tuple[int, int]:
    """The columns seen by the tile that lie inside the image: begin … end, counted from the tile's first."""
    start = tile.x0 + columns.first
    width = tile.x1 - tile.x0 + columns.taps - 1
    begin = min(max(-start, 0), width)
    return begin, min(max(columns.length - start, begin), width)


@compiled
def beyond(columns: Axis, tile: Tile) -> Any:
    """The columns seen by the tile that lie beyond the image's edges: int64 [columns, 3] of the column, the index along
    the axis from which its samples come (OUTSIDE: the border value), and the tile's column at that index (-1: none)."""
    begin, end = inside(columns, tile)
    start = tile.x0 + columns.first
    width = tile.x1 - tile.x0 + columns.taps - 1
    found = np.empty((begin + width - end, 3), np.int64)
    for i in range(found.shape[0]):
        column = i if i < begin else i - begin + end
        source = source_index(start + column, columns)
        found[i, 0], found[i, 1] = column, source
        found[i, 2] = source - start if begin <= source - start < end else -1
    return found


@compiled
def sample(image: Any, border: Any, row: int, column: int, channels: int, channel: int) -> Any:
    """One sample, `row` from `row_start` and `column` from `source_index`."""
    return border[0] if row < 0 or column < 0 else image[row + column * channels + channel]


@compiled
def copy_pixel(array: Any, source: int, target: int, channels: int) -> None:
    for c in range(channels):
        array[target + c] = array[source + c]


@compiled
def fill(array: Any, at: int, count: int, value: Any) -> None:
    for i in range(count):
        store(array, at + i, value)


@compiled
def convert(source: Any, source_at: int, array: Any, at: int, count: int) -> None:
    for i in range(count):
        store(array, at + i, load(source, source_at + i))


@compiled
def add(source: Any, source_at: int, total: Any, at: int, count: int) -> None:
    for i in range(count):
        store(total, at + i, reload(total, at + i) + load(source, source_at + i))


@compiled
def slide(entering: Any, entering_at: int, leaving: Any, leaving_at: int, total: Any, at: int, count: int) -> None:
    """total += entering - leaving: moves the running sum by one row."""
    for i in range(count):
        change = load(entering, entering_at + i) - load(leaving, leaving_at + i)
        store(total, at + i, reload(total, at + i) + change)


@compiled
def pair_sum(array: Any, first: int, second: int, at: int, count: int) -> None:
    for i in range(count):
        store(array, at + i, load(array, first + i) + load(array, second + i))


@compiled
def triple_sum(array: Any, first: int, second: int, third: int, at: int, count: int) -> None:
    """(first + second) + third."""
    for i in range(count):
        store(array, at + i, load(array, first + i) + load(array, second + i) + load(array, third + i))


@compiled
def scaled(array: Any, source: int, factor: Any, out: Any, at: int, count: int) -> None:
    for i in range(count):
        store(out, at + i, load(array, source + i) * factor)


@compiled
def rounded(array: Any, source: int, rounding: Any, out: Any, at: int, count: int) -> None:
    """(row + rounding[0]) - rounding[1], as integers. Floats as large as rounding[0] are one apart, so the difference
    counts the floats between rounding[1] and the sum."""
    up, down = rounding[0], rounding[1]
    for i in range(count):
        store(out, at + i, clipped(out, floats_apart(load(array, source + i) + up, down)))


@compiled
def one_tap(array: Any, low: int, high: int, weight: Any, at: int, count: int) -> None:
    for i in range(count):
        store(array, at + i, fma(weight, load(array, low + i) + load(array, high + i), reload(array, at + i)))


@compiled
def more_taps(array: Any, low: Any, high: Any, weight: Any, k: int, at: int, count: int) -> None:
    """Taps k … k + 3 of a symmetric weighted sum: four per sweep, so that the sum is loaded and stored once for all."""
    low_1, low_2, low_3, low_4 = low[k], low[k + 1], low[k + 2], low[k + 3]
    high_1, high_2, high_3, high_4 = high[k], high[k + 1], high[k + 2], high[k + 3]
    weight_1, weight_2, weight_3, weight_4 = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
    for i in range(count):
        a = reload(array, at + i)
        a = fma(weight_1, load(array, low_1 + i) + load(array, high_1 + i), a)
        a = fma(weight_2, load(array, low_2 + i) + load(array, high_2 + i), a)
        a = fma(weight_3, load(array, low_3 + i) + load(array, high_3 + i), a)
        a = fma(weight_4, load(array, low_4 + i) + load(array, high_4 + i), a)
        store(array, at + i, a)


@compiled
def first_taps(array: Any, low: Any, high: Any, weight: Any, at: int, count: int) -> None:
    """Taps 0 … 4 of a symmetric weighted sum."""
    low_0, low_1, low_2, low_3, low_4 = low[0], low[1], low[2], low[3], low[4]
    high_1, high_2, high_3, high_4 = high[1], high[2], high[3], high[4]
    weight_0, weight_1, weight_2, weight_3, weight_4 = weight[0], weight[1], weight[2], weight[3], weight[4]
    for i in range(count):
        a = weight_0 * load(array, low_0 + i)
        a = fma(weight_1, load(array, low_1 + i) + load(array, high_1 + i), a)
        a = fma(weight_2, load(array, low_2 + i) + load(array, high_2 + i), a)
        a = fma(weight_3, load(array, low_3 + i) + load(array, high_3 + i), a)
        a = fma(weight_4, load(array, low_4 + i) + load(array, high_4 + i), a)
        store(array, at + i, a)
