"""Medians of 3 × 3 of aligned rows: arguments and launches of rows.cuh."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.rank.cuda import square
from kernels.rank.cuda.gather import C_TYPES, constants
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel
from kernels.smoothing.borders import MODES

WARPS, VECTOR = 4, 16  # of rows.cuh; bytes that a lane has of a row
STRIP = 64  # rows of results of a warp, of which it sorts two more
MAX_SIDE = 1 << 30
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}
ENTRIES = tuple(f"median_rows<{name}>" for name in _NAMES.values())


class RowsTask(ctypes.Structure):
    """struct RowsTask of rows.cuh."""

    _fields_ = (
        ("planes", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns", "out_rows", "first_y", "mode_y", "mode_x")),
        *((name, ctypes.c_int) for name in ("strip", "strips", "across")),
    )


def applies(task: Task) -> bool:
    _, rows, columns = task.axes
    return (
        task.dtype.name in _NAMES
        and rows.taps == columns.taps == 3
        and square.applies(task)
        and columns.first == -1
        and max(rows.length, columns.length) < MAX_SIDE  # a row's bytes in 31 bits
        and columns.length * task.dtype.itemsize % VECTOR == 0
        and columns.length * task.dtype.itemsize % (32 * VECTOR) != VECTOR  # the first lane of a warp is not the last
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    if image.data.ptr % VECTOR or out.data.ptr % VECTOR:
        square.run(image, task, out, stream)
        return
    _, rows, columns = task.axes
    across = blocks_of(columns.length * task.dtype.itemsize, 32 * VECTOR)
    strips = blocks_of(rows.out_length, STRIP)
    rows_task = RowsTask(
        planes=task.planes, rows=rows.length, columns=columns.length, out_rows=rows.out_length, first_y=rows.first,
        mode_y=MODES.index(rows.mode), mode_x=MODES.index(columns.mode), strip=STRIP, strips=strips, across=across,
    )  # fmt: skip
    kernel("rank", f"median_rows<{_NAMES[task.dtype.name]}>").launch(
        (blocks_of(task.planes * strips * across, WARPS),), (32, WARPS),
        (image, out, rows_task, constants(task)[0]), stream=stream,
    )  # fmt: skip
