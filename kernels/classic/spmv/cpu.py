"""Sparse products of NumPy arrays: strips of rows with about equal nonzeros, by our threads and Numba-compiled code.
Each row is summed in its own order, so the bits do not depend on the number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.spmv.formats import Coo, Csr, Ell, Hybrid, Jds, Matrix
from kernels.runtime.compiled import compiled

Array = NDArray[Any]

MIN_NONZEROS_A_WORKER = 1 << 16  # below this a thread costs more than it saves


def spmv(matrix: Matrix, x: Array, out: Array | None, *, workers: int | None = None) -> Array:
    """y = A x; see kernels.classic.spmv."""
    if out is None:
        out = np.empty(matrix.shape[0], matrix.values.dtype)
    count = max(min(workers or len(os.sched_getaffinity(0)), matrix.values.size // MIN_NONZEROS_A_WORKER), 1)
    if isinstance(matrix, Csr):
        csr, y = matrix, out
        ends = np.searchsorted(csr.starts, np.linspace(0, csr.nonzeros, count + 1)[1:-1]).tolist()
        _in_strips(lambda a, b: _rows(csr.values, csr.columns, csr.starts, x, y, a, b), [0, *ends, csr.shape[0]])
    elif isinstance(matrix, Jds):
        _jds(matrix, x, out, count)
    else:
        out[:] = 0
        ell = matrix.ell if isinstance(matrix, Hybrid) else matrix
        coo = matrix.coo if isinstance(matrix, Hybrid) else matrix
        if isinstance(ell, Ell):
            _ell(ell, x, out, count)
        if isinstance(coo, Coo):
            _coordinates(coo.values, coo.rows, coo.columns, x, out)
    return out


def _ell(ell: Ell, x: Array, y: Array, count: int) -> None:
    ends = [ell.shape[0] * i // count for i in range(count + 1)]
    _in_strips(lambda a, b: _slots(ell.values, ell.columns, x, y, a, b), ends)


def _jds(jds: Jds, x: Array, y: Array, count: int) -> None:
    rows = jds.shape[0]
    sums = np.zeros(rows, y.dtype)
    if jds.transposed:
        ends = [rows * i // count for i in range(count + 1)]
        _in_strips(lambda a, b: _diagonals(jds.values, jds.columns, jds.starts, x, sums, a, b), ends)
    else:
        cuts = np.searchsorted(jds.starts, np.linspace(0, jds.nonzeros, count + 1)[1:-1]).tolist()
        _in_strips(lambda a, b: _rows(jds.values, jds.columns, jds.starts, x, sums, a, b), [0, *cuts, rows])
    y[jds.order] = sums


def _in_strips(compute: Callable[[int, int], None], ends: list[int]) -> None:
    if len(ends) == 2:
        compute(*ends)
        return
    with ThreadPoolExecutor(len(ends) - 1) as pool:
        list(pool.map(compute, ends[:-1], ends[1:]))


@compiled
def _rows(values: Array, columns: Array, starts: Array, x: Array, y: Array, first: int, end: int) -> None:
    for row in range(first, end):
        total = values.dtype.type(0)
        for i in range(starts[row], starts[row + 1]):
            total += values[i] * x[columns[i]]
        y[row] = total


@compiled
def _slots(values: Array, columns: Array, x: Array, y: Array, first: int, end: int) -> None:
    for slot in range(values.shape[0]):
        for row in range(first, end):
            if columns[slot, row] >= 0:
                y[row] += values[slot, row] * x[columns[slot, row]]


@compiled
def _coordinates(values: Array, rows: Array, columns: Array, x: Array, y: Array) -> None:
    for i in range(values.size):
        y[rows[i]] += values[i] * x[columns[i]]


@compiled
def _diagonals(values: Array, columns: Array, starts: Array, x: Array, sums: Array, first: int, end: int) -> None:
    for d in range(starts.size - 1):
        start = starts[d]
        for place in range(first, min(end, starts[d + 1] - start)):
            sums[place] += values[start + place] * x[columns[start + place]]
