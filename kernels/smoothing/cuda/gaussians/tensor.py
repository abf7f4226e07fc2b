"""Gaussians of bytes along both axes at once, kernel `tensor`: when it applies, and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import blocks_a_multiprocessor, kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.cuda import tuning
from kernels.smoothing.cuda.block_partition import PieceCost, partition, up_to
from kernels.smoothing.cuda.fused import MAX_BLOCKS, MAX_CHANNELS, MAX_LENGTH, View, picture_of, view_of
from kernels.smoothing.window import EXACT_RADIUS, Window

RADII = (4, 8, 16, 32)  # reaches of the compiled kernels; other windows use the next larger
WARPS = 4
UNIT = 2.0**15  # factor of the weights down the columns: see tensor.cuh
# Adding one of these rounds a sum to quarters or integers and leaves the bits of a float16: round_pair() of tensor.cuh.
QUARTERS, WHOLE = 1.5 * 2**21 + 0x6600 / 4 - 128, 1.5 * 2**23 + 0x6600 - 128

ENTRIES = tuple(f"tensor<{channels}, {radius}>" for radius in RADII for channels in range(1, MAX_CHANNELS + 1))


class TensorFilter(ctypes.Structure):
    """struct TensorFilter of tensor.cuh."""

    _fields_ = (
        *((name, ctypes.c_ushort * (EXACT_RADIUS + 1)) for name in ("y", "x")),
        *((name, ctypes.c_float) for name in ("rounding", "scale")),
    )


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or not windows[0].exact or max(view.columns * view.channels, view.rows) > MAX_LENGTH:
        return False
    rows, shared_bytes = _strip(view.channels, _radius(windows))
    if shared_bytes > shared_bytes_a_block():
        return False
    return view.planes * -(-view.rows // rows) * -(-view.columns // _chunk(_radius(windows))) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view, radius = view_of(image.shape, windows), _radius(windows)
    assert view is not None
    picture = picture_of(image, view, cval, out)
    rows, shared_bytes = _strip(view.channels, radius)
    picture.bands = -(-picture.out_rows // rows)
    out_columns = picture.out_row_samples // view.channels
    resident = min(_blocks(view.channels, radius), blocks_a_multiprocessor(shared_bytes)) * multiprocessors()
    chunk = _chunk(radius)
    cost = PieceCost(unit=chunk, begin=tuning.TENSOR_START_CHUNKS * chunk)
    tiles = partition(out_columns, view.planes * picture.bands, resident, cost)
    picture.tiles = tiles.pieces
    kernel("smoothing", f"tensor<{view.channels}, {radius}>").launch(
        (view.planes * picture.bands * picture.tiles,),
        (32 * WARPS,),
        (image, out, picture, _filter(view), tiles),
        shared_bytes=shared_bytes,
        stream=stream,
    )


def _radius(windows: Sequence[Window]) -> int:
    return next(radius for radius in RADII if radius >= max(window.after for window in windows))


def _chunk(radius: int) -> int:
    """Positions that a block fetches and writes at once: those seen by 16 neighbouring windows, in blocks of 16."""
    return up_to(16 + 2 * radius, 16)


def _blocks(channels: int, radius: int) -> int:
    """Blocks on a multiprocessor, as in struct Tensor of tensor.cuh."""
    seen = _chunk(radius) // 16
    return 2 if seen * channels > 12 else 4 if seen * channels > 6 or seen > 3 else 5


def _strip(channels: int, radius: int) -> tuple[int, int]:
    """Rows that a block filters together, and its bytes of shared memory, as in struct Tensor of tensor.cuh."""
    rows, chunk_bytes, slots = 16 * WARPS, _chunk(radius) * channels, 3 if radius % 16 else 2
    pitch, result_pitch = (slots * chunk_bytes // 16 | 1) * 16, chunk_bytes + 16 * {2: 2, 4: 4}.get(channels, 1)
    return rows, (rows + _chunk(radius) - 16) * (pitch + 8) + rows * result_pitch


def _filter(view: View) -> TensorFilter:
    whole = view.across is None
    found = TensorFilter(rounding=WHOLE if whole else QUARTERS, scale=1.0 if whole else 0.25)
    for window, weights, unit in ((view.down, found.y, UNIT), (view.across, found.x, 1.0)):
        half = (1.0,) if window is None or window.half_weights is None else window.half_weights
        weights[: len(half)] = (np.array(half) * unit).astype(np.float16).view(np.uint16).tolist()
    return found
