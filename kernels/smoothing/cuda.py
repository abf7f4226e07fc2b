"""Smoothing on CUDA: which kernels of smoothing.cu run for an image, with which grids."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.ladder import Ladder
from kernels.launch import Repeat, kernel, record
from kernels.smoothing import fused, ladder, running, streamed, tree, wide
from kernels.smoothing.borders import MODES
from kernels.smoothing.constant import filtered_constant
from kernels.smoothing.window import MAX_TAPS, Window

# The contract fixes every rounding: the compiler must not contract a multiplication and an addition on its own.
OPTIONS = ("--fmad=false",)

THREADS = 256
TILE_BYTES = 64 * THREADS  # a separable pass's tile of sums in shared memory
MAX_BLOCKS = 1 << 30  # kernels loop where there is more to do
MAX_REPEATS = 256
ALIGNMENT = 256  # bytes; what a launch depends on of a pointer is its remainder

_C_TYPES = {
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "int16": "short",
    "float32": "float",
    "float64": "double",
}
_CTYPES = {"uint32": ctypes.c_uint32, "uint64": ctypes.c_uint64, "float32": ctypes.c_float, "float64": ctypes.c_double}
_SUM_TYPES = {"uint32": "unsigned", "uint64": "unsigned long long", "float32": "float", "float64": "double"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to smooth: what it is, which kernels it is made of, and how it runs them."""

    summary: str
    entries: tuple[str, ...]
    run: Callable[[Any, Sequence[Window], float, Any, Any], None]  # (image, windows, cval, out, stream)
    # Whether it can do this: (image's shape and dtype, windows)
    applies: Callable[[tuple[int, ...], np.dtype, Sequence[Window]], bool] = lambda shape, dtype, windows: True
    repeatable: bool = False  # whether `run` does nothing but launch kernels on the image and the result


def smooth(
    image: Any, windows: Sequence[Window], cval: float, out: Any, *, stream: Any = None, variant: str | None = None
) -> Any:
    """Filters a CuPy array along the windows' axes, taken in ascending order; without windows, a copy.

    image   : CuPy array of one of `kernels.smoothing.DTYPES`, any strides
    windows : sorted by axis; all boxes or all Gaussians
    out     : C-contiguous array of the result's shape and the image's dtype, or None for a new one
    stream  : the cupy.cuda.Stream to launch on; default CuPy's current one
    variant : a name in `VARIANTS`; default the fastest that applies

    Returns `out`. Nothing waits for the device. Raises ValueError where the variant named does not apply.
    """
    import cupy

    if variant is None and _repeated(image, windows, cval, out, stream):
        return out
    with image.device:
        stream = cupy.cuda.get_current_stream() if stream is None else stream
        with stream:
            source = cupy.ascontiguousarray(image)
            if out is None:
                out = cupy.empty(_output_shape(image.shape, windows), image.dtype)
            if not windows:
                cupy.copyto(out, source)
                return out
            chosen = _chosen(variant, image, windows)
            if variant is None and chosen.repeatable:
                _run_and_record(chosen, source, windows, cval, out, stream)
            else:
                chosen.run(source, windows, cval, out, stream)
    return out


_repeats: dict[Any, Repeat] = {}


def _layout(image: Any, windows: Sequence[Window], cval: Any, out: Any) -> Any:
    """All that the launches depend on but the arrays themselves; None where `cval` cannot be compared."""
    if not isinstance(cval, int | float):
        return None
    alignments = image.data.ptr % ALIGNMENT, out.data.ptr % ALIGNMENT
    return image.shape, image.dtype, tuple(windows), cval, math.copysign(1, cval), alignments, image.data.device_id


