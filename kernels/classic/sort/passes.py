"""The launches of sorts and merges, pass by pass. A task (kernels/classic/sort/cuda.py) holds the arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kernels.runtime.launch import blocks_of, pointer

# Tuned on an H200 (sm_90), as in the headers.
MERGE_THREADS, RANGE, STAGE_KEYS, TILE = 256, 16, 1024 * 4, 256 * 15
BITONIC_TILE, BITONIC_THREADS = 2048, 512
RADIX_THREADS, COUNT_BLOCK_KEYS = 256, 1 << 16
RADIX_ITEMS = {(4, False): 20, (4, True): 16, (8, False): 14, (8, True): 14}  # by (bytes of a key, has values)
ORDER_BLOCKS = 1 << 12
GRIDS = {  # of the merges before the last: keys per block, threads
    "merge_ranks": (256, 256),
    "merge_ranges": (256 * RANGE, 256),
    "merge_tiles": (STAGE_KEYS, MERGE_THREADS),
    "merge_circular": (STAGE_KEYS, MERGE_THREADS),
}

DIGITS = 256
PORTION = 1 << 29  # keys of one launch; tiles count in 30 bits
ROW_BYTES = 4 * DIGITS
UNSIGNED = 0


class MergeStruct(ctypes.Structure):
    """struct Merge<unsigned> of merge.cuh, as for all types."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("count", ctypes.c_longlong),
        ("second_count", ctypes.c_longlong),
        ("run", ctypes.c_longlong),
    )


def _ordered(task: Any, keys: Any, to: Any, *, back: bool = False) -> None:
    blocks = min(blocks_of(keys.size, 256), ORDER_BLOCKS)
    size = ctypes.c_longlong(keys.size)
    task.launch(
        f"order_keys<{task.key}>", blocks, 256, keys, to, size, ctypes.c_int(task.kind), ctypes.c_int(int(back))
    )


def _merge_struct(keys: Any, second: Any, run: int) -> MergeStruct:
    struct = MergeStruct(
        first=pointer(keys),
        second=pointer(second),
        count=keys.size,
        second_count=0 if second is None else second.size,
        run=run,
    )
    struct.held = keys, second  # keep the arrays alive
    return struct


def _merge_by(entry: str, task: Any, struct: MergeStruct, out: Any) -> None:
    """One launch of a merge before the last: two arrays, or all pairs of runs, of ordered keys."""
    each, threads = GRIDS[entry]
    task.launch(f"{entry}<{task.key}>", blocks_of(out.size, each), threads, struct, out)


def _ordered_inputs(task: Any) -> tuple[Any, Any]:
    """The two arrays to merge, as ordered keys."""
    if task.kind == UNSIGNED:
        return task.keys, task.second
    ordered = task.like(task.keys), task.like(task.second)
    for keys, to in zip((task.keys, task.second), ordered, strict=True):
        if keys.size:
            _ordered(task, keys, to)
    return ordered


def run_merge(task: Any, entry: str) -> None:
    _merge_by(entry, task, _merge_struct(*_ordered_inputs(task), 0), task.out)
    if task.kind != UNSIGNED:
        _ordered(task, task.out, task.out, back=True)


def _merge_paths(task: Any, struct: MergeStruct, values: Any, out: Any, out_values: Any, kind_out: int) -> None:
    tiles = blocks_of(out.size, TILE)
    corners = task.empty(tiles, np.int64)
    task.launch(f"find_corners<{task.key}>", blocks_of(tiles, 128), 128, struct, corners, ctypes.c_longlong(tiles))
    none = ctypes.c_void_p(0)
    given = (none if values is None else values, none)
    to = (out, none if out_values is None else out_values)
    entry = f"merge_paths<{task.key}, {task.value}>"
    task.launch(entry, tiles, MERGE_THREADS, struct, corners, *given, *to, ctypes.c_int(kind_out))


def run_merge_paths(task: Any) -> None:
    _merge_paths(task, _merge_struct(*_ordered_inputs(task), 0), None, task.out, None, task.kind)


