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
            work[start : start + count] = cval
        else:
            _copy(source, at + origin * inner, work, start, count)
    if is_float:
        count = (runs[-1, 0] + runs[-1, 2]) * inner
        turn(work, to, work, to, count)
        return not _has_nan(work, to, count, ends[0], ends[1])
    return True


@compiled
def scatter_row(work: Any, at: int, is_float: bool, target: Any, to: int, count: int) -> None:
    """The samples of keys."""
    if is_float:
        turn(work, at, target, to, count)
    else:
        _copy(work, at, target, to, count)


@compiled
def turn(source: Any, at: int, target: Any, to: int, count: int) -> None:
    """The bits of floats as keys, or back; in place too."""
    if source.itemsize == 4:
        for i in range(count):
            bits = source[at + i]
            target[to + i] = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        for i in range(count):
            bits = source[at + i]
            target[to + i] = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@compiled
def _copy(source: Any, at: int, target: Any, to: int, count: int) -> None:
    for i in range(count):
        store(target, to + i, load(source, at + i))


@compiled
def _has_nan(keys: Any, at: int, count: int, lowest: int, highest: int) -> bool:
    found = False
    for i in range(count):
        found |= keys[at + i] < lowest or keys[at + i] > highest
    return found
