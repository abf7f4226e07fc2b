"""Matrix products of NumPy arrays: the BLAS that NumPy was built with, which has threads of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def gemm(a: Array, b: Array, out: Array | None) -> Array:
    """A B; see kernels.classic.gemm."""
    if out is None:
        out = np.empty((a.shape[0], b.shape[1]), np.float32)
    with np.errstate(all="ignore"):  # NumPy may warn of lanes that a BLAS computes and nobody reads
        return np.matmul(a, b, out=out)


def gram(a: Array, out: Array | None) -> Array:
    """A Aᵀ; see kernels.classic.gemm."""
    return gemm(a, a.T, out)
