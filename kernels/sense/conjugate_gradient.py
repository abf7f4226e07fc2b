"""Conjugate gradients on the normal equations, with their convergence curve.

Source: Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. Natl. Bur. Stand. 49
(1952); for images Pruessmann et al., Magn. Reson. Med. 46 (2001).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.arrays import namespace
from kernels.runtime.threads import check_wanted
from kernels.sense.arrays import inner_product, inner_products
from kernels.sense.resumption import Resumption


def unchanged(value: Any) -> Any:
    """Default `agreed` of a single process."""
    return value


@dataclass(kw_only=True, eq=False)
class Progress:
    """The state of the iterations, sufficient to continue after an error or in another process.

    solution, residual, direction : for the right-hand side divided by `scale`
    now, squares                  : the residual's current square, and those after 0, 1, 2 … `number` iterations
    """

    scale: Any
    solution: Any
    residual: Any
    direction: Any
    now: Any
    squares: Any
    number: int = 0

    def state(self) -> Mapping[str, Any]:
        """What `restore` takes, by name."""
        arrays = {name: value for name, value in vars(self).items() if name != "number"}
        return {**arrays, "number": np.array(self.number)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from arrays of `state` on the host."""
        xp = namespace(self.residual)
        for name in vars(self):
            setattr(self, name, int(saved[name]) if name == "number" else xp.asarray(saved[name]).copy())


def initial_progress(right: Any, iterations: int, *, separate: bool = False) -> Progress:
    """The state before the first of at most `iterations` iterations."""
    xp = namespace(right)
    # Without scaling, squares of small values would underflow float32.
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
    resumption: Resumption | None = None,
) -> tuple[Any, Any]:
    """Solve (normal + damping · 1) x = right, from x = 0.

    normal     : a positive semidefinite Hermitian operator; returns a new array, or one that it may reuse. If it
                 raises, `progress` is as it was before the iteration.
    right      : complex array of any shape, NumPy or CuPy; ignored if `progress` is passed
    iterations : maximum number of iterations
    tolerance  : stop once the relative residual falls to this; with 0 nothing waits for the device
    separate   : each index of the first axis is an independent problem, whose result does not depend on the others
    on_iteration : called after each iteration with its number and relative residual: a float, or with a tolerance of 0
                 a 0-d array
    progress   : state to continue from, changed in place; from `initial_progress` with the same number of iterations
    agreed     : maps this process's relative residual to the one that all processes solving the problem use
    resumption   : continue from a saved state that fits, and save later ones

    Returns x, and the relative residuals ‖right − (normal + damping) x‖ / ‖right‖ after 0, 1, 2 … iterations by the
    recurrence, float64, on the device of `right`.
    """
    at = initial_progress(right, iterations, separate=separate) if progress is None else progress
    if resumption is not None and resumption.saved and at.number == 0 and resumption.fits(at.state()):
        at.restore(resumption.saved)
    xp, real = namespace(at.residual), at.residual.real.dtype
    # Few operations: on a GPU each is a launch, which for a small image takes longer than the arithmetic.
    smallest = np.finfo(real).tiny
    product = inner_products if separate else inner_product
    whole = at.squares[0]
    least = max(float(whole), float(smallest)) if tolerance > 0 else 0.0

    def share(square: Any) -> float:
        return agreed(math.sqrt(float(square) / least))

    if (progress is not None or at.number) and tolerance > 0 and share(at.squares[at.number]) <= tolerance:
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
        if resumption is not None and at.number < iterations and resumption.due():
            resumption.save(at.state())
    return at.solution * at.scale, xp.sqrt(at.squares[: at.number + 1] / xp.maximum(whole, smallest))
