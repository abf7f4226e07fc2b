"""Prefix sums along a row, in vector registers (LLVM does not vectorise a sum that depends on the one before).

A scan may read and write up to eight samples beyond its rows' ends.
"""

from __future__ import annotations

from typing import Any

from kernels.runtime.compiled import cgutils, ir, types
from kernels.smoothing.cpu.rows import generated

LANES = 4


@generated
def scan(_typing: Any, array: Any, source: Any, at: Any, count: Any) -> Any:
    """array[at + k] = array[source] + … + array[source + k - 1] for k = 0 … count, wrapping.

    Four at a time: two shifted additions sum within the register, whose last lane is carried over.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = _Row(context, builder, signature.args[0], args[0], LANES)
        carried = cgutils.alloca_once_value(builder, row.zero)
        builder.store(row.element(0), row.pointer(args[2], vector=False))
        vectors = builder.udiv(builder.add(args[3], row.index(LANES - 1)), row.index(LANES))
        with cgutils.for_range(builder, vectors) as loop:
            i = builder.mul(loop.index, row.index(LANES))
            sums = row.load(builder.add(args[1], i))
            for shift in (1, 2):
                sums = builder.add(sums, row.shuffled(sums, [max(k - shift, -1) for k in range(LANES)]))
            sums = builder.add(sums, builder.load(carried))
            builder.store(row.shuffled(sums, [LANES - 1] * LANES), carried)
            row.store(sums, builder.add(builder.add(args[2], i), row.index(1)))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp), code


@generated
def scan_4(_typing: Any, array: Any, source: Any, at: Any, pixels: Any, channels: Any) -> Any:
    """As `scan`, for each of up to four interleaved channels, a pixel at a time."""
    return _scan_pixels(array, 4)


@generated
def scan_8(_typing: Any, array: Any, source: Any, at: Any, pixels: Any, channels: Any) -> Any:
    """As `scan_4`, for up to eight channels."""
    return _scan_pixels(array, 8)


def _scan_pixels(array: Any, lanes: int) -> Any:
    """Lanes beyond the channels hold garbage, which the next pixel's store overwrites."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = _Row(context, builder, signature.args[0], args[0], lanes)
        sums = cgutils.alloca_once_value(builder, row.zero)
        with cgutils.for_range(builder, args[3]) as loop:
            i = builder.mul(loop.index, args[4])
            pixel = row.load(builder.add(args[1], i))
            row.store(builder.load(sums), builder.add(args[2], i))
            builder.store(builder.add(builder.load(sums), pixel), sums)
        row.store(builder.load(sums), builder.add(args[2], builder.mul(args[3], args[4])))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, types.intp, types.intp), code


class _Row:
    """Loads and stores of whole vectors at any sample of an array."""

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any, lanes: int) -> None:
        self.builder = builder
        self.data = context.make_array(array_type)(context, builder, array).data
        self.sample = ir.IntType(array_type.dtype.bitwidth)
        self.vector = ir.VectorType(self.sample, lanes)
        self.zero = ir.Constant(self.vector, [0] * lanes)

    def index(self, value: int) -> Any:
        return ir.Constant(ir.IntType(64), value)

    def element(self, value: int) -> Any:
        return ir.Constant(self.sample, value)

    def pointer(self, index: Any, *, vector: bool = True) -> Any:
        at = self.builder.gep(self.data, [index], inbounds=True)
        return self.builder.bitcast(at, self.vector.as_pointer()) if vector else at

    def load(self, index: Any) -> Any:
        return self.builder.load(self.pointer(index), align=self.sample.width // 8, typ=self.vector)

    def store(self, value: Any, index: Any) -> None:
        self.builder.store(value, self.pointer(index), align=self.sample.width // 8)

    def shuffled(self, value: Any, lanes: list[int]) -> Any:
        """The given lanes of `value`; zero for -1."""
        count = value.type.count
        mask = ir.Constant(ir.VectorType(ir.IntType(32), count), [count if k < 0 else k for k in lanes])
        return self.builder.shuffle_vector(value, self.zero, mask)
