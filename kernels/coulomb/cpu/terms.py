"""The terms of eight points and one atom in explicit SIMD: IEEE additions, multiplications and fused multiply-adds, so
that the bits depend neither on the compiler nor on the CPU.

1/sqrt starts from an integer estimate y (Lomont, "Fast inverse square root", 2003). With e = 1 - x y², it is y times a
polynomial of e, minimax for that estimate: the relative error is below 1e-7. That takes less than half the time of an
exact square root and division (AMD EPYC 7003).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from kernels.coulomb.geometry import SPLIT_TERMS
from kernels.runtime.compiled import cgutils, intrinsic, ir, types

LANES = 8
GUESS = 0x5F375A86
ROOT = (0.49999834, 0.37500035, 0.31393535, 0.27407935)  # (1 / sqrt(1 - e) - 1) / e for e from -0.0692 to 0.0676
TAYLOR = (1.875, -1.25, 0.375)

_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)
_BITS = ir.VectorType(ir.IntType(32), LANES)


def _same(number: float) -> Any:
    return ir.Constant(_FLOATS, [ir.Constant(_FLOAT, number)] * LANES)


def _spread(builder: Any, scalar: Any) -> Any:
    vector = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [ir.Constant(ir.IntType(32), 0)] * LANES)
    return builder.shuffle_vector(vector, ir.Constant(_FLOATS, ir.Undefined), lanes)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index], inbounds=True), _FLOATS.as_pointer())


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    function = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{LANES}f32"), [a, b, c])


def _inverse_root(builder: Any, x: Any) -> Any:
    half = builder.lshr(builder.bitcast(x, _BITS), ir.Constant(_BITS, [ir.Constant(ir.IntType(32), 1)] * LANES))
    guess = ir.Constant(_BITS, [ir.Constant(ir.IntType(32), GUESS)] * LANES)
    y = builder.bitcast(builder.sub(guess, half), _FLOATS)
    error, series = _fma(builder, builder.fneg(builder.fmul(x, y)), y, _same(1)), _same(ROOT[-1])
    for coefficient in ROOT[-2::-1]:
        series = _fma(builder, series, error, _same(coefficient))
    return _fma(builder, y, builder.fmul(error, series), y)


def _clamped(builder: Any, x: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", x, _same(1)), x, _same(1))


def _shift(builder: Any, x: Any, _split: Any) -> tuple[Any, Any]:
    x = _clamped(builder, x)
    rest = builder.fsub(_same(1), x)
    root = _inverse_root(builder, x)
    return builder.fmul(root, builder.fmul(rest, rest)), root


def _taylor2(builder: Any, x: Any, _split: Any) -> tuple[Any, Any]:
    root = _inverse_root(builder, x)
    c0, c1, c2 = map(_same, TAYLOR)
    series = _fma(builder, x, _fma(builder, c2, x, c1), c0)
    inside = builder.fcmp_ordered("<=", x, _same(1))
    return builder.select(inside, builder.fsub(root, series), _same(0)), root


def _truncate(builder: Any, x: Any, _split: Any) -> tuple[Any, Any]:
    root = _inverse_root(builder, x)
    return builder.select(builder.fcmp_ordered("<=", x, _same(1)), root, _same(0)), root


def _splitting(builder: Any, x: Any, split: Any) -> tuple[Any, Any]:
    x = _clamped(builder, x)
    root, rest, series = _inverse_root(builder, x), builder.fsub(_same(1), x), split[-1]
    for coefficient in split[-2::-1]:
        series = _fma(builder, series, rest, coefficient)
    return builder.fsub(root, series), root


def _direct(builder: Any, x: Any, _split: Any) -> tuple[Any, Any]:
    root = _inverse_root(builder, x)
    return root, root


# Indexed like SCHEMES.
_VALUES = (_shift, _taylor2, _truncate, _splitting, _direct)


def _add_eight(builder: Any, kind: int, sums: Any, squares: Any, square: Any, charge: Any, split: Any) -> None:
    """sums[0 … 7] += charge * value(squares[0 … 7] + square): pointers to eight floats, and vectors of eight."""
    along = builder.load(squares, align=4)
    term, root = _VALUES[kind % len(_VALUES)](builder, builder.fadd(along, square), split)
    if kind >= len(_VALUES):
        term = builder.fmul(term, root)
    builder.store(_fma(builder, charge, term, builder.load(sums, align=4)), sums, align=4)


def _is_split(kind: int) -> bool:
    return _VALUES[kind % len(_VALUES)] is _splitting


def _loaded(context: Any, builder: Any, array_type: Any, array: Any) -> list[Any]:
    data = context.make_array(array_type)(context, builder, array).data
    places = (ir.Constant(ir.IntType(64), k) for k in range(SPLIT_TERMS))
    return [_spread(builder, builder.load(builder.gep(data, [place], inbounds=True))) for place in places]


def _add_row(
    _typing: Any, kind: Any, sums: Any, at: Any, squares: Any, of: Any, count: Any, square: Any, charge: Any, split: Any
) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        chosen, target, at, source, of, count, square, charge, coefficients = args
        square, charge = _spread(builder, square), _spread(builder, charge)
        after = builder.append_basic_block("after")
        switch = builder.switch(chosen, after)
        for number in range(2 * len(_VALUES)):
            block = builder.append_basic_block(f"kind{number}")
            switch.add_case(number, block)
            builder.position_at_end(block)
            terms = _loaded(context, builder, signature.args[8], coefficients) if _is_split(number) else []
            step, first = ir.Constant(count.type, LANES), ir.Constant(count.type, 0)
            with cgutils.for_range_slice(builder, first, count, step) as (k, _):
                sums_at = _pointer(context, builder, signature.args[1], target, builder.add(at, k))
                squares_at = _pointer(context, builder, signature.args[3], source, builder.add(of, k))
                _add_eight(builder, number, sums_at, squares_at, square, charge, terms)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(types.intp, sums, types.intp, squares, types.intp, types.intp, square, charge, split), code


# Adds one atom's terms to `count` points of one row, a multiple of eight: sums[at …] += charge * value(squares[of …] +
# square); float32 arrays, lengths in cutoffs. kind: index of the scheme in SCHEMES, plus their number if the dielectric
# is distance-dependent. split: the coefficients of the scheme "split"; any others for other schemes.
add_row = cast("Callable[..., None]", intrinsic(_add_row))
