"""The rank filter by a moving window over sorted tiles: tiles, arguments and launches of ordered.cuh."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, constants, footprint_of, rank_task
from kernels.rank.task import Task
from kernels.runtime.launch import kernel

ENTRIES = tuple(
    f"rank_ordered<{C_TYPES[name]}, {shaped}, {complete}>"
    for name in C_TYPES
    for shaped in ("false", "true")
    for complete in ("false", "true")
    if complete == "false" or not name.startswith("float")
)
SORTERS = 128  # of ordered.cuh
COUNTS_BYTES = 2 * 16 * SORTERS
WALKERS = (32, 64, 96, 128)
# Samples of a tile: for windows that need more, as many as shared memory holds beside all else.
SAMPLES = {size: (9, 13, 17, 25, 33, most) for size, most in ((1, 97), (2, 97), (4, 65), (8, 33))}  # times SORTERS
SHARED_BYTES = 227 << 10  # of a multiprocessor; one with less has room for fewer blocks
FEW_SAMPLES = 64
MAX_BLOCKS = (1 << 31) - 1
# Cycles of a warp that is alone, and instructions, of sorting a sample by a digit, flipping a bit, finding a result.
SORT, FLIP, FIND = (160, 40), (40, 14), (800, 90)


class OrderedTask(ctypes.Structure):
    """struct OrderedTask of ordered.cuh."""

    _fields_ = (
        *((name, ctypes.c_int * 3) for name in ("outs", "sides")),
        *((name, ctypes.c_int) for name in ("pitch", "each", "pieces")),
        ("tiles", ctypes.c_int * 3),
    )


def applies(task: Task) -> bool:
    # The least or the largest of few samples takes one look at each.
    if task.samples <= FEW_SAMPLES and task.whole_rank in (0, task.samples - 1):
        return False
    tile = _tile(task.taps, tuple(axis.out_length for axis in task.axes), task.samples, task.dtype.itemsize)
    return tile is not None and math.prod(task.out_shape) < MAX_BLOCKS


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    lengths = tuple(axis.out_length for axis in task.axes)
    tile = _tile(task.taps, lengths, task.samples, task.dtype.itemsize)
    assert tile is not None
    outs, pieces = tile
    sides = [n + taps - 1 for n, taps in zip(outs, task.taps, strict=True)]
    pitch = _two_above_four(sides[2])
    each = -(-sides[0] * sides[1] * pitch // SORTERS) | 1
    tiles = [-(-length // n) for length, n in zip(lengths, outs, strict=True)]
    ordered = OrderedTask(
        outs=(ctypes.c_int * 3)(*outs), sides=(ctypes.c_int * 3)(*sides), pitch=pitch, each=each, pieces=pieces,
        tiles=(ctypes.c_int * 3)(*tiles),
    )  # fmt: skip
    cval, nodata, empty = constants(task)
    shaped = "false" if task.footprint is None else "true"
    complete = "true" if task.dtype.kind != "f" and task.nodata is None else "false"
    entry = f"rank_ordered<{C_TYPES[task.dtype.name]}, {shaped}, {complete}>"
    kernel("rank", entry).launch(
        (task.planes * task.inner * math.prod(tiles),), (SORTERS,),
        (image, out, rank_task(task), ordered, cval, nodata, empty, ctypes.c_int(task.samples), footprint_of(task)),
        shared_bytes=_shared_bytes(each, outs[0] * outs[1] * pieces, task.dtype.itemsize), stream=stream,
    )  # fmt: skip


def _two_above_four(count: int) -> int:
    """The least number of at least `count` that is 2 above a multiple of 4."""
    return count + (2 - count) % 4


def _shared_bytes(each: int, walkers: int, itemsize: int) -> int:
    count = SORTERS * each
    bits = 0 if walkers <= 32 else walkers * count // 8
    return (8 + (itemsize if itemsize > 2 else 0)) * count + max(COUNTS_BYTES, bits)


@functools.lru_cache(maxsize=256)
def _tile(
    taps: tuple[int, int, int], lengths: tuple[int, ...], samples: int, itemsize: int
) -> tuple[tuple[int, int, int], int] | None:
    """Results of a tile along the axes, and the pieces of its lines, for the most results a cycle; None if a
    window is too large."""
    best, most = None, 0.0
    for each, walkers, planes, pieces in itertools.product(SAMPLES[itemsize], WALKERS, (1, 2, 4, 8), (1, 2, 4, 8)):
        rows = walkers // planes // pieces
        if rows < 1 or planes > lengths[0]:
            continue
        outs0, outs1 = planes, min(rows, lengths[1])
        longest = each * SORTERS // ((outs0 + taps[0] - 1) * (outs1 + taps[1] - 1))
        outs2 = min((longest - 2) // 4 * 4 + 2 - taps[2] + 1, lengths[2])
        if outs2 < pieces:
            continue
        used, steps = outs0 * outs1 * pieces, outs2 / pieces
        blocks = SHARED_BYTES // (_shared_bytes(each, used, itemsize) + 1024)
        flips, fill = 2 * taps[0] * taps[1], samples
        cycles, issued = (
            4 * itemsize * each * sort / 2
            + (steps * (flips * flip + find) + fill * flip) * (1 if alone else -(-used // 32) / 4)
            for alone, sort, flip, find in zip((True, False), SORT, FLIP, FIND, strict=True)
        )
        if blocks:
            speed = blocks * outs0 * outs1 * outs2 / max(cycles, blocks * issued)
            if speed > most:
                best, most = ((outs0, outs1, outs2), pieces), speed
    return best
