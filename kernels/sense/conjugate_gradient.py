"""Conjugate gradients on the normal equations, with the curve of convergence.

Source: Hestenes, Stiefel, "Methods of conjugate gradients for solving linear systems", J. Res. Natl. Bur. Stand. 49
(1952); for images Pruessmann et al., Magn. Reson. Med. 46 (2001).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernels.sense.arrays import inner_product, inner_products, namespace, to_host


def conjugate_gradient(
    normal: Callable[[Any], Any],
    right: Any,
    *,
    iterations: int,
    damping: float = 0.0,
    tolerance: float = 0.0,
    on_iteration: Callable[[int, Any], None] | None = None,
    separate: bool = False,
) -> tuple[Any, Any]:
    """Solve (normal + damping · 1) x = right, from x = 0.

    normal     : a Hermitian operator without negative eigenvalues; returns a new array, or one that it may use again
    right      : complex array of any shape, NumPy or CuPy
    iterations : at most this many; fewer where the relative residual falls to `tolerance`. With a tolerance of 0
                 nothing waits for the device.
    separate   : each index of the first axis is a problem of its own; what it becomes does not depend on the others
    on_iteration : told the number of each iteration that is done, and its relative residual (a 0-d array)

    Returns x, and the relative residuals ‖right − (normal + damping) x‖ / ‖right‖ after 0, 1, 2 … iterations, float64,
    where `right` lives (as the recurrence has them).
    """
    xp = namespace(right)
    # Few and small operations: on a GPU each is a launch, and those of a small image take longer than its arithmetic.
    smallest = np.finfo(right.real.dtype).tiny
    product = inner_products if separate else inner_product
    squares = xp.zeros(iterations + 1, np.float64)
    # Squares of small values would leave the range of float32.
    scale = xp.maximum(xp.max(xp.abs(right)), smallest)
    residual = right / scale
    solution, direction = xp.zeros_like(residual), residual.copy()
    now = product(residual, residual)
    squares[0] = whole = xp.sum(now) if separate else now
    for number in range(1, iterations + 1):
        image = normal(direction)
        if damping:
            image = image + np.float32(damping) * direction
        step = (now / xp.maximum(product(direction, image), smallest)).astype(right.real.dtype)
        solution += step * direction
        residual -= step * image
        before, now = now, product(residual, residual)
        squares[number] = total = xp.sum(now) if separate else now
        if on_iteration is not None:
            on_iteration(number, xp.sqrt(total / xp.maximum(whole, smallest)))
        if tolerance > 0 and float(total) <= tolerance**2 * float(whole):
            squares = squares[: number + 1]
            break
        direction *= (now / xp.maximum(before, smallest)).astype(right.real.dtype)
        direction += residual
    return solution * scale, xp.sqrt(squares / xp.maximum(whole, smallest))


def on_host(curve: Any) -> list[float]:
    """The curve as plain numbers."""
    return [float(value) for value in to_host(curve)]
