"""The choice of a solver, and automatic strengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.sense.conjugate_gradient import unchanged
from kernels.sense.regularized.admm import Admm
from kernels.sense.regularized.fista import Fista, largest_eigenvalue
from kernels.sense.regularized.iterate import iterate
from kernels.sense.regularized.problem import Problem

# Automatic strengths: rounds of a few iterations, after each of which the strengths follow the misfit.
_ROUNDS, _ROUND_ITERATIONS, _MOST_FACTOR = 12, 5, 4.0
_WEAKEST, _STRONGEST = 1e-5, 1.0
_WIPED = 1e-6  # share of a penalty's value at the right-hand side


@dataclass(frozen=True, kw_only=True, eq=False)
class Regularized:
    """image : complex64 as the right-hand side; status: (n, 3) objective, misfit and change after each iteration, the
    objective in the samples' units, the others relative; strengths: of each penalty; solver: "fista" or "admm"."""

    image: Any
    status: NDArray[np.float64]
    strengths: tuple[float, ...]
    solver: str


def regularized_sense(
    problem: Problem,
    *,
    iterations: int,
    tolerance: float = 0.0,
    automatic: bool = False,
    largest: float | None = None,
    on_iteration: Callable[[int, NDArray[np.float64]], None] | None = None,
    agreed: Callable[[float], float] = unchanged,
) -> Regularized:
    """Images that fit the samples and the penalties.

    tolerance    : stop once an iteration changes the image by less than this share of its norm; 0: never
    automatic    : scale all strengths together until the misfit equals the noise: Morozov's discrepancy principle
    largest      : the largest eigenvalue of `problem.normal`, if it is known; FISTA needs it
    on_iteration : called with an iteration's number and status
    agreed       : maps this process's change to the one that all processes solving the problem use

    Raises ValueError if an automatic strength has no noise to fit, or if the strengths wipe the image out.
    """
    unit, scale = problem.in_units()
    solver: Fista | Admm
    if len(unit.penalties) == 1 and unit.penalties[0].simple:
        solver = Fista(unit, largest_eigenvalue(unit.normal, unit.right) if largest is None else largest)
    else:
        solver = Admm(unit)
    if automatic:
        _follow_discrepancy(solver, unit)
    status = iterate(
        solver, iterations, tolerance=tolerance, capture=unit.capture, on_iteration=on_iteration, agreed=agreed
    )
    strengths = tuple(float(each) for each in solver.weights)
    _refuse_wiped(unit, solver.image, strengths)
    status[:, 0] *= scale**2
    return Regularized(
        image=solver.image * np.float32(scale),
        status=status,
        strengths=strengths,
        solver=type(solver).__name__.lower(),
    )


def _follow_discrepancy(solver: Fista | Admm, unit: Problem) -> None:
    """The misfit rises with the strength: where it exceeds the noise, the strength is too large."""
    if unit.noise is None:
        raise ValueError("an automatic strength needs the noise of the samples")
    for _ in range(_ROUNDS):
        status = iterate(solver, _ROUND_ITERATIONS, capture=unit.capture)
        apart = float(status[-1, 1]) ** 2 * unit.energy / max(unit.noise, 1e-300)
        factor = min(max(1 / max(apart, 1e-300), 1 / _MOST_FACTOR), _MOST_FACTOR)
        solver.weights *= factor
        largest = float(solver.weights.max())
        solver.weights *= min(max(largest, _WEAKEST), _STRONGEST) / largest
        solver.restart()


def _refuse_wiped(unit: Problem, image: Any, strengths: tuple[float, ...]) -> None:
    for penalty, strength in zip(unit.penalties, strengths, strict=True):
        whole, left = float(penalty.value(unit.right)), float(penalty.value(image))
        if penalty.wipes and strength > 0 and whole > 0 and left <= _WIPED * whole:
            raise ValueError(f"a strength of {strength:g} leaves nothing of the image")
