"""The rank filter of boxes by counts of columns: tiles, arguments and launches of columns.cuh."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, constants
from kernels.rank.task import Task
from kernels.runtime.launch import blocks_of, kernel
from kernels.smoothing.borders import MODES

THREADS, COLUMN_BYTES, MOST_SIDE = 128, 16 + 256, 127  # of columns.cuh
BINS = 256
STATIC_BYTES = 2048  # at least those of the kernel's own arrays
MOST_ROWS, MOST_COLUMNS = 31, 63  # of a window: counts of eight columns fit a byte, positions in a tile 7 bits
SMALL = 255  # samples of windows whose counts fit a byte
WORDS = {True: 4, False: 8}  # a quarter of a bin's places: of small windows, of others
MIN_ROWS, MIN_COLUMNS = 9, 4  # of a window: fewer rows take less time by moving windows (ordered.cuh)
WIDTHS = (96, 64, 32)  # results of a tile along a line
SHARED_BYTES = 227 << 10
MAX_BLOCKS = (1 << 31) - 1
_NAMES = {name: C_TYPES[name] for name in ("uint8", "uint16", "int16")}
ENTRIES = tuple(f"rank_columns<{name}, {small}>" for name in _NAMES.values() for small in ("true", "false"))


class ColumnsTask(ctypes.Structure):
    """struct ColumnsTask of columns.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("rows", "columns", "out_rows", "out_columns", "inner")),
        *((name, ctypes.c_int) for name in ("first_y", "first_x", "mode_y", "mode_x", "taps_y", "taps_x")),
        *((name, ctypes.c_int) for name in ("tile_y", "tile_x", "tiles_y", "tiles_x", "quads", "rank")),
    )


def applies(task: Task) -> bool:
    planes, rows, columns = task.axes
    return (
        task.dtype.name in _NAMES
        and task.footprint is None
        and task.nodata is None
        and planes.taps == 1
        and MIN_ROWS <= rows.taps <= MOST_ROWS
        and MIN_COLUMNS <= columns.taps <= MOST_COLUMNS
        and max(rows.length, columns.length) < MAX_BLOCKS
        and math.prod(task.out_shape) < MAX_BLOCKS
    )


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    planes, rows, columns = task.axes
    tile_y, tile_x = _tile(rows.taps, columns.taps, rows.out_length, columns.out_length, task.dtype.itemsize)
    tiles_y, tiles_x = blocks_of(rows.out_length, tile_y), blocks_of(columns.out_length, tile_x)
    quads = (columns.taps - 3) // 4
    columns_task = ColumnsTask(
        rows=rows.length, columns=columns.length, out_rows=rows.out_length, out_columns=columns.out_length,
        inner=task.inner, first_y=rows.first, first_x=columns.first, mode_y=MODES.index(rows.mode),
        mode_x=MODES.index(columns.mode), taps_y=rows.taps, taps_x=columns.taps, tile_y=tile_y, tile_x=tile_x,
        tiles_y=tiles_y, tiles_x=tiles_x, quads=quads, rank=int(task.rank.of(task.samples)),
    )  # fmt: skip
    small = task.samples <= SMALL
    name = _NAMES[task.dtype.name]
    shared_bytes = _shared_bytes(rows.taps, columns.taps, tile_y, tile_x, task.dtype.itemsize)
    found = kernel("rank", f"rank_columns<{name}, {'true' if small else 'false'}>")
    found.grant(shared_bytes + STATIC_BYTES)
    found.launch(
        (task.planes * planes.length * task.inner * tiles_y * tiles_x,), (THREADS,),
        (image, out, columns_task, constants(task)[0]),
        shared_bytes=shared_bytes, stream=stream,
    )  # fmt: skip


def _shared_bytes(taps_y: int, taps_x: int, tile_y: int, tile_x: int, itemsize: int) -> int:
    rows, columns = tile_y + taps_y - 1, tile_x + taps_x - 1
    total, width = rows * columns, 4 * WORDS[taps_y * taps_x <= SMALL]
    places = blocks_of(total, width) * width
    digits = 1 << 8 if itemsize == 1 else 1 << 13
    padded = blocks_of(total, THREADS) * THREADS
    sort = max(2 * digits + 4 * THREADS, 2 * padded) + 2 * padded
    counts = (columns + blocks_of(columns, 4) + 1) * COLUMN_BYTES
    return places * (2 + itemsize) + blocks_of(total, 16) * 16 + max(sort, counts)


@functools.lru_cache(maxsize=256)
def _tile(taps_y: int, taps_x: int, out_rows: int, out_columns: int, itemsize: int) -> tuple[int, int]:
    """Results of a tile along both axes, for the most results a cycle."""
    words = WORDS[taps_y * taps_x <= SMALL]
    best, least = (1, WIDTHS[-1]), math.inf
    for tile_x in WIDTHS:
        columns = tile_x + taps_x - 1
        if columns >= MOST_SIDE or (tile_x > WIDTHS[-1] and tile_x - 32 >= out_columns):
            continue
        for tile_y in range(1, min(MOST_SIDE - taps_y, out_rows) + 1):
            rows = tile_y + taps_y - 1
            if rows * columns > 4 * words * BINS:
                break
            held = _shared_bytes(taps_y, taps_x, tile_y, tile_x, itemsize) + STATIC_BYTES + 1024
            cost = _cost(rows, columns, tile_y, tile_x, words, SHARED_BYTES // held)
            if cost < least:
                best, least = (tile_y, tile_x), cost
    return best


def _cost(rows: int, columns: int, tile_y: int, tile_x: int, words: int, blocks: int) -> float:
    """Cycles of a multiprocessor a result: fits the best tiles that an H100 measured, for windows of 9 to 31 rows."""
    warps, rounds = blocks_of(columns, 32), rows * columns / 32
    issued = rounds * 120 + warps * (rows + tile_y) * 20 + tile_y * tile_x / 32 * (150 + 20 * words)
    alone = rounds * 150 + rows * 300 + tile_y * 1000  # of a block that has a multiprocessor to itself
    return max(issued / 3, alone / max(blocks, 1)) / (tile_y * tile_x)
