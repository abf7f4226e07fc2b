"""The Toeplitz convolution of NumPy arrays: FFTs (scipy.fft) over the lines of the doubled grid that can be nonzero."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft.cpu import Plan, default_workers
from kernels.nufft.toeplitz.kernel import kernel_from_spread, pairs_of

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
        out = np.empty(image.shape, image.dtype) if out is None else out
        workers = self._workers if len(maps) < self._workers else 1
        total = np.zeros(image.shape, image.dtype)
        turn = threading.Condition()
        added = 0

        def one(coil: int) -> None:
            nonlocal added
            normal = self._of_coil(image, maps[coil], workers)
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

    def _of_coil(self, image: Array, coil: Array, workers: int) -> Array:
        normal = self._normal(coil * image, workers)
        normal *= coil.conj()
        return normal

    def _normal(self, image: Array, workers: int) -> Array:
        grid = self._transformed(image, workers)
        grid *= self._kernel
        return self._cropped(grid, workers)

    def _transformed(self, image: Array, workers: int) -> Array:
        """The FFT on the doubled grid."""
        from scipy import fft

        grid = image
        for axis in reversed(range(len(self._shape))):
            grid = fft.fft(grid, self._kernel.shape[axis], axis=axis, workers=workers)
        return grid

    def _cropped(self, grid: Array, workers: int) -> Array:
        """The image of a grid, which is overwritten."""
        from scipy import fft

        for axis in range(len(self._shape)):
            grid = fft.ifft(grid, axis=axis, norm="forward", overwrite_x=True, workers=workers)
            grid = grid[(slice(None),) * axis + (slice(self._shape[axis]),)]
        return np.asarray(grid)


class SubspaceConvolution(Convolution):
    """The CPU body of kernels.nufft.SubspaceToeplitz."""

    def __init__(self, kernels: Array, coefficients: int, shape: tuple[int, ...], workers: int | None) -> None:
        super().__init__(kernels[0].real, shape, workers)
        self._kernels = kernels
        self._places = {pair: place for place, pair in enumerate(pairs_of(coefficients))}

    def _of_coil(self, image: Array, coil: Array, workers: int) -> Array:
        grids = [self._transformed(coil * each, workers) for each in image]
        out = np.empty_like(image)
        for row in range(len(image)):
            mixed: Any = 0
            for column, grid in enumerate(grids):
                mixed = mixed + self._element(row, column) * grid
            out[row] = self._cropped(mixed, workers)
        out *= coil.conj()
        return out

    def _element(self, row: int, column: int) -> Array:
        kernel = self._kernels[self._places[min(row, column), max(row, column)]]
        return np.asarray(kernel if row <= column else kernel.conj())
