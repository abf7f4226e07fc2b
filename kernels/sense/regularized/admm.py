"""ADMM for several penalties at once, and for total variation.

x comes nearer to the samples and the split variables z_j = K_j x by one step along the steepest descent; each z_j
follows by a proximal operator. (Of the same number of normal operators, one step an iteration left a smaller objective
than two, three or five conjugate gradients.) The penalty parameter ρ balances the primal and the dual residual.

Source: Boyd, Parikh, Chu, Peleato, Eckstein, "Distributed optimization and statistical learning via the alternating
direction method of multipliers", Found. Trends Mach. Learn. 3 (2011), sections 3.3 and 3.4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernels.proximal import inner
from kernels.sense.arrays import namespace
from kernels.sense.regularized.problem import Problem, captured_step, penalty_states
from kernels.sense.resumption import put

_RATIO, _FACTOR = 5.0, 2.0  # residuals that differ by more than the ratio change ρ by the factor
_RHO_OF_STRENGTH, _SMALLEST = 10.0, 1e-300


class Admm:
    """The state of the iterations; see `iterate`. `image` is complex [frames, *shape]."""

    rests = False

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._xp = xp = namespace(problem.right)
        self._real = problem.right.real.dtype
        self.image = xp.zeros_like(problem.right)
        self._normal = self.image.copy()
        self._split = [penalty.apply(self.image).copy() for penalty in problem.penalties]
        self._dual = [each.copy() for each in self._split]
        strengths = [penalty.strength for penalty in problem.penalties]
        self._rho = xp.full((), max(min(_RHO_OF_STRENGTH * max(strengths, default=0.0), 1.0), 1e-3))
        self.status = xp.zeros(3, np.float64)
        self.captured = captured_step(problem, self.step)

    def state(self) -> Mapping[str, Any]:
        split = {f"split_{number}": each for number, each in enumerate(self._split)}
        dual = {f"dual_{number}": each for number, each in enumerate(self._dual)}
        own = {"image": self.image, "normal": self._normal, "rho": self._rho, "status": self.status}
        return {**own, **split, **dual, **penalty_states(self._problem)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        put(self.state(), saved)

    def _coupled(self, image: Any) -> Any:
        """Σ K^H K x."""
        total: Any = 0
        for penalty in self._problem.penalties:
            total = total + (image if penalty.simple else penalty.adjoint(penalty.apply(image)))
        return total

    def step(self) -> None:
        xp, real, problem = self._xp, self._real, self._problem
        for penalty in problem.penalties:
            penalty.turn()
        rho = self._rho.astype(real)
        before = self.image.copy()
        target: Any = 0
        for penalty, split, dual in zip(problem.penalties, self._split, self._dual, strict=True):
            target = target + penalty.adjoint(split - dual)
        self._descend(problem.right + rho * target, rho)
        fidelity = 0.5 * inner(self.image, self._normal) - inner(self.image, problem.right) + 0.5 * problem.energy
        squares = inner(self.image, self.image)
        objective = fidelity + 0.5 * problem.damping * squares
        primal, dual_residual = xp.zeros(()), xp.zeros(())
        for number, penalty in enumerate(problem.penalties):
            seen = penalty.apply(self.image)
            moved = seen + self._dual[number]
            split, _ = penalty.shrink(moved, (penalty.strength / self._rho).astype(real))
            objective = objective + penalty.strength * penalty.value(self.image)
            apart, change = seen - split, split - self._split[number]
            primal = primal + inner(apart, apart)
            dual_residual = dual_residual + self._rho**2 * inner(change, change)
            self._split[number][...] = split
            self._dual[number] += apart
        grow = primal > _RATIO**2 * dual_residual
        fall = dual_residual > _RATIO**2 * primal
        factor = xp.where(grow, _FACTOR, xp.where(fall, 1 / _FACTOR, 1.0))
        self._rho *= factor
        for dual in self._dual:
            dual /= factor.astype(real)
        change = self.image - before
        misfit = xp.sqrt(2 * xp.maximum(fidelity, 0) / max(problem.energy, _SMALLEST))
        self.status[0], self.status[1] = objective, misfit
        self.status[2] = xp.sqrt(inner(change, change) / xp.maximum(squares, _SMALLEST))

    def _descend(self, right: Any, rho: Any) -> None:
        """The step that minimises along the residual of (normal + λ₂ + ρ Σ K^H K) x = right."""
        xp, damping = self._xp, np.float32(self._problem.damping)
        residual = right - self._normal - damping * self.image - rho * self._coupled(self.image)
        normal = self._problem.normal(residual)
        whole = normal + damping * residual + rho * self._coupled(residual)
        rate = inner(residual, residual) / xp.maximum(inner(residual, whole), _SMALLEST)
        self.image += rate.astype(self._real) * residual
        self._normal += rate.astype(self._real) * normal
