"""Smoothing of NumPy arrays: the image is cut into tiles, which our own threads compute with Numba-compiled code.

Neighbouring axes are filtered in pairs, without an intermediate array. Filters along more axes take several such
sweeps, with exact sums (integer boxes) or floats of the working precision in between.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.arrays import native
from kernels.runtime.threads import for_each
from kernels.smoothing import decimated
from kernels.smoothing.borders import border_indices
from kernels.smoothing.cpu import byte_sums as cpu_byte_sums
from kernels.smoothing.cpu import floats as cpu_float
from kernels.smoothing.cpu import integer_box as cpu_integer_box
from kernels.smoothing.cpu import runs as cpu_runs
from kernels.smoothing.cpu import small_box as cpu_small_box
from kernels.smoothing.cpu import words as cpu_words
from kernels.smoothing.cpu.resample import CpuPasses
from kernels.smoothing.cpu.rows import Axis, Tile, row_pitch
from kernels.smoothing.scalars import WHOLES
from kernels.smoothing.window import Window, extended, output_shape, result_dtype

Array = NDArray[Any]

MIN_SAMPLES_PER_WORKER = 1 << 18  # below this a thread costs more than it saves
MIN_TILE_SAMPLES = 1 << 12  # along a row
TILES_PER_WORKER = 4
MAX_KEPT_SCRATCH_BYTES = 1 << 24
CACHE_LINE_BYTES = 64
MAX_INT32_TAPS = (1 << 16) - 1  # samples of 16 bits, relative to the middle of their range, that fit an int32 sum
MAX_PAIRED_TAPS = 255  # of filters whose scratch has a row for every tap
MANY_CHANNELS = 8  # from which a single axis is filtered by sums of whole rows instead of within a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """One pass over the image as [planes, rows, columns, channels], which filters rows, columns or both."""

    windows: tuple[Window, ...]
    planes: int
    rows: Axis
    columns: Axis
    channels: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How tiles are computed."""

    tile: Callable[..., None]  # of image, border, out, scratch, pitch, rows, columns, channels, tile, *parameters
    precision: Any  # dtype of the scratch array and of the arrays between sweeps
    scratch_rows: Callable[[Axis], int]  # needed for the windows down the rows
    cache_samples: int  # scratch that stays in a core's cache
    parameters: Callable[[Sweep, bool, bool], tuple[Any, ...]]  # of (sweep, is first, is last)
    most_paired_taps: float = math.inf  # along either axis of a pair: its scratch has as many rows, each longer


def smooth(
    image: Array, windows: Sequence[Window], cval: float, out: Array | None, *, workers: int | None = None
) -> Array:
    """Filter along each window's axis (ascending, at least two taps each; all boxes or all Gaussians).

    image   : uint8, uint16, int16, float32 or float64, any layout and byte order
    out     : C-contiguous array for the result, in native byte order; None allocates one
    workers : threads, default one per core; 1 computes in the calling thread. The bits do not depend on it.
    """
    dtype = image.dtype.newbyteorder("=")
    result = np.empty(output_shape(image.shape, windows), result_dtype(dtype, windows)) if out is None else out
    if not windows:
        result[...] = image
        return result
    workers = workers or len(os.sched_getaffinity(0))
    if any(window.decimation or window.derivative for window in windows):
        decimated.smooth(native(image), windows, cval, result, CpuPasses(smooth, workers))
        return result
    usual, divisor = _method(tuple(windows), dtype), math.prod(window.taps for window in windows)
    source, windows = extended(native(image), windows, cval, np)
    groups, border = list(_neighbours(windows, usual.most_paired_taps, source.shape)), dtype.type(cval)
    for index, group in enumerate(groups):
        first, last = index == 0, index == len(groups) - 1
        in_runs = dtype.kind == "f" and any(window.is_long_box for window in group)
        method = _run_box(divisor, dtype) if in_runs else usual
        sweep = _sweep(source.shape, group)
        target = result if last else np.empty(output_shape(source.shape, group), method.precision)
        parameters = method.parameters(sweep, first, last)
        _compute(method, sweep, parameters, source, border, target, workers)
        if not last:
            border = _swept_border(method, group, first, source, border)
        source = target
    return result


