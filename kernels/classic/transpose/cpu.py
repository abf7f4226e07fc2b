"""Transposes of NumPy arrays: blocks that fit a core's cache, copied by our own threads."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK_BYTES = 1 << 17  # of the input; with the result's block it stays in a core's second cache
SMALL_BYTES = 1 << 20  # what is not worth a second thread
MATRICES_AT_ONCE = 1 << 12


def transpose(array: Array, out: Array | None, *, workers: int | None = None) -> Array:
    """See kernels.classic.transpose."""
    turned = np.swapaxes(array, -1, -2)
    if out is None:
        out = np.empty(turned.shape, array.dtype)
    edge = max(16, int((BLOCK_BYTES / array.dtype.itemsize) ** 0.5) // 16 * 16)
    rows, columns = array.shape[-2:]
    if rows * columns <= edge * edge:
        _small_matrices(turned, out)
        return out
    blocks = [
        (place, slice(column, column + edge), slice(row, row + edge))
        for place in np.ndindex(*array.shape[:-2])
        for row, column in itertools.product(range(0, rows, edge), range(0, columns, edge))
    ]

    def copy(mine: list[Any]) -> None:
        for place, across, down in mine:
            out[(*place, across, down)] = turned[(*place, across, down)]

    workers = 1 if array.nbytes <= SMALL_BYTES else workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(copy, (blocks[k::workers] for k in range(workers))))
    return out


def _small_matrices(turned: Array, out: Array) -> None:
    """Whole matrices, many in one call."""
    if turned.ndim == 2:
        out[...] = turned
        return
    for first in range(0, turned.shape[0], MATRICES_AT_ONCE):
        out[first : first + MATRICES_AT_ONCE] = turned[first : first + MATRICES_AT_ONCE]
