"""What becomes of the maps of several frames: their mean, least, greatest or standard deviation at each point.

The frames are cut into a fixed number of shards, whatever computes them. Sums are float64: within a shard in the order
of the frames, of the shards along a fixed binary tree. So the bits are the same on one device, and for any number of
ranks that share the shards among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from pipeline.workloads.coulomb.parameters import Combination

Array = Any  # of NumPy or CuPy

# Enough for eight ranks to have two each; few enough that each may keep a sum of its own.
MOST_SHARDS = 16
_DEPTH = 5  # sums that are open at once on the way down a tree of so many shards


def shard_count(frames: int) -> int:
    return min(frames, MOST_SHARDS)


def frames_of(shard: int, frames: int) -> range:
    """The frames of a shard: runs as even as whole frames allow."""
    shards = shard_count(frames)
    return range(frames * shard // shards, frames * (shard + 1) // shards)


def sum_bytes(how: Combination) -> int:
    """Bytes a point of a shard's sum."""
    return {"none": 4, "min": 4, "max": 4, "avg": 8, "std": 16}[how]


def passing_bytes(how: Combination) -> int:
    """Bytes a point of what is alive while one frame's map is added: the map, the first frame's, differences."""
    return {"none": 0, "min": 4, "max": 4, "avg": 4, "std": 4 + 8 + 8}[how]


def scratch_bytes(how: Combination, frames: int) -> int:
    """Bytes a point that `combine` takes besides the result."""
    if frames == 1:
        return 0
    sums = 0 if how in ("min", "max") else min(shard_count(frames).bit_length(), _DEPTH) * sum_bytes(how)
    return passing_bytes(how) + sums


def reduction(how: Combination) -> Literal["sum", "min", "max"]:
    """How the shards' sums are put together."""
    return "min" if how == "min" else "max" if how == "max" else "sum"


def begun(how: Combination, found: Array, first: Array) -> Array:
    """A shard's sum of one frame's map `found`; a new array.

    first : the map of the very first frame, float64, which a deviation is taken about, so that few digits cancel
            (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983); else not looked at
    """
    if how != "std":
        return found.astype(np.float64) if how == "avg" else found.copy()
    apart = found - first
    total = np.empty_like(apart, shape=(2, *apart.shape))
    total[0] = apart
    np.multiply(apart, apart, out=total[1])
    return total


def add(how: Combination, total: Array, found: Array, first: Array) -> None:
    """One more frame's map into a shard's sum."""
    if how in ("min", "max"):
        (np.minimum if how == "min" else np.maximum)(total, found, out=total)
    elif how == "avg":
        total += found
    else:
        apart = found - first
        total[0] += apart
        apart *= apart
        total[1] += apart


def finished(how: Combination, total: Array, frames: int) -> Array:
    """The combined map, of float64 or float32, from the sum of all shards; may be the sum's own memory.

    The deviation is that of the frames themselves: divided by their number, not by one less.
    """
    if how in ("min", "max"):
        return total
    total /= frames
    if how == "avg":
        return total
    mean, squares = total[0], total[1]
    mean *= mean
    squares -= mean
    return np.sqrt(np.maximum(squares, 0, out=squares), out=squares)


def combine(how: Combination, frames: int, compute: Callable[[int, Any], None], out: Array) -> None:
    """The maps of all frames, one after another, into one.

    compute : fills an array like `out` with the map of a frame
    out     : float32, NumPy or CuPy; a point's value does not depend on what else is in the array
    """
    compute(0, out)
    if frames == 1:
        return
    found = out.copy()
    if how in ("min", "max"):
        for number in range(1, frames):
            compute(number, found)
            add(how, out, found, None)
        return
    first = out.astype(np.float64) if how == "std" else None

    def shard_sum(shard: int) -> Array:
        total = None
        for number in frames_of(shard, frames):
            if number > 0:
                compute(number, found)
            if total is None:
                total = begun(how, found, first)
            else:
                add(how, total, found, first)
        return total

    def tree_sum(begin: int, count: int) -> Array:
        if count == 1:
            return shard_sum(begin)
        half = 1 << (count - 1).bit_length() - 1  # as `fixed_tree_sum` cuts
        left = tree_sum(begin, half)
        left += tree_sum(begin + half, count - half)
        return left

    out[...] = finished(how, tree_sum(0, shard_count(frames)), frames)
