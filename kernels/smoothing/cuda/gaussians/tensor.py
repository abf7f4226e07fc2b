"""Gaussians of bytes along both axes at once, kernel `tensor`: when it applies, and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import blocks_a_multiprocessor, kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing import byte_sums
from kernels.smoothing.cuda import passes, tuning
from kernels.smoothing.cuda.block_partition import PieceCost, partition, up_to
from kernels.smoothing.cuda.fused import MAX_BLOCKS, MAX_CHANNELS, MAX_LENGTH, View, picture_of, view_of
from kernels.smoothing.cuda.gaussians.words import WordsWeights
from kernels.smoothing.window import Window

RADII = (4, 8, 16, 32)  # reaches of the compiled kernels; other windows use the next larger
WARPS = 4
ROWS = 16 * WARPS  # that a block filters together


def _entry(channels: int, radius: int, aligned: bool) -> str:
    return f"tensor<{channels}, {radius}, {str(aligned).lower()}>"


ENTRIES = tuple(
    _entry(channels, radius, aligned)
    for aligned in (True, False)
    for radius in RADII
    for channels in range(1, MAX_CHANNELS + 1)
)
GATHER_ENTRIES = ("words_down<unsigned char>", "bytes_across<unsigned char>", "bytes_across<unsigned>")


class TensorAxis(ctypes.Structure):
    """struct TensorAxis of tensor.cuh."""

    _fields_ = (
        ("upper", ctypes.c_ubyte * (byte_sums.MOST_RADIUS + 1)),
        ("lower", ctypes.c_byte * (byte_sums.MOST_RADIUS + 1)),
    )


class TensorFilter(ctypes.Structure):
    """struct TensorFilter of tensor.cuh."""

    _fields_ = (
        ("y", TensorAxis),
        ("x", TensorAxis),
        ("shift", ctypes.c_int),
        ("unit", ctypes.c_int),
        ("bias", ctypes.c_int),
    )


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or not windows[0].exact or max(view.columns * view.channels, view.rows) > MAX_LENGTH:
        return False
    radius = _radius(windows)
    if max(_shared_bytes(view.channels, radius, aligned) for aligned in (True, False)) > shared_bytes_a_block():
        return False
    return view.planes * -(-view.rows // ROWS) * -(-view.columns // _chunk(radius)) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view, radius = view_of(image.shape, windows), _radius(windows)
    assert view is not None
    picture = picture_of(image, view, cval, out)
    shared_bytes = _shared_bytes(view.channels, radius, picture.aligned)
    picture.bands = -(-picture.out_rows // ROWS)
    out_columns = picture.out_row_samples // view.channels
    resident = min(_blocks(view.channels, radius), blocks_a_multiprocessor(shared_bytes)) * multiprocessors()
    chunk = _chunk(radius)
    cost = PieceCost(unit=chunk, begin=tuning.TENSOR_START_CHUNKS * chunk)
    tiles = partition(out_columns, view.planes * picture.bands, resident, cost)
    picture.tiles = tiles.pieces
    kernel("smoothing", _entry(view.channels, radius, picture.aligned)).launch(
        (view.planes * picture.bands * picture.tiles,),
        (32 * WARPS,),
        (image, out, picture, _filter(view), tiles),
        shared_bytes=shared_bytes,
        stream=stream,
    )


def run_gather(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    """One thread per result and axis, for images that `tensor` does not take."""
    steps = passes.passes_of(image, windows, cval, out, "float32")  # sums in between have 32 bits too
    across = byte_sums.byte_weights(windows[-1].half_weights or ())
    weights, fill = WordsWeights(bias=1 << 15), ctypes.c_ubyte(int(cval))
    weights.upper[: across.upper.size], weights.lower[: across.upper.size] = (
        across.whole.tolist(),
        across.upper.tolist(),
    )
    if len(steps) == 1:
        passes.launch_gather("bytes_across<unsigned char>", steps[0], (fill, weights), stream)
        return
    down, weights.bias = byte_sums.byte_weights(windows[0].half_weights or ()), across.bias
    of_down = WordsWeights(shift=8)
    of_down.upper[: down.upper.size] = down.whole.tolist()
    passes.launch_gather("words_down<unsigned char>", steps[0], (fill, of_down), stream)
    passes.launch_gather("bytes_across<unsigned>", steps[1], (ctypes.c_uint(int(cval) << 8), weights), stream)


def _radius(windows: Sequence[Window]) -> int:
    return next(radius for radius in RADII if radius >= max(window.after for window in windows))


def _chunk(radius: int) -> int:
    """Positions that a block fetches and writes at once: those seen by 16 neighbouring windows, in blocks of 16."""
    return up_to(16 + 2 * radius, 16)


def _blocks(channels: int, radius: int) -> int:
    """Blocks on a multiprocessor, as in struct Tensor of tensor.cuh."""
    seen = _chunk(radius) // 16
    return 2 if seen * channels > 12 else 4 if seen * channels > 6 or seen > 3 else 5


def _shared_bytes(channels: int, radius: int, aligned: bool) -> int:
    """Shared memory of a block, as in struct Tensor of tensor.cuh."""
    vectors, slots = _chunk(radius) * channels // 16, 3 if aligned and radius % 16 else 2
    fetched = vectors if aligned else vectors + 2 if channels == 3 else vectors + 1
    pitch, apart = slots * fetched | 1, channels if aligned and channels % 2 == 0 else 1
    result_pitch = up_to(vectors + (0 if aligned else 2 if vectors % 2 else 4) - apart, 2 * apart) + apart
    seen_rows = ROWS + _chunk(radius) - 16
    return seen_rows * (16 * pitch + 8) + 16 * ROWS * result_pitch


def _filter(view: View) -> TensorFilter:
    found = TensorFilter(shift=8, unit=256, bias=1 << 15)
    for window, axis in ((view.down, found.y), (view.across, found.x)):
        if window is None:
            axis.upper[0] = 128
            continue
        weights = byte_sums.byte_weights(window.half_weights or ())
        axis.upper[: weights.upper.size] = weights.upper.tolist()
        axis.lower[: weights.lower.size] = weights.lower.tolist()
    if view.down is None:
        found.shift = 9  # v is 256 times the sample
    elif view.across is None:
        # v / 256 is rounded: v = 256 h + l, and 2**7 l + bias reaches 2**16 from l = 2**7 on.
        found.unit, found.bias = 512, (1 << 16) - (1 << 14)
    else:
        found.bias = byte_sums.byte_weights(view.across.half_weights or ()).bias
    return found
