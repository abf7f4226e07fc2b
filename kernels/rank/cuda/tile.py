"""Medians of squares of 9 to 15: arguments and launches of tile.cuh."""

from __future__ import annotations

from typing import Any

from kernels.rank.cuda.gather import C_TYPES, MAX_GRID, PlanesTask, constants, is_median_of_square, planes_of
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel

SIZES = (9, 11, 13, 15)
SIDE, ACROSS, DOWN = 4, 32, 4  # of tile.cuh
STRIPS = 2
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}
ENTRIES = tuple(f"median_tile<{name}, {size}>" for name in _NAMES.values() for size in SIZES)


def applies(task: Task) -> bool:
    return (
        task.dtype.name in _NAMES
        and is_median_of_square(task, SIZES)
        and task.axes[1].out_length <= MAX_GRID * SIDE * DOWN
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    _, rows, columns = task.axes
    size = rows.taps
    tile = PlanesTask(**planes_of(task))
    core = size - 3
    lists = ACROSS + core // 4 + 1 + core % 4 // 2
    words = (SIDE * DOWN + size - 1) * 4 * lists + (12 * core + 24) * lists * DOWN
    grid = (blocks_of(columns.out_length, STRIPS * SIDE * ACROSS), blocks_of(rows.out_length, SIDE * DOWN), task.planes)
    kernel("rank", f"median_tile<{_NAMES[task.dtype.name]}, {size}>").launch(
        grid, (ACROSS * DOWN,), (image, out, tile, constants(task)[0]), shared_bytes=4 * words, stream=stream
    )
