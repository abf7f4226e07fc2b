"""Proximal operators on CUDA. Launches on the current stream of the arrays' device; nothing waits for it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, kernel, multiprocessors, on_stream

OPTIONS: tuple[str, ...] = ()
THREADS, MOST_PARTS, PARTS_EACH = 256, 1024, 4
LOW_RANK_PIXELS = 64
NULL = ctypes.c_void_p(0)


class ExtentStruct(ctypes.Structure):
    """struct Extent of proximal.cu."""

    _fields_ = [("size", ctypes.c_int * 4), ("axes", ctypes.c_int)]


def soft_threshold(values: Any, threshold: Any, vectors: bool) -> Any:
    import cupy

    with on_stream(values) as stream:
        values = cupy.ascontiguousarray(values)
        out, by = cupy.empty_like(values), cupy.asarray(threshold, cupy.float32)
        components, count = _split(values, vectors)
        args = (values, out, by, ctypes.c_int(components), ctypes.c_longlong(count))
        _launch("soft_threshold", count, args, stream)
    return out


def magnitudes(values: Any, vectors: bool) -> Any:
    components, count = _split(values, vectors)
    return _sum("magnitudes", (values,), (ctypes.c_int(components), ctypes.c_longlong(count)), count)


def inner(one: Any, other: Any) -> Any:
    return _sum("inner", (one, other), (ctypes.c_longlong(one.size),), one.size)


def differences(image: Any, axes: tuple[int, ...]) -> Any:
    import cupy

    with on_stream(image) as stream:
        image = cupy.ascontiguousarray(image)
        fields = cupy.empty((len(axes), *image.shape), image.dtype)
        args = (image, fields, _extent(image.shape, axes), ctypes.c_longlong(image.size))
        _launch("differences", image.size, args, stream)
    return fields


def differences_adjoint(fields: Any, axes: tuple[int, ...]) -> Any:
    import cupy

    with on_stream(fields) as stream:
        fields = cupy.ascontiguousarray(fields)
        image = cupy.empty(fields.shape[1:], fields.dtype)
        args = (fields, image, _extent(image.shape, axes), ctypes.c_longlong(image.size))
        _launch("differences_adjoint", image.size, args, stream)
    return image


def _extent(shape: tuple[int, ...], axes: tuple[int, ...]) -> ExtentStruct:
    missing = 4 - len(shape)
    if list(axes) != sorted(set(axes)):
        raise ValueError(f"axes must increase; got {axes}")
    return ExtentStruct(size=(1,) * missing + shape, axes=sum(1 << (axis + missing) for axis in axes))


def _split(values: Any, vectors: bool) -> tuple[int, int]:
    return (values.shape[0], values[0].size) if vectors else (1, values.size)


def _launch(name: str, count: int, args: tuple[Any, ...], stream: Any, dependent: bool = False) -> None:
    if count:
        blocks = (blocks_of(count, THREADS),)
        kernel("proximal", name).launch(blocks, (THREADS,), args, stream=stream, dependent_launch=dependent)


def next_shift(table: Any, row: Any, shift: Any) -> None:
    """The table's next row [axes] becomes the shift, in place, and its number `row`."""
    with on_stream(table) as stream:
        args = (table, row, shift, *map(ctypes.c_int, table.shape))
        kernel("proximal", "next_shift").launch((1,), (1,), args, stream=stream, dependent_launch=True)


def _sum_blocks(count: int) -> int:
    return max(min(blocks_of(count, THREADS), PARTS_EACH * multiprocessors(), MOST_PARTS), 1)


def _sum(name: str, arrays: tuple[Any, ...], sizes: tuple[Any, ...], count: int) -> Any:
    import cupy

    with on_stream(arrays[0]) as stream:
        arrays = tuple(cupy.ascontiguousarray(each) for each in arrays)
        blocks = _sum_blocks(count)
        parts, ticket = cupy.empty(blocks, cupy.float64), cupy.zeros((), cupy.uint32)
        total = cupy.empty((), cupy.float64)
        kernel("proximal", name).launch((blocks,), (THREADS,), (*arrays, parts, ticket, total, *sizes), stream=stream)
    return total


