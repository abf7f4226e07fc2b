"""Medians of small squares: arguments and launches of square.cuh."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, MAX_GRID, PlanesTask, constants, is_median_of_square, planes_of, rank_task
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel

SIZES = (3, 5, 7)
STRIP, ACROSS, DOWN = 8, 16, 8  # of square.cuh
VECTOR_IN, VECTOR_OUT = 4, 16  # samples that are loaded, and bytes that are stored at once at most
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16", "float32")}
ENTRIES = tuple(f"median_square<{name}, {size}>" for name in _NAMES.values() for size in SIZES)


class SquareTask(PlanesTask):
    """struct SquareTask of square.cuh."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("aligned_in", "aligned_out"))


def applies(task: Task) -> bool:
    return (
        task.dtype.name in _NAMES
        and is_median_of_square(task, SIZES)
        and task.axes[1].out_length <= MAX_GRID * 2 * DOWN
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    _, rows, columns = task.axes
    size = task.dtype.itemsize
    first = columns.first + columns.taps // 2  # the input's place of result 0's centre
    vector_out = min(STRIP * size, VECTOR_OUT)
    square = SquareTask(
        **planes_of(task),
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
