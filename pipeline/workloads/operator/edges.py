"""Where a block lies in its image: for functions of several steps, and of absolute positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.borders import OUTSIDE, border_indices
from pipeline.workloads.common.samples import module_of


@dataclass(frozen=True, kw_only=True)
class Edges:
    """A block with its halo, in an image.

    first : position of the block's first sample in the image, along every axis of the block
    halo  : samples of the block before and after those that are wanted, along every axis
    shape : of the image
    mode  : what lies beyond the image's edges, with `cval`
    """

    first: tuple[int, ...]
    halo: Sequence[tuple[int, int]]
    shape: tuple[int, ...]
    mode: str
    cval: float

    def wanted(self, block: Any) -> Any:
        """The block without its halo."""
        return block[tuple(slice(before, n - after) for n, (before, after) in zip(block.shape, self.halo, strict=True))]

    def extend(self, block: Any, axes: Sequence[int]) -> None:
        """Replace what lies beyond the image's edges by what the border mode puts there, in place: a step's result is
        extended like an image of its own.

        A wrapped image goes on beyond its edges, so nothing is replaced along an axis that the block does not span.
        """
        for axis in axes:
            first, length, count = self.first[axis], self.shape[axis], block.shape[axis]
            spans = first <= 0 and first + count >= length
            if self.mode == "wrap" and not spans:
                continue
            for begin, end in ((0, min(-first, count)), (max(length - first, 0), count)):
                if begin >= end:
                    continue
                along = (slice(None),) * axis
                source = _source(first, count, length, begin, end, self.mode)
                if source is None:
                    block[(*along, slice(begin, end))] = self.cval
                elif isinstance(source, slice):
                    block[(*along, slice(begin, end))] = block[(*along, source)]
                else:
                    block[(*along, slice(begin, end))] = block.take(module_of(block).asarray(source), axis)


@lru_cache(maxsize=256)  # a stream of chunks repeats them
def _source(first: int, count: int, length: int, begin: int, end: int, mode: str) -> slice | NDArray[np.intp] | None:
    """What of a block the places begin … end are filled with: a slice if they are all the same, or neighbours in turn;
    None: the constant."""
    sources = border_indices(np.arange(first + begin, first + end), length, mode)
    if sources[0] == OUTSIDE:
        return None
    # Sources that the block lacks belong to samples that no result of the block needs.
    indices = np.clip(sources - first, 0, count - 1)
    at, last = int(indices[0]), int(indices[-1])
    by = (last > at) - (last < at)
    if not np.array_equal(indices, at + by * np.arange(len(indices))):
        return indices
    if by < 0:
        return slice(at, last - 1 if last > 0 else None, -1)
    return slice(at, last + 1)
