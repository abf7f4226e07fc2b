"""Products y = A x of sparse matrices with vectors, on NumPy arrays (CPU) and CuPy arrays (CUDA).

Matrices : `Csr`, `Coo`, `Ell`, `Hybrid` or `Jds`, with float32 or float64 values and int32 columns; any sizes, zero
           included, rows of any length; `to_csr`, `to_coo` … convert between all of them on their own device.
Vectors  : x [columns] and y [rows], of the matrix's dtype and library.
Precision: sums have the matrix's dtype. The error of a result with n terms is at most (n + 2) u times the sum of their
           magnitudes, u = 2⁻²⁴ for float32 and 2⁻⁵³ for float64.
Order    : on the same kind of device the same arrays give the same bits every time, with one exception: `Coo` with
           unsorted rows is summed by atomics on CUDA, so its last bits vary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.classic.spmv.formats import (
    VALUES,
    Coo,
    Csr,
    Ell,
    Hybrid,
    Jds,
    Matrix,
    arrays_of,
    to_coo,
    to_csr,
    to_ell,
    to_hybrid,
    to_jds,
)
from kernels.runtime.arrays import check_array, check_out, check_workers

__all__ = [
    "VALUES",
    "Coo",
    "Csr",
    "Ell",
    "Hybrid",
    "Jds",
    "Matrix",
    "spmv",
    "to_coo",
    "to_csr",
    "to_ell",
    "to_hybrid",
    "to_jds",
]


def spmv(matrix: Matrix, x: Any, *, out: Any = None, workers: int | None = None, stream: Any = None) -> Any:
    """The product of a sparse matrix with a vector.

    matrix  : one of the formats above
    x       : array [columns] of the matrix's dtype and library, C-contiguous
    out     : array for the result [rows], likewise; must not share memory with x or the matrix
    workers : CPU threads; default one per core
    stream  : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device, except
              that the first product with a `Csr` reads back the length of its longest row, to choose the kernel.

    Returns y, an array [rows].
    Raises ValueError or TypeError; the message names the parameter.
    """
    if not isinstance(matrix, Csr | Coo | Ell | Hybrid | Jds):
        raise TypeError(f"matrix must be a Csr, Coo, Ell, Hybrid or Jds; got {type(matrix).__name__}")
    _check_vector("x", x, matrix, matrix.shape[1])
    check_out(out, (matrix.shape[0],), x.dtype, apart_from={"x": x} | arrays_of(matrix))
    check_workers(workers)
    if isinstance(x, np.ndarray):
        from kernels.classic.spmv import cpu

        return cpu.spmv(matrix, x, out, workers=workers)
    from kernels.classic.spmv import cuda

    return cuda.spmv(matrix, x, out, stream=stream)


def _check_vector(name: str, vector: Any, matrix: Matrix, size: int) -> None:
    kind = np.ndarray if isinstance(matrix.values, np.ndarray) else type(matrix.values)
    if not isinstance(vector, kind):
        raise TypeError(f"{name} must be a {kind.__module__} array like the matrix; got {type(vector).__name__}")
    check_array(name, vector)
    if vector.dtype != matrix.values.dtype:
        raise TypeError(f"{name} has dtype {vector.dtype}; the matrix has {matrix.values.dtype}")
    if vector.shape != (size,) or not vector.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous of shape {(size,)}; got shape {vector.shape}")
