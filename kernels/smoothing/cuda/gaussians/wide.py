"""Gaussians of medium reach along both axes at once, kernel `wide`: when it applies, and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import blocks_a_multiprocessor, kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.cuda import tuning
from kernels.smoothing.cuda.block_partition import PieceCost, factored
from kernels.smoothing.cuda.fused import (
    C_TYPES,
    MAX_BLOCKS,
    MAX_CHANNELS,
    MAX_LENGTH,
    TINY,
    VECTOR_BYTES,
    View,
    picture_of,
    view_of,
)
from kernels.smoothing.window import Window

RADII = (16, 32)  # reaches of the compiled kernels; other windows use the next larger
STRIP = 32  # rows that a block filters together
RUN = 16  # samples that a thread filters along a row
STEPS = (64, 64, 32, 32)  # positions per step of a block, for 1 … 4 channels
PLANE_GAPS = (0, 16, 12, 8)  # words between the channels of the ring

DTYPES = ("uint16", "int16", "float32")  # Gaussians of uint8 with these reaches are exact: other kernels


def _entry(dtype: str, channels: int, radius: int, aligned: bool) -> str:
    return f"wide<{C_TYPES[dtype]}, {channels}, {radius}, {str(aligned).lower()}>"


ENTRIES = tuple(
    _entry(dtype, channels, radius, aligned)
    for aligned in (True, False)
    for radius in RADII
    for dtype in DTYPES
    for channels in range(1, MAX_CHANNELS + 1)
)


class Reach(ctypes.Structure):
    """struct Reach of wide.cuh."""

    _fields_ = (
        ("y", ctypes.c_float * 33),
        ("x", ctypes.c_float * 33),
        *((name, ctypes.c_int) for name in ("reach_y", "reach_x")),
    )


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or dtype.name not in DTYPES or windows[0].half_weights is None:
        return False
    radius = _radius(windows)
    if radius is None or max(view.columns * view.channels, view.rows) > MAX_LENGTH:
        return False
    if _shared_bytes(dtype, view.channels, radius, aligned=False) > shared_bytes_a_block():
        return False
    return view.planes * -(-view.rows // STRIP) * -(-view.columns // STEPS[view.channels - 1]) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view, radius = view_of(image.shape, windows), _radius(windows)
    assert view is not None
    assert radius is not None
    picture, dtype = picture_of(image, view, cval, out), np.dtype(image.dtype)
    step = STEPS[view.channels - 1]
    shared_bytes = _shared_bytes(dtype, view.channels, radius, aligned=picture.aligned)
    threads = 2 * step * view.channels
    resident = min((512 if radius > 16 else 768) // threads, blocks_a_multiprocessor(shared_bytes)) * multiprocessors()
    picture.bands = -(-picture.out_rows // STRIP)
    out_columns = picture.out_row_samples // view.channels
    cost = PieceCost(unit=step, lost=2 * radius)
    tiles = factored(out_columns, view.planes * picture.bands, resident, cost, tuning.WIDE_SHARE)
    picture.tiles = tiles.pieces
    entry = _entry(dtype.name, view.channels, radius, picture.aligned)
    kernel("smoothing", entry).launch(
        (view.planes * picture.bands * picture.tiles,),
        (threads,),
        (image, out, picture, _reach(view, dtype), tiles),
        shared_bytes=shared_bytes,
        stream=stream,
        dependent_launch=True,
    )


def _radius(windows: Sequence[Window]) -> int | None:
    return next((radius for radius in RADII if radius >= max(window.after for window in windows)), None)


def _shared_bytes(dtype: np.dtype[Any], channels: int, radius: int, *, aligned: bool) -> int:
    """Shared memory of a block, as in struct Wide of wide.cuh."""
    step, rows = STEPS[channels - 1], STRIP + 2 * radius
    plane = (step + 2 * radius) // RUN * RUN + PLANE_GAPS[channels - 1]
    words = step * channels * dtype.itemsize // 4
    result_pitch = _pitch(words, 4 if channels == 1 and dtype.itemsize == 4 else 2)
    fetched = words * 4 + (0 if aligned else VECTOR_BYTES)
    return rows * fetched + STRIP * (_pitch(channels * plane, 4) + result_pitch) * 4 + rows * 8


def _pitch(width: int, apart: int) -> int:
    return (width - apart + 31) // 32 * 32 + apart


def _reach(view: View, dtype: np.dtype[Any]) -> Reach:
    reach = Reach()
    for window, weights, axis in ((view.down, reach.y, "y"), (view.across, reach.x, "x")):
        half = (1.0,) if window is None or window.half_weights is None else window.half_weights
        weights[: len(half)] = half
        setattr(reach, f"reach_{axis}", len(half) - 1)
    if dtype.kind == "u":
        reach.y[:] = [weight * TINY for weight in reach.y]
    return reach
