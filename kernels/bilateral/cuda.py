"""The bilateral filter on CUDA. Launches on one stream; nothing waits for it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.bilateral import Task
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import kernel, on_stream
from kernels.smoothing.borders import MODES

OPTIONS = ("--fmad=false",)  # the bits of the CPU
ACROSS, DOWN, SIDE = 32, 8, 32  # of bilateral.cu
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
        *((name, ctypes.c_longlong) for name in ("planes", "inner", "tiles_y", "tiles_x", "blocks")),
        ("scale", ctypes.c_double),
    )


def _entry(dtype: str) -> str:
    return f"bilateral_tiles<{TYPES[dtype][0]}, {'double' if dtype == 'float64' else 'float'}>"


def filtered(image: Any, task: Task, *, stream: Any = None) -> Any:
    import cupy

    with on_stream(image, stream) as current:
        source = cupy.ascontiguousarray(image, task.dtype)
        out = cupy.empty(task.out_shape, task.dtype)
        _, rows, columns = task.axes
        tiles_y, tiles_x = -(-rows.out_length // SIDE), -(-columns.out_length // ACROSS)
        axes = [
            BilateralAxis(length=axis.length, out_length=axis.out_length, first=axis.first, taps=axis.taps,
                          mode=MODES.index(axis.mode))
            for axis in task.axes
        ]  # fmt: skip
        if max(axis.length for axis in task.axes) > MAX_LENGTH:
            raise ValueError(f"image has more than {MAX_LENGTH:,} samples along an axis: cut it")
        blocks = task.planes * task.axes[0].out_length * tiles_y * tiles_x * task.inner
        arguments = BilateralTask(
            axis=(BilateralAxis * 3)(*axes), planes=task.planes, inner=task.inner, tiles_y=tiles_y, tiles_x=tiles_x,
            blocks=blocks, scale=task.scale,
        )  # fmt: skip
        size = np.dtype(task.spatial.dtype).itemsize
        cval = TYPES[task.dtype.name][1](task.dtype.type(task.cval).item())
        kernel("bilateral", _entry(task.dtype.name)).launch(
            (min(blocks, MAX_BLOCKS),), (ACROSS, DOWN),
            (source, out, cupy.asarray(task.spatial), arguments, cval),
            shared_bytes=(SIDE + rows.taps - 1) * (ACROSS + columns.taps - 1) * size, stream=current,
        )  # fmt: skip
    return out


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "tiles": Variant(
            summary="tiles in shared memory, four results a thread",
            entries=tuple(_entry(dtype) for dtype in TYPES),
            run=lambda task: filtered(*task),
        )
    }
)
