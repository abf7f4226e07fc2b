"""FISTA with adaptive restart, for one penalty whose proximal operator is known.

Each iteration applies the normal operator once: those of extrapolated images follow by linearity, and so does the
objective. The step adapts if the eigenvalue's estimate proves too small. Without random shifts a step that would raise
the objective is refused, and momentum starts again; with them it starts again once it points uphill.

Sources: Beck, Teboulle, "A fast iterative shrinkage-thresholding algorithm", SIAM J. Imaging Sci. 2 (2009); O'Donoghue,
Candès, "Adaptive restart for accelerated gradient schemes", Found. Comput. Math. 15 (2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.proximal import inner
from kernels.runtime.threads import check_wanted
from kernels.sense.arrays import namespace
from kernels.sense.regularized.problem import Problem, captured_step

# Power iterations end once an estimate grows by less than this, and the bound exceeds it by as much.
_POWER_SHARE, _POWER_STEPS = 0.01, 12
_ROUNDING = 1e-6  # a smaller rise of the objective is none


def largest_eigenvalue(normal: Callable[[Any], Any], like: Any) -> float:
    """An upper estimate of a positive operator's largest eigenvalue, by power iteration from `like`.

    Waits for the device. 1 for a right-hand side of 0.
    """
    xp = namespace(like)
    size = math.sqrt(float(inner(like, like)))
    if not size > 0:
        return 1.0
    # Noise makes sure that no eigenvector is left out.
    rng = np.random.default_rng(0)
    spread = xp.asarray(rng.normal(size=like.shape).astype(np.float32) / math.sqrt(like.size))
    vector = like / np.float32(size) + np.float32(0.5) * spread
    vector = (vector / np.float32(math.sqrt(float(inner(vector, vector))))).astype(like.dtype)
    found = 0.0
    for _ in range(_POWER_STEPS):
        check_wanted()
        image = normal(vector)
        before, found = found, math.sqrt(float(inner(image, image)))
        if not found > 0:
            return 1.0
        vector = image / np.float32(found)
        if found <= before * (1 + _POWER_SHARE):
            break
    return found * (1 + _POWER_SHARE)


class Fista:
    """The state of the iterations; see `iterate`. `image` is complex [frames, *shape]."""

    def __init__(self, problem: Problem, largest: float) -> None:
        """largest: of the normal operator's eigenvalues."""
        (self._penalty,) = problem.penalties
        self._problem = problem
        self._xp = xp = namespace(problem.right)
        self._real = problem.right.real.dtype
        self._monotone = getattr(self._penalty, "shift", None) is None
        self.image = xp.zeros_like(problem.right)
        self._before = self.image.copy()  # the image of the iteration before, and the normal operator of both
        self._normal, self._normal_before = self.image.copy(), self.image.copy()
        self._lipschitz = xp.asarray(largest + problem.damping, np.float64)
        self._momentum, self._beta = xp.ones((), np.float64), xp.zeros((), np.float64)
        self._objective = xp.full((), np.inf)
        self.status = xp.zeros(3, np.float64)
        self.captured = captured_step(problem, self.step)

    def step(self) -> None:
        xp, real, problem = self._xp, self._real, self._problem
        right, damping = problem.right, problem.damping
        self._penalty.turn()
        beta, rate = self._beta.astype(real), (1 / self._lipschitz).astype(real)
        moved = self.image - self._before
        start = self.image + beta * moved
        gradient = self._normal + beta * (self._normal - self._normal_before) - right
        if damping:
            gradient += np.float32(damping) * start
        image, size = self._penalty.shrink(start - rate * gradient, real.type(self._penalty.strength) * rate)
        normal = problem.normal(image)
        step, change = image - start, image - self.image
        squares = inner(image, image)
        fidelity = 0.5 * inner(image, normal) - inner(image, right) + 0.5 * problem.energy
        objective = fidelity + 0.5 * damping * squares + self._penalty.strength * size
        moved_square = inner(change, change)
        bent = inner(change, normal - self._normal) + damping * moved_square
        uphill = inner(step, change) < 0
        refused = (objective > self._objective * (1 + _ROUNDING)) & (self._beta > 0) if self._monotone else xp.asarray(
            False
        )  # fmt: skip
        self._lipschitz[...] = xp.maximum(self._lipschitz, bent / xp.maximum(moved_square, 1e-300))
        again = uphill | refused
        following = xp.where(again, 1.0, 0.5 + xp.sqrt(0.25 + self._momentum**2))
        self._beta[...] = xp.where(again, 0.0, (self._momentum - 1) / following)
        self._momentum[...] = following
        self._before[...] = xp.where(refused, self._before, self.image)
        self._normal_before[...] = xp.where(refused, self._normal_before, self._normal)
        self.image[...] = xp.where(refused, self.image, image)
        self._normal[...] = xp.where(refused, self._normal, normal)
        self._objective[...] = xp.where(refused, self._objective, objective)
        self.status[0] = self._objective
        misfit = xp.sqrt(2 * xp.maximum(fidelity, 0) / max(problem.energy, 1e-300))
        self.status[1] = xp.where(refused, self.status[1], misfit)
        self.status[2] = xp.where(refused, 1.0, xp.sqrt(moved_square / xp.maximum(squares, 1e-300)))