def run_passes(task: Any, entry: str) -> None:
    """Bitonic tiles, then passes of one of the merges."""
    size = task.keys.size
    runs = blocks_of(size, BITONIC_TILE)
    passes = (runs - 1).bit_length()
    here, there = task.out, task.like(task.out) if passes else None
    if passes % 2:
        here, there = there, here
    keys = task.keys
    if task.kind != UNSIGNED:
        _ordered(task, keys, here)
        keys = here
    task.launch(f"sort_bitonic<{task.key}>", runs, BITONIC_THREADS, keys, here, ctypes.c_longlong(size))
    run = BITONIC_TILE
    for _ in range(passes):
        _merge_by(entry, task, _merge_struct(here, None, run), there)
        here, there, run = there, here, 2 * run
    if task.kind != UNSIGNED:
        _ordered(task, task.out, task.out, back=True)


def run_paths(task: Any) -> None:
    """Tiles sorted in registers, then passes of merge_paths."""
    size, none = task.keys.size, ctypes.c_void_p(0)
    tiles = blocks_of(size, TILE)
    passes = (tiles - 1).bit_length()
    valued = task.out_values is not None
    here = (task.out, task.out_values)
    there = (task.like(task.out), task.like(task.out_values) if valued else None) if passes else here
    if passes % 2:
        here, there = there, here
    task.launch(
        f"sort_tiles<{task.key}, {task.value}>",
        tiles,
        MERGE_THREADS,
        task.keys,
        none if task.values is None else task.values,
        here[0],
        here[1] if valued else none,
        ctypes.c_longlong(size),
        ctypes.c_int(task.kind),
        ctypes.c_int(UNSIGNED if passes else task.kind),
    )
    run = TILE
    for step in range(passes):
        last = step == passes - 1
        struct = _merge_struct(here[0], None, run)
        _merge_paths(task, struct, here[1], there[0], there[1], task.kind if last else UNSIGNED)
        here, there, run = there, here, 2 * run


def run_radix(task: Any) -> None:
    """One launch of sort_tiles if the keys fit a tile; otherwise counts the digits and moves all keys in each pass."""
    size, passes = task.keys.size, task.keys.dtype.itemsize
    if size <= TILE:
        run_paths(task)
        return
    valued = task.out_values is not None
    tile = RADIX_ITEMS[passes, valued] * RADIX_THREADS
    portion = PORTION // tile * tile
    begins = range(0, size, portion)
    tiles = [blocks_of(min(portion, size - begin), tile) for begin in begins]
    # Zeros: the counts; then for every launch the states of its tiles and its ticket.
    zeros = task.zeros((2 * passes + passes * (sum(tiles) + len(tiles)), DIGITS), np.uint32)
    positions = task.empty((len(begins) + 1, passes, DIGITS), np.int64)
    counts, states = pointer(zeros), pointer(zeros) + 2 * passes * ROW_BYTES
    count_args = (task.keys, ctypes.c_longlong(size), ctypes.c_void_p(counts), ctypes.c_int(task.kind))
    task.launch(f"count_digits<{task.key}>", blocks_of(size, COUNT_BLOCK_KEYS), RADIX_THREADS, *count_args)
    task.launch("place_digits", passes, DIGITS, zeros, positions)
    spare = (task.like(task.out), task.like(task.out_values) if valued else None)
    come, go = (task.keys, task.values), spare
    entry = f"move_digits<{task.key}, {task.value}>"
    for step in range(passes):
        arrays = tuple(ctypes.c_void_p(pointer(array)) for array in (*come, *go))
        kinds = (task.kind if step == 0 else UNSIGNED, task.kind if step == passes - 1 else UNSIGNED)
        tail = (ctypes.c_int(8 * step), *(ctypes.c_int(kind) for kind in kinds))
        for part, begin in enumerate(begins):
            here, after = (pointer(positions) + 2 * ROW_BYTES * (row * passes + step) for row in (part, part + 1))
            ticket = states + tiles[part] * ROW_BYTES
            range_ = (ctypes.c_longlong(begin), ctypes.c_longlong(min(portion, size - begin)))
            scratch = tuple(ctypes.c_void_p(address) for address in (here, after, states, ticket))
            task.launch(entry, tiles[part], RADIX_THREADS, *arrays, *range_, *scratch, *tail)
            states = ticket + ROW_BYTES
        come, go = go, (task.out, task.out_values) if step % 2 == 0 else spare
