"""The transforms of NumPy arrays: by FINUFFT, or exactly, as matrix products."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft.exact import cpu as exact_cpu
from kernels.nufft.tuning import EXACT_PAIRS, VALUES_A_THREAD

Array = NDArray[Any]

# Below this relative error FINUFFT's float32 coordinates, grids and FFTs do not suffice; complex64 is then computed in
# float64 and rounded once.
SINGLE_EPS, SINGLE_EPS_A_SIZE = 5e-6, 1.5e-7
# Small images with samples at the edge of k-space exceed FINUFFT's tolerance, hence the margins. For a large eps the
# smaller grid is faster, but needs a wider margin.
COARSE_EPS, COARSE = 1e-3, {"upsampfac": 1.25, "margin": 0.2}
FINE = {"upsampfac": 2.0, "margin": 0.5}

_PLANNING = threading.Lock()  # FFTW's planner, which FINUFFT may use, is not thread-safe


def default_workers(workers: int | None) -> int:
    return workers or len(os.sched_getaffinity(0))


class Plan:
    """One trajectory's transforms; see kernels.nufft.Nufft. FINUFFT's plans are created on demand."""

    def __init__(self, trajectory: Array, shape: tuple[int, ...], eps: float, method: str, workers: int | None) -> None:
        self._trajectory = np.array(trajectory, np.float64)  # a copy, since plans are created later
        self._shape = shape
        self._eps = eps
        self._workers = default_workers(workers)
        self._plans: dict[tuple[int, str, int, int], Any] = {}
        self._lock = threading.Lock()
        pairs = len(trajectory) * math.prod(shape)
        self.method = ("exact" if pairs <= EXACT_PAIRS else "gridding") if method == "auto" else method

    def forward(self, images: Array, out: Array | None, stream: Any) -> Array:
        points = len(self._trajectory)
        out = np.empty((*images.shape[: -len(self._shape)], points), images.dtype) if out is None else out
        flat = images.reshape(-1, *self._shape)
        result = out.reshape(len(flat), points)
        if self.method == "exact":
            self._exact(exact_cpu.forward, flat, result)
        else:
            self._run(2, flat, result)
        return out

    def adjoint(self, samples: Array, weights: Array | None, out: Array | None, stream: Any) -> Array:
        points = len(self._trajectory)
        out = np.empty((*samples.shape[:-1], *self._shape), samples.dtype) if out is None else out
        # reshape(-1, 0) is ambiguous.
        flat = samples.reshape(math.prod(samples.shape[:-1]), points)
        result = out.reshape(-1, *self._shape)
        if weights is not None:
            flat = flat * weights.astype(flat.real.dtype)
        if self.method == "exact":
            self._exact(exact_cpu.adjoint, flat, result)
        else:
            self._run(1, flat, result)
        return out

    def _exact(self, transform: Callable[[Array, Array, Array], None], source: Array, result: Array) -> None:
        if source.dtype == np.complex64 and self._eps < SINGLE_EPS:
            wide = np.empty(result.shape, np.complex128)
            transform(self._trajectory, source.astype(np.complex128), wide)
            result[...] = wide
        else:
            transform(self._trajectory, source, result)

    def _run(self, kind: int, source: Array, result: Array) -> None:
        if not len(self._trajectory) or not len(source):
            result[...] = 0
            return
        double = source.dtype == np.complex128 or self._eps < max(SINGLE_EPS, SINGLE_EPS_A_SIZE * max(self._shape))
        dtype = np.dtype(np.complex128 if double else np.complex64)
        source = np.ascontiguousarray(source, dtype)
        # One coil per thread: FINUFFT's own threads synchronise after every stage, so that a slow one delays all. They
        # are used if there are fewer coils than threads.
        a_coil = len(self._trajectory) + math.prod(self._shape)
        shares = self._workers if len(source) >= self._workers and len(source) * a_coil >= VALUES_A_THREAD else 1
        threads = 1 if shares > 1 else min(self._workers, 1 + a_coil // VALUES_A_THREAD)

        def run(share: int) -> None:
            plan = self._plan(kind, dtype.name, share, threads)
            for coil in range(share, len(source), shares):
                result[coil] = plan.execute(source[coil]).reshape(result.shape[1:])

        with self._lock:  # each FINUFFT plan has one work space
            if shares == 1:
                run(0)
                return
            with ThreadPoolExecutor(shares) as pool:
                for _ in pool.map(run, range(shares)):
                    pass

    def _plan(self, kind: int, dtype: str, share: int, threads: int) -> Any:
        import finufft

        found = self._plans.get((kind, dtype, share, threads))
        if found is None:
            grid = COARSE if self._eps >= COARSE_EPS else FINE
            eps = max(grid["margin"] * self._eps, 1e-14 if dtype == "complex128" else 1e-6)
            options = {"nthreads": threads, "upsampfac": grid["upsampfac"], "isign": 1 if kind == 1 else -1}
            with _PLANNING:
                found = finufft.Plan(kind, self._shape, 1, eps=eps, dtype=dtype, **options)
            real = np.float64 if dtype == "complex128" else np.float32
            found.setpts(*(np.ascontiguousarray(axis, real) for axis in radians(self._trajectory, self._shape)))
            self._plans[kind, dtype, share, threads] = found
        return found


def radians(trajectory: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """Each axis' coordinates in [−π, π], folded in float64 before rounding."""
    for axis, size in zip(trajectory.T, shape, strict=True):
        turns = axis / size
        yield 2 * np.pi * (turns - np.round(turns))
