"""Smoothing on CUDA: the choice and launch of the kernels of smoothing.cu."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.runtime.launch import Repeat, on_stream, record
from kernels.smoothing import decimated
from kernels.smoothing.cuda import far, fused, ladder, passes
from kernels.smoothing.cuda.boxes import run_plane, running, runs, streamed, sweep, tree
from kernels.smoothing.cuda.coarse import resample
from kernels.smoothing.cuda.gaussians import apart, tensor, wide, words
from kernels.smoothing.cuda.ladder import naive
from kernels.smoothing.window import MAX_TAPS, Window, extended, output_shape, result_dtype

# The contract fixes every rounding, so the compiler must not contract multiplications and additions.
OPTIONS = ("--fmad=false",)

MAX_REPEATS = 256
ALIGNMENT = 256  # bytes; launches depend on a pointer's remainder only


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to smooth, with its kernels."""

    summary: str
    entries: tuple[str, ...]
    # (image, windows, cval, out, stream) -> the arrays that it made for results in between, if it is repeatable
    run: Callable[[Any, Sequence[Window], float, Any, Any], Sequence[Any] | None]
    # (image's shape and dtype, windows) -> whether it can filter them
    applies: Callable[[tuple[int, ...], np.dtype, Sequence[Window]], bool] = lambda shape, dtype, windows: True
    repeatable: bool = False  # whether `run` only launches kernels on the image and the result
    most_taps: int = passes.MOST_TAPS  # along any axis
    words: bool = False  # Gaussians of 16-bit samples in exact sums; others do not
    exact: bool = False  # the same of bytes
    decimates: bool = False  # Gaussians of which an axis is decimated, and derivatives; others do not

    def can_filter(self, shape: tuple[int, ...], dtype: np.dtype, windows: Sequence[Window]) -> bool:
        if self.decimates != any(window.decimation or window.derivative for window in windows):
            return False
        if (self.words, self.exact) != (windows[0].words, windows[0].exact):
            return False
        if dtype.kind == "f" and self.most_taps == passes.MOST_TAPS and any(window.is_long_box for window in windows):
            return False  # which is summed in runs
        return max(window.taps for window in windows) <= self.most_taps and self.applies(shape, dtype, windows)

    def can_repeat(self, windows: Sequence[Window]) -> bool:
        """CuPy's own kernels, which copy and convert between direct and decimated axes, are not recorded."""
        return self.repeatable and (not self.decimates or all(window.decimation for window in windows))


