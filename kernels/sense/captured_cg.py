"""Conjugate gradients on a GPU without the host: one operator's iteration as a CUDA graph, for any right-hand side.

Scalars stay on the device, and residuals are read back while later iterations run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernels.proximal import inner
from kernels.sense.arrays import namespace
from kernels.sense.iterate import Captured, iterate
from kernels.sense.resumption import Resumption, put

_SMALLEST = np.finfo(np.float32).tiny


class CapturedCg:
    """Solves (normal + damping · 1) x = right from x = 0, as `conjugate_gradient` does.

    Calls from several threads follow one another; all must use one stream.

    normal : a positive semidefinite Hermitian operator that can be captured: it launches the same kernels on the same
             memory in each call, and does not wait for the device; it may return memory that it uses again
    like   : a CuPy array of the size, dtype and device of the right-hand sides
    """

    rests = True

    def __init__(self, normal: Callable[[Any], Any], like: Any, *, damping: float = 0.0) -> None:
        xp = namespace(like)
        self._normal, self._damping, self._real = normal, np.float32(damping), like.real.dtype
        self._solution, self._residual, self._direction = (xp.empty_like(like) for _ in range(3))
        self._now, self._whole = xp.zeros((), np.float64), xp.zeros((), np.float64)
        self._tolerance = xp.zeros((), np.float64)
        self.status = xp.zeros(1, np.float64)
        self.captured: Captured | None = Captured(self.step)
        self._lock = threading.Lock()

    def solve(
        self,
        right: Any,
        *,
        iterations: int,
        tolerance: float = 0.0,
        on_iteration: Callable[[int, float], None] | None = None,
        resumption: Resumption | None = None,
    ) -> tuple[Any, Any]:
        """x, and the relative residuals after 0, 1, 2 … iterations, float64, on the host.

        tolerance : stop once the relative residual has fallen to this
        """
        xp = namespace(right)
        with self._lock:
            scale = xp.maximum(xp.max(xp.abs(right)), _SMALLEST)
            self._residual[...] = right / scale
            self._direction[...] = self._residual
            self._solution.fill(0)
            self._whole[...] = inner(self._residual, self._residual)
            self._now[...] = self._whole
            self._tolerance[...] = tolerance
            self.status.fill(np.inf)
            follow = None if on_iteration is None else lambda number, row: on_iteration(number, float(row[0]))
            rows = iterate(self, iterations, tolerance=tolerance, on_iteration=follow, resumption=resumption)
            first = float(self._whole > 0)
            return self._solution * scale, np.concatenate([[first], rows[:, 0]])

    def state(self) -> Mapping[str, Any]:
        vectors = {"solution": self._solution, "residual": self._residual, "direction": self._direction}
        return {**vectors, "now": self._now, "status": self.status}

    def restore(self, saved: Mapping[str, Any]) -> None:
        put(self.state(), saved)

    def step(self) -> None:
        xp, real = namespace(self._now), self._real
        image = self._normal(self._direction)
        if self._damping:
            image = image + self._damping * self._direction
        rate = self._now / xp.maximum(inner(self._direction, image), _SMALLEST)
        rate = xp.where(self.status[0] > self._tolerance, rate, 0.0).astype(real)
        self._solution += rate * self._direction
        self._residual -= rate * image
        following = inner(self._residual, self._residual)
        self._direction *= (following / xp.maximum(self._now, _SMALLEST)).astype(real)
        self._direction += self._residual
        self._now[...] = following
        self.status[0] = xp.sqrt(following / xp.maximum(self._whole, _SMALLEST))
