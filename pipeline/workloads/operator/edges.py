"""Where a block lies in its image: for functions of several steps, and of absolute positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
                sources = border_indices(np.arange(first + begin, first + end), length, self.mode)
                beyond = (slice(None),) * axis + (slice(begin, end),)
                if sources[0] == OUTSIDE:
                    block[beyond] = self.cval
                    continue
                # Sources that the block lacks belong to samples that no result of the block needs.
                block[beyond] = _taken(block, np.clip(sources - first, 0, count - 1), axis)


def _taken(block: Any, indices: NDArray[np.intp], axis: int) -> Any:
    """`block.take(indices, axis)`; a view where they are all the same, or neighbours in turn."""
    by = int(indices[-1] > indices[0]) - int(indices[-1] < indices[0])
    if not np.array_equal(indices, indices[0] + by * np.arange(len(indices))):
        return block.take(module_of(block).asarray(indices), axis)
    begin, end = sorted((int(indices[0]), int(indices[-1])))
    taken = block[(slice(None),) * axis + (slice(begin, end + 1),)]
    return np.flip(taken, axis) if by < 0 else taken
