"""Boxes over floats, one axis per pass, kernels `box_columns` and `box_rows`: when they apply, and their launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import blocks_a_multiprocessor, kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.window import Window

REALS = {"float32": "float", "float64": "double"}
# Samples that a thread of box_rows holds; the number that wastes the least of a line is chosen.
ROW_SAMPLES = {"float32": (8, 12, 16), "float64": (4, 6, 8)}
BATCH = 8  # rows of a warp in a step of box_columns
# Warps of a block: few if their rings leave room for several blocks, otherwise as many as shared memory allows.
COLUMN_WARPS, FEW_WARPS_BYTES = (8, 4), 52 << 10
ENTRIES = (
    "box_columns<float, 4>",  # whose rings always leave room
    *(f"box_columns<double, {warps}>" for warps in COLUMN_WARPS),
    *(f"box_rows<{real}, {samples}>" for name, real in REALS.items() for samples in ROW_SAMPLES[name]),
)
MIN_COLUMNS = 32  # neighbouring columns that a warp needs for whole loads
TILE_COLUMNS = 32
MAX_LENGTH = 1 << 30  # samples of a line that box_rows takes: positions in it are 32-bit numbers
ROW_HALO_BYTES, ROW_THREADS = 4096, 256
MAX_BLOCKS = (1 << 31) - 1
MAX_BAND_ROWS = 1 << 30


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    if dtype.name not in REALS or windows[0].half_weights is not None:
        return False
    for window in (window for window in windows if not window.is_long_box):
        inner = math.prod(shape[window.axis + 1 :])
        if inner < MIN_COLUMNS and (window.taps - 1) * inner * dtype.itemsize > ROW_HALO_BYTES:
            return False
        if inner < MIN_COLUMNS and (shape[window.axis] + window.taps) * inner > MAX_LENGTH:
            return False
        if inner >= MIN_COLUMNS and _warps(window.taps, dtype.itemsize) is None:
            return False
        if math.prod(shape[: window.axis]) * (1 + shape[window.axis] * inner // TILE_COLUMNS) > MAX_BLOCKS:
            return False
    return True


def launch(axis: Any, source: Any, target: Any, fill: Any, scale: Any, stream: Any) -> None:
    """One axis's pass. `axis` is struct Axis of smoothing.cu; fill and scale are ctypes values of the arrays' type."""
    itemsize, real = source.dtype.itemsize, REALS[source.dtype.name]
    if axis.inner < MIN_COLUMNS:
        out_samples = axis.out_length * axis.inner
        each, outputs = _row_tile(source.dtype.name, out_samples, (axis.taps - 1) * axis.inner)
        blocks = axis.outer * -(-out_samples // outputs)
        kernel("smoothing", f"box_rows<{real}, {each}>").launch(
            (blocks,), (ROW_THREADS,), (source, target, axis, fill, scale, ctypes.c_int(outputs)), stream=stream
        )
        return
    warps = _warps(axis.taps, itemsize)
    assert warps is not None
    shared = _shared_bytes(axis.taps, itemsize, warps)
    tiles = axis.outer * -(-axis.inner // TILE_COLUMNS)
    at_once = (16 if itemsize == 8 else 24) // warps  # as registers allow
    resident = min(blocks_a_multiprocessor(shared), at_once) * multiprocessors()
    # Tall bands, since each also reads a halo of taps - 1 rows, but enough to fill the device once.
    bands = max(min(resident // tiles, axis.out_length // (4 * axis.taps)), 1)
    rows = min(-(-axis.out_length // bands), MAX_BAND_ROWS)
    blocks = tiles * -(-axis.out_length // rows)
    args = (source, target, axis, fill, scale, ctypes.c_longlong(rows))
    kernel("smoothing", f"box_columns<{real}, {warps}>").launch(
        (blocks,), (32 * warps,), args, shared_bytes=shared, stream=stream
    )


def _row_tile(dtype: str, out_samples: int, halo: int) -> tuple[int, int]:
    """Samples per thread, and outputs per block, as equal as whole sectors of memory allow."""
    tiles = {each: -(-out_samples // (each * ROW_THREADS - halo)) for each in ROW_SAMPLES[dtype]}
    each = min(tiles, key=lambda each: tiles[each] * each)
    return each, min(-(-out_samples // tiles[each] // 32) * 32, each * ROW_THREADS - halo)


def _warps(taps: int, itemsize: int) -> int | None:
    if _shared_bytes(taps, itemsize, COLUMN_WARPS[-1]) <= FEW_WARPS_BYTES:
        return COLUMN_WARPS[-1]
    most = shared_bytes_a_block()
    return next((warps for warps in COLUMN_WARPS if _shared_bytes(taps, itemsize, warps) <= most), None)


def _shared_bytes(taps: int, itemsize: int, warps: int) -> int:
    """Of the rings of all levels of box_columns."""
    levels, slots = taps.bit_length() - 1, 0
    for level in range(levels):
        delay = (taps >> levels - level) + (taps >> levels - level - 1 & 1)
        slots += -(-delay // BATCH) * BATCH + (warps + 1) * BATCH
    return slots * TILE_COLUMNS * itemsize