class BlocksStruct(ctypes.Structure):
    """struct Blocks of low_rank.cuh."""

    _fields_ = [
        ("frames", ctypes.c_int), ("even", ctypes.c_int), ("size", ctypes.c_int * 3), ("block", ctypes.c_int * 3),
        ("count", ctypes.c_int * 3), ("shifted", ctypes.c_int),
    ]  # fmt: skip


def low_rank(series: Any, threshold: Any, block: Sequence[int], shift: Any) -> tuple[Any, Any]:
    import cupy

    with on_stream(series) as stream:
        series = cupy.ascontiguousarray(series)
        frames, missing = len(series), (1,) * (4 - series.ndim)
        size, sizes = missing + series.shape[1:], missing + tuple(block)
        count = tuple(blocks_of(n, b) for n, b in zip(size, sizes, strict=True))
        blocks, even = math.prod(count), frames + frames % 2
        struct = BlocksStruct(frames=frames, even=even, size=size, block=sizes, count=count, shifted=series.ndim - 1)
        out, by = cupy.empty_like(series), cupy.asarray(threshold, cupy.float32)
        parts, ticket = cupy.empty(blocks, cupy.float64), cupy.zeros((), cupy.uint32)
        nuclear = cupy.empty((), cupy.float64)
        lags = NULL if shift is None else cupy.asarray(shift, cupy.int32)
        # Matrices, tile, rotations and factors; compilers read the factors in vectors of up to four.
        shared_bytes = 8 * (2 * even**2 + frames * LOW_RANK_PIXELS) + 12 * even + 8
        args = (series, out, by, lags, parts, ticket, nuclear, struct)
        kernel("proximal", "low_rank").launch((blocks,), (THREADS,), args, stream=stream, shared_bytes=shared_bytes)
    return out, nuclear


class CgStruct(ctypes.Structure):
    """struct Cg of cg.cuh."""

    _fields_ = [("tolerance", ctypes.c_double), ("damping", ctypes.c_float), ("count", ctypes.c_longlong)]


class CgVectors:
    """The vector operations of conjugate gradients; see cg.cuh. `direction` is what the normal operator is applied to.

    A CUDA graph can hold `step`, for any right-hand side and tolerance.
    """

    def __init__(self, like: Any, damping: float) -> None:
        import cupy

        self.solution, self._residual, self.direction = (cupy.empty_like(like) for _ in range(3))
        self.status = cupy.zeros(1, cupy.float64)
        self._numbers = cupy.zeros(5, cupy.float64)
        self.whole = self._numbers[1]  # the right-hand side's square
        self._blocks = _sum_blocks(like.size)
        self._parts, self._ticket = cupy.empty(self._blocks, cupy.float64), cupy.zeros((), cupy.uint32)
        self._struct = CgStruct(damping=damping, count=like.size)

    def state(self) -> Mapping[str, Any]:
        vectors = {"solution": self.solution, "residual": self._residual, "direction": self.direction}
        return {**vectors, "numbers": self._numbers, "status": self.status}

    def begin(self, right: Any, tolerance: float) -> None:
        import cupy

        self._struct.tolerance = tolerance
        self._launch("cg_begin", cupy.ascontiguousarray(right), self.solution, self._residual, self.direction)

    def step(self, normal: Any) -> None:
        """Takes the normal operator of the direction."""
        self._launch("cg_rate", self.direction, normal)
        self._launch("cg_advance", self.solution, self._residual, self.direction, normal)
        with on_stream(self.solution) as stream:
            count = self.solution.size
            args = (self._residual, self.direction, self._numbers, ctypes.c_longlong(count))
            _launch("cg_turn", count, args, stream, dependent=True)

    def _launch(self, name: str, *arrays: Any) -> None:
        with on_stream(self.solution) as stream:
            args = (*arrays, self._parts, self._ticket, self._numbers, self.status, self._struct)
            launch = kernel("proximal", name).launch
            launch((self._blocks,), (THREADS,), args, stream=stream, dependent_launch=True)


