"""Medians of 3 × 3 × 3 and 5 × 5 × 5: arguments and launches of cube.cuh."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, constants
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel, multiprocessors
from kernels.smoothing.borders import MODES

SIZES = (3, 5)
THREADS, LANES = 128, {3: 32, 5: 128}  # of cube.cuh
PIECES = (16, 32, 64, 128)  # planes of results, of which a block sorts SIZE - 1 more
BLOCKS = {3: 7, 5: 2}  # of a multiprocessor, by registers
MAX_GRID, MAX_BYTES = 65535, (1 << 31) - (1 << 10)  # along y and z; of a plane
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}
ENTRIES = tuple(f"median_cube<{name}, {size}>" for name in _NAMES.values() for size in SIZES)


class CubeTask(ctypes.Structure):
    """struct CubeTask of cube.cuh."""

    _fields_ = (
        *((name, ctypes.c_int * 3) for name in ("length", "out_length", "first", "mode")),
        *((name, ctypes.c_int) for name in ("windows", "piece")),
    )


def applies(task: Task) -> bool:
    return (
        task.dtype.name in _NAMES
        and task.footprint is None
        and task.nodata is None
        and task.inner == 1
        and task.taps in [(size,) * 3 for size in SIZES]
        and task.whole_rank == task.samples // 2
        and max(axis.length for axis in task.axes) < 1 << 30
        and task.axes[1].length * task.axes[2].length * task.dtype.itemsize < MAX_BYTES
        and _windows(task) < MAX_BYTES
        and max(blocks_of(task.axes[0].out_length, PIECES[0]), task.planes) <= MAX_GRID
    )


def _windows(task: Task) -> int:
    """Those of a plane, two rows at once, with the columns beyond the last result of each."""
    _, rows, columns = task.axes
    return blocks_of(rows.out_length, 2) * (columns.out_length + columns.taps - 1)


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    each, size, depth = ctypes.c_int * 3, task.taps[0], task.axes[0].out_length
    windows = _windows(task)
    across = blocks_of(windows, THREADS // LANES[size] * (LANES[size] - size + 1))

    def planes_in_turn(piece: int) -> int:
        blocks = across * blocks_of(depth, piece) * task.planes
        return blocks_of(blocks, BLOCKS[size] * multiprocessors()) * (min(piece, depth) + size - 1)

    piece = min(PIECES, key=planes_in_turn)
    cube = CubeTask(
        length=each(*(axis.length for axis in task.axes)), out_length=each(*(axis.out_length for axis in task.axes)),
        first=each(*(axis.first for axis in task.axes)), mode=each(*(MODES.index(axis.mode) for axis in task.axes)),
        windows=windows, piece=piece,
    )  # fmt: skip
    kernel("rank", f"median_cube<{_NAMES[task.dtype.name]}, {size}>").launch(
        (across, blocks_of(depth, piece), task.planes), (THREADS,), (image, out, cube, constants(task)[0]),
        stream=stream,
    )  # fmt: skip
