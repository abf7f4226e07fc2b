"""Transposes on CUDA: which kernels of transpose.cu run for an array, with which grids."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream
from kernels.runtime.limits.cuda import random_values

OPTIONS: tuple[str, ...] = ()

# Tuned on an H200 (sm_90), by the bytes of an element. Every tile fits the 48 KiB of shared memory of any device.
TILE, THREADS = 32, 256
# Tiles of transpose_coarsened, in elements.
SHAPES = {1: (64, 64), 2: (64, 64), 4: (64, 64), 8: (32, 64), 16: (32, 32)}
# 16-byte pieces of a tile of transpose_vectors along a row of the input and of the output, for aligned rows …
PIECES = {1: (8, 8), 2: (16, 16), 4: (16, 16), 8: (16, 16), 16: (16, 32)}
# … and for others.
UNALIGNED_PIECES = {1: (8, 8), 2: (8, 16), 4: (8, 16), 8: (16, 32), 16: (16, 32)}

SECTOR = 32  # spare bytes of an unaligned tile along a row of the output
MAX_TILES = (1 << 31) - 1  # of one launch
UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}


class MatricesStruct(ctypes.Structure):
    """struct Matrices of transpose.cu."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("rows", "columns", "row_pitch", "batch_pitch", "first_batch")),
        *((name, ctypes.c_uint) for name in ("tiles_down", "tiles_across")),
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """One batch of matrices to transpose."""

    array: Any  # CuPy [batches, rows, columns] without gaps within rows
    out: Any  # CuPy [batches, columns, rows], C-contiguous
    stream: Any

    @property
    def size(self) -> int:
        return int(self.array.dtype.itemsize)


def transpose(array: Any, out: Any, *, stream: Any = None, variant: str | None = None) -> Any:
    """The last two axes of a CuPy array exchanged; see kernels.classic.transpose.

    variant : a name in `VARIANTS`; default the fastest
    """
    import cupy

    turned = cupy.swapaxes(array, -1, -2)
    with on_stream(array, stream) as current:
        if out is None:
            out = cupy.empty(turned.shape, array.dtype)
        if array.size == 0:
            return out
        if variant is None and (1 in array.shape[-2:] or turned.flags.c_contiguous):
            cupy.copyto(out, turned)  # the order of the elements does not change
            return out
        shape = (math.prod(array.shape[:-2]), *array.shape[-2:])
        source = _as_matrices(array, shape)
        task = Task(array=source, out=out.reshape(shape[0], shape[2], shape[1]), stream=current)
        VARIANTS[variant or PRODUCTION].run(task)
    return out


def _as_matrices(array: Any, shape: tuple[int, ...]) -> Any:
    """As [batches, rows, columns], without a copy if rows have no gaps and strides are multiples of an element."""
    import cupy

    size = array.dtype.itemsize
    row_stride = array.strides[-2]
    direct = array.ndim <= 3 and array.strides[-1] == size and row_stride >= array.shape[-1] * size
    if direct and all(stride % size == 0 and stride >= 0 for stride in array.strides):
        return array.reshape(shape) if array.ndim == 3 else array[None]
    return cupy.ascontiguousarray(array).reshape(shape)


def _launch(task: Task, entry: str, tile: tuple[int, int], threads: tuple[int, ...]) -> None:
    array = task.array
    batches, rows, columns = array.shape
    down, across = blocks_of(rows, tile[0]), blocks_of(columns, tile[1])
    if down * across > MAX_TILES:
        raise ValueError(
            f"array has matrices of {rows} × {columns}: more than {MAX_TILES} tiles; transpose it in parts"
        )
    matrices = MatricesStruct(
        rows=rows, columns=columns, row_pitch=array.strides[1] // task.size, batch_pitch=array.strides[0] // task.size,
        tiles_down=down, tiles_across=across,
    )  # fmt: skip
    at_once = MAX_TILES // (down * across)
    found = kernel("transpose", entry)
    for first in range(0, batches, at_once):
        part = MatricesStruct.from_buffer_copy(matrices)
        part.first_batch = first
        blocks = down * across * min(at_once, batches - first)
        found.launch((blocks,), threads, (array, task.out, part), stream=task.stream)


