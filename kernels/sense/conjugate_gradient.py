"""Conjugate gradients on the normal equations, with the curve of convergence.

Source: Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. Natl. Bur. Stand. 49
(1952); for images Pruessmann et al., Magn. Reson. Med. 46 (2001).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.threads import check_wanted
from kernels.sense.arrays import inner_product, inner_products, namespace


def unchanged(value: Any) -> Any:
    """Where nobody else has a part in it."""
    return value


@dataclass(kw_only=True, eq=False)
class Progress:
    """How far the iterations have come: all that they need to go on, after an error or in another process.

    solution, residual, direction : of the right-hand side over `scale`
    now, squares                  : the residual's square now, and after 0, 1, 2 … `number` iterations
    """

    scale: Any
    solution: Any
    residual: Any
    direction: Any
    now: Any
    squares: Any
    number: int = 0


def begun(right: Any, iterations: int, *, separate: bool = False) -> Progress:
    """Before the first of at most so many iterations."""
    xp = namespace(right)
    # Squares of small values would leave the range of float32.
    scale = xp.maximum(xp.max(xp.abs(right)), np.finfo(right.real.dtype).tiny)
    residual = right / scale
    now = (inner_products if separate else inner_product)(residual, residual)
    squares = xp.zeros(iterations + 1, np.float64)
    squares[0] = xp.sum(now) if separate else now
    return Progress(
        scale=scale,
        solution=xp.zeros_like(residual),
        residual=residual,
        direction=residual.copy(),
        now=now,
        squares=squares,
    )


def conjugate_gradient(
    normal: Callable[[Any], Any],
    right: Any,
    *,
    iterations: int,
    damping: float = 0.0,
    tolerance: float = 0.0,
    on_iteration: Callable[[int, Any], None] | None = None,
    separate: bool = False,
    progress: Progress | None = None,
    agreed: Callable[[float], float] = unchanged,
) -> tuple[Any, Any]:
    """Solve (normal + damping · 1) x = right, from x = 0.

    normal     : a Hermitian operator without negative eigenvalues; returns a new array, or one that it may use again.
                 Where it raises, `progress` is as it was before the iteration.
    right      : complex array of any shape, NumPy or CuPy; not looked at where there is `progress`
    iterations : at most this many; fewer where the relative residual falls to `tolerance`. With a tolerance of 0
                 nothing waits for the device.
    separate   : each index of the first axis is a problem of its own; what it becomes does not depend on the others
    on_iteration : told the number of each iteration that is done, and its relative residual: a float, or with a
                 tolerance of 0 a 0-d array
    progress   : where to go on from, changed in place; `begun` with as many iterations made it
    agreed     : of several processes that solve it side by side, makes the relative residual that all go by

    Returns x, and the relative residuals ‖right − (normal + damping) x‖ / ‖right‖ after 0, 1, 2 … iterations, float64,
    where `right` lives (as the recurrence has them).
    """
    at = begun(right, iterations, separate=separate) if progress is None else progress
    xp, real = namespace(at.residual), at.residual.real.dtype
    # Few and small operations: on a GPU each is a launch, and those of a small image take longer than its arithmetic.
    smallest = np.finfo(real).tiny
    product = inner_products if separate else inner_product
    whole = at.squares[0]
    least = max(float(whole), float(smallest)) if tolerance > 0 else 0.0

    def share(square: Any) -> float:
        return agreed(math.sqrt(float(square) / least))

    if progress is not None and tolerance > 0 and share(at.squares[at.number]) <= tolerance:
        iterations = at.number
    while at.number < iterations:
        check_wanted()
        image = normal(at.direction)
        if damping:
            image = image + np.float32(damping) * at.direction
        step = (at.now / xp.maximum(product(at.direction, image), smallest)).astype(real)
        at.solution += step * at.direction
        at.residual -= step * image
        before, at.now = at.now, product(at.residual, at.residual)
        at.squares[at.number + 1] = total = xp.sum(at.now) if separate else at.now
        at.direction *= (at.now / xp.maximum(before, smallest)).astype(real)
        at.direction += at.residual
        at.number += 1
        reached = share(total) if tolerance > 0 else None
        if on_iteration is not None:
            on_iteration(at.number, xp.sqrt(total / xp.maximum(whole, smallest)) if reached is None else reached)
        if reached is not None and reached <= tolerance:
            break
    return at.solution * at.scale, xp.sqrt(at.squares[: at.number + 1] / xp.maximum(whole, smallest))
