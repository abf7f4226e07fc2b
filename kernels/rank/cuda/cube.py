"""Medians of 3 × 3 × 3 and 5 × 5 × 5: arguments and launches of cube.cuh."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, constants
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel
from kernels.smoothing.borders import MODES

SIZES = (3, 5)
WARPS = 4  # of cube.cuh
PIECE = 32  # planes of results, of which a warp sorts SIZE - 1 more
MAX_BLOCKS = (1 << 31) - 1
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}
ENTRIES = tuple(f"median_cube<{name}, {size}>" for name in _NAMES.values() for size in SIZES)


class CubeTask(ctypes.Structure):
    """struct CubeTask of cube.cuh."""

    _fields_ = (
        ("planes", ctypes.c_longlong),
        *((name, ctypes.c_int * 3) for name in ("length", "out_length", "first", "mode")),
        *((name, ctypes.c_int) for name in ("tiles", "pairs", "pieces", "piece")),
    )


def applies(task: Task) -> bool:
    return (
        task.dtype.name in _NAMES
        and task.footprint is None
        and task.nodata is None
        and task.inner == 1
        and task.taps in [(size,) * 3 for size in SIZES]
        and task.rank.of(task.samples) == task.samples // 2
        and max(axis.length for axis in task.axes) < 1 << 30
        and task.axes[1].length * task.axes[2].length * task.dtype.itemsize < 1 << 31
        and math.prod(task.out_shape) < MAX_BLOCKS
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    depth, rows, columns = (axis.out_length for axis in task.axes)
    each, size = ctypes.c_int * 3, task.taps[0]
    cube = CubeTask(
        planes=task.planes, length=each(*(axis.length for axis in task.axes)), out_length=each(depth, rows, columns),
        first=each(*(axis.first for axis in task.axes)), mode=each(*(MODES.index(axis.mode) for axis in task.axes)),
        tiles=blocks_of(columns, 32 - size + 1), pairs=blocks_of(rows, 2), pieces=blocks_of(depth, PIECE), piece=PIECE,
    )  # fmt: skip
    warps = task.planes * cube.pieces * cube.pairs * cube.tiles
    kernel("rank", f"median_cube<{_NAMES[task.dtype.name]}, {size}>").launch(
        (blocks_of(warps, WARPS),), (32, WARPS), (image, out, cube, constants(task)[0]), stream=stream
    )