def _method(windows: tuple[Window, ...], dtype: np.dtype[Any]) -> Method:
    if windows[0].half_weights is not None:
        return _gaussian(windows, dtype)
    divisor = math.prod(window.taps for window in windows)
    if dtype.kind == "f":
        return _float_box(divisor, dtype)
    small = _small_box(windows, divisor, dtype)
    return _integer_box(divisor, dtype) if small is None else small


def _small_box(windows: tuple[Window, ...], divisor: int, dtype: np.dtype[Any]) -> Method | None:
    """The method for boxes of few samples; None if there are more."""
    middle = _middle(dtype)
    if dtype == np.uint8:
        division = cpu_small_box.byte_division(divisor)
    elif divisor <= cpu_small_box.MOST_SAMPLES and windows[-1].taps <= cpu_small_box.MOST_COLUMNS:
        division = cpu_small_box.float_division(divisor, middle)
    else:
        return None
    if division is None:
        return None
    return Method(
        tile=cpu_small_box.small_box_tile,
        precision=np.uint16 if dtype == np.uint8 else np.int32,
        scratch_rows=lambda _rows: cpu_small_box.SCRATCH_ROWS,
        cache_samples=1 << (16 if dtype == np.uint8 else 15),
        parameters=lambda sweep, first, last: (
            middle if first else 0,
            cpu_float.doublings(sweep.columns.taps),
            division,
            last,
        ),
    )


def _middle(dtype: np.dtype[Any]) -> int:
    """The middle of the type's range, for types whose sums are relative to it; otherwise 0."""
    return 1 << 15 if dtype == np.uint16 else 0


def _integer_box(divisor: int, dtype: np.dtype[Any]) -> Method:
    sums, real = (np.int32, np.float32) if divisor <= MAX_INT32_TAPS else (np.int64, np.float64)
    middle = _middle(dtype)
    return Method(
        tile=cpu_integer_box.integer_box_tile,
        precision=sums,
        scratch_rows=lambda _rows: cpu_integer_box.SCRATCH_ROWS,
        cache_samples=1 << 15,
        parameters=lambda _sweep, first, last: (
            middle if first else 0,
            middle if last else 0,
            divisor if last else 0,
            real(1 / divisor),
        ),
    )


def _float_box(divisor: int, dtype: np.dtype[Any]) -> Method:
    return Method(
        tile=cpu_float.float_box_tile,
        precision=dtype,
        scratch_rows=cpu_float.float_box_scratch_rows,
        most_paired_taps=MAX_PAIRED_TAPS,
        cache_samples=1 << 16,
        parameters=lambda sweep, _first, last: (
            cpu_float.doublings(sweep.rows.taps),
            cpu_float.doublings(sweep.columns.taps),
            dtype.type(1 / divisor if last else 1),
        ),
    )


def _run_box(divisor: int, dtype: np.dtype[Any]) -> Method:
    def parameters(sweep: Sweep, _first: bool, last: bool) -> tuple[Any, ...]:
        down, across = sweep.windows[0], sweep.windows[-1]
        steps = cpu_runs.run_steps(sweep.rows.taps), cpu_runs.run_steps(sweep.columns.taps)
        return down.offset, across.offset, *steps, dtype.type(1 / divisor if last else 1)

    return Method(
        tile=cpu_runs.run_box_tile,
        precision=dtype,
        scratch_rows=cpu_runs.run_box_scratch_rows,
        cache_samples=1 << 17,
        parameters=parameters,
    )


