"""Sums whose bits do not depend on the number of ranks, the assignment of shards, or the order of arrival.

The work is cut into a fixed number of shards, and their partial sums are added along a fixed binary tree over the shard
numbers. If all shards below a node are on one rank, that rank adds them and broadcasts the node; every rank adds the
nodes above in the same order. Integer sums need no tree: their bits are the same in any order.

A plain all-reduce sends an array once up and once down. This sends one array for each node that lies on one rank but
whose parent does not: one per rank if each holds an aligned run of a power of two of shards, otherwise up to
2 log₂(shards) per rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.cluster.communicators.base import Array, Communicator, combine


def fixed_tree_sum(communicator: Communicator, partials: Mapping[int, Array], holders: Sequence[int]) -> Array:
    """The sum of all shards' partials, as a new array on every rank. Collective.

    partials : by shard, of the shards that this rank holds (at least one); same shape and dtype everywhere; unchanged
    holders  : the rank that holds each shard, by shard number; the same on every rank

    Raises ValueError if `partials` do not match `holders`, and as `Communicator.allreduce` does.
    """
    mine = {shard for shard, holder in enumerate(holders) if holder == communicator.rank}
    if not mine or mine - partials.keys():
        raise ValueError(f"rank {communicator.rank} must hold the shards {sorted(mine)}, it has {sorted(partials)}")
    sample = partials[min(mine)]
    if any(partials[shard].shape != sample.shape or partials[shard].dtype != sample.dtype for shard in mine):
        raise ValueError("the shards' partials must be alike in shape and dtype")
    if sample.dtype.kind in "iu":
        return communicator.allreduce(_sum_of(partials, sorted(mine)))
    return _node(communicator, partials, holders, sample, 0, len(holders))


def _node(
    communicator: Communicator,
    partials: Mapping[int, Array],
    holders: Sequence[int],
    sample: Array,
    first: int,
    count: int,
) -> Array:
    """The sum of `count` shards from `first`, as a new array on every rank."""
    here = set(holders[first : first + count])
    if len(here) == 1:
        holder = here.pop()
        if holder == communicator.rank:
            return communicator.broadcast(_local(partials, first, count), root=holder)
        return communicator.broadcast(np.empty_like(sample), root=holder)
    half = _half(count)
    left = _node(communicator, partials, holders, sample, first, half)
    right = _node(communicator, partials, holders, sample, first + half, count - half)
    combine("sum", left, right, left)
    return left


def _local(partials: Mapping[int, Array], first: int, count: int) -> Array:
    if count == 1:
        return partials[first].copy()
    half = _half(count)
    left = _local(partials, first, half)
    right = partials[first + half] if count - half == 1 else _local(partials, first + half, count - half)
    combine("sum", left, right, left)
    return left


def _half(count: int) -> int:
    """The largest power of two below `count`: a node's position does not depend on its neighbours."""
    return 1 << (count - 1).bit_length() - 1


def _sum_of(partials: Mapping[int, Array], shards: Sequence[int]) -> Array:
    total = partials[shards[0]].copy()
    for shard in shards[1:]:
        combine("sum", total, partials[shard], total)
    return total