class FistaStruct(ctypes.Structure):
    """struct Fista of fista.cuh."""

    _fields_ = [
        ("strength", ctypes.c_double), ("damping", ctypes.c_double), ("energy", ctypes.c_double),
        ("tolerance", ctypes.c_double), ("count", ctypes.c_longlong), ("monotone", ctypes.c_int),
    ]  # fmt: skip


class FistaVectors:
    """The vector operations of a FISTA iteration; see fista.cuh. `image` and the others are of one size."""

    def __init__(
        self,
        right: Any,
        largest: float,
        status: Any,
        *,
        strength: float,
        damping: float,
        energy: float,
        monotone: bool,
        tolerance: float,
    ) -> None:
        import cupy

        self._right, self._status = right, status
        self.image, self._before, self._normal, self._normal_before = (cupy.zeros_like(right) for _ in range(4))
        self._struct = FistaStruct(
            strength=strength,
            damping=damping,
            energy=energy,
            tolerance=tolerance,
            count=right.size,
            monotone=monotone,
        )
        self._state = cupy.asarray([largest + damping, 1, 0, float("inf"), 0], cupy.float64)
        self._moved, self._threshold = cupy.empty_like(right), cupy.zeros((), cupy.float32)
        self._blocks = _sum_blocks(right.size)
        self._parts = cupy.empty(6 * self._blocks, cupy.float64)
        self._ticket = cupy.zeros((), cupy.uint32)

    def state(self) -> Mapping[str, Any]:
        vectors = {"image": self.image, "before": self._before}
        return {**vectors, "normal": self._normal, "normal_before": self._normal_before, "numbers": self._state}

    def restore(self, saved: Mapping[str, Any]) -> None:
        for name, array in self.state().items():
            array.set(saved[name])

    def gradient(self) -> tuple[Any, Any]:
        """The point after a gradient step, whose memory is used again, and the threshold for it."""
        with on_stream(self.image) as stream:
            vectors = (self.image, self._before, self._normal, self._normal_before, self._right, self._state)
            args = (*vectors, self._moved, self._threshold, self._struct)
            _launch("fista_gradient", self.image.size, args, stream, dependent=True)
        return self._moved, self._threshold

    def accept(self, image: Any, size: Any, normal: Any) -> None:
        """Takes the new image, with its penalty and its normal operator, unless it raises the objective."""
        with on_stream(self.image) as stream:
            args = (image, normal, self.image, self._before, self._normal, self._right, size, self._parts, self._ticket)
            launch = kernel("proximal", "fista_sums").launch
            given = (*args, self._state, self._status, self._struct)
            launch((self._blocks,), (THREADS,), given, stream=stream, dependent_launch=True)
            both = (image, normal, self.image, self._before, self._normal, self._normal_before, self._state)
            count = self.image.size
            _launch("fista_accept", count, (*both, ctypes.c_longlong(count)), stream, dependent=True)


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "elements": Variant(
            summary="a thread a value; sums end in the last block, so that no second launch is needed",
            entries=("soft_threshold", "magnitudes", "inner", "differences", "differences_adjoint", "next_shift"),
            run=lambda task: task(),
        ),
        "low_rank": Variant(
            summary="a block an image block: Gram matrix, Jacobi rotations and the product in shared memory",
            entries=("low_rank",),
            run=lambda task: task(),
        ),
        "conjugate_gradients": Variant(
            summary="the vectors of an iteration in three launches instead of twenty",
            entries=("cg_begin", "cg_rate", "cg_advance", "cg_turn"),
            run=lambda task: task(),
        ),
        "fista": Variant(
            summary="the vectors of a FISTA iteration in three launches instead of sixty",
            entries=("fista_gradient", "fista_sums", "fista_accept"),
            run=lambda task: task(),
        ),
    }
)
