"""The Toeplitz convolution of NumPy arrays: FFTs (scipy.fft) over the lines of the doubled grid that can be nonzero."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft.cpu import Plan, default_workers
from kernels.nufft.toeplitz.kernel import kernel_from_spread

Array = NDArray[Any]

SINGLE_KERNEL_EPS = 1e-4  # below it the point-spread function is computed in float64


def toeplitz_kernel(
    trajectory: Array, weights: Array | None, shape: tuple[int, ...], eps: float, workers: int | None
) -> Array:
    """See kernels.nufft.toeplitz."""
    doubled = tuple(2 * n for n in shape)
    dtype = np.complex64 if eps >= SINGLE_KERNEL_EPS else np.complex128
    plan = Plan(2 * trajectory.astype(np.float64), doubled, eps, "auto", workers)
    spread = plan.adjoint(np.ones(len(trajectory), dtype), weights, None, None)
    kernel = np.asarray(kernel_from_spread(spread, shape, np))
    return kernel.astype(np.float32) if eps >= 1e-6 else kernel


class Convolution:
    """The CPU body of kernels.nufft.Toeplitz. Images are padded axis by axis, so no line of zeros is transformed."""

    def __init__(self, kernel: Array, shape: tuple[int, ...], workers: int | None) -> None:
        self._kernel = np.ascontiguousarray(kernel)
        self._shape = shape
        self._workers = default_workers(workers)

    def apply(self, image: Array, out: Array | None, stream: Any) -> Array:
        out = np.empty_like(image, order="C") if out is None else out
        flat, result = image.reshape(-1, *self._shape), out.reshape(-1, *self._shape)
        workers = self._workers if len(flat) < self._workers else 1

        def one(index: int) -> None:
            result[index] = self._normal(flat[index], workers)

        self._each(one, len(flat), workers)
        return out

    def apply_sense(self, image: Array, maps: Array, out: Array | None, stream: Any) -> Array:
        out = np.empty(self._shape, image.dtype) if out is None else out
        workers = self._workers if len(maps) < self._workers else 1
        total = np.zeros(self._shape, image.dtype)
        turn = threading.Condition()
        added = 0

        def one(coil: int) -> None:
            nonlocal added
            normal = self._normal(maps[coil] * image, workers)
            normal *= maps[coil].conj()
            with turn:  # in coil order, so that the bits do not depend on thread timing
                turn.wait_for(lambda: added == coil)
                np.add(total, normal, out=total)
                added += 1
                turn.notify_all()

        self._each(one, len(maps), workers)
        out[...] = total
        return out

    def _each(self, one: Any, count: int, workers: int) -> None:
        """One coil per thread, whose grid stays in that core's cache; with few coils, all threads on each coil."""
        if count <= 1 or workers > 1 or self._workers == 1:
            for index in range(count):
                one(index)
            return
        with ThreadPoolExecutor(self._workers) as pool:
            for _ in pool.map(one, range(count)):
                pass

    def _normal(self, image: Array, workers: int) -> Array:
        from scipy import fft

        padded, axes = self._kernel.shape, range(len(self._shape))
        grid = image
        for axis in reversed(axes):
            grid = fft.fft(grid, padded[axis], axis=axis, workers=workers)
        grid *= self._kernel
        for axis in axes:
            grid = fft.ifft(grid, axis=axis, norm="forward", overwrite_x=True, workers=workers)
            grid = grid[(slice(None),) * axis + (slice(self._shape[axis]),)]
        return np.asarray(grid)
