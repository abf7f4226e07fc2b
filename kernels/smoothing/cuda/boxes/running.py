"""Boxes of any size over integers, kernels `box_running` and `box_column_sums`: when they apply, and their launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from kernels.runtime.launch import kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.cuda import tuning
from kernels.smoothing.cuda.block_partition import up_to
from kernels.smoothing.cuda.fused import C_TYPES, MAX_BLOCKS, MAX_LENGTH, SECTOR_BYTES, picture_of, view_of
from kernels.smoothing.window import Window


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a kernel goes down an image."""

    words: int  # of a row that a lane sums; an odd number keeps lanes on different banks
    teams: int = 16  # warps of a block; there are no named barriers for more

    @property
    def strip_bytes(self) -> int:
        """Bytes of a row that a warp sums."""
        return 128 * self.words


@dataclass(frozen=True, kw_only=True)
class Windows(Shape):
    """The shape of box_running, which passes sums of windows from row to row."""

    rows: int = 1  # that a warp filters in a step
    # Blocks that start while others finish do not run beside their neighbours, so L2 no longer holds the rows that they
    # share (u16 RGB 127x127 306 -> 320 us on an H200).
    dependent_launch: ClassVar[bool] = False

    def outputs(self, itemsize: int, beside: int) -> int:
        """Maximum samples of a row that a warp writes, if windows see `beside` more."""
        return self.strip_bytes // itemsize

    def pitch(self, itemsize: int, beside: int) -> int:
        """Bytes of a row in shared memory."""
        return up_to(self.strip_bytes + beside * itemsize + SLACK_BYTES, SECTOR_BYTES)

    def team_bytes(self, pitch: int) -> int:
        """Shared memory of a team."""
        return self.rows * (STAGES * 2 * pitch + self.strip_bytes)

    def entry(self, sample: str, channels: int) -> str:
        return f"box_running<{sample}, {channels}, {self.words}, {self.rows}, {self.teams}>"


@dataclass(frozen=True, kw_only=True)
class Columns(Shape):
    """The shape of box_column_sums, which passes sums down the columns of bytes: struct Columns of columns.cuh."""

    most_taps: int  # across
    dependent_launch: ClassVar[bool] = True

    def outputs(self, itemsize: int, beside: int) -> int:
        return (self.strip_bytes - beside) // SECTOR_BYTES * SECTOR_BYTES

    def pitch(self, itemsize: int, beside: int) -> int:
        return self.strip_bytes + up_to(SLACK_BYTES, SECTOR_BYTES)

    def team_bytes(self, pitch: int) -> int:
        return STAGES * 2 * pitch + 4 * up_to(33 * 2 * self.words + 4, 8) + self.strip_bytes

    def entry(self, sample: str, channels: int) -> str:
        return f"box_column_sums<{channels}, {self.words}, {self.teams}>"


COLUMNS = {channels: Columns(**shape) for channels, shape in tuning.RUNNING_COLUMNS.items()}
WINDOWS = {key: Windows(**shape) for key, shape in tuning.RUNNING_WINDOWS.items()}
DTYPES = ("uint8", "uint16", "int16")
STAGES = 2  # steps whose rows a warp holds in shared memory
STATIC_BYTES = 12 << 10  # shared memory of a block in addition to that of its teams
SLACK_BYTES = 48  # of a row in shared memory: the rest of its first sector and last vector


