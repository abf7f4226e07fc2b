"""The first step of the classic ladder, kernels of naive.cuh: one thread per result, every tap from global memory.
Gaussians, floats and more than three axes take one axis per pass."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from kernels.runtime.launch import kernel
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda import passes
from kernels.smoothing.cuda.axis import Axis
from kernels.smoothing.window import Window

ENTRIES = (
    *(f"box_direct<{sample}>" for sample in ("unsigned char", "unsigned short", "short")),
    *passes.pass_entries("box_gather", "gauss_gather", single_box=False),
)


class Axes(ctypes.Structure):
    """struct Axes of naive.cuh."""

    _fields_ = (
        ("axis", Axis * 3),
        ("between", ctypes.c_longlong * 3),
        ("inner", ctypes.c_longlong),
        ("total", ctypes.c_longlong),
    )


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    if windows[0].half_weights is not None or image.dtype.kind == "f" or len(windows) > 3:
        _run_gather(image, windows, cval, out, stream)
        return
    axes = Axes(total=out.size)
    shape, before = image.shape, 0
    for place, window in enumerate(windows, start=3 - len(windows)):
        axis = window.axis
        axes.between[place] = math.prod(shape[before:axis])
        axes.axis[place] = Axis(
            length=shape[axis], inner=math.prod(shape[axis + 1 :]), out_length=out.shape[axis],
            before=window.before, taps=window.taps, mode=MODES.index(window.mode),
        )  # fmt: skip
        before = axis + 1
    for place in range(3 - len(windows)):
        axes.between[place] = 1
        axes.axis[place] = Axis(length=1, inner=0, out_length=1, before=0, taps=1, mode=0)
    axes.inner = math.prod(shape[before:])
    samples = math.prod(window.taps for window in windows)
    args = (image, out, axes, ctypes.c_int(int(cval)), ctypes.c_uint64(samples))
    entry, blocks = f"box_direct<{passes.type_name(image.dtype)}>", passes.blocks_of(out.size, passes.THREADS)
    kernel("smoothing", entry).launch(blocks, (passes.THREADS,), args, stream=stream)


def _run_gather(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    sums = passes.sum_type(image.dtype, windows)
    for step in passes.passes_of(image, windows, cval, out, sums):
        gaussian = step.window.half_weights is not None
        entry = step.entry("gauss_gather" if gaussian else "box_gather", sums)
        finish = passes.weights_of(step, sums) if gaussian else passes.divisor(step, sums)
        passes.launch_gather(entry, step, (passes.C_SCALARS[sums](step.fill), finish), stream)
