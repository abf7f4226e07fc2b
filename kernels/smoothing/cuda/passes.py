"""Smoothing with one axis per pass, from device memory to device memory: the arguments and launches of these kernels of
smoothing.cu."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel
from kernels.smoothing.cuda.axis import Axis, axis_of
from kernels.smoothing.cuda.boxes import runs, streamed
from kernels.smoothing.scalars import filtered_constant
from kernels.smoothing.window import Window

THREADS = 256
TILE_BYTES = 64 * THREADS  # a separable pass's tile of sums in shared memory
MAX_HALF = 128  # weights of half a Gaussian that kernels take as an argument
MOST_TAPS = 2 * MAX_HALF - 1
MAX_BLOCKS = 1 << 30  # kernels loop if there is more to do

_C_TYPES = {
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "int16": "short",
    "float32": "float",
    "float64": "double",
}
C_SCALARS = {
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}
SUM_TYPES = {"uint32": "unsigned", "uint64": "unsigned long long", "float32": "float", "float64": "double"}


class FloatWeights(ctypes.Structure):
    """struct Weights<float> of smoothing.cu."""

    _fields_ = (("half", ctypes.c_float * MAX_HALF),)


class DoubleWeights(ctypes.Structure):
    """struct Weights<double> of smoothing.cu."""

    _fields_ = (("half", ctypes.c_double * MAX_HALF),)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One axis's pass between two arrays."""

    axis: Axis
    window: Window
    source: Any
    target: Any
    fill: Any  # the value beyond the edge, in the type of the sums
    last: bool
    samples: int  # in the whole window, over all axes

    def entry(self, family: str, sums: str) -> str:
        """The kernel that reads the source's type and writes the target's."""
        return f"{family}<{type_name(self.source.dtype)}, {SUM_TYPES[sums]}, {type_name(self.target.dtype)}>"


def type_name(dtype: Any) -> str:
    return {**SUM_TYPES, **_C_TYPES}[np.dtype(dtype).name]


def sum_type(dtype: np.dtype, windows: Sequence[Window]) -> str:
    """The type of the sums: the image's precision, or integers that hold the whole window's sum."""
    if windows[0].half_weights is not None:
        return "float64" if dtype == np.float64 else "float32"
    if dtype.kind == "f":
        return str(dtype.name)
    values = 1 << 8 * dtype.itemsize
    return "uint32" if values * math.prod(window.taps for window in windows) <= 1 << 32 else "uint64"


def passes_of(image: Any, windows: Sequence[Window], cval: float, out: Any, sums: str) -> list[Pass]:
    passes = []
    source, shape = image, list(image.shape)
    fill = np.dtype(sums).type(cval + 32768 if windows[0].half_weights is None and image.dtype == np.int16 else cval)
    for window in windows:
        axis = window.axis
        view = axis_of(shape, window)
        shape[axis] = view.out_length
        last = window is windows[-1]
        target = out if last else type(image)(tuple(shape), sums)  # on the stream that `smooth` made current
        samples = math.prod(each.taps for each in windows)
        passes.append(
            Pass(
                axis=view, window=window, source=source, target=target, fill=fill, last=last, samples=samples,
            )
        )  # fmt: skip
        source, fill = target, filtered_constant(window, fill)
    return passes


def divisor(step: Pass, sums: str) -> Any:
    """The divisor of box kernels: the number of samples; for floats its reciprocal, rounded once, 1 before the last."""
    if np.dtype(sums).kind == "u":
        return C_SCALARS[sums](step.samples)
    return C_SCALARS[sums](np.dtype(sums).type(1 / step.samples if step.last else 1))


def weights_of(step: Pass, sums: str) -> Any:
    half = step.window.half_weights
    assert half is not None
    weights = DoubleWeights() if sums == "float64" else FloatWeights()
    weights.half[: len(half)] = half
    return weights


def blocks_of(total: int, each: int) -> tuple[int]:
    return (min(-(-total // each), MAX_BLOCKS),)


def launch_gather(entry: str, step: Pass, parameters: tuple[Any, ...], stream: Any) -> None:
    """A kernel with one thread per result."""
    args = (step.source, step.target, step.axis, *parameters)
    kernel("smoothing", entry).launch(blocks_of(step.target.size, THREADS), (THREADS,), args, stream=stream)


def run_separable(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    sums = sum_type(image.dtype, windows)
    for step in passes_of(image, windows, cval, out, sums):
        gaussian = step.window.half_weights is not None
        entry = step.entry("gauss_separable" if gaussian else "box_separable", sums)
        finish = weights_of(step, sums) if gaussian else divisor(step, sums)
        axis, size = step.axis, TILE_BYTES // np.dtype(sums).itemsize
        axis.columns = _tile_columns(axis, size)
        outputs = size // axis.columns - axis.taps + 1
        tiles = axis.outer * -(-axis.out_length // outputs) * -(-axis.inner // axis.columns)
        args = (step.source, step.target, axis, C_SCALARS[sums](step.fill), finish, ctypes.c_longlong(tiles))
        kernel("smoothing", entry).launch(blocks_of(tiles, 1), (THREADS,), args, stream=stream)


def run_streamed(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> Sequence[Any]:
    sums = sum_type(image.dtype, windows)
    steps = passes_of(image, windows, cval, out, sums)
    for step in steps:
        run_float_box(step, sums, stream)
    return [step.target for step in steps if not step.last]


def run_float_box(step: Pass, sums: str, stream: Any) -> None:
    args = step.source, step.target, C_SCALARS[sums](step.fill), divisor(step, sums), stream
    if step.window.is_long_box:
        runs.launch(step.axis, step.window, *args)
    else:
        streamed.launch(step.axis, *args)


def _tile_columns(axis: Axis, size: int) -> int:
    """Whole sectors of memory per row if the window allows a wide tile; at least half of its positions give output."""
    columns = min(int(axis.inner), 32)
    while columns > 1 and size // columns < 2 * (axis.taps - 1):
        columns = (columns + 1) // 2
    return columns


def pass_entries(box: str, gauss: str, *, single_box: bool) -> tuple[str, ...]:
    """Every combination of types in the passes of a family.

    single_box : whether a box over integers may be one pass; its sums then fit 32 bits
    """
    entries = []
    for sums in ("unsigned", "unsigned long long"):
        for sample in ("unsigned char", "unsigned short", "short"):
            entries += [f"{box}<{a}, {sums}, {b}>" for a, b in ((sample, sums), (sums, sample))]
            if single_box and sums == "unsigned":
                entries.append(f"{box}<{sample}, {sums}, {sample}>")
        entries.append(f"{box}<{sums}, {sums}, {sums}>")
    for sample in ("unsigned char", "unsigned short", "short"):
        entries += [f"{gauss}<{a}, float, {b}>" for a, b in ((sample, sample), (sample, "float"), ("float", sample))]
    return (*entries, *(f"{family}<{real}, {real}, {real}>" for family in (box, gauss) for real in ("float", "double")))