class Mean(ctypes.Structure):
    """struct Mean of smoothing.cu."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("before_y", "taps_y", "before_x", "taps_x")),
        *((name, ctypes.c_uint) for name in ("initial", "multiplier", "shift")),
        *((name, ctypes.c_int) for name in ("outputs", "pitch", "band_rows", "edge_band_rows")),
    )


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or dtype.name not in DTYPES or any(window.half_weights is not None for window in windows):
        return False
    if max(view.columns * view.channels, view.rows) > MAX_LENGTH or exact_division(_samples(windows), dtype) is None:
        return False
    taps_x = 1 if view.across is None else view.across.taps
    outputs = _shape(dtype.itemsize, view.channels, taps_x).outputs(dtype.itemsize, (taps_x - 1) * view.channels)
    return view.planes * -(-view.columns * view.channels // outputs) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    view, dtype, samples = view_of(image.shape, windows), np.dtype(image.dtype), _samples(windows)
    division = exact_division(samples, dtype)
    assert view is not None
    assert division is not None
    picture = picture_of(image, view, cval, out)
    before_y, taps_y = (0, 1) if view.down is None else (view.down.before, view.down.taps)
    before_x, taps_x = (0, 1) if view.across is None else (view.across.before, view.across.taps)
    shape, beside = _shape(dtype.itemsize, view.channels, taps_x), (taps_x - 1) * view.channels
    most = shape.outputs(dtype.itemsize, beside)
    tiles = -(-picture.out_row_samples // most)
    outputs = min(up_to(-(-picture.out_row_samples // tiles), SECTOR_BYTES // dtype.itemsize), most)
    pitch = shape.pitch(dtype.itemsize, beside + view.channels)
    team_bytes = shape.team_bytes(pitch)
    teams = min(shape.teams, (shared_bytes_a_block() - STATIC_BYTES) // team_bytes)
    picture.tiles = -(-picture.out_row_samples // outputs)
    band_rows, edge_band_rows = _band_rows(view.planes, picture.tiles, picture.out_rows, taps_y, multiprocessors())
    picture.bands = -(-picture.out_rows // band_rows)
    edges = min(picture.tiles, 2)
    blocks = (picture.tiles - edges) * picture.bands + edges * -(-picture.out_rows // edge_band_rows)
    mean = Mean(
        before_y=before_y, taps_y=taps_y, before_x=before_x, taps_x=taps_x,
        initial=samples // 2 + (samples << 15 if dtype == np.int16 else 0),
        multiplier=division[0], shift=division[1], outputs=outputs, pitch=pitch,
        band_rows=band_rows, edge_band_rows=edge_band_rows,
    )  # fmt: skip
    kernel("smoothing", shape.entry(C_TYPES[dtype.name], view.channels)).launch(
        (view.planes * blocks,), (32 * teams,), (image, out, picture, mean),
        shared_bytes=teams * team_bytes, stream=stream, dependent_launch=shape.dependent_launch,
    )  # fmt: skip


def exact_division(divisor: int, dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """(multiplier, shift) so that n // divisor == n * multiplier >> 32 + shift for every n < divisor * 2**bits.

    The multiplier exceeds 2**(32 + shift) / divisor by error / divisor, which must add up to less than 1 / divisor.
    Shifts by whole bytes are tried first, since they cost nothing. None for a divisor of 1.
    """
    for shift in sorted(range(32), key=lambda shift: shift % 8 != 0):
        multiplier = -(-(1 << 32 + shift) // divisor)
        error = multiplier * divisor - (1 << 32 + shift)
        if multiplier < 1 << 32 and error * (divisor << 8 * dtype.itemsize) < 1 << 32 + shift:
            return multiplier, shift
    return None


def _samples(windows: Sequence[Window]) -> int:
    return math.prod(window.taps for window in windows)


def _shape(itemsize: int, channels: int, taps_x: int) -> Windows | Columns:
    columns = COLUMNS[channels]
    return columns if itemsize == 1 and taps_x <= columns.most_taps else WINDOWS[itemsize, channels]


@lru_cache(maxsize=256)
def _band_rows(planes: int, tiles: int, out_rows: int, taps_y: int, at_once: int) -> tuple[int, int]:
    """Rows of a band, and of a band at the left or right edge, if `at_once` blocks run at once. A block starts by
    waiting for its first row and adding up its first window, which costs about as much as half of the window's rows."""
    edges, begin = min(tiles, 2), tuning.RUNNING_START_ROWS + taps_y // 2

    def cost(bands: tuple[int, int]) -> float:
        blocks = planes * ((tiles - edges) * bands[0] + edges * bands[1])
        inner, outer = (-(-out_rows // count) + begin for count in bands)
        return -(-blocks // at_once) * max(inner if tiles > edges else 0, tuning.RUNNING_EDGE_COST * outer)

    most = min(out_rows, 2 * at_once)
    choices = (
        (inner, min(inner + more, out_rows)) for inner in range(1, most + 1) for more in range(min(inner // 4, 8) + 2)
    )
    inner, outer = min(choices, key=cost)
    return -(-out_rows // inner), -(-out_rows // outer)


ENTRIES = (
    *(shape.entry("unsigned char", channels) for channels, shape in COLUMNS.items()),
    *(
        shape.entry(C_TYPES[dtype], channels)
        for dtype in DTYPES
        for (itemsize, channels), shape in WINDOWS.items()
        if itemsize == np.dtype(dtype).itemsize
    ),
)
