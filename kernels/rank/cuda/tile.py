"""Medians of squares of 9 to 15: arguments and launches of tile.cuh."""

from __future__ import annotations

from typing import Any

from kernels.rank.cuda import bitsets
from kernels.rank.cuda.gather import C_TYPES, MAX_GRID, PlanesTask, constants, is_median_of_square, planes_of
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel, shared_bytes_a_block

DOWN = {9: 4, 11: 4, 13: 8, 15: 8}  # of tile.cuh: lines of tiles of a block, by the square's side
SIDE, ACROSS = 4, 32
STRIPS = 2
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}
ENTRIES = tuple(f"median_tile<{name}, {size}>" for name in _NAMES.values() for size in DOWN)


def applies(task: Task) -> bool:
    return (
        task.dtype.name in _NAMES
        and is_median_of_square(task, tuple(DOWN))
        and task.axes[1].out_length <= MAX_GRID * SIDE * 4
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    _, rows, columns = task.axes
    size = rows.taps
    down, core = DOWN[size], size - 3
    lists = ACROSS + core // 4 + 1 + core % 4 // 2
    shared_bytes = 4 * ((SIDE * down + size - 1) * 4 * lists + (12 * core + 32) * lists * down)
    if shared_bytes > shared_bytes_a_block():
        bitsets.run(image, task, out, stream)
        return
    grid = (blocks_of(columns.out_length, STRIPS * SIDE * ACROSS), blocks_of(rows.out_length, SIDE * down), task.planes)
    kernel("rank", f"median_tile<{_NAMES[task.dtype.name]}, {size}>").launch(
        grid, (32 * down,), (image, out, PlanesTask(**planes_of(task)), constants(task)[0]),
        shared_bytes=shared_bytes, stream=stream,
    )  # fmt: skip