def smooth(
    image: Any, windows: Sequence[Window], cval: float, out: Any, *, stream: Any = None, variant: str | None = None
) -> Any:
    """Filters a CuPy array along the windows' axes, in ascending order; copies it if there are no windows.

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
    with on_stream(image, stream) as current:
        if out is None:
            out = cupy.empty(output_shape(image.shape, windows), result_dtype(image.dtype, windows))
        source, windows = extended(cupy.ascontiguousarray(image), windows, cval, cupy)
        if not windows:
            cupy.copyto(out, source)
            return out
        chosen = _chosen(variant, source, windows)
        if variant is None and chosen.can_repeat(windows):
            _run_and_record(chosen, source, windows, cval, out, current)
        else:
            chosen.run(source, windows, cval, out, current)
    return out


_repeats: dict[Any, Repeat] = {}


def _layout(image: Any, windows: Sequence[Window], cval: Any, out: Any) -> Any:
    """Everything that the launches depend on, except the arrays; None if `cval` cannot be compared."""
    if not isinstance(cval, int | float):
        return None
    alignments = image.data.ptr % ALIGNMENT, out.data.ptr % ALIGNMENT
    return image.shape, image.dtype, tuple(windows), cval, math.copysign(1, cval), alignments, image.data.device_id


def _repeated(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> bool:
    """Repeats the launches of an earlier call on arrays of the same layout, if there was one: a stream of chunks
    repeats calls, and choosing kernels and grids takes longer than many chunks."""
    import cupy

    if out is None or not image.flags.c_contiguous:
        return False
    repeat = _repeats.get(_layout(image, windows, cval, out))
    if repeat is None or cupy.cuda.runtime.getDevice() != image.data.device_id:
        return False
    current = cupy.cuda.get_current_stream() if stream is None else stream
    with current:  # the pool hands freed memory to later work on the same stream only
        made = [cupy.cuda.alloc(size) for size in repeat.made_bytes]
    repeat.launch((image.data.ptr, out.data.ptr, *(memory.ptr for memory in made)), current.ptr)
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
    if not VARIANTS[name].can_filter(image.shape, image.dtype, windows):
        raise ValueError(f"variant {name!r} cannot smooth {image.dtype} of shape {image.shape} along these axes")
    return VARIANTS[name]


@lru_cache(maxsize=256)
def _fastest(shape: tuple[int, ...], dtype: np.dtype, windows: tuple[Window, ...]) -> Variant:
    """The last variant that applies; cached, since a stream of chunks repeats calls."""
    return [found for found in VARIANTS.values() if found.can_filter(shape, dtype, windows)][-1]


def _run_decimated(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> Sequence[Any]:
    def directly(values: Any, coarse: Sequence[Window], fill: float, smoothed: Any) -> None:
        _chosen(None, values, coarse).run(values, coarse, fill, smoothed, stream)

    passes = resample.CudaPasses(directly, stream)
    decimated.smooth(image, windows, cval, out, passes)
    return passes.made


# In the order of the source, naive to fast: production uses the last that applies.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "far": Variant(
            summary="windows of any size, one axis per pass: boxes by doubling in device memory, Gaussians tap by tap",
            entries=far.ENTRIES,
            run=far.run,
            most_taps=MAX_TAPS,
        ),
        "sweep": Variant(
            summary="boxes of integers past 255 samples, both axes at once: sums of what changes from row to row",
            entries=sweep.ENTRIES,
            run=sweep.run,
            applies=sweep.applies,
            repeatable=True,
            most_taps=MAX_TAPS,
        ),
        "decimated": Variant(
            summary="wide Gaussians, on a coarse grid, and derivatives of Gaussians",
            entries=resample.ENTRIES,
            run=_run_decimated,
            repeatable=True,
            most_taps=MAX_TAPS,
            decimates=True,
        ),
        "naive": Variant(
            summary="one thread per result, every tap from global memory",
            entries=naive.ENTRIES,
            run=naive.run,
        ),
        "tiled": Variant(
            summary="both axes at once, taps from a tile with its halo in shared memory",
            entries=ladder.TILED_ENTRIES,
            run=ladder.run_tiled,
            applies=ladder.tiled_applies,
        ),
        "padded": Variant(
            summary="RGB is copied to RGBX first, so that a tap is one vector from global memory",
            entries=ladder.PADDED_ENTRIES,
            run=ladder.run_padded,
            applies=ladder.gather_applies,
        ),
        "pitched": Variant(
            summary="padded, with every row starting at a multiple of 256 bytes",
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
            summary="one axis per pass, taps from a tile in shared memory",
            entries=passes.pass_entries("box_separable", "gauss_separable", single_box=True),
            run=passes.run_separable,
        ),
        "streamed": Variant(
            summary="boxes of floats, one axis per pass: each sample is loaded once, sums are kept in shared memory",
            entries=(*streamed.ENTRIES, *runs.ENTRIES),
            run=passes.run_streamed,
            applies=streamed.applies,
            repeatable=True,
            most_taps=MAX_TAPS,
        ),
        "tree": Variant(
            summary="square boxes of float32 in one kernel: sums stay in registers down the columns and along the rows",
            entries=tree.ENTRIES,
            run=tree.run,
            applies=tree.applies,
            repeatable=True,
        ),
        "run_plane": Variant(
            summary="boxes of float32 of 65 to 128 samples, both axes in one kernel, in runs of 16",
            entries=run_plane.ENTRIES,
            run=run_plane.run,
            applies=run_plane.applies,
            repeatable=True,
            most_taps=run_plane.MOST_TAPS,
        ),
        "running": Variant(
            summary="boxes of any size in one kernel: running sums down the columns and along the rows",
            entries=running.ENTRIES,
            run=running.run,
            applies=running.applies,
            repeatable=True,
        ),
        "wide": Variant(
            summary="Gaussians of medium reach in one kernel: from registers down the columns, then along the rows",
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
        "word_sums": Variant(
            summary="Gaussians of 16-bit samples in exact sums, one axis per pass, every tap from global memory",
            entries=words.GATHER_ENTRIES,
            run=words.run_gather,
            words=True,
        ),
        "words_apart": Variant(
            summary="the same by `words`, on a copy whose channels are apart",
            entries=words.APART_ENTRIES,
            run=partial(apart.run, words.run),
            applies=partial(apart.applies, words.applies),
            words=True,
        ),
        "words": Variant(
            summary="the same, both axes in one kernel, by exact products on tensor cores",
            entries=words.ENTRIES,
            run=words.run,
            applies=words.applies,
            repeatable=True,
            words=True,
        ),
        "byte_sums": Variant(
            summary="Gaussians of bytes in exact sums, one axis per pass, every tap from global memory",
            entries=tensor.GATHER_ENTRIES,
            run=tensor.run_gather,
            exact=True,
        ),
        "bytes_apart": Variant(
            summary="the same by `tensor`, on a copy whose channels are apart",
            entries=tensor.ENTRIES[:: fused.MAX_CHANNELS],
            run=partial(apart.run, tensor.run),
            applies=partial(apart.applies, tensor.applies),
            exact=True,
        ),
        "tensor": Variant(
            summary="the same, both axes in one kernel, by exact products on tensor cores",
            entries=tensor.ENTRIES,
            run=tensor.run,
            applies=tensor.applies,
            repeatable=True,
            exact=True,
        ),
    }
)
