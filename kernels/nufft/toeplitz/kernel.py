"""The kernel of the Toeplitz convolution: its grid, and its computation from a point-spread function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.nufft.checks import checked_shape, on_host
from kernels.nufft.gridding.spreading import fast_size

MOST_COEFFICIENTS = 12
LINES = (128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)  # values of a line that lines.cuh transforms


def toeplitz_shape(shape: Sequence[int], *, host: bool = True) -> tuple[int, ...]:
    """The shape of the kernel for images of `shape`: even, at least 2N − 1.

    host : on the CPU; on CUDA the sizes are those of our own FFTs, unless an axis is too long for those
    """
    shape = checked_shape(shape)
    if not host and 2 * max(shape) - 1 <= LINES[-1]:
        return tuple(next(size for size in LINES if size >= 2 * n - 1) for n in shape)
    return tuple(fast_size(2 * n - 1) for n in shape)


def kernel_from_spread(spread: Any, shape: tuple[int, ...], numpy: Any) -> Any:
    """The kernel from the point-spread function q(d), complex [2N …], d = index − N on each axis.

    numpy : the array's module, NumPy or CuPy
    """
    padded = toeplitz_shape(shape, host=on_host(spread))
    placed = numpy.zeros(padded, spread.dtype)
    inside = tuple(slice(1, None) for _ in shape)  # d = −N has no partner and is never used
    where = numpy.ix_(*(numpy.arange(1 - n, n) % size for n, size in zip(shape, padded, strict=True)))
    placed[where] = spread[inside]
    kernel = numpy.fft.fftn(placed).real / np.prod(padded)
    real = np.float32 if spread.dtype == np.complex64 else np.float64
    return numpy.ascontiguousarray(kernel.astype(real))


def grid_kernel(trajectory: Any, weights: Any, shape: tuple[int, ...], numpy: Any) -> Any:
    """The kernel of samples on the grid itself, float32 (*shape): the weights at each frequency, in FFT order.

    FᴴWF is then circulant: an FFT of the image's own size, without padding.
    """
    index: Any = 0
    for axis, n in enumerate(shape):
        index = index * n + numpy.rint(trajectory[:, axis]).astype(numpy.int64) % n
    summed = numpy.bincount(index, weights=weights.astype(numpy.float64), minlength=int(np.prod(shape)))
    return numpy.ascontiguousarray(summed.reshape(shape).astype(numpy.float32))


def pairs_of(coefficients: int) -> list[tuple[int, int]]:
    """The elements of a Hermitian matrix's upper triangle, row by row: the order of a subspace's kernels."""
    return [(row, column) for row in range(coefficients) for column in range(row, coefficients)]