def _word_gaussian(windows: tuple[Window, ...], dtype: np.dtype[Any]) -> Method:
    down, across = (window.half_weights or () for window in windows)
    parameters = cpu_words.row_parameters(down), cpu_words.column_parameters(across), _added_middle(dtype)
    return Method(
        tile=cpu_words.words_tile,
        precision=np.int32,
        scratch_rows=cpu_words.scratch_rows,
        cache_samples=3 << 15,
        parameters=lambda _sweep, _first, _last: parameters,
    )


def _byte_gaussian(windows: tuple[Window, ...]) -> Method:
    first, second = windows[0].half_weights or (), windows[-1].half_weights or ()
    across = cpu_byte_sums.column_parameters(second) if len(windows) == 2 else (np.empty(0, np.int32), 0)
    parameters = cpu_byte_sums.row_parameters(first), *across
    return Method(
        tile=cpu_byte_sums.bytes_tile,
        precision=np.float32,
        scratch_rows=cpu_byte_sums.scratch_rows,
        cache_samples=1 << 16,
        parameters=lambda _sweep, _first, _last: parameters,
    )


def _added_middle(dtype: np.dtype[Any]) -> int:
    return 1 << 15 if dtype == np.int16 else 0


def _gaussian(windows: tuple[Window, ...], dtype: np.dtype[Any]) -> Method:
    if windows[0].words:
        return _word_gaussian(windows, dtype)
    if windows[0].exact:
        return _byte_gaussian(windows)
    precision = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    whole = dtype.kind != "f"

    def parameters(sweep: Sweep, _first: bool, last: bool) -> tuple[Any, ...]:
        weights = [np.array(window.half_weights, precision) for window in sweep.windows]
        if len(weights) == 1:
            weights.insert(0 if sweep.rows.taps == 1 else 1, np.ones(1, precision))
        return *weights, np.array((WHOLES, WHOLES), precision), whole and last

    return Method(
        tile=cpu_float.gaussian_tile,
        precision=precision,
        scratch_rows=cpu_float.gaussian_scratch_rows,
        most_paired_taps=MAX_PAIRED_TAPS,
        cache_samples=1 << 16,
        parameters=parameters,
    )


def _neighbours(windows: Sequence[Window], most_taps: float, shape: tuple[int, ...]) -> Iterator[tuple[Window, ...]]:
    """The windows in order, two of neighbouring axes together if neither has more taps than this or than the image has
    samples: a pair sums its halo's corners too."""
    rest = list(windows)
    while rest:
        fits = all(each.taps <= min(most_taps, max(shape[each.axis], MAX_PAIRED_TAPS)) for each in rest[:2])
        pair = len(rest) > 1 and rest[0].axis + 1 == rest[1].axis and fits
        # Of three neighbours, the last two are paired: they are closer in memory.
        if pair and len(rest) > 2 and rest[1].axis + 1 == rest[2].axis and len(rest) % 2:
            pair = False
        yield tuple(rest[: 1 + pair])
        rest = rest[1 + pair :]


