"""The choice of a solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.proximal import inner
from kernels.sense.conjugate_gradient import unchanged
from kernels.sense.iterate import iterate
from kernels.sense.regularized.admm import Admm, steps_for
from kernels.sense.regularized.fista import Fista, largest_eigenvalue
from kernels.sense.regularized.problem import Problem
from kernels.sense.resumption import Resumption

_WIPED = 1e-6  # share of the norm, or of a penalty's value, of the right-hand side


@dataclass(frozen=True, kw_only=True, eq=False)
class Regularized:
    """image : complex64 as the right-hand side; status: (n, 3) objective, misfit and change after each iteration, the
    objective in the samples' units, the others relative; solver: "fista" or "admm"."""

    image: Any
    status: NDArray[np.float64]
    solver: str


def regularized_sense(
    problem: Problem,
    *,
    iterations: int,
    tolerance: float = 0.0,
    largest: float | None = None,
    on_iteration: Callable[[int, NDArray[np.float64]], None] | None = None,
    agreed: Callable[[float], float] = unchanged,
    resumption: Resumption | None = None,
) -> Regularized:
    """Images that fit the samples and the penalties.

    tolerance    : stop once an iteration changes the image by less than this share of its norm; 0: never
    largest      : the largest eigenvalue of `problem.normal`, if it is known; FISTA needs it
    on_iteration : called with an iteration's number and status
    agreed       : maps this process's change to the one that all processes solving the problem use
    resumption   : continue from a saved state that fits, and save later ones

    Raises ValueError if a strength wipes the image out.
    """
    unit, scale = problem.in_units()
    solver: Fista | Admm
    if len(unit.penalties) == 1 and unit.penalties[0].simple:
        if largest is None and resumption is not None and resumption.saved and "numbers" in resumption.saved:
            largest = 1.0  # the saved state has a better one
        if largest is not None:
            solver = Fista(unit, largest, tolerance)
        else:
            largest = largest_eigenvalue(unit.normal, unit.right, capture=unit.capture)
            solver = Fista(unit, largest, tolerance, applied=True)
    else:
        solver = Admm(unit, steps_for(unit, agreed))
    status = iterate(
        solver,
        iterations,
        tolerance=tolerance,
        on_iteration=on_iteration,
        agreed=agreed,
        resumption=resumption,
    )
    _refuse_wiped(unit, solver.image)
    status[:, 0] *= scale**2
    return Regularized(
        image=solver.image * np.float32(scale),
        status=status,
        solver=type(solver).__name__.lower(),
    )


def _refuse_wiped(unit: Problem, image: Any) -> None:
    for penalty in unit.penalties:
        if not (penalty.wipes and penalty.strength > 0):
            continue
        # An image is 0 if its norm is. Total variation wipes out more: a constant image, whose differences are 0.
        sizes = [inner(each, each) if penalty.simple else penalty.value(each) for each in (unit.right, image)]
        whole, left = map(float, sizes)
        if whole > 0 and left <= _WIPED ** (2 if penalty.simple else 1) * whole:
            raise ValueError(f"a strength of {penalty.strength:g} leaves nothing of the image")
