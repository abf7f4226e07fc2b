"""Gaussians that are decimated: the passes of `kernels.smoothing.decimated` on CuPy arrays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel
from kernels.smoothing.axis_rounding import NO_ROUNDING, WHOLES
from kernels.smoothing.borders import MODES
from kernels.smoothing.decimation import Stage
from kernels.smoothing.window import Window

THREADS = 256
MAX_BLOCKS = 1 << 30  # kernels loop if there is more to do
MOST_WEIGHTS = 48
C_TYPES = {
    "uint8": "unsigned char", "uint16": "unsigned short", "int16": "short", "float32": "float", "float64": "double",
}  # fmt: skip
ENTRIES = (
    *(f"decimate<{name}, float>" for name in ("unsigned char", "unsigned short", "short", "float")),
    *(f"interpolate<float, {name}>" for name in ("unsigned char", "unsigned short", "short", "float")),
    "decimate<double, double>",
    "interpolate<double, double>",
)


class Resample(ctypes.Structure):
    """struct Resample of resample.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("outer", "length", "inner", "count", "first")),
        *((name, ctypes.c_int) for name in ("factor", "taps", "mode")),
    )


class FloatSplines(ctypes.Structure):
    """struct Splines<float> of resample.cuh."""

    _fields_ = (("weight", ctypes.c_float * MOST_WEIGHTS), ("up", ctypes.c_float), ("down", ctypes.c_float))


class DoubleSplines(ctypes.Structure):
    """struct Splines<double> of resample.cuh."""

    _fields_ = (("weight", ctypes.c_double * MOST_WEIGHTS), ("up", ctypes.c_double), ("down", ctypes.c_double))


class CudaPasses:
    """`kernels.smoothing.decimated.Passes` on CuPy arrays."""

    def __init__(self, smooth: Callable[..., Any], stream: Any) -> None:
        self._smooth = smooth
        self._stream = stream

    def decimate(self, values: Any, axis: int, first: int, count: int, stage: Stage, mode: str, fill: Any) -> Any:
        out = _new(values, axis, count, fill.dtype)
        view = _view(values, axis, first, count, stage.factor, len(stage.down), mode)
        border = np.ctypeslib.as_ctypes_type(fill.dtype)(fill)
        args = (values, out, view, _splines(stage.down, out.dtype, whole=False), border)
        self._launch(f"decimate<{C_TYPES[values.dtype.name]}, {C_TYPES[out.dtype.name]}>", out.size, args)
        return out

    def smooth(self, values: Any, windows: Sequence[Window], fill: Any) -> Any:
        return self._smooth(values, windows, float(fill), None, stream=self._stream)

    def interpolate(self, values: Any, axis: int, first: int, count: int, stage: Stage, out: Any) -> Any:
        if out is None:
            out = _new(values, axis, count, values.dtype)
        view = _view(values, axis, first, count, stage.factor, stage.order, "valid")
        weights = [weight for phase in stage.up for weight in phase]
        args = (values, out, view, _splines(weights, values.dtype, whole=out.dtype.kind != "f"))
        self._launch(f"interpolate<{C_TYPES[values.dtype.name]}, {C_TYPES[out.dtype.name]}>", out.size, args)
        return out

    def _launch(self, entry: str, total: int, args: tuple[Any, ...]) -> None:
        blocks = min(-(-total // THREADS), MAX_BLOCKS)
        kernel("smoothing", entry).launch((blocks,), (THREADS,), args, stream=self._stream)


def _new(values: Any, axis: int, count: int, dtype: Any) -> Any:
    import cupy

    return cupy.empty((*values.shape[:axis], count, *values.shape[axis + 1 :]), dtype)


def _view(values: Any, axis: int, first: int, count: int, factor: int, taps: int, mode: str) -> Resample:
    return Resample(
        outer=math.prod(values.shape[:axis]), length=values.shape[axis], inner=math.prod(values.shape[axis + 1 :]),
        count=count, first=first, factor=factor, taps=taps, mode=MODES.index(mode),
    )  # fmt: skip


def _splines(weights: Sequence[float], dtype: Any, *, whole: bool) -> FloatSplines | DoubleSplines:
    made = FloatSplines() if dtype == np.float32 else DoubleSplines()
    made.weight[: len(weights)] = weights
    made.up, made.down = (WHOLES, WHOLES) if whole else (NO_ROUNDING.up, NO_ROUNDING.down)
    return made
