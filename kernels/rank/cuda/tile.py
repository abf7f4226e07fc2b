"""Medians of squares of 9 to 15: arguments and launches of tile.cuh."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.rank.cuda import bitsets
from kernels.rank.cuda.gather import C_TYPES, MAX_GRID, PlanesTask, constants, is_median_of_square, planes_of
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel, shared_bytes_a_block

DOWN = {9: 4, 11: 4, 13: 8, 15: 8}  # of tile.cuh: lines of tiles of a block, by the square's side
SIDE, ACROSS = 4, 32
STRIPS = 2
# The kernel and the sign bits of two samples: those of int16 are flipped, and compared as uint16.
_NAMES = {"uint8": (C_TYPES["uint8"], 0), "uint16": (C_TYPES["uint16"], 0), "int16": (C_TYPES["uint16"], 0x80008000)}
ENTRIES = tuple(f"median_tile<{C_TYPES[name]}, {size}>" for name in ("uint8", "uint16") for size in DOWN)


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
    name, signs = _NAMES[task.dtype.name]
    kernel("rank", f"median_tile<{name}, {size}>").launch(
        grid, (32 * down,), (image, out, PlanesTask(**planes_of(task)), constants(task)[0], ctypes.c_uint32(signs)),
        shared_bytes=shared_bytes, stream=stream,
    )  # fmt: skip
