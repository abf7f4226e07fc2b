"""Large matrices for benchmarks, generated on the host or the device: `xp` is NumPy or CuPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kernels.classic.spmv.formats import Csr

SHORTEST, EXPONENT = 4, 0.75  # row lengths by a power law with a mean of 16


def mesh_nonzeros(edge: int) -> int:
    """Nonzeros of `mesh`: along each axis a point has itself and two neighbours, the two end points only one."""
    return (3 * edge - 2) ** 3


def mesh(xp: Any, edge: int) -> Csr:
    """The 27-point operator on a cubic mesh, float32: rows of 8 to 27 nonzeros, near the diagonal in nine bands."""
    along = xp.arange(edge, dtype=np.int32)
    z, y, x = along[:, None, None], along[:, None], along
    shape = (edge, edge, edge, 27)
    exists, columns = xp.empty(shape, bool), xp.empty(shape, np.int32)
    for i, (dz, dy, dx) in enumerate(itertools.product((-1, 0, 1), repeat=3)):
        inside = [(at + d >= 0) & (at + d < edge) for at, d in ((z, dz), (y, dy), (x, dx))]
        exists[..., i] = inside[0] & inside[1] & inside[2]
        columns[..., i] = ((z + dz) * edge + (y + dy)) * edge + (x + dx)
    starts = xp.zeros(edge**3 + 1, np.int32)
    starts[1:] = xp.cumsum(exists.reshape(-1, 27).sum(1))
    columns = columns[exists]
    values = xp.random.default_rng(1).random(columns.size, dtype=np.float32)
    return Csr(values=values, columns=columns, starts=starts, shape=(edge**3, edge**3))


def scattered_lengths(rows: int) -> Any:
    """Row lengths of `scattered`: int64 [rows], shuffled, from 4 to several hundred thousand for millions of rows."""
    quantile = (np.random.default_rng(3).permutation(rows) + 0.5) / rows
    return np.minimum(SHORTEST * quantile**-EXPONENT, rows).astype(np.int64)


def scattered(xp: Any, rows: int) -> Csr:
    """A square float32 matrix with row lengths by a power law and random columns."""
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(scattered_lengths(rows), out=starts[1:])
    rng = xp.random.default_rng(1)
    columns = rng.integers(0, rows, int(starts[-1]), dtype=np.int32)
    values = rng.random(columns.size, dtype=np.float32)
    return Csr(values=values, columns=columns, starts=xp.asarray(starts.astype(np.int32)), shape=(rows, rows))
