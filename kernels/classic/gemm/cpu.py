"""Matrix products of NumPy arrays, by NumPy's multithreaded BLAS."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def gemm(a: Array, b: Array, out: Array | None) -> Array:
    """A B; see kernels.classic.gemm."""
    if out is None:
        out = np.empty((a.shape[0], b.shape[1]), np.float32)
    with np.errstate(all="ignore"):  # NumPy may warn about padding lanes of the BLAS, which are never used
        return np.matmul(a, b, out=out)


def gram(a: Array, out: Array | None) -> Array:
    """A Aᵀ; see kernels.classic.gemm."""
    return gemm(a, a.T, out)
