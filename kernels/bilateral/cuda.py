"""The bilateral filter on CUDA. Launches on one stream; nothing waits for it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.bilateral import NUMBERS, Task
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import kernel, multiprocessors, on_stream
from kernels.smoothing.borders import MODES

OPTIONS = ("--fmad=false",)  # the bits of the CPU
ACROSS, DOWN, SIDE = 32, 8, 32  # of bilateral.cu
# Of bilateral_strips, by the window's radius: results of a thread, threads of a block, blocks of a multiprocessor.
STRIPS = {1: (8, 256, 2), 2: (8, 256, 2), 3: (8, 384, 1), 4: (4, 384, 1)}
MAX_BLOCKS = (1 << 31) - 1
MAX_LENGTH = 1 << 30  # of an axis: positions have 32 bits
TYPES = {
    "uint8": ("unsigned char", ctypes.c_uint8),
    "uint16": ("unsigned short", ctypes.c_uint16),
    "int16": ("short", ctypes.c_int16),
    "float32": ("float", ctypes.c_float),
    "float64": ("double", ctypes.c_double),
}


class BilateralAxis(ctypes.Structure):
    """struct BilateralAxis of bilateral.cu."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("length", "out_length", "first", "taps", "mode", "unused"))


class BilateralTask(ctypes.Structure):
    """struct BilateralTask of bilateral.cu."""

    _fields_ = (
        ("axis", BilateralAxis * 3),
        *((name, ctypes.c_longlong) for name in ("planes", "inner", "tiles_y", "tiles_x", "blocks", "rows")),
        ("scale", ctypes.c_double),
        ("inverse", ctypes.c_double),
    )


def _entry(dtype: str, radius: int | None = None) -> str:
    if radius is not None:
        return f"bilateral_strips<{TYPES[dtype][0]}, {radius}>"
    return f"bilateral_tiles<{TYPES[dtype][0]}, {'double' if dtype == 'float64' else 'float'}>"


def filtered(image: Any, task: Task, out: Any = None, *, stream: Any = None) -> Any:
    import cupy

    with on_stream(image, stream) as current:
        source = cupy.ascontiguousarray(image, task.dtype)
        out = cupy.empty(task.out_shape, task.dtype) if out is None else out
        if max(axis.length for axis in task.axes) > MAX_LENGTH:
            raise ValueError(f"image has more than {MAX_LENGTH:,} samples along an axis: cut it")
        cval = TYPES[task.dtype.name][1](task.dtype.type(task.cval).item())
        depth, rows, columns = task.axes
        radius = rows.taps // 2
        if depth.taps == 1 and rows.taps == columns.taps and radius in STRIPS and task.dtype != np.float64:
            width, threads, resident = STRIPS[radius]
            planes, strips = task.planes * depth.length, -(-columns.out_length // width)
            at_once = resident * multiprocessors() * threads
            height = _height(rows.out_length, planes * strips * task.inner, at_once, radius)
            bands = -(-rows.out_length // height)
            quadrant = np.ascontiguousarray(task.taps.reshape(rows.taps, columns.taps, NUMBERS)[radius:, radius:])
            kernel("bilateral", _entry(task.dtype.name, radius)).launch(
                (-(-planes * bands * strips * task.inner // threads),), (threads,),
                (source, out, (ctypes.c_float * quadrant.size)(*quadrant.ravel()),
                 _task(task, planes=planes, tiles_y=bands, tiles_x=strips, rows=height), cval), stream=current,
            )  # fmt: skip
            return out
        tiles_y, tiles_x = -(-rows.out_length // SIDE), -(-columns.out_length // ACROSS)
        blocks = task.planes * depth.out_length * tiles_y * tiles_x * task.inner
        arguments = _task(task, planes=task.planes, tiles_y=tiles_y, tiles_x=tiles_x, blocks=blocks)
        kernel("bilateral", _entry(task.dtype.name)).launch(
            (min(blocks, MAX_BLOCKS),), (ACROSS, DOWN), (source, out, cupy.asarray(task.taps), arguments, cval),
            shared_bytes=(SIDE + rows.taps - 1) * (ACROSS + columns.taps - 1) * task.taps.itemsize, stream=current,
        )  # fmt: skip
    return out


def _height(rows: int, strips: int, at_once: int, radius: int) -> int:
    """Rows of a band, which computes `radius` more: all bands keep the device busy for a few whole turns."""

    def time(turns: int) -> tuple[int, int]:
        height = -(-rows // max(turns * at_once // strips, 1))
        return -(-strips * -(-rows // height) // at_once) * (height + radius), height

    return min(map(time, range(1, 5)))[1]


def _task(task: Task, **sizes: int) -> BilateralTask:
    axes = [
        BilateralAxis(length=axis.length, out_length=axis.out_length, first=axis.first, taps=axis.taps,
                      mode=MODES.index(axis.mode))
        for axis in task.axes
    ]  # fmt: skip
    return BilateralTask(
        axis=(BilateralAxis * 3)(*axes), inner=task.inner, scale=task.scale,
        inverse=task.taps.dtype.type(1) / task.taps.dtype.type(task.scale), **sizes,
    )  # fmt: skip


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "tiles": Variant(
            summary="tiles in shared memory, four results a thread",
            entries=tuple(_entry(dtype) for dtype in TYPES),
            run=lambda task: filtered(*task),
        ),
        "strips": Variant(
            summary="small squares: results of a thread side by side, row by row, each pair's weight computed once",
            entries=tuple(_entry(dtype, radius) for dtype in TYPES if dtype != "float64" for radius in STRIPS),
            run=lambda task: filtered(*task),
        ),
    }
)
