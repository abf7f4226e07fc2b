"""Wavelet transforms on CUDA: a launch for each level and axis. Nothing waits for the device."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream
from kernels.wavelet.levels import Level

OPTIONS: tuple[str, ...] = ()
THREADS = 256
TAPS = (2, 4, 6, 8)
NULL = ctypes.c_void_p(0)


class PassStruct(ctypes.Structure):
    """struct Pass of wavelet.cu."""

    _fields_ = [
        ("batch", ctypes.c_int), ("size", ctypes.c_int * 3), ("full", ctypes.c_int * 3), ("half", ctypes.c_int * 3),
        ("axis", ctypes.c_int), ("shifted", ctypes.c_int), ("coarsest", ctypes.c_int),
    ]  # fmt: skip


class FilterStruct(ctypes.Structure):
    """struct Filter of wavelet.cu."""

    _fields_ = [("low", ctypes.c_float * 8), ("high", ctypes.c_float * 8)]


class Body:
    """The transforms of [batch, x, y, z] by a filter, on the current stream of the array's device."""

    def __init__(self, taps: Any, like: Any) -> None:
        self._taps = len(taps)
        high = taps[::-1] * (-1.0) ** np.arange(len(taps))
        self._filter = FilterStruct(low=tuple(taps.tolist()), high=tuple(high.tolist()))
        self._like = like

    def forward(self, image: Any, out: Any, levels: tuple[Level, ...], shift: Any, threshold: Any) -> None:
        import cupy

        with on_stream(self._like) as stream:
            lags = shift if shift is None or hasattr(shift, "data") else cupy.asarray(shift, cupy.int32)
            by = None if threshold is None else cupy.asarray(threshold, cupy.float32)
            if not levels:  # single pixels
                out[...] = image if by is None else image * cupy.maximum(1 - by / cupy.maximum(abs(image), by), 0)
            works = [cupy.empty_like(out), cupy.empty_like(out)]
            source = image
            for number, level in enumerate(levels):
                for step, axis in enumerate(reversed(level.axes)):
                    final = step == len(level.axes) - 1
                    made = works[step % 2] if not final or source is out else out
                    turned = lags if number == step == 0 else None
                    args = (source, made, self._filter, _or_null(turned), _or_null(by if final else None))
                    self._launch("analyse", args, level, axis, image, turned, stream)
                    source = made
                if source is not out:
                    box = (slice(None), *map(slice, level.size))
                    out[box] = source[box]
                    source = out

    def inverse(self, coefficients: Any, out: Any, levels: tuple[Level, ...], shift: Any) -> None:
        import cupy

        with on_stream(self._like) as stream:
            lags = shift if shift is None or hasattr(shift, "data") else cupy.asarray(shift, cupy.int32)
            if not levels:
                out[...] = coefficients
            works = [cupy.empty_like(out), cupy.empty_like(out)]
            for number, level in enumerate(reversed(levels)):
                source, finest = coefficients, number == len(levels) - 1
                for step, axis in enumerate(level.axes):
                    final = step == len(level.axes) - 1
                    made = works[step % 2]
                    if final and finest:
                        made = out
                    elif final and source is not coefficients:
                        made = coefficients
                    turned = lags if final and finest else None
                    args = (source, made, self._filter, _or_null(turned))
                    self._launch("synthesise", args, level, axis, coefficients, turned, stream)
                    source = made
                if source is not coefficients and not finest:
                    box = (slice(None), *map(slice, level.size))
                    coefficients[box] = source[box]

    def _launch(
        self, name: str, args: tuple[Any, ...], level: Level, axis: int, image: Any, lags: Any, stream: Any
    ) -> None:
        one = PassStruct(
            batch=image.shape[0], size=level.size, full=image.shape[1:], half=level.half, axis=axis,
            shifted=0 if lags is None else len(lags), coarsest=level.last,
        )  # fmt: skip
        pairs = image.shape[0] * math.prod(level.size) // level.size[axis] * -(-level.size[axis] // 2)
        entry = f"{name}<{self._taps}>"
        blocks = (blocks_of(pairs, THREADS),)
        kernel("wavelet", entry).launch(blocks, (THREADS,), (*args, one), stream=stream, dependent_launch=True)


def _or_null(array: Any) -> Any:
    return NULL if array is None else array


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "passes": Variant(
            summary="a thread makes a pair of values; thresholds and shifts cost no pass of their own",
            entries=tuple(f"{name}<{taps}>" for name in ("analyse", "synthesise") for taps in TAPS),
            run=lambda task: task(),
        )
    }
)