def _run_copy(task: Task) -> None:
    """Copies the bytes without transposing them."""
    import cupy

    array = cupy.ascontiguousarray(task.array)
    count = ctypes.c_longlong(array.nbytes)
    blocks = max(1, blocks_of(array.nbytes // 16, THREADS))
    kernel("transpose", "copy_vectors").launch((blocks,), (THREADS,), (array, task.out, count), stream=task.stream)


def _runner(template: str, tile: Callable[[int], tuple[int, int]], threads: tuple[int, int]) -> Callable[[Task], None]:
    """Launches a template on elements of the task's size."""

    def run(task: Task) -> None:
        height, width = tile(task.size)
        entry = template.format(element=UNSIGNED[task.size], height=height, width=width)
        _launch(task, entry, (height, width), threads)

    return run


def _square(size: int) -> tuple[int, int]:
    return TILE, TILE


def _vectors_entry(size: int, aligned: bool) -> str:
    vectors, quads = (PIECES if aligned else UNALIGNED_PIECES)[size]
    return f"transpose_vectors<{size}, {vectors}, {quads}, {str(aligned).lower()}>"


def _run_vectors(task: Task) -> None:
    size, aligned = task.size, _aligned(task)
    vectors, quads = (PIECES if aligned else UNALIGNED_PIECES)[size]
    rows = quads * (16 // size) - (0 if aligned else SECTOR // size)
    _launch(task, _vectors_entry(size, aligned), (rows, vectors * (16 // size)), (THREADS,))


def _aligned(task: Task) -> bool:
    """Whether the input's rows consist of whole 16-byte pieces, and the output's of whole sectors."""
    array, size = task.array, task.size
    pieces = (array.data.ptr, array.strides[0], array.strides[1], array.shape[2] * size)
    return all(at % 16 == 0 for at in pieces) and all(
        at % SECTOR == 0 for at in (task.out.data.ptr, array.shape[1] * size)
    )


_COARSENED = "transpose_coarsened<{element}, {height}, {width}>"


def _each(template: str, tile: Callable[[int], tuple[int, int]] = _square) -> tuple[str, ...]:
    named = ((element, *tile(size)) for size, element in UNSIGNED.items())
    return tuple(template.format(element=element, height=height, width=width) for element, height, width in named)


# In the order of the source, naive to fast; "copy" does not transpose: it is the bound.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "copy": Variant(
            summary="no transpose: a plain copy of the same bytes, the upper bound",
            entries=("copy_vectors",),
            run=_run_copy,
        ),
        "naive": Variant(
            summary="one thread per element: coalesced reads, scattered writes",
            entries=_each("transpose_naive<{element}>"),
            run=_runner("transpose_naive<{element}>", _square, (TILE, TILE)),
        ),
        "shared": Variant(
            summary="transposed in a tile in shared memory: writes are coalesced too, but a tile's column is one bank",
            entries=_each("transpose_tiled<{element}, 0>"),
            run=_runner("transpose_tiled<{element}, 0>", _square, (TILE, TILE)),
        ),
        "padded": Variant(
            summary="the tile's rows padded by one element: no bank conflicts",
            entries=_each("transpose_tiled<{element}, 1>"),
            run=_runner("transpose_tiled<{element}, 1>", _square, (TILE, TILE)),
        ),
        "coarsened": Variant(
            summary="four elements per thread: more loads in flight, fewer addresses",
            entries=_each(_COARSENED),
            run=_runner(_COARSENED, _square, (TILE, 8)),
        ),
        "shapes": Variant(
            summary="larger tiles: memory accesses twice as long",
            entries=_each(_COARSENED, SHAPES.__getitem__),
            run=_runner(_COARSENED, SHAPES.__getitem__, (TILE, 8)),
        ),
        "vectors": Variant(
            summary="16 bytes per load and store, for any element size and row alignment; swizzled tile",
            entries=tuple(_vectors_entry(size, aligned) for size in UNSIGNED for aligned in (True, False)),
            run=_run_vectors,
        ),
    }
)
PRODUCTION = "vectors"

SIDE = 16384


def ladders() -> tuple[Ladder, ...]:
    """Elements of 4 bytes on every rung; other sizes in production and on the rungs before it."""
    few = ("copy", "coarsened", "shapes", "vectors")
    sides = {1: (2 * SIDE, SIDE), 2: (SIDE, SIDE), 4: (SIDE, SIDE), 8: (SIDE // 2, SIDE), 16: (SIDE // 2, SIDE // 2)}
    return (
        _ladder("uint32", sides[4], tuple(VARIANTS)),
        *(_ladder(name, sides[size], few) for size, name in ((1, "uint8"), (2, "uint16"), (8, "uint64"))),
        _ladder("complex128", sides[16], few),
        _ladder("uint32", (16381, 16411), few),
    )


def _ladder(dtype: str, shape: tuple[int, int], variants: tuple[str, ...]) -> Ladder:
    @cache
    def arrays() -> tuple[Any, Any]:
        import cupy

        size = math.prod(shape) * np.dtype(dtype).itemsize
        array = random_values(size, "uint8").view(dtype).reshape(shape)
        return array, cupy.empty(shape[::-1], dtype)

    def prepare(name: str) -> Callable[[], Any]:
        array, out = arrays()
        return lambda: transpose(array, out, variant=name)

    def libraries() -> Mapping[str, Callable[[], Any]]:
        import cupy

        array, out = arrays()
        return {"CuPy (copyto of .T)": lambda: cupy.copyto(out, array.T)}

    return Ladder(
        name=f"{dtype}, {shape[0]} × {shape[1]}", variants=variants, bound="copy", flops=0, limit="copy",
        bytes=2 * math.prod(shape) * np.dtype(dtype).itemsize, prepare=prepare, libraries=libraries,
    )  # fmt: skip
