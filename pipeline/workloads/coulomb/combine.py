"""Combines the maps of several frames: mean, minimum, maximum or standard deviation at each point.

The frames are divided into shards, whose number depends on the number of frames alone. Sums are float64: within a shard
in the order of the frames, over the shards along a fixed binary tree. One device and any number of ranks that share the
shards therefore give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from pipeline.workloads.coulomb.parameters import Combination

Array = Any  # NumPy or CuPy

# Eight ranks have two each, and there is memory for a sum of each.
MOST_SHARDS = 16
_DEPTH = 5  # unfinished sums at a time in a tree of that many shards


def shard_count(frames: int) -> int:
    return min(frames, MOST_SHARDS)


def frames_of(shard: int, frames: int) -> range:
    """The frames of a shard: consecutive ones; the shards differ by one frame at most."""
    shards = shard_count(frames)
    return range(frames * shard // shards, frames * (shard + 1) // shards)


def shard_of(frame: int, frames: int) -> int:
    return next(shard for shard in range(shard_count(frames)) if frame in frames_of(shard, frames))


def sum_bytes(how: Combination) -> int:
    """Bytes per point of a shard's sum."""
    return {"none": 4, "min": 4, "max": 4, "avg": 8, "std": 16}[how]


def temporary_bytes(how: Combination) -> int:
    """Bytes per point of the temporary arrays that add one frame's map: the map, the first frame's, differences."""
    return {"none": 0, "min": 4, "max": 4, "avg": 4, "std": 4 + 8 + 8}[how]


def scratch_bytes(how: Combination, frames: int) -> int:
    """Bytes per point that `combine` takes besides the result."""
    if frames == 1:
        return 0
    sums = 0 if how in ("min", "max") else min(shard_count(frames).bit_length(), _DEPTH) * sum_bytes(how)
    return temporary_bytes(how) + sums


def reduction(how: Combination) -> Literal["sum", "min", "max"]:
    """The operation that combines the shards' sums."""
    return "min" if how == "min" else "max" if how == "max" else "sum"


def add_map(how: Combination, total: Array | None, found: Array, first: Array) -> Array:
    """A shard's sum with one more frame's map `found`: a new array if `total` is None, else `total`, changed in place.

    first : only for a deviation: the map of the very first frame, float64. Deviations are taken about it to limit
            cancellation (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983)
    """
    if how == "avg":
        return found.astype(np.float64) if total is None else np.add(total, found, out=total)
    if how != "std":
        return found.copy() if total is None else (np.minimum if how == "min" else np.maximum)(total, found, out=total)
    apart = found - first
    if total is None:
        total = np.empty_like(apart, shape=(2, *apart.shape))
        total[0] = apart
        np.multiply(apart, apart, out=total[1])
    else:
        total[0] += apart
        apart *= apart
        total[1] += apart
    return total


def finish_sum(how: Combination, total: Array, frames: int) -> Array:
    """The combined map, of float64 or float32, from the sum of all shards, whose memory it may share.

    The standard deviation is that of the population: divided by the number of frames, not by one less.
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


def combine(
    how: Combination,
    frames: int,
    compute: Callable[[int, Any], None],
    out: Array,
    finish_shard: Callable[[int, Array, Array], None] | None = None,
) -> None:
    """Combine the maps of all frames, computed one after another, in `out`.

    compute : fills an array like `out` with the map of a frame
    out     : float32, NumPy or CuPy; a point's value does not depend on the other points in the array
    finish_shard : adds to the sum of a shard, the second argument, what its frames have in common; the third is scratch
                   like `out`. Only for a mean.
    """
    compute(0, out)
    if frames == 1:
        return
    found = out.copy()
    if how in ("min", "max"):
        for number in range(1, frames):
            compute(number, found)
            add_map(how, out, found, None)
        return
    first = out.astype(np.float64) if how == "std" else None

    def shard_sum(shard: int) -> Array:
        total = None
        for number in frames_of(shard, frames):
            if number > 0:
                compute(number, found)
            total = add_map(how, total, found, first)
        if finish_shard is not None:
            finish_shard(shard, total, found)
        return total

    def tree_sum(begin: int, count: int) -> Array:
        if count == 1:
            return shard_sum(begin)
        half = 1 << (count - 1).bit_length() - 1  # splits as `fixed_tree_sum` does
        left = tree_sum(begin, half)
        left += tree_sum(begin + half, count - half)
        return left

    out[...] = finish_sum(how, tree_sum(0, shard_count(frames)), frames)
