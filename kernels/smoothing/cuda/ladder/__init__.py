"""The classic steps between `naive` and production, kernels of steps.cuh: a tile in shared memory, channels padded to a
vector, pitched rows, and pitched rows with a tile. When they apply, and their launch.

If the image is laid out anew (RGB as RGBX, pitched rows), the copy and its memory are part of each call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel, shared_bytes_a_block
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda.fused import C_TYPES, MAX_BLOCKS, MAX_LENGTH, View, view_of
from kernels.smoothing.cuda.passes import MAX_HALF
from kernels.smoothing.window import Window

# Padding and pitching move bits: types of the same width share kernels.
BITS = {1: "unsigned char", 2: "unsigned short", 4: "float"}
VECTORS = (1, 2, 4)  # samples
ROW_ALIGNMENT = 256  # bytes, as with cudaMallocPitch
THREADS = 256
MAX_LAY_OUT_BLOCKS = 1 << 30  # lay_out loops where there is more to do
GATHER_TILE = (8, 32)  # rows, columns of pixels
TILES = ((32, 64), (16, 64), (16, 32), (8, 32))
SHARED_BYTES = 48 << 10  # of a block, if possible, so that several share a multiprocessor


RULES = ("ladder::BOX", "ladder::GAUSS")


def _tiled_entries(vectors: Sequence[int]) -> tuple[str, ...]:
    return tuple(
        f"ladder::tiled<{c_type}, {vector}, {rule}>"
        for rule in RULES
        for c_type in C_TYPES.values()
        for vector in vectors
    )


_LAY_OUT_ENTRIES = {vector: tuple(f"ladder::lay_out<{bits}, {vector}>" for bits in BITS.values()) for vector in VECTORS}
_GATHER_ENTRIES = tuple(f"ladder::gather<{c_type}, {vector}>" for c_type in C_TYPES.values() for vector in VECTORS)
TILED_ENTRIES = _tiled_entries((1,))
PADDED_ENTRIES = (*_LAY_OUT_ENTRIES[2], *_LAY_OUT_ENTRIES[4], *_GATHER_ENTRIES)  # single samples need no padding
PITCHED_ENTRIES = (*_LAY_OUT_ENTRIES[1], *PADDED_ENTRIES)
PITCHED_TILED_ENTRIES = (*chain.from_iterable(_LAY_OUT_ENTRIES.values()), *_tiled_entries(VECTORS))


class Frame(ctypes.Structure):
    """struct ladder::Frame of steps.cuh."""

    _fields_ = (
        ("pitch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns", "step", "out_rows", "out_columns", "channels")),
        *((name, ctypes.c_int) for name in ("first_y", "taps_y", "mode_y", "first_x", "taps_x", "mode_x")),
        *((name, ctypes.c_int) for name in ("tile_rows", "tile_columns", "tiles_y", "tiles_x")),
        ("divisor", ctypes.c_uint),
        ("scale", ctypes.c_float),
        ("weights_y", ctypes.c_float * (MAX_HALF)),
        ("weights_x", ctypes.c_float * (MAX_HALF)),
    )


def gather_applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    """Boxes only: every tap is a load, and a Gaussian of sigma 4 has 33 × 33."""
    view = _view(shape, dtype, windows)
    return view is not None and windows[0].half_weights is None and _blocks(view, GATHER_TILE) <= MAX_BLOCKS


def tiled_applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = _view(shape, dtype, windows)
    return view is not None and _tile_fits(view, view.channels, dtype.itemsize)


def pitched_tiled_applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = _view(shape, dtype, windows)
    return view is not None and _tile_fits(view, _vector(view), dtype.itemsize)


def run_tiled(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view = view_of(image.shape, windows)
    assert view is not None
    frame = _frame(view, view.columns * view.channels, view.channels)
    _launch_tiled(image, 1, frame, view, windows, cval, out, stream)


def run_padded(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    _run_gather(image, windows, cval, out, stream, 1)


def run_pitched(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    _run_gather(image, windows, cval, out, stream, ROW_ALIGNMENT)


def run_pitched_tiled(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view = view_of(image.shape, windows)
    assert view is not None
    source, pitch = _laid_out(image, view, ROW_ALIGNMENT, stream)
    _launch_tiled(source, _vector(view), _frame(view, pitch, 1), view, windows, cval, out, stream)


def _run_gather(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any, row_alignment: int) -> None:
    view = view_of(image.shape, windows)
    assert view is not None
    source, pitch = _laid_out(image, view, row_alignment, stream)
    frame = _frame(view, pitch, 1)
    blocks = _set_tiles(frame, view, GATHER_TILE)
    entry = f"ladder::gather<{C_TYPES[image.dtype.name]}, {_vector(view)}>"
    args = (source, out, frame, _sample(cval, image.dtype))
    kernel("smoothing", entry).launch((blocks,), (THREADS,), args, stream=stream)


def _launch_tiled(
    source: Any, vector: int, frame: Frame, view: View, windows: Sequence[Window], cval: float, out: Any, stream: Any
) -> None:
    itemsize = out.dtype.itemsize
    tile = _tile(view, vector * frame.step, itemsize)
    assert tile is not None
    blocks = _set_tiles(frame, view, tile)
    rule = RULES[0 if windows[0].half_weights is None else 1]
    entry = f"ladder::tiled<{C_TYPES[out.dtype.name]}, {vector}, {rule}>"
    args = (source, out, frame, _sample(cval, out.dtype))
    shared = _shared_bytes(view, tile, vector * frame.step, itemsize)
    kernel("smoothing", entry).launch((blocks,), (THREADS,), args, shared_bytes=shared, stream=stream)


def _view(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> View | None:
    view = view_of(shape, windows)
    if view is None or dtype.name not in C_TYPES or max(view.columns * view.channels, view.rows) > MAX_LENGTH:
        return None
    return view


def _vector(view: View) -> int:
    """Samples of a padded pixel."""
    return 4 if view.channels == 3 else view.channels


def _laid_out(image: Any, view: View, row_alignment: int, stream: Any) -> tuple[Any, int]:
    """The image with a vector per pixel and rows that start at a multiple of bytes; and the pitch in vectors."""
    vector, itemsize = _vector(view), image.dtype.itemsize
    pixel_bytes = vector * itemsize
    alignment = max(row_alignment, pixel_bytes)
    row_bytes = -(-view.columns * pixel_bytes // alignment) * alignment
    if vector == view.channels and row_bytes == view.columns * pixel_bytes and image.data.ptr % alignment == 0:
        return image, view.columns
    rows, pitch = view.planes * view.rows, row_bytes // pixel_bytes
    target = type(image)((rows, pitch, vector), image.dtype)  # on the stream that `smooth` made the current one
    blocks = min(rows * -(-view.columns // THREADS), MAX_LAY_OUT_BLOCKS)
    args = (
        image, target, ctypes.c_longlong(rows), ctypes.c_int(view.columns), ctypes.c_longlong(pitch),
        ctypes.c_int(view.channels),
    )  # fmt: skip
    entry = f"ladder::lay_out<{BITS[itemsize]}, {vector}>"
    kernel("smoothing", entry).launch((blocks,), (THREADS,), args, stream=stream)
    return target, pitch


def _frame(view: View, pitch: int, step: int) -> Frame:
    frame = Frame(
        pitch=pitch, step=step, rows=view.rows, columns=view.columns, channels=view.channels,
        out_rows=_output_length(view.down, view.rows), out_columns=_output_length(view.across, view.columns),
    )  # fmt: skip
    samples = 1
    for window, weights, axis in ((view.down, frame.weights_y, "y"), (view.across, frame.weights_x, "x")):
        half = (1.0,) if window is None or window.half_weights is None else window.half_weights
        weights[: len(half)] = half
        taps, mode = (1, "nearest") if window is None else (window.taps, window.mode)
        setattr(frame, f"taps_{axis}", taps)
        setattr(frame, f"mode_{axis}", MODES.index(mode))
        setattr(frame, f"first_{axis}", 0 if window is None or mode == "valid" else -window.before)
        samples *= taps
    frame.divisor = samples
    frame.scale = float(np.float32(1) / np.float32(samples))
    return frame


def _output_length(window: Window | None, length: int) -> int:
    return length if window is None else window.output_length(length)


def _set_tiles(frame: Frame, view: View, tile: tuple[int, int]) -> int:
    """Divides the output into tiles of pixels; returns the number of blocks."""
    frame.tile_rows, frame.tile_columns = tile
    frame.tiles_y, frame.tiles_x = -(-frame.out_rows // tile[0]), -(-frame.out_columns // tile[1])
    return int(view.planes * frame.tiles_y * frame.tiles_x)


def _blocks(view: View, tile: tuple[int, int]) -> int:
    return view.planes * -(-view.rows // tile[0]) * -(-view.columns // tile[1])


def _tile_fits(view: View, samples: int, itemsize: int) -> bool:
    tile = _tile(view, samples, itemsize)
    return tile is not None and _blocks(view, tile) <= MAX_BLOCKS


def _tile(view: View, samples: int, itemsize: int) -> tuple[int, int] | None:
    """The largest tile, of pixels of `samples` samples, that leaves room for other blocks, or else that fits at all."""
    for limit in (SHARED_BYTES, shared_bytes_a_block()):
        for tile in TILES:
            if _shared_bytes(view, tile, samples, itemsize) <= limit:
                return tile
    return None


def _shared_bytes(view: View, tile: tuple[int, int], samples: int, itemsize: int) -> int:
    """The tile's samples with their halo, and 32-bit sums down its columns."""
    halo_rows, halo_columns = (0 if window is None else window.taps - 1 for window in (view.down, view.across))
    width = (tile[1] + halo_columns) * samples
    return width * ((tile[0] + halo_rows) * itemsize + tile[0] * 4)


def _sample(cval: float, dtype: np.dtype[Any]) -> Any:
    """The sample beyond the edge in mode "constant", by value."""
    return np.ctypeslib.as_ctypes_type(dtype)(np.array(cval, dtype).item())
