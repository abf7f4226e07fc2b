"""Transposes of NumPy arrays: our own threads copy blocks that fit a core's cache."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK_BYTES = 1 << 17  # of the input; together with the result's block it fits a core's L2 cache
SMALL_BYTES = 1 << 20  # below this a second thread does not pay
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
        (batch, slice(column, column + edge), slice(row, row + edge))
        for batch in np.ndindex(*array.shape[:-2])
        for row, column in itertools.product(range(0, rows, edge), range(0, columns, edge))
    ]

    def copy(mine: list[Any]) -> None:
        for batch, across, down in mine:
            out[(*batch, across, down)] = turned[(*batch, across, down)]

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
