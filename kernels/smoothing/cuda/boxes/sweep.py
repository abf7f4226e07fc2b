"""Boxes of integers of any size, kernels of sweep.cuh: when they apply, and their launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda import tuning
from kernels.smoothing.cuda.block_partition import up_to
from kernels.smoothing.cuda.boxes.running import exact_division
from kernels.smoothing.cuda.fused import MAX_BLOCKS, MAX_LENGTH, SECTOR_BYTES, VECTOR_BYTES, View, view_of
from kernels.smoothing.window import Window

START_THREADS = 64
STATIC_BYTES = 6400
SLACK_BYTES = 64  # of a row in shared memory: the rest of its first sector and last word
MORE_TILES = 6  # across a row than the fewest that are tried
START_ROWS = 12  # whose work the start of a block equals
C_TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "int16": "short"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many windows of a row a block of box_sweep sums."""

    words: int  # of results of a thread; an odd number keeps lanes on different banks
    threads: int  # most of a block, or of the blocks of a multiprocessor, as registers allow
    rows: int = 1  # of a step
    whole: bool = False  # whether it keeps the sums of windows in 32 bits, not means and rests
    cost: float = 1  # of a sample, compared with other shapes

    def entry(self, sample: str, channels: int) -> str:
        total = "unsigned" if self.whole else "unsigned long long"
        return f"box_sweep<{sample}, {channels}, {self.words}, {self.threads}, {self.rows}, {total}>"

    def division(self, samples: int, dtype: np.dtype[Any]) -> tuple[int, int] | None:
        """The multiplier and the shift of struct Sweep; None if sums do not fit."""
        if self.whole:
            return exact_division(samples, dtype) if samples <= 1 << 24 else None
        shift = samples.bit_length() - 1 - (samples & samples - 1 == 0)
        return -(-(1 << 32 + shift) // samples), shift


SHAPES = {key: tuple(Shape(**shape) for shape in shapes) for key, shapes in tuning.SWEEP.items()}
ENTRIES = (
    *(f"box_starts<{c}>" for c in C_TYPES.values()),
    *(
        shape.entry(c, channels)
        for dtype, c in C_TYPES.items()
        for (itemsize, channels), shapes in SHAPES.items()
        if itemsize == np.dtype(dtype).itemsize
        for shape in shapes
    ),
)


class Sweep(ctypes.Structure):
    """struct Sweep of sweep.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("rows", "out_rows", "columns", "out_columns")),
        *((name, ctypes.c_int) for name in ("before_y", "taps_y", "mode_y", "before_x", "taps_x", "mode_x")),
        *((name, ctypes.c_int) for name in ("tiles", "outputs", "pitch", "bands", "parts", "span")),
        *((name, ctypes.c_int) for name in ("channels", "aligned", "aligned_out")),
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


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> Sequence[Any]:
    import cupy

    view, dtype = view_of(image.shape, windows), np.dtype(image.dtype)
    assert view is not None
    cut = min(_cuts(view, dtype), key=lambda cut: cut.cost)
    sweep = _sweep(view, dtype, cval, cut)
    row_samples, row_bytes = view.columns * view.channels, view.columns * view.channels * dtype.itemsize
    sweep.aligned_out = sweep.out_columns * view.channels * dtype.itemsize % VECTOR_BYTES == 0
    sweep.aligned_out &= out.data.ptr % VECTOR_BYTES == 0
    sweep.aligned = row_bytes % VECTOR_BYTES == 0 and image.data.ptr % VECTOR_BYTES == 0
    count = sweep.bands + sweep.parts - 1
    starts = cupy.empty((view.planes, count, row_samples), "uint32")
    vectors = START_THREADS if sweep.aligned else START_THREADS // 32 * 31
    blocks = view.planes * count * -(-row_bytes // (VECTOR_BYTES * vectors))
    kernel("smoothing", f"box_starts<{C_TYPES[dtype.name]}>").launch(
        (blocks,), (START_THREADS,), (image, starts, sweep), stream=stream
    )
    kernel("smoothing", cut.shape.entry(C_TYPES[dtype.name], view.channels)).launch(
        (view.planes * sweep.bands * sweep.tiles,), (cut.threads + 32,), (image, out, starts, sweep),
        shared_bytes=cut.shared_bytes, stream=stream,
    )  # fmt: skip
    return [starts]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How an image is cut into blocks of box_sweep."""

    shape: Shape
    threads: int  # of a block that sum; 32 more ask for rows
    tiles: int  # across a row
    outputs: int  # pixels of a row that a block writes
    pitch: int  # bytes of a row in shared memory
    shared_bytes: int
    bands: int  # down the rows
    parts: int  # bands in a span
    span: int  # rows: of a window, or of a band if that is higher
    cost: float  # what a multiprocessor does, in samples read


def _cuts(view: View, dtype: np.dtype[Any]) -> list[Cut]:
    """Those that are possible."""
    taps_y, taps_x = (1 if window is None else window.taps for window in (view.down, view.across))
    out_rows, out_columns = _output(view)
    channels, found = view.channels, []
    shapes = (shape for shape in SHAPES[dtype.itemsize, channels] if shape.division(taps_y * taps_x, dtype))
    for shape, more in product(shapes, range(MORE_TILES)):
        samples = shape.words * 4 // dtype.itemsize  # of a thread
        tiles = -(-out_columns * channels // (samples * (shape.threads - 32))) + more
        outputs = min(up_to(-(-out_columns // tiles), VECTOR_BYTES), out_columns)
        threads = up_to(-(-outputs * channels // samples), 32)
        pitch = up_to((threads * samples + taps_x * channels) * dtype.itemsize + SLACK_BYTES, SECTOR_BYTES)
        # Rows of two steps, results, and the sources of pixels beyond the edges.
        shared = shape.rows * (4 * pitch + 4 * threads * shape.words) + 2 * _beyond(view, outputs)
        at_once = min((shared_bytes_a_block() + 1024) // (shared + STATIC_BYTES), shape.threads // (threads + 32))
        if at_once == 0 or outputs * (tiles - 1) >= out_columns:
            continue
        bands = max(at_once * multiprocessors() // (view.planes * tiles), 1)
        band_rows = -(-out_rows // min(bands, out_rows))
        parts, span = (taps_y // band_rows, taps_y) if taps_y >= band_rows else (1, band_rows)
        bands, band_rows = -(-out_rows * parts // span), -(-span // parts)
        blocks = view.planes * tiles * bands
        row = shape.cost * (threads * samples + taps_x * channels // 4)
        cost = -(-blocks // (at_once * multiprocessors())) * at_once * row * (band_rows + START_ROWS)
        found.append(
            Cut(
                shape=shape, threads=threads, tiles=tiles, outputs=outputs, pitch=pitch, shared_bytes=shared,
                bands=bands, parts=parts, span=span, cost=cost,
            )
        )  # fmt: skip
    return found


def _beyond(view: View, outputs: int) -> int:
    """The most pixels of a strip that lie beyond a row's ends."""
    if view.across is None or view.across.mode == "valid":
        return 2
    before, taps = view.across.before, view.across.taps
    starts = range(0, view.columns, outputs)
    strips = ((x - before - 1, min(x + outputs, view.columns) - before + taps - 1) for x in starts)
    return max(max(-left, 0) + max(right - view.columns, 0) for left, right in strips)


def _output(view: View) -> tuple[int, int]:
    """Rows and columns of a plane of the result."""
    out_rows = view.rows if view.down is None else view.down.output_length(view.rows)
    return out_rows, view.columns if view.across is None else view.across.output_length(view.columns)


def _sweep(view: View, dtype: np.dtype[Any], cval: float, cut: Cut) -> Sweep:
    down, across = view.down, view.across
    before_y, taps_y, mode_y = (0, 1, "reflect") if down is None else (down.before, down.taps, down.mode)
    before_x, taps_x, mode_x = (0, 1, "reflect") if across is None else (across.before, across.taps, across.mode)
    out_rows, out_columns = _output(view)
    samples = taps_y * taps_x
    division = cut.shape.division(samples, dtype)
    assert division is not None
    return Sweep(
        rows=view.rows, out_rows=out_rows, columns=view.columns, out_columns=out_columns,
        before_y=before_y, taps_y=taps_y, mode_y=MODES.index(mode_y),
        before_x=before_x, taps_x=taps_x, mode_x=MODES.index(mode_x),
        tiles=cut.tiles, outputs=cut.outputs * view.channels, pitch=cut.pitch,
        bands=cut.bands, parts=cut.parts, span=cut.span, channels=view.channels,
        fill=int(cval) & 0xFFFF, samples=samples, multiplier=division[0], shift=division[1],
        extra=_extra(view, dtype),
    )  # fmt: skip


def _extra(view: View, dtype: np.dtype[Any]) -> int:
    """The least whole number of means that a window may lose from one row to the next."""
    return int(-(-np.iinfo(f"uint{8 * dtype.itemsize}").max // (1 if view.down is None else view.down.taps)))
