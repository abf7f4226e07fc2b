"""Rows of samples as keys (integers of the same order, see `kernels.rank.keys`), with what lies beyond the edge."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled
from kernels.smoothing.cpu.rows import load, store


def runs_of(sources: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 (runs, 3): position, source and length of the parts of an index map that ascend one by one; -1 is beyond
    the edge, a run for each."""
    ends = np.flatnonzero((np.diff(sources) != 1) | (sources[:-1] < 0)) + 1
    starts = np.concatenate(([0], ends))
    return np.stack((starts, sources[starts], np.diff(np.append(starts, len(sources)))), axis=1)


@compiled
def gather_row(
    source: Any, at: int, runs: Any, inner: int, cval: int, is_float: bool, ends: Any, work: Any, to: int
) -> bool:
    """Fill work[to …] with the keys of a row. Returns whether it did: not if it met a NaN.

    at   : index of the row's first sample; -1: beyond the edge
    runs : of `runs_of`, along the row
    ends : lowest and highest key of numbers
    """
    for run in range(len(runs)):
        start, origin, count = to + runs[run, 0] * inner, runs[run, 1], runs[run, 2] * inner
        if at < 0 or origin < 0:
            work[start : start + count] = _turned(cval, source.itemsize) if is_float else cval
        elif is_float:
            _turn(source, at + origin * inner, work, start, count)
        else:
            _copy(source, at + origin * inner, work, start, count)
    return not is_float or _are_within(work, to, (runs[-1, 0] + runs[-1, 2]) * inner, ends[0], ends[1])


@compiled
def scatter_row(work: Any, at: int, is_float: bool, target: Any, to: int, count: int) -> None:
    """The samples of keys."""
    if is_float:
        _turn(work, at, target, to, count)
    else:
        _copy(work, at, target, to, count)


@compiled
def _turned(bits: int, itemsize: int) -> int:
    """The bits of a float as a key, or back."""
    if itemsize == 4:
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@compiled
def _turn(source: Any, at: int, target: Any, to: int, count: int) -> None:
    if source.itemsize == 4:
        for i in range(count):
            bits = load(source, at + i)
            store(target, to + i, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    else:
        for i in range(count):
            bits = load(source, at + i)
            store(target, to + i, bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF))


@compiled
def _copy(source: Any, at: int, target: Any, to: int, count: int) -> None:
    for i in range(count):
        store(target, to + i, load(source, at + i))


@compiled
def _are_within(keys: Any, at: int, count: int, lowest: int, highest: int) -> bool:
    least = most = load(keys, at)
    for i in range(count):
        least, most = min(least, load(keys, at + i)), max(most, load(keys, at + i))
    return bool(lowest <= least and most <= highest)
