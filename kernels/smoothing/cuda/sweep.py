"""Boxes of integers of any size, kernels of sweep.cuh: when they apply, and their launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda.fused import MAX_BLOCKS, MAX_CHANNELS, MAX_LENGTH, VECTOR_BYTES, View, view_of
from kernels.smoothing.window import Window

THREADS = (640, 256)  # of a block of box_sweep, as its shared memory allows
EACH, START_EACH, START_THREADS = 24, 8, 256
STATIC_BYTES = 2048
START_ROWS = 12  # whose work the start of a block equals
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
    if not _cuts(view, dtype):
        return False
    samples = math.prod(window.taps for window in windows)
    if (2 * _extra(view, dtype) + 1) * samples > 1 << 31 or (view.down and view.down.taps > 1 << 16):
        return False
    return view.planes * view.rows * view.columns * view.channels <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    import cupy

    view, dtype = view_of(image.shape, windows), np.dtype(image.dtype)
    assert view is not None
    cut = min(_cuts(view, dtype), key=lambda cut: cut.cost)
    sweep = _sweep(view, dtype, cval, cut)
    row_samples, row_bytes = view.columns * view.channels, view.columns * view.channels * dtype.itemsize
    vector = START_EACH * dtype.itemsize
    sweep.aligned = row_bytes % vector == 0 and image.data.ptr % VECTOR_BYTES == 0
    count = sweep.bands + sweep.starts - 1
    starts = cupy.empty((view.planes, count, row_samples), "uint32")
    blocks = view.planes * count * -(-row_samples // (START_EACH * START_THREADS))
    kernel("smoothing", f"box_starts<{C_TYPES[dtype.name]}>").launch(
        (blocks,), (START_THREADS,), (image, starts, sweep), stream=stream
    )
    kernel("smoothing", f"box_sweep<{C_TYPES[dtype.name]}, {view.channels}, {cut.threads}>").launch(
        (view.planes * sweep.bands * sweep.tiles,), (cut.threads,), (image, out, starts, sweep),
        shared_bytes=_shared_bytes(cut.threads, dtype.itemsize), stream=stream,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How an image is cut into blocks of box_sweep."""

    threads: int
    tiles: int  # across a row
    band_rows: int
    cost: int  # what a multiprocessor does, in samples read


def _cuts(view: View, dtype: np.dtype[Any]) -> list[Cut]:
    """Those that are possible."""
    taps_y, taps_x = (1 if window is None else window.taps for window in (view.down, view.across))
    out_rows, out_columns = _output(view)
    found = []
    for threads in THREADS:
        at_once = min((shared_bytes_a_block() + 1024) // (_shared_bytes(threads, dtype.itemsize) + STATIC_BYTES), 2)
        most = EACH * threads // view.channels - taps_x  # pixels of a row that a block writes
        if threads > 320:
            at_once = min(at_once, 1)
        if at_once == 0 or most < taps_x // 8 + 1:
            continue
        tiles = -(-out_columns // most)
        bands = max(at_once * multiprocessors() // (view.planes * tiles), 1)
        band_rows = -(-out_rows // min(bands, out_rows))
        # As high as the window or a whole part of it, if that is not much higher.
        if taps_y >= band_rows:
            band_rows = taps_y // (taps_y // band_rows)
        blocks = view.planes * tiles * -(-out_rows // band_rows)
        cost = -(-blocks // (at_once * multiprocessors())) * at_once * threads * (band_rows + START_ROWS)
        found.append(Cut(threads=threads, tiles=tiles, band_rows=band_rows, cost=cost))
    return found


def _output(view: View) -> tuple[int, int]:
    """Rows and columns of a plane of the result."""
    out_rows = view.rows if view.down is None else view.down.output_length(view.rows)
    return out_rows, view.columns if view.across is None else view.across.output_length(view.columns)


def _sweep(view: View, dtype: np.dtype[Any], cval: float, cut: Cut) -> Sweep:
    down, across = view.down, view.across
    before_y, taps_y, mode_y = (0, 1, "reflect") if down is None else (down.before, down.taps, down.mode)
    before_x, taps_x, mode_x = (0, 1, "reflect") if across is None else (across.before, across.taps, across.mode)
    out_rows, out_columns = _output(view)
    samples, tiles, band_rows = taps_y * taps_x, cut.tiles, cut.band_rows
    outputs = -(-out_columns // tiles)
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


def _shared_bytes(threads: int, itemsize: int) -> int:
    """Of box_sweep: sums, four rows and the sources of samples beyond the edges."""
    return EACH * threads * (4 + 4 * itemsize + 2) + 4 * 32
