"""Windows of more than 255 taps, kernels of far.cuh: boxes by doubling, one axis per pass, and direct Gaussians."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel
from kernels.smoothing.cuda import passes
from kernels.smoothing.cuda.boxes import runs
from kernels.smoothing.window import Window

THREADS = 256
_SUMS = ("unsigned", "unsigned long long", "float", "double")
_SAMPLES = ("unsigned char", "unsigned short", "short")
ENTRIES = (
    *(f"box_double<{sums}>" for sums in _SUMS),
    *(f"{each}<{sums}, {sums}>" for each in ("box_extend", "box_finish") for sums in _SUMS),
    *(f"box_extend<{sample}, {sums}>" for sample in _SAMPLES for sums in _SUMS[:2]),
    *(f"box_finish<{sums}, {sample}>" for sample in _SAMPLES for sums in _SUMS[:2]),
    *(f"gauss_far<{sample}, float, {each}>" for sample in _SAMPLES for each in (sample, "float")),
    *(f"gauss_far<float, float, {sample}>" for sample in _SAMPLES),
    *(f"gauss_far<{real}, {real}, {real}>" for real in ("float", "double")),
)  # fmt: skip


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    sums = passes.sum_type(image.dtype, windows)
    for step in passes.passes_of(image, windows, cval, out, sums):
        if step.window.half_weights is not None:
            _gaussian(step, sums, stream)
        elif step.window.is_long_box and image.dtype.kind == "f":
            passes.run_float_box(step, sums, stream)
        else:
            _box(step, sums, stream)


def _gaussian(step: passes.Pass, sums: str, stream: Any) -> None:
    import cupy

    half = cupy.asarray(np.array(step.window.half_weights, sums))  # on the stream that `smooth` made current
    args = (step.source, step.target, half, step.axis, passes.C_SCALARS[sums](step.fill))
    _launch(step.entry("gauss_far", sums), step.target.size, args, stream)


def _box(step: passes.Pass, sums: str, stream: Any) -> None:
    import cupy

    axis, name = step.axis, passes.SUM_TYPES[sums]
    samples = cupy.empty(axis.outer * (axis.out_length + axis.taps - 1) * axis.inner, sums)
    entry = f"box_extend<{passes.type_name(step.source.dtype)}, {name}>"
    _launch(entry, samples.size, (step.source, samples, axis, passes.C_SCALARS[sums](step.fill)), stream)
    widened = runs.doubled(samples, axis.taps, axis.inner, name, stream)
    entry = f"box_finish<{name}, {passes.type_name(step.target.dtype)}>"
    _launch(entry, step.target.size, (widened, step.target, axis, passes.divisor(step, sums)), stream)


def _launch(entry: str, total: int, args: tuple[Any, ...], stream: Any) -> None:
    blocks = min(-(-total // THREADS), passes.MAX_BLOCKS)
    kernel("smoothing", entry).launch((blocks,), (THREADS,), args, stream=stream)