def _repeated(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> bool:
    """Makes the launches of an earlier call on arrays laid out alike, if there was one: a stream of chunks asks for the
    same again and again, and choosing kernels and grids takes longer than many a chunk."""
    import cupy

    if out is None or not image.flags.c_contiguous:
        return False
    repeat = _repeats.get(_layout(image, windows, cval, out))
    if repeat is None or cupy.cuda.runtime.getDevice() != image.data.device_id:
        return False
    repeat.launch((image.data.ptr, out.data.ptr), (cupy.cuda.get_current_stream() if stream is None else stream).ptr)
    return True


def _run_and_record(chosen: Variant, image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    repeat = record(lambda: chosen.run(image, windows, cval, out, stream), (image, out))
    layout = _layout(image, windows, cval, out)
    if repeat is not None and layout is not None:
        if len(_repeats) >= MAX_REPEATS:
            _repeats.clear()
        _repeats[layout] = repeat


def _chosen(name: str | None, image: Any, windows: Sequence[Window]) -> Variant:
    if name is None:
        return _fastest(image.shape, image.dtype, tuple(windows))
    if not VARIANTS[name].applies(image.shape, image.dtype, windows):
        raise ValueError(f"variant {name!r} cannot smooth {image.dtype} of shape {image.shape} along these axes")
    return VARIANTS[name]


@lru_cache(maxsize=256)
def _fastest(shape: tuple[int, ...], dtype: np.dtype, windows: tuple[Window, ...]) -> Variant:
    """The last variant that applies; looked up once, since a stream of chunks asks the same again and again."""
    return [found for found in VARIANTS.values() if found.applies(shape, dtype, windows)][-1]


def _output_shape(shape: Sequence[int], windows: Sequence[Window]) -> tuple[int, ...]:
    lengths = list(shape)
    for window in windows:
        lengths[window.axis] = window.output_length(lengths[window.axis])
    return tuple(lengths)


class Axis(ctypes.Structure):
    """struct Axis of smoothing.cu."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("outer", "length", "inner", "out_length")),
        *((name, ctypes.c_int) for name in ("before", "taps", "mode", "columns")),
    )


class Axes(ctypes.Structure):
    """struct Axes of smoothing.cu."""

    _fields_ = (
        ("axis", Axis * 3),
        ("between", ctypes.c_longlong * 3),
        ("inner", ctypes.c_longlong),
        ("total", ctypes.c_longlong),
    )


class FloatWeights(ctypes.Structure):
    """struct Weights<float> of smoothing.cu."""

    _fields_ = (("half", ctypes.c_float * (MAX_TAPS // 2 + 1)),)


class DoubleWeights(ctypes.Structure):
    """struct Weights<double> of smoothing.cu."""

    _fields_ = (("half", ctypes.c_double * (MAX_TAPS // 2 + 1)),)


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One axis's pass between two arrays."""

    axis: Axis
    window: Window
    source: Any
    target: Any
    fill: Any  # what the pass sees beyond the edge, of the type sums have
    last: bool
    samples: int  # in the whole window, over all axes

    def entry(self, family: str, sums: str) -> str:
        """The kernel that reads the source's type and writes the target's."""
        return f"{family}<{_type(self.source.dtype)}, {_SUM_TYPES[sums]}, {_type(self.target.dtype)}>"


def _type(dtype: Any) -> str:
    return {**_SUM_TYPES, **_C_TYPES}[np.dtype(dtype).name]


def _sum_type(dtype: np.dtype, windows: Sequence[Window]) -> str:
    """What a pass adds up in: the image's own precision, or whole numbers that hold the whole window's sum."""
    if windows[0].half_weights is not None:
        return "float64" if dtype == np.float64 else "float32"
    if dtype.kind == "f":
        return str(dtype.name)
    values = 1 << 8 * dtype.itemsize
    return "uint32" if values * math.prod(window.taps for window in windows) <= 1 << 32 else "uint64"


def _passes(image: Any, windows: Sequence[Window], cval: float, out: Any, sums: str) -> list[_Pass]:
    import cupy

    passes = []
    source, shape = image, list(image.shape)
    fill = np.dtype(sums).type(cval + 32768 if windows[0].half_weights is None and image.dtype == np.int16 else cval)
    for window in windows:
        axis = window.axis
        length, out_length = shape[axis], window.output_length(shape[axis])
        view = Axis(
            outer=math.prod(shape[:axis]), length=length, inner=math.prod(shape[axis + 1 :]), out_length=out_length,
            before=window.before, taps=window.taps, mode=MODES.index(window.mode), columns=0,
        )  # fmt: skip
        shape[axis] = out_length
        last = window is windows[-1]
        target = out if last else cupy.empty(shape, sums)
        samples = math.prod(each.taps for each in windows)
        passes.append(
            _Pass(axis=view, window=window, source=source, target=target, fill=fill, last=last, samples=samples)
        )
        source, fill = target, filtered_constant(window, fill)
    return passes


def _divisor(step: _Pass, sums: str) -> Any:
    """What box kernels finish with: the number of samples, or for floats its reciprocal (one before the last pass)."""
    if np.dtype(sums).kind == "u":
        return _CTYPES[sums](step.samples)
    return _CTYPES[sums](np.dtype(sums).type(1) / np.dtype(sums).type(step.samples) if step.last else 1)


def _weights(window: Window, sums: str) -> Any:
    assert window.half_weights is not None
    struct = DoubleWeights if sums == "float64" else FloatWeights
    weights = struct()
    weights.half[: len(window.half_weights)] = window.half_weights
    return weights


def _blocks(total: int, each: int) -> tuple[int]:
    return (min(-(-total // each), MAX_BLOCKS),)


def _run_gather(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    sums = _sum_type(image.dtype, windows)
    for step in _passes(image, windows, cval, out, sums):
        gaussian = step.window.half_weights is not None
        entry = step.entry("gauss_gather" if gaussian else "box_gather", sums)
        finish = _weights(step.window, sums) if gaussian else _divisor(step, sums)
        args = (step.source, step.target, step.axis, _CTYPES[sums](step.fill), finish)
        kernel("smoothing", entry).launch(_blocks(step.target.size, THREADS), (THREADS,), args, stream=stream)


def _run_separable(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    sums = _sum_type(image.dtype, windows)
    for step in _passes(image, windows, cval, out, sums):
        gaussian = step.window.half_weights is not None
        entry = step.entry("gauss_separable" if gaussian else "box_separable", sums)
        finish = _weights(step.window, sums) if gaussian else _divisor(step, sums)
        axis, size = step.axis, TILE_BYTES // np.dtype(sums).itemsize
        axis.columns = _tile_columns(axis, size)
        outputs = size // axis.columns - axis.taps + 1
        tiles = axis.outer * -(-axis.out_length // outputs) * -(-axis.inner // axis.columns)
        args = (step.source, step.target, axis, _CTYPES[sums](step.fill), finish, ctypes.c_longlong(tiles))
        kernel("smoothing", entry).launch(_blocks(tiles, 1), (THREADS,), args, stream=stream)


def _run_streamed(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    sums = _sum_type(image.dtype, windows)
    for step in _passes(image, windows, cval, out, sums):
        streamed.launch(step.axis, step.source, step.target, _CTYPES[sums](step.fill), _divisor(step, sums), stream)


def _tile_columns(axis: Axis, size: int) -> int:
    """Whole sectors of memory a row where the window lets the tile be wide; at least half its positions give output."""
    columns = min(int(axis.inner), 32)
    while columns > 1 and size // columns < 2 * (axis.taps - 1):
        columns = (columns + 1) // 2
    return columns


def _run_naive(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
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
    entry = f"box_direct<{_type(image.dtype)}>"
    kernel("smoothing", entry).launch(_blocks(out.size, THREADS), (THREADS,), args, stream=stream)


def _pass_entries(box: str, gauss: str, *, single_box: bool) -> tuple[str, ...]:
    """Every combination of types that the passes of a family meet.

    single_box : whether a box over whole numbers may be one pass; its sums then fit 32 bits
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


_DIRECT_ENTRIES = tuple(f"box_direct<{sample}>" for sample in ("unsigned char", "unsigned short", "short"))

# In the order of the source, naive to fast: the last that applies is the one in production.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "naive": Variant(
            summary="one thread a result, every tap from global memory",
            entries=(*_DIRECT_ENTRIES, *_pass_entries("box_gather", "gauss_gather", single_box=False)),
            run=_run_naive,
        ),
        "tiled": Variant(
            summary="both axes at once, taps from a tile with its halo in shared memory",
            entries=ladder.TILED_ENTRIES,
            run=ladder.run_tiled,
            applies=ladder.tiled_applies,
        ),
        "padded": Variant(
            summary="RGB copied to RGBX first, so that a tap is one vector from global memory",
            entries=ladder.PADDED_ENTRIES,
            run=ladder.run_padded,
            applies=ladder.gather_applies,
        ),
        "pitched": Variant(
            summary="the same, and every row begins at a multiple of 256 bytes",
            entries=ladder.PITCHED_ENTRIES,
            run=ladder.run_pitched,
            applies=ladder.gather_applies,
        ),
        "pitched_tiled": Variant(
            summary="padded and pitched, taps from a tile in shared memory",
            entries=ladder.PITCHED_TILED_ENTRIES,
            run=ladder.run_pitched_tiled,
            applies=ladder.pitched_tiled_applies,
        ),
        "separable": Variant(
            summary="one axis a pass, taps from a tile in shared memory",
            entries=_pass_entries("box_separable", "gauss_separable", single_box=True),
            run=_run_separable,
        ),
        "streamed": Variant(
            summary="boxes of floats, one axis a pass: each sample is loaded once, sums wait in shared memory",
            entries=streamed.ENTRIES,
            run=_run_streamed,
            applies=streamed.applies,
        ),
        "tree": Variant(
            summary="square boxes of float32 in one kernel: sums wait in registers down the columns and along the rows",
            entries=tree.ENTRIES,
            run=tree.run,
            applies=tree.applies,
            repeatable=True,
        ),
        "running": Variant(
            summary="boxes of any size in one kernel: running sums down the columns and along the rows",
            entries=running.ENTRIES,
            run=running.run,
            applies=running.applies,
            repeatable=True,
        ),
        "wide": Variant(
            summary="Gaussians of middling reach in one kernel: from registers down the columns, then along the rows",
            entries=wide.ENTRIES,
            run=wide.run,
            applies=wide.applies,
            repeatable=True,
        ),
        "fused": Variant(
            summary="short windows, both axes in one kernel, from registers",
            entries=fused.ENTRIES,
            run=fused.run,
            applies=fused.applies,
            repeatable=True,
        ),
    }
)


def ladders() -> tuple[Ladder, ...]:
    """What `millrace kernels bench smoothing` measures."""
    from kernels.smoothing.ladders import smoothing_ladders

    return smoothing_ladders()
