"""Products of float32 matrices, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    gemm(A, B) = A B        gram(A) = A Aᵀ

Arrays   : A [m, k], B [k, n], result [m, n] or [m, m], float32, row-major. Sizes may be zero; k = 0 gives zeros.
Precision: float32 throughout. The error of an element is at most (k + 2) 2⁻²⁴ times the sum of its terms' magnitudes,
           in any order of additions; in practice it grows as the square root of k.
Production uses the vendor's BLAS: cuBLAS through CuPy, and NumPy's own BLAS on the CPU. Our own kernels, up to tensor
cores, are measured against it: `kernels.classic.gemm.cuda.VARIANTS`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out

__all__ = ["DTYPE", "MAX_SIZE", "gemm", "gram"]

DTYPE = "float32"
MAX_SIZE = (1 << 31) - 1 - 128  # 32-bit indices reach up to a tile beyond the matrix


def gemm(a: Any, b: Any, *, out: Any = None, stream: Any = None) -> Any:
    """The product A B.

    a, b   : NumPy or CuPy arrays [m, k] and [k, n], float32, any strides
    out    : array of the same library for the result: float32 [m, n], C-contiguous; must not share memory with a or b
    stream : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Returns the product: float32 [m, n], an array of the same library.
    Raises ValueError or TypeError; the message names the parameter.
    """
    _check_matrix("a", a)
    _check_matrix("b", b)
    if type(a) is not type(b):
        raise TypeError(f"a and b must be arrays of one kind; got {type(a).__module__} and {type(b).__module__}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a has {a.shape[1]} columns and b {b.shape[0]} rows: they must be as many")
    check_out(out, (a.shape[0], b.shape[1]), np.float32, apart_from={"a": a, "b": b})
    if isinstance(a, np.ndarray):
        from kernels.classic.gemm import cpu

        return cpu.gemm(a, b, out)
    from kernels.classic.gemm import cuda

    return cuda.gemm(a, b, out, stream=stream)


def gram(a: Any, *, out: Any = None, stream: Any = None) -> Any:
    """The product A Aᵀ of a matrix with itself: all inner products of its rows.

    a      : NumPy or CuPy array [m, k], float32, any strides
    out    : array of the same library for the result: float32 [m, m], C-contiguous; must not share memory with a
    stream : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Returns the product: float32 [m, m], an array of the same library.
    Raises ValueError or TypeError; the message names the parameter.
    """
    _check_matrix("a", a)
    check_out(out, (a.shape[0], a.shape[0]), np.float32, apart_from={"a": a})
    if isinstance(a, np.ndarray):
        from kernels.classic.gemm import cpu

        return cpu.gram(a, out)
    from kernels.classic.gemm import cuda

    return cuda.gram(a, out, stream=stream)


def _check_matrix(name: str, matrix: Any) -> None:
    check_array(name, matrix)
    if np.dtype(matrix.dtype).newbyteorder("=").name != DTYPE:
        raise TypeError(f"{name} has dtype {matrix.dtype}; supported is {DTYPE}")
    if matrix.ndim != 2 or max(matrix.shape) > MAX_SIZE:
        raise ValueError(f"{name} must be a matrix of at most {MAX_SIZE} rows and columns; got shape {matrix.shape}")