def _sweep(shape: tuple[int, ...], windows: tuple[Window, ...]) -> Sweep:
    axis = windows[0].axis
    before, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    if len(windows) == 2:
        rows, columns = _axis(shape[axis], windows[0]), _axis(shape[axis + 1], windows[1])
        return Sweep(windows=windows, planes=before, rows=rows, columns=columns, channels=inner // shape[axis + 1])
    if inner >= MANY_CHANNELS:
        rows, columns = _axis(shape[axis], windows[0]), _axis(inner, None)
        return Sweep(windows=windows, planes=before, rows=rows, columns=columns, channels=1)
    rows, columns = _axis(before, None), _axis(shape[axis], windows[0])
    return Sweep(windows=windows, planes=1, rows=rows, columns=columns, channels=inner)


@functools.lru_cache(maxsize=256)
def _axis(length: int, window: Window | None) -> Axis:
    nothing = np.empty(0, np.int64)
    if window is None:
        return Axis(length, length, 0, 1, nothing, nothing)
    if window.mode == "valid":
        return Axis(length, window.output_length(length), 0, window.taps, nothing, nothing)
    low = border_indices(np.arange(-window.before, 0), length, window.mode)
    high = border_indices(np.arange(length, length + window.after), length, window.mode)
    return Axis(length, length, -window.before, window.taps, low, high)


def _swept_border(method: Method, windows: tuple[Window, ...], first: bool, source: Array, border: Any) -> Any:
    """The value beyond the edge as a sweep filters it, for the next sweep."""
    shape = [1] * source.ndim
    for window in windows:
        shape[window.axis] = window.taps
    whole_windows = tuple(dataclasses.replace(window, mode="valid") for window in windows)
    sweep = _sweep(tuple(shape), whole_windows)
    result = np.empty(1, method.precision)
    _compute(method, sweep, method.parameters(sweep, first, False), np.full(shape, border), border, result, 1)
    return result[0]


def _compute(
    method: Method, sweep: Sweep, parameters: tuple[Any, ...], source: Array, border: Any, target: Array, workers: int
) -> None:
    rows, columns, channels = sweep.rows, sweep.columns, sweep.channels
    workers = max(1, min(workers, target.size // MIN_SAMPLES_PER_WORKER))
    tiles = _tiles(method, sweep, workers)
    tile_columns = max(tile.x1 - tile.x0 for tile in tiles)
    pitch = row_pitch((tile_columns + columns.taps) * channels)
    scratch_samples = method.scratch_rows(rows) * pitch
    flat_source, flat_target = source.reshape(-1), target.reshape(-1)
    outside = np.full(columns.length * channels, border, source.dtype)

    def compute(tile: Tile) -> None:
        scratch = _scratch(scratch_samples, method.precision)
        method.tile(flat_source, outside, flat_target, scratch, pitch, rows, columns, channels, tile, *parameters)

    for_each(compute, tiles, workers)


def _tiles(method: Method, sweep: Sweep, workers: int) -> list[Tile]:
    """Tiles that cover the output once: narrow enough for the cache, enough to keep the workers busy, and not so small
    that the windows' overlap dominates."""
    rows, columns, channels = sweep.rows, sweep.columns, sweep.channels
    widest = max(
        method.cache_samples // (method.scratch_rows(rows) * channels),
        4 * columns.taps,
        MIN_TILE_SAMPLES // channels // 4,
        1,
    )
    across = -(-columns.out_length // widest)
    wanted = 1 if workers == 1 else TILES_PER_WORKER * workers
    stacks = min(sweep.planes, wanted)
    down = min(-(-wanted // (stacks * across)), max(1, rows.out_length // (4 * rows.taps)))
    if stacks * across * down < workers:
        narrowest = max(4 * columns.taps, -(-MIN_TILE_SAMPLES // channels))
        across = max(across, min(-(-workers // (stacks * down)), columns.out_length // narrowest))
    return [
        Tile(plane0, plane1, y0, y1, x0, x1)
        for plane0, plane1 in _cuts(sweep.planes, stacks)
        for y0, y1 in _cuts(rows.out_length, down)
        for x0, x1 in _cuts(columns.out_length, across)
    ]


def _cuts(length: int, parts: int) -> list[tuple[int, int]]:
    return [(length * i // parts, length * (i + 1) // parts) for i in range(parts)]


_this_thread = threading.local()


def _scratch(samples: int, dtype: Any) -> Array:
    """Uninitialised memory, which each thread reuses from call to call."""
    needed_bytes = samples * np.dtype(dtype).itemsize
    kept: Array | None = getattr(_this_thread, "scratch", None)
    if kept is None or kept.size < needed_bytes:
        kept = np.empty(needed_bytes + CACHE_LINE_BYTES, np.uint8)
        kept = kept[-kept.ctypes.data % CACHE_LINE_BYTES :]
        if needed_bytes <= MAX_KEPT_SCRATCH_BYTES:
            _this_thread.scratch = kept
    return kept[:needed_bytes].view(dtype)
