"""ADMM for several penalties at once, and for total variation.

x comes nearer to the samples and the split variables z_j = K_j x by a few conjugate gradients from the last x; each z_j
follows by a proximal operator. The penalty parameter ρ balances the primal and the dual residual.

One step of conjugate gradients is enough where density weights or a grid make the operator's eigenvalues much the same:
of as many normal operators, more iterations then leave a smaller objective. Without weights, or with penalties that are
too weak to fill in what was not sampled, three steps do, by far.

Source: Boyd, Parikh, Chu, Peleato, Eckstein, "Distributed optimization and statistical learning via the alternating
direction method of multipliers", Found. Trends Mach. Learn. 3 (2011), sections 3.3 and 3.4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernels.proximal import inner
from kernels.runtime.arrays import namespace
from kernels.sense.conjugate_gradient import unchanged
from kernels.sense.regularized.problem import Problem, captured_step, penalty_states
from kernels.sense.resumption import put

_STEPS = 3  # conjugate gradients an iteration, if the operator's eigenvalues differ much
_WEAK = 0.005  # strength of all penalties
_MUCH = 8.0  # times the diagonal, of the right-hand side's Rayleigh quotient: 3 to 4 with weights, 20 to 50 without
_RATIO, _FACTOR = 5.0, 2.0  # residuals that differ by more than the ratio change ρ by the factor
_RHO_OF_STRENGTH, _SMALLEST = 10.0, 1e-300


def steps_for(problem: Problem, agreed: Callable[[float], float] = unchanged) -> int:
    """Conjugate gradients an iteration. May apply the operator once, and wait for the device."""
    if all(penalty.strength < _WEAK for penalty in problem.penalties):
        return _STEPS
    square = float(inner(problem.right, problem.right))
    if not square > 0:
        return 1
    return _STEPS if agreed(float(inner(problem.right, problem.normal(problem.right))) / square) > _MUCH else 1


class Admm:
    """The state of the iterations; see `iterate`. `image` is complex [frames, *shape]."""

    rests = False

    def __init__(self, problem: Problem, steps: int = _STEPS) -> None:
        """steps: conjugate gradients an iteration"""
        self._problem, self._steps = problem, steps
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
        self._fit(problem.right + rho * target, rho)
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

    def _fit(self, right: Any, rho: Any) -> None:
        """Conjugate gradients on (normal + λ₂ + ρ Σ K^H K) x = right, from the last x."""
        xp, real, damping = self._xp, self._real, np.float32(self._problem.damping)
        residual = right - self._normal - damping * self.image - rho * self._coupled(self.image)
        direction = residual.copy()
        now = inner(residual, residual)
        for _ in range(self._steps):
            normal = self._problem.normal(direction)
            whole = normal + damping * direction + rho * self._coupled(direction)
            rate = (now / xp.maximum(inner(direction, whole), _SMALLEST)).astype(real)
            self.image += rate * direction
            self._normal += rate * normal
            residual -= rate * whole
            last, now = now, inner(residual, residual)
            direction *= (now / xp.maximum(last, _SMALLEST)).astype(real)
            direction += residual
