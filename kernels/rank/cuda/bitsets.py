"""The rank filter of boxes by bits over the sorted samples of a tile: arguments and launches of bitsets.cuh."""

from __future__ import annotations

import ctypes
import math
from dataclasses import astuple, dataclass
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, MAX_GRID, MAX_SIDE, PlanesTask, constants, planes_of
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel

ROWS, LINES, GROUPS = 32, 64, 8  # of bitsets.cuh
MAX_SAMPLES = (1 << 31) - 1
MIN_TAPS, MAX_ROWS, MAX_COLUMNS = 4, 33, 65  # of a window: counts fit bytes, samples of a tile 13 bits
FLAT_ROWS, FLAT_COLUMNS = 8, 17  # moving windows are faster for windows with at most 8 rows and more than 17 columns


@dataclass(frozen=True)
class Shape:
    """A tile, by the kernel's parameters.

    warps  : of a block
    chunks : 32 samples each, for a line of the tile with its halo
    across : results of a line
    quads  : four words each, of the places of a group
    """

    warps: int
    chunks: int
    across: int
    quads: int

    def holds(self, taps_y: int, taps_x: int) -> bool:
        """Whether a line's samples fit, and the places that results of such windows may have."""
        columns = self.across + taps_x - 1
        places = (ROWS + taps_y - 1) * columns - taps_y * taps_x + 1
        return columns <= 32 * self.chunks and places <= 128 * self.quads * GROUPS

    def shared_bytes(self, itemsize: int) -> int:
        pitch, words = 32 * self.chunks, 4 * self.quads * GROUPS
        sets = pitch * (words + 4) + (LINES + 1) * words
        places = LINES * pitch // 2
        counts = max(ROWS * (self.across + 1) * 4, places)
        return 4 * (sets + places + counts + 2 * ROWS * (pitch + 1)) + LINES * pitch * itemsize


SHAPES = (Shape(16, 2, 48, 3), Shape(16, 2, 32, 3), Shape(16, 3, 32, 4))
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}


def _entry(name: str, shape: Shape) -> str:
    return f"rank_bitsets<{_NAMES[name]}, {', '.join(map(str, astuple(shape)))}>"


ENTRIES = tuple(_entry(name, shape) for name in _NAMES for shape in SHAPES)


class BitsetsTask(PlanesTask):
    """struct BitsetsTask of bitsets.cuh."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("taps_y", "taps_x", "inner", "rank"))


def applies(task: Task) -> bool:
    planes, rows, columns = task.axes
    return (
        task.dtype.name in _NAMES
        and task.footprint is None
        and task.nodata is None
        and planes.taps == 1
        and MIN_TAPS <= rows.taps <= MAX_ROWS
        and MIN_TAPS <= columns.taps <= MAX_COLUMNS
        and (rows.taps > FLAT_ROWS or columns.taps <= FLAT_COLUMNS)
        and task.planes * planes.length * task.inner <= MAX_GRID
        and rows.out_length <= MAX_GRID * ROWS
        and max(rows.length, columns.length) < MAX_SIDE
        and task.planes * planes.length * rows.length * columns.length * task.inner <= MAX_SAMPLES
        and math.prod(task.out_shape) <= MAX_SAMPLES
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    planes, rows, columns = task.axes
    shape = next(shape for shape in SHAPES if shape.holds(rows.taps, columns.taps))
    bitsets = BitsetsTask(
        **planes_of(task), taps_y=rows.taps, taps_x=columns.taps, inner=task.inner,
        rank=task.whole_rank,
    )  # fmt: skip
    kernel("rank", _entry(task.dtype.name, shape)).launch(
        (blocks_of(columns.out_length, shape.across), blocks_of(rows.out_length, ROWS),
         task.planes * planes.length * task.inner),
        (32 * shape.warps,), (image, out, bitsets, constants(task)[0]),
        shared_bytes=shape.shared_bytes(task.dtype.itemsize), stream=stream,
    )  # fmt: skip
