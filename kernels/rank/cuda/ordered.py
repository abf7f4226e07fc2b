"""The rank filter by a moving window over sorted tiles: tiles, arguments and launches of ordered.cuh."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, constants, footprint_of, rank_task
from kernels.rank.task import Task
from kernels.runtime.launch import kernel

ENTRIES = tuple(f"rank_ordered<{name}, {shaped}>" for name in C_TYPES.values() for shaped in ("false", "true"))
SORTERS = 128  # of ordered.cuh
COUNTS_BYTES = 2 * 16 * SORTERS
WALKERS = (32, 64, 96, 128)
# Samples of a tile, so that several blocks share a multiprocessor, and for windows that need more.
FEW_SAMPLES, MOST_SAMPLES = SORTERS * 34, {1: SORTERS * 98, 2: SORTERS * 98, 4: SORTERS * 66, 8: SORTERS * 34}
MAX_BLOCKS = (1 << 31) - 1
# Steps of a thread, measured against each other: sorting a sample, flipping a bit, finding a result.
SORT_STEPS, FLIP_STEPS, FIND_STEPS = 110, 9, 60


class OrderedTask(ctypes.Structure):
    """struct OrderedTask of ordered.cuh."""

    _fields_ = (
        *((name, ctypes.c_int * 3) for name in ("outs", "sides")),
        *((name, ctypes.c_int) for name in ("pitch", "each", "pieces")),
        ("tiles", ctypes.c_int * 3),
    )


def applies(task: Task) -> bool:
    tile = _tile(task.taps, tuple(axis.out_length for axis in task.axes), task.samples, task.dtype.itemsize)
    return tile is not None and math.prod(task.out_shape) < MAX_BLOCKS


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    lengths = tuple(axis.out_length for axis in task.axes)
    tile = _tile(task.taps, lengths, task.samples, task.dtype.itemsize)
    assert tile is not None
    outs, pieces = tile
    sides = [n + taps - 1 for n, taps in zip(outs, task.taps, strict=True)]
    pitch = _two_above_four(sides[2])
    each = _two_above_four(-(-sides[0] * sides[1] * pitch // SORTERS))
    tiles = [-(-length // n) for length, n in zip(lengths, outs, strict=True)]
    ordered = OrderedTask(
        outs=(ctypes.c_int * 3)(*outs), sides=(ctypes.c_int * 3)(*sides), pitch=pitch, each=each, pieces=pieces,
        tiles=(ctypes.c_int * 3)(*tiles),
    )  # fmt: skip
    cval, nodata, empty = constants(task)
    entry = f"rank_ordered<{C_TYPES[task.dtype.name]}, {'false' if task.footprint is None else 'true'}>"
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
    """Results of a tile along the axes, and the pieces of its lines, with the fewest steps a result; None if a
    window is too large."""
    best, least = None, math.inf
    for budget in (FEW_SAMPLES, MOST_SAMPLES[itemsize]):
        for walkers in WALKERS:
            for planes in (1, 2, 4, 8):
                for pieces in (1, 2, 4):
                    rows = walkers // planes // pieces
                    outs0, outs1 = min(planes, lengths[0]), min(rows, lengths[1])
                    if rows < 1 or planes > max(1, lengths[0]):
                        continue
                    longest = budget // ((outs0 + taps[0] - 1) * (outs1 + taps[1] - 1)) - 3
                    outs2 = min(longest - taps[2] + 1, lengths[2])
                    if outs2 < pieces:
                        continue
                    outs = outs0 * outs1 * outs2
                    side = (outs0 + taps[0] - 1) * (outs1 + taps[1] - 1) * (outs2 + taps[2] - 1)
                    flips = 2 * taps[0] * taps[1] + samples * pieces / outs2
                    # Walkers that a warp lacks cost as much as others.
                    idle = -(-outs0 * outs1 * pieces // 32) * 32 / (outs0 * outs1 * pieces)
                    steps = SORT_STEPS * side / outs + (FLIP_STEPS * flips + FIND_STEPS) * idle
                    if steps < least:
                        best, least = ((outs0, outs1, outs2), pieces), steps
        if best is not None:
            break
    return best
