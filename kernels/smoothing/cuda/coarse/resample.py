"""Gaussians that are decimated: the passes of `kernels.smoothing.decimated` on CuPy arrays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda.coarse import planes
from kernels.smoothing.decimated import Resampling, shape_after
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
    *planes.ENTRIES,
)


class Resample(ctypes.Structure):
    """struct Resample of resample.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("outer", "length", "inner", "count", "first")),
        *((name, ctypes.c_int) for name in ("factor", "taps", "mode")),
    )


class FloatSplines(ctypes.Structure):
    """struct Splines<float> of resample.cuh."""

    _fields_ = (("weight", ctypes.c_float * MOST_WEIGHTS),)


class DoubleSplines(ctypes.Structure):
    """struct Splines<double> of resample.cuh."""

    _fields_ = (("weight", ctypes.c_double * MOST_WEIGHTS),)


class CudaPasses:
    """`kernels.smoothing.decimated.Passes` on CuPy arrays.

    smooth : of (values, windows, fill, out): the direct Gaussian
    made   : the arrays made so far
    """

    def __init__(self, smooth: Callable[[Any, Sequence[Window], float, Any], None], stream: Any) -> None:
        self._smooth = smooth
        self._stream = stream
        self.made: list[Any] = []

    def _new(self, shape: Sequence[int], dtype: Any) -> Any:
        import cupy

        self.made.append(cupy.empty(shape, dtype))
        return self.made[-1]

    def decimate(self, values: Any, steps: Sequence[Resampling]) -> Any:
        if planes.applies(values, steps):
            out = self._new(shape_after(values.shape, steps), np.float32)
            planes.decimate(values, steps, out, self._stream)
            return out
        for step in steps:
            values = self._decimate(values, step)
        return values

    def _decimate(self, values: Any, step: Resampling) -> Any:
        stage, precision = step.stage, np.dtype(np.float64 if values.dtype == np.float64 else np.float32)
        out = self._new(shape_after(values.shape, [step]), precision)
        view = _view(values, step, len(stage.down))
        fill = (ctypes.c_double if precision == np.float64 else ctypes.c_float)(step.fill)
        args = (values, out, _on_device(stage.down, precision.name, values.device.id), view, fill)
        self._launch(f"decimate<{C_TYPES[values.dtype.name]}, {C_TYPES[out.dtype.name]}>", out.size, args)
        return out

    def smooth(self, values: Any, windows: Sequence[Window], fill: Any) -> Any:
        shape = list(values.shape)
        for window in windows:
            shape[window.axis] = window.output_length(shape[window.axis])
        out = self._new(shape, values.dtype)
        self._smooth(values, windows, float(fill), out)
        return out

    def interpolate(self, values: Any, steps: Sequence[Resampling], out: Any) -> Any:
        if planes.applies(values, steps):
            if out is None:
                out = self._new(shape_after(values.shape, steps), values.dtype)
            planes.interpolate(values, steps, out, self._stream)
            return out
        for step in steps:
            values = self._interpolate(values, step, out if step is steps[-1] else None)
        return values

    def _interpolate(self, values: Any, step: Resampling, out: Any) -> Any:
        if out is None:
            out = self._new(shape_after(values.shape, [step]), values.dtype)
        view = _view(values, step, step.stage.order)
        weights = [weight for phase in step.stage.up for weight in phase]
        args = (values, out, view, _splines(weights, values.dtype))
        self._launch(f"interpolate<{C_TYPES[values.dtype.name]}, {C_TYPES[out.dtype.name]}>", out.size, args)
        return out

    def _launch(self, entry: str, total: int, args: tuple[Any, ...]) -> None:
        blocks = min(-(-total // THREADS), MAX_BLOCKS)
        kernel("smoothing", entry).launch((blocks,), (THREADS,), args, stream=self._stream)


@lru_cache(maxsize=64)
def _on_device(weights: tuple[float, ...], dtype: str, device: int) -> Any:
    """The weights in memory of the current device, there before the call returns."""
    import cupy

    found = cupy.asarray(np.array(weights, dtype))
    cupy.cuda.get_current_stream().synchronize()  # other streams may use it next
    return found


def _view(values: Any, step: Resampling, taps: int) -> Resample:
    return Resample(
        outer=math.prod(values.shape[: step.axis]), length=values.shape[step.axis],
        inner=math.prod(values.shape[step.axis + 1 :]), count=step.count, first=step.first, factor=step.stage.factor,
        taps=taps, mode=MODES.index(step.mode),
    )  # fmt: skip


def _splines(weights: Sequence[float], dtype: Any) -> FloatSplines | DoubleSplines:
    made = FloatSplines() if dtype == np.float32 else DoubleSplines()
    made.weight[: len(weights)] = weights
    return made
