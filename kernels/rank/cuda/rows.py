"""Medians of 3 × 3 of aligned rows: arguments and launches of rows.cuh."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.rank.cuda import square
from kernels.rank.cuda.gather import C_TYPES, PlanesTask, constants, planes_of
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel

WARPS, VECTOR = 4, 16  # of rows.cuh; bytes that a lane has of a row
STRIP = 64  # rows of results of a warp, of which it sorts two more
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}
ENTRIES = tuple(f"median_rows<{name}>" for name in _NAMES.values())


class RowsTask(PlanesTask):
    """struct RowsTask of rows.cuh."""

    _fields_ = (
        ("planes", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("strip", "strips", "across")),
    )


def applies(task: Task) -> bool:
    _, rows, columns = task.axes
    return (
        task.dtype.name in _NAMES
        and rows.taps == columns.taps == 3
        and square.applies(task)
        and columns.first == -1
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
    rows_task = RowsTask(**planes_of(task), planes=task.planes, strip=STRIP, strips=strips, across=across)
    kernel("rank", f"median_rows<{_NAMES[task.dtype.name]}>").launch(
        (blocks_of(task.planes * strips * across, WARPS),), (32, WARPS),
        (image, out, rows_task, constants(task)[0]), stream=stream,
    )  # fmt: skip
