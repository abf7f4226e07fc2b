"""Conjugate gradients on a GPU without the host: one operator's iteration as a CUDA graph, for any right-hand side.

Scalars stay on the device, and residuals are read back while later iterations run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernels.runtime.repeated import Captured
from kernels.sense.iterate import iterate
from kernels.sense.resumption import Resumption, put


class CapturedCg:
    """Solves (normal + damping · 1) x = right from x = 0, as `conjugate_gradient` does.

    Calls from several threads follow one another; all must use one stream.

    normal : a positive semidefinite Hermitian operator that can be captured: it launches the same kernels on the same
             memory in each call, and does not wait for the device; it may return memory that it uses again
    like   : a CuPy array of the size, dtype and device of the right-hand sides
    """

    rests = True

    def __init__(self, normal: Callable[[Any], Any], like: Any, *, damping: float = 0.0) -> None:
        from kernels.proximal.cuda import CgVectors

        self._normal = normal
        self._vectors = CgVectors(like, damping)
        self.status = self._vectors.status
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
        with self._lock:
            self._vectors.begin(right, tolerance)
            follow = None if on_iteration is None else lambda number, row: on_iteration(number, float(row[0]))
            rows = iterate(self, iterations, tolerance=tolerance, on_iteration=follow, resumption=resumption)
            first = float(self._vectors.whole > 0)
            return self._vectors.solution.copy(), np.concatenate([[first], rows[:, 0]])

    def state(self) -> Mapping[str, Any]:
        return self._vectors.state()

    def restore(self, saved: Mapping[str, Any]) -> None:
        put(self.state(), saved)

    def step(self) -> None:
        self._vectors.step(self._normal(self._vectors.direction))
