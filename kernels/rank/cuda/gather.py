"""The rank filter of any window: arguments and launches of gather.cuh."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from kernels.rank.footprint import MAX_RADIUS
from kernels.rank.keys import keys_of
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel
from kernels.smoothing.borders import MODES

THREADS = 256
MAX_BLOCKS = 1 << 30  # kernels loop if there is more to do
MAX_GRID, MAX_SIDE = 65535, 1 << 30  # of a grid along y and z; of planes
C_TYPES = {
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "int16": "short",
    "float32": "float",
    "float64": "double",
}
ENTRIES = tuple(f"rank_gather<{name}, {shaped}>" for name in C_TYPES.values() for shaped in ("false", "true"))
_VALUES = {1: ctypes.c_uint8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}


class RankAxis(ctypes.Structure):
    """struct RankAxis of gather.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("length", "out_length")),
        *((name, ctypes.c_int) for name in ("first", "taps", "mode", "unused")),
    )


class RankOf(ctypes.Structure):
    """struct RankOf of gather.cuh."""

    _fields_ = (("percentile", ctypes.c_double), ("rank", ctypes.c_longlong), ("whole", ctypes.c_longlong))


class RankTask(ctypes.Structure):
    """struct RankTask of gather.cuh."""

    _fields_ = (
        ("axis", RankAxis * 3),
        *((name, ctypes.c_longlong) for name in ("planes", "inner", "total")),
        ("rank", RankOf),
        *((name, ctypes.c_int) for name in ("omit_nan", "has_nodata")),
    )


class PlanesTask(ctypes.Structure):
    """struct PlanesTask of gather.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("rows", "columns", "out_rows", "out_columns")),
        *((name, ctypes.c_int) for name in ("first_y", "first_x", "mode_y", "mode_x")),
    )


class Footprint(ctypes.Structure):
    """struct Footprint of gather.cuh."""

    _fields_ = (("row", ctypes.c_uint * (2 * MAX_RADIUS + 1) ** 2),)


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    arguments = rank_task(task)
    entry = f"rank_gather<{C_TYPES[task.dtype.name]}, {'false' if task.footprint is None else 'true'}>"
    grid = (min(blocks_of(arguments.total, THREADS), MAX_BLOCKS),)
    kernel("rank", entry).launch(
        grid, (THREADS,), (image, out, arguments, *constants(task), footprint_of(task)), stream=stream
    )


def planes_of(task: Task) -> dict[str, int]:
    """The fields of PlanesTask."""
    _, rows, columns = task.axes
    return {
        "rows": rows.length, "columns": columns.length, "out_rows": rows.out_length, "out_columns": columns.out_length,
        "first_y": rows.first, "first_x": columns.first, "mode_y": MODES.index(rows.mode),
        "mode_x": MODES.index(columns.mode),
    }  # fmt: skip


def is_median_of_square(task: Task, sizes: tuple[int, ...]) -> bool:
    """Whether the results are the medians of odd squares of planes, of one of these sizes, without missing samples."""
    planes, rows, columns = task.axes
    return (
        task.footprint is None
        and task.nodata is None
        and task.inner == planes.taps == planes.length == 1
        and rows.taps == columns.taps
        and rows.taps in sizes
        and task.whole_rank == task.samples // 2
        and task.planes <= MAX_GRID
        and max(rows.length, columns.length) < MAX_SIDE
    )


def rank_task(task: Task) -> RankTask:
    axes = [
        RankAxis(length=axis.length, out_length=axis.out_length, first=axis.first, taps=axis.taps,
                 mode=MODES.index(axis.mode))
        for axis in task.axes
    ]  # fmt: skip
    percentile = -1.0 if task.rank.percentile is None else task.rank.percentile
    return RankTask(
        axis=(RankAxis * 3)(*axes), planes=task.planes, inner=task.inner, total=math.prod(task.out_shape),
        rank=RankOf(percentile=percentile, rank=task.rank.rank, whole=task.rank.whole), omit_nan=task.omit_nan,
        has_nodata=task.nodata is not None,
    )  # fmt: skip


def footprint_of(task: Task) -> Footprint:
    footprint = Footprint()
    if task.footprint is not None:
        rows = task.footprint.reshape(-1, task.taps[2])
        footprint.row[: len(rows)] = (rows << np.arange(task.taps[2], dtype=np.uint64)).sum(axis=1).tolist()
    return footprint


def constants(task: Task) -> tuple[Any, Any, Any]:
    """The samples beyond the edge, that mark missing ones, and of a window of missing samples, as bits."""
    keys = keys_of(task)
    nodata = 0 if task.nodata is None else int(np.array(task.nodata, task.dtype).view(keys.bits))
    value = _VALUES[task.dtype.itemsize]
    return value(keys.cval), value(nodata), value(keys.empty)
