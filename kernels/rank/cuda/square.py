"""Medians of small squares: arguments and launches of square.cuh."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, constants, rank_task
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel
from kernels.smoothing.borders import MODES

SIZES = (3, 5, 7)
STRIP, ACROSS, DOWN = 8, 16, 8  # of square.cuh
VECTOR_IN, VECTOR_OUT = 4, 16  # samples that are loaded, and bytes that are stored at once at most
MAX_GRID = 65535  # along y and z
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16", "float32")}
ENTRIES = tuple(f"median_square<{name}, {size}>" for name in _NAMES.values() for size in SIZES)


class SquareTask(ctypes.Structure):
    """struct SquareTask of square.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("planes", "rows", "columns", "out_rows", "out_columns")),
        *((name, ctypes.c_int) for name in ("first_y", "first_x", "mode_y", "mode_x", "aligned_in", "aligned_out")),
    )


def applies(task: Task) -> bool:
    planes, rows, columns = task.axes
    return (
        task.dtype.name in _NAMES
        and task.footprint is None
        and task.inner == planes.taps == planes.length == 1
        and rows.taps == columns.taps
        and rows.taps in SIZES
        and task.rank.of(task.samples) == task.samples // 2
        and task.nodata is None
        and task.planes <= MAX_GRID
        and rows.out_length <= MAX_GRID * 2 * DOWN
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    _, rows, columns = task.axes
    size = task.dtype.itemsize
    first = columns.first + columns.taps // 2  # the input's place of result 0's centre
    vector_out = min(STRIP * size, VECTOR_OUT)
    square = SquareTask(
        planes=task.planes, rows=rows.length, columns=columns.length, out_rows=rows.out_length,
        out_columns=columns.out_length, first_y=rows.first, first_x=columns.first, mode_y=MODES.index(rows.mode),
        mode_x=MODES.index(columns.mode),
        aligned_in=first % VECTOR_IN == columns.length % VECTOR_IN == image.data.ptr % (VECTOR_IN * size) == 0,
        aligned_out=columns.out_length * size % vector_out == out.data.ptr % vector_out == 0,
    )  # fmt: skip
    strips = 1 if task.dtype.kind == "f" else 2
    grid = (
        blocks_of(columns.out_length, strips * STRIP * ACROSS), blocks_of(rows.out_length, 2 * DOWN), task.planes,
    )  # fmt: skip
    cval, _, _ = constants(task)
    kernel("rank", f"median_square<{_NAMES[task.dtype.name]}, {rows.taps}>").launch(
        grid, (ACROSS, DOWN), (image, out, square, rank_task(task), cval), stream=stream
    )
