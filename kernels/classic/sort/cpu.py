"""Sorting of NumPy arrays: NumPy sorts one part per thread, and our own threads merge the parts along merge paths."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled

Array = NDArray[Any]

MIN_PART = 1 << 16  # keys; below this a thread costs more than it saves


def sort(keys: Array, values: Array | None, *, workers: int | None = None) -> Any:
    """The sorted keys, and any values with them; see kernels.classic.sort."""
    if values is None:
        bits = _ordered(keys)
        runs = _parts(len(bits), workers)
        _each(lambda run: bits[run[0] : run[1]].sort(), runs)
        return _unordered(_merged(bits, None, runs)[0], keys.dtype)
    indices = argsort(keys, workers=workers)
    return _native(keys)[indices], _native(values)[indices]


def argsort(keys: Array, *, workers: int | None = None) -> Array:
    """The indices that sort the keys, int64."""
    bits = _ordered(keys)
    indices = np.empty(len(bits), np.int64)
    runs = _parts(len(bits), workers)

    def sort_part(run: tuple[int, int]) -> None:
        part = slice(*run)
        order = np.argsort(bits[part], kind="stable")
        indices[part] = order + run[0]
        bits[part] = bits[part][order]

    _each(sort_part, runs)
    return np.asarray(_merged(bits, indices, runs)[1])


def merge(first: Array, second: Array, *, workers: int | None = None) -> Array:
    """Merges two sorted arrays."""
    bits = np.concatenate((_ordered(first), _ordered(second)))
    runs = [(0, len(first)), (len(first), len(bits))]
    return _unordered(_merge_runs(bits, None, runs, _threads(workers))[0], first.dtype)


def _native(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _ordered(keys: Array) -> Array:
    """The keys mapped to unsigned integers of the same order, one to one."""
    bits = _native(keys).copy().view(f"u{keys.dtype.itemsize}")
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    if keys.dtype.kind == "i":
        bits ^= top
    elif keys.dtype.kind == "f":
        bits = np.where(bits & top, ~bits, bits | top) - _minus_infinity(bits.dtype)
    return bits


def _unordered(bits: Array, dtype: Any) -> Array:
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    if dtype.kind == "i":
        bits ^= top
    elif dtype.kind == "f":
        flipped = bits + _minus_infinity(bits.dtype)
        bits = np.where(flipped & top, flipped & ~top, ~flipped)
    return bits.view(dtype.newbyteorder("="))


def _minus_infinity(dtype: Any) -> Any:
    """Its rank among all bit patterns before NaNs of negative sign move from the bottom to the top."""
    return ~np.array(-np.inf, f"f{dtype.itemsize}").view(dtype)[()]


def _threads(workers: int | None) -> int:
    return workers or len(os.sched_getaffinity(0))


def _parts(size: int, workers: int | None) -> list[tuple[int, int]]:
    count = max(1, min(_threads(workers), size // MIN_PART))
    cuts = [size * i // count for i in range(count + 1)]
    return list(itertools.pairwise(cuts))


def _each(body: Callable[[Any], None], parts: Sequence[Any]) -> None:
    if len(parts) <= 1:
        for part in parts:
            body(part)
        return
    with ThreadPoolExecutor(len(parts), thread_name_prefix="sort") as threads:
        list(threads.map(body, parts))


def _merged(bits: Array, indices: Array | None, runs: list[tuple[int, int]]) -> tuple[Array, Any]:
    workers = len(runs)
    while len(runs) > 1:
        bits, indices = _merge_runs(bits, indices, runs, workers)
        runs = [(runs[i][0], runs[min(i + 1, len(runs) - 1)][1]) for i in range(0, len(runs), 2)]
    return bits, indices


def _merge_runs(bits: Array, indices: Array | None, runs: list[tuple[int, int]], workers: int) -> tuple[Array, Any]:
    """Merges each odd run with the even one before it into new arrays, with equal outputs per thread."""
    out = np.empty_like(bits)
    carried = np.empty(0, np.int64) if indices is None else indices
    out_carried = np.empty_like(carried)
    pairs = [(*runs[i], *(runs[i + 1] if i + 1 < len(runs) else (runs[i][1],) * 2)) for i in range(0, len(runs), 2)]
    share = max(MIN_PART, -(-len(bits) // workers))
    jobs = [
        (a, b, d, rank, min(rank + share, d - a)) for a, b, _c, d in pairs for rank in range(0, max(d - a, 1), share)
    ]
    _each(lambda job: _merge_range(bits, carried, out, out_carried, *job), jobs)
    return out, None if indices is None else out_carried


@compiled
def _merge_range(
    bits: Array,
    carried: Array,
    out: Array,
    out_carried: Array,
    begin: int,
    middle: int,
    end: int,
    rank: int,
    until: int,
) -> None:
    """Outputs [rank, until) of merging bits[begin:middle] with bits[middle:end]."""
    low, high = max(rank - (end - middle), 0), min(rank, middle - begin)
    while low < high:
        half = (low + high) // 2
        if bits[middle + rank - 1 - half] < bits[begin + half]:
            high = half
        else:
            low = half + 1
    i, j = begin + low, middle + rank - low
    for k in range(begin + rank, begin + until):
        if i < middle and (j >= end or bits[i] <= bits[j]):
            source = i
            i += 1
        else:
            source = j
            j += 1
        out[k] = bits[source]
        if carried.size:
            out_carried[k] = carried[source]
