"""Medians of squares of 9 to 15: arguments and launches of tile.cuh."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, constants
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel
from kernels.smoothing.borders import MODES

SIZES = (9, 11, 13, 15)
SIDE, ACROSS, DOWN = 4, 32, 4  # of tile.cuh
STRIPS = 2
MAX_GRID, MAX_SIDE = 65535, 1 << 30  # along y and z
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}
ENTRIES = tuple(f"median_tile<{name}, {size}>" for name in _NAMES.values() for size in SIZES)


class TileTask(ctypes.Structure):
    """struct TileTask of tile.cuh."""

    _fields_ = (
        ("planes", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns", "out_rows", "out_columns")),
        *((name, ctypes.c_int) for name in ("first_y", "first_x", "mode_y", "mode_x")),
    )


def applies(task: Task) -> bool:
    planes, rows, columns = task.axes
    return (
        task.dtype.name in _NAMES
        and task.footprint is None
        and task.nodata is None
        and task.inner == planes.taps == planes.length == 1
        and rows.taps == columns.taps
        and rows.taps in SIZES
        and task.rank.of(task.samples) == task.samples // 2
        and task.planes <= MAX_GRID
        and max(rows.length, columns.length) < MAX_SIDE
        and rows.out_length <= MAX_GRID * SIDE * DOWN
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    _, rows, columns = task.axes
    size = rows.taps
    tile = TileTask(
        planes=task.planes, rows=rows.length, columns=columns.length, out_rows=rows.out_length,
        out_columns=columns.out_length, first_y=rows.first, first_x=columns.first, mode_y=MODES.index(rows.mode),
        mode_x=MODES.index(columns.mode),
    )  # fmt: skip
    core = size - 3
    lists = ACROSS + core // 4 + 1 + core % 4 // 2
    words = (SIDE * DOWN + size - 1) * 4 * lists + (12 * core + 24) * lists * DOWN
    grid = (blocks_of(columns.out_length, STRIPS * SIDE * ACROSS), blocks_of(rows.out_length, SIDE * DOWN), task.planes)
    kernel("rank", f"median_tile<{_NAMES[task.dtype.name]}, {size}>").launch(
        grid, (ACROSS * DOWN,), (image, out, tile, constants(task)[0]), shared_bytes=4 * words, stream=stream
    )
