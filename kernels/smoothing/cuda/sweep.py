"""Boxes of integers of any size, kernels of sweep.cuh: when they apply, and their launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda.fused import MAX_BLOCKS, MAX_CHANNELS, MAX_LENGTH, VECTOR_BYTES, View, view_of
from kernels.smoothing.window import Window

THREADS = (640, 256)  # of a block of box_sweep, as its shared memory allows
EACH, START_EACH, START_THREADS = 24, 8, 256
STATIC_BYTES = 1024
C_TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "int16": "short"}
ENTRIES = (
    *(f"box_starts<{c}>" for c in C_TYPES.values()),
    *(
        f"box_sweep<{c}, {channels}, {threads}>"
        for c in C_TYPES.values()
        for channels in range(1, MAX_CHANNELS + 1)
        for threads in THREADS
    ),
)


class Sweep(ctypes.Structure):
    """struct Sweep of sweep.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("rows", "out_rows", "columns", "out_columns")),
        *((name, ctypes.c_int) for name in ("before_y", "taps_y", "mode_y", "before_x", "taps_x", "mode_x")),
        *((name, ctypes.c_int) for name in ("tiles", "outputs", "bands", "band_rows", "start_rows", "starts")),
        *((name, ctypes.c_int) for name in ("channels", "aligned")),
        *((name, ctypes.c_uint) for name in ("fill", "samples", "multiplier", "shift")),
        ("extra", ctypes.c_int),
    )


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or dtype.name not in C_TYPES or any(window.half_weights is not None for window in windows):
        return False
    if max(view.columns * view.channels, view.rows) + max(window.taps for window in windows) > MAX_LENGTH:
        return False
    threads = _threads(dtype.itemsize)
    taps_x = 1 if view.across is None else view.across.taps
    if threads is None or taps_x * view.channels > EACH * threads * 7 // 8:
        return False
    samples = math.prod(window.taps for window in windows)
    if (2 * _extra(view, dtype) + 1) * samples > 1 << 31 or (view.down and view.down.taps > 1 << 16):
        return False
    return view.planes * view.rows * view.columns * view.channels <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    import cupy

    view, dtype = view_of(image.shape, windows), np.dtype(image.dtype)
    assert view is not None
    sweep = _sweep(view, dtype, cval)
    row_samples, row_bytes = view.columns * view.channels, view.columns * view.channels * dtype.itemsize
    vector = START_EACH * dtype.itemsize
    sweep.aligned = row_bytes % vector == 0 and image.data.ptr % VECTOR_BYTES == 0
    count = sweep.bands + sweep.starts - 1
    starts = cupy.empty((view.planes, count, row_samples), "uint32")
    blocks = view.planes * count * -(-row_samples // (START_EACH * START_THREADS))
    kernel("smoothing", f"box_starts<{C_TYPES[dtype.name]}>").launch(
        (blocks,), (START_THREADS,), (image, starts, sweep), stream=stream
    )
    threads = _threads(dtype.itemsize)
    assert threads is not None
    kernel("smoothing", f"box_sweep<{C_TYPES[dtype.name]}, {view.channels}, {threads}>").launch(
        (view.planes * sweep.bands * sweep.tiles,), (threads,), (image, out, starts, sweep),
        shared_bytes=_shared_bytes(threads, dtype.itemsize), stream=stream,
    )  # fmt: skip


def _sweep(view: View, dtype: np.dtype[Any], cval: float) -> Sweep:
    down, across = view.down, view.across
    before_y, taps_y, mode_y = (0, 1, "reflect") if down is None else (down.before, down.taps, down.mode)
    before_x, taps_x, mode_x = (0, 1, "reflect") if across is None else (across.before, across.taps, across.mode)
    out_rows = view.rows if down is None else down.output_length(view.rows)
    out_columns = view.columns if across is None else across.output_length(view.columns)
    samples, threads = taps_y * taps_x, _threads(dtype.itemsize)
    assert threads is not None
    most = EACH * threads // view.channels - taps_x  # pixels
    tiles = -(-out_columns // most)
    outputs = -(-out_columns // tiles)
    bands = max(multiprocessors() // (view.planes * tiles), 1)
    band_rows = -(-out_rows // min(bands, out_rows))
    # As high as the window or a whole part of it, if that is not much higher.
    if taps_y >= band_rows:
        band_rows = taps_y // (taps_y // band_rows)
    start_rows = min(band_rows, taps_y)
    shift = samples.bit_length() - 1 - (samples & samples - 1 == 0)
    return Sweep(
        rows=view.rows, out_rows=out_rows, columns=view.columns, out_columns=out_columns,
        before_y=before_y, taps_y=taps_y, mode_y=MODES.index(mode_y),
        before_x=before_x, taps_x=taps_x, mode_x=MODES.index(mode_x),
        tiles=tiles, outputs=outputs * view.channels, bands=-(-out_rows // band_rows), band_rows=band_rows,
        start_rows=start_rows, starts=taps_y // start_rows, channels=view.channels,
        fill=int(cval) & 0xFFFF, samples=samples, multiplier=-(-(1 << 32 + shift) // samples), shift=shift,
        extra=_extra(view, dtype),
    )  # fmt: skip


def _extra(view: View, dtype: np.dtype[Any]) -> int:
    """The least whole number of means that a window may lose from one row to the next."""
    return int(-(-np.iinfo(f"uint{8 * dtype.itemsize}").max // (1 if view.down is None else view.down.taps)))


def _threads(itemsize: int) -> int | None:
    most = shared_bytes_a_block() - STATIC_BYTES
    return next((threads for threads in THREADS if _shared_bytes(threads, itemsize) <= most), None)


def _shared_bytes(threads: int, itemsize: int) -> int:
    """Of box_sweep: sums, four rows and the sources of samples beyond the edges."""
    return EACH * threads * (4 + 4 * itemsize + 2) + 4 * 32
