"""Gaussians of 16-bit samples along two neighbouring axes, kernels of words.cuh: when they apply, their launches."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import blocks_a_multiprocessor, kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing import words
from kernels.smoothing.cuda import passes, tuning
from kernels.smoothing.cuda.block_partition import PieceCost, partition
from kernels.smoothing.cuda.fused import MAX_BLOCKS, MAX_CHANNELS, MAX_LENGTH, Picture, View, picture_of, view_of
from kernels.smoothing.window import Window

REACH = 32
WARPS = 4


ROWS = ("ALIGNED_ROWS", "EVEN_ROWS", "ODD_ROWS", "MIXED_ROWS")  # enum WordsRows of words.cuh


def _entry(channels: int, radius: int, rows: str) -> str:
    return f"words<{channels}, {radius}, {rows}>"


ENTRIES = tuple(
    _entry(channels, radius, rows)
    for rows in ROWS
    for radius in words.RADII
    for channels in range(1, MAX_CHANNELS + 1)
    if channels % 2 or rows != "MIXED_ROWS"  # rows of an odd number of samples
)
# On copies whose channels are apart, which begin at aligned addresses.
APART_ENTRIES = tuple(entry for entry in ENTRIES if entry.startswith("words<1,") and "ODD" not in entry)
GATHER_ENTRIES = ("words_down<unsigned short>", "words_across")


class WordsAxis(ctypes.Structure):
    """struct WordsAxis of words.cuh."""

    _fields_ = tuple((name, ctypes.c_byte * (REACH + 1)) for name in ("top", "middle", "low"))


class WordsFilter(ctypes.Structure):
    """struct WordsFilter of words.cuh."""

    _fields_ = (
        ("y", WordsAxis),
        ("x", WordsAxis),
        ("bias_y", ctypes.c_int),
        ("finer_y", ctypes.c_int),
        ("bias_x", ctypes.c_int),
        ("finer_x", ctypes.c_int),
        ("middle", ctypes.c_uint),
    )


class WordsWeights(ctypes.Structure):
    """struct WordsWeights of words.cuh."""

    _fields_ = (
        *((name, ctypes.c_int * (REACH + 1)) for name in ("upper", "lower", "top")),
        ("bias", ctypes.c_int),
        ("shift", ctypes.c_int),
        ("middle", ctypes.c_uint),
    )


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or max(view.columns * view.channels, view.rows) > MAX_LENGTH:
        return False
    strip = _Strip(view, _radius(windows), aligned=False)
    if strip.shared_bytes > shared_bytes_a_block():
        return False
    return view.planes * -(-view.rows // strip.rows) * -(-view.columns // strip.chunk) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view, radius = view_of(image.shape, windows), _radius(windows)
    assert view is not None
    picture = picture_of(image, view, cval, out)
    strip = _Strip(view, radius, aligned=picture.aligned)
    picture.bands = -(-picture.out_rows // strip.rows)
    resident = min(strip.blocks, blocks_a_multiprocessor(strip.shared_bytes)) * multiprocessors()
    cost = PieceCost(unit=strip.chunk, begin=tuning.WORDS_START_CHUNKS * strip.chunk, tail=tuning.WORDS_TAIL)
    tiles = partition(picture.out_row_samples // view.channels, view.planes * picture.bands, resident, cost)
    picture.tiles = tiles.pieces
    kernel("smoothing", _entry(view.channels, radius, _rows(image, picture))).launch(
        (view.planes * picture.bands * picture.tiles,),
        (strip.threads,),
        (image, out, picture, _filter(image.dtype, windows), tiles),
        shared_bytes=strip.shared_bytes,
        stream=stream,
        dependent_launch=True,
    )


def run_gather(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    down, across = passes.passes_of(image, windows, cval, out, "float32")  # sums in between have 32 bits too
    first, second = _weights(windows)
    middle, fill = _middle(image.dtype), int(cval) & 0xFFFF
    of_down = WordsWeights(bias=first.bias, shift=9 + first.finer, middle=middle)
    constant = ctypes.c_uint(words.sum_of_constant(fill ^ middle, first))
    for entry, step, value, weights in (
        ("words_down<unsigned short>", down, ctypes.c_ushort(fill), of_down),
        ("words_across", across, constant, WordsWeights(bias=second.bias, shift=16 + second.finer, middle=middle)),
    ):
        parts = first if step is down else second
        for field, values in (("upper", parts.upper), ("lower", parts.lower), ("top", parts.top)):
            getattr(weights, field)[: values.size] = values.tolist()
        passes.launch_gather(entry, step, (value, weights), stream)


class _Strip:
    """What a block of `words` filters together, and needs: struct Words of words.cuh."""

    rows, threads = 16 * WARPS, 32 * WARPS

    def __init__(self, view: View, radius: int, *, aligned: bool) -> None:
        channels = view.channels
        self.chunk = 16 + 2 * radius  # positions that it fetches at once
        self.blocks = 2 if radius > 16 else 5 - radius // 8 - (channels == 4)
        pitch = 16 * (self.chunk * channels // 8 + (not aligned)) * 2 + 16
        result_pitch = 16 * ({1: 3, 2: 6, 3: 7, 4: 12}[channels] if aligned else 2 * channels + 3)
        self.shared_bytes = (self.rows + self.chunk - 16) * (pitch + 4) + self.rows * result_pitch


def _rows(image: Any, picture: Picture) -> str:
    if picture.aligned:
        return "ALIGNED_ROWS"
    if picture.row_samples % 2:
        return "MIXED_ROWS"
    return "ODD_ROWS" if (image.data.ptr // 2 + picture.centre_x) % 2 else "EVEN_ROWS"


def _radius(windows: Sequence[Window]) -> int:
    return next(radius for radius in words.RADII if radius >= max(window.after for window in windows))


def _weights(windows: Sequence[Window]) -> tuple[words.WordWeights, words.WordWeights]:
    down, across = (window.half_weights or () for window in windows)
    return words.first_weights(down), words.second_weights(across)


def _middle(dtype: np.dtype[Any]) -> int:
    return words.MIDDLE if dtype.kind == "i" else 0


def _filter(dtype: np.dtype[Any], windows: Sequence[Window]) -> WordsFilter:
    first, second = _weights(windows)
    found = WordsFilter(
        bias_y=first.bias,
        finer_y=first.finer,
        # Of near windows, results are moved by 2**15 too.
        bias_x=second.bias - (0 if _radius(windows) > words.COARSE_RADIUS else _middle(dtype) << 16),
        finer_x=second.finer,
        middle=_middle(dtype) * 0x10001,
    )
    for axis, weights in ((found.y, first), (found.x, second)):
        for limb, values in (
            (axis.top, weights.top),
            (axis.middle, weights.middle),
            (axis.low, weights.lower),
        ):
            limb[: values.size] = values.tolist()
    return found
