"""Square boxes over float32, both axes in one kernel, `tree` of smoothing.cu: when it applies, and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.cuda import tuning
from kernels.smoothing.cuda.block_partition import PieceCost, partition, up_to
from kernels.smoothing.cuda.fused import picture_of, view_of
from kernels.smoothing.window import Window

# A tree's rings are registers, so the compiler must know the window. `streamed` filters other sizes.
SIZES = (11, 15, 21, 25, 31, 51, 63)
ENTRIES = tuple(f"tree<{size}>" for size in SIZES)
CHUNK, BATCH, GROUP, GROUPS, BUFFERS = 32, 8, 4, 4, 6
MAX_BAND_ROWS = 1376
MAX_LENGTH = 1 << 28  # samples along either axis: offsets within a row are 32-bit numbers of bytes
MAX_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """struct TreeShape of tree.cuh."""

    taps: int
    period: int
    column_threads: int
    row_warps: int
    pitch: int

    @property
    def threads(self) -> int:
        return self.column_threads + 32 * self.row_warps

    @property
    def span(self) -> int:
        return 2 * self.column_threads

    @property
    def lead_rows(self) -> int:
        return up_to(self.taps - 1, self.period)

    @property
    def outputs(self) -> int:
        """Samples of a row that a block writes."""
        runs = 32 // BATCH
        return (self.span - self.lead_rows) // runs // CHUNK * CHUNK * runs

    @property
    def shared_bytes(self) -> int:
        fetched = GROUPS * GROUP
        words = BUFFERS * BATCH * self.pitch + self.row_warps * 32 * CHUNK + fetched * self.span
        return 4 * (words + MAX_BAND_ROWS + self.lead_rows + self.period + fetched)


def shape_of(taps: int) -> Shape:
    if taps > 31:
        return Shape(taps=taps, period=32, column_threads=288, row_warps=3, pitch=612)
    return Shape(taps=taps, period=16, column_threads=352, row_warps=5, pitch=740)


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if dtype != np.float32 or view is None or view.down is None or view.across is None or view.channels > 1:
        return False
    taps = view.down.taps
    if view.down.half_weights is not None or view.across.taps != taps or taps not in SIZES:
        return False
    block = shape_of(taps)
    if max(view.rows, view.columns) > MAX_LENGTH or block.shared_bytes > shared_bytes_a_block():
        return False
    return view.planes * -(-view.columns // block.outputs) * -(-view.rows // block.period) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view = view_of(image.shape, windows)
    assert view is not None
    taps = windows[0].taps
    block, picture = shape_of(taps), picture_of(image, view, cval, out)
    picture.tiles = -(-picture.out_row_samples // block.outputs)
    cost = PieceCost(
        unit=block.period,
        most=MAX_BAND_ROWS // block.period,
        begin=block.lead_rows + tuning.TREE_START_ROWS,
        tail=tuning.TREE_TAIL,
    )
    bands = partition(picture.out_rows, picture.tiles * picture.planes, multiprocessors(), cost)
    scale = ctypes.c_float(float(np.float32(1) / np.float32(taps * taps)))
    kernel("smoothing", f"tree<{taps}>").launch(
        (picture.planes * picture.tiles * bands.pieces,), (block.threads,),
        (image, out, picture, bands, scale), shared_bytes=block.shared_bytes, stream=stream, dependent_launch=True,
    )  # fmt: skip
