"""The contract's arithmetic on NumPy scalars."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from kernels.smoothing.window import Window

# Adding a float of this size rounds a small number (|number| < 2**22) to an integer, ties to even, because such floats
# are one apart.
WHOLES = 1.5 * 2**23


def filtered_constant(window: Window, value: Any) -> Any:
    """The window's sum over samples equal to `value` (a NumPy scalar), by the contract's arithmetic in its type."""
    if window.half_weights is None:
        return _box_sum(value, window.taps)
    weights = [value.dtype.type(weight) for weight in window.half_weights]
    total = weights[0] * value
    for weight in weights[1:]:
        total = fma(weight, value + value, total)
    return total


def _box_sum(value: Any, taps: int) -> Any:
    if value.dtype.kind == "u":
        return value.dtype.type(int(value) * taps)
    total = value
    for bit in f"{taps:b}"[1:]:
        total = total + total
        if bit == "1":
            total = total + value
    return total


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding to nearest, ties to even."""
    if not all(math.isfinite(number) for number in (a, b, c)):
        return a * b + c
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = type(a)(float(exact))
    if near.dtype == np.float64 or not np.isfinite(near):
        return near
    candidates = [np.nextafter(near, near.dtype.type(-np.inf)), near, np.nextafter(near, near.dtype.type(np.inf))]
    finite = [candidate for candidate in candidates if np.isfinite(candidate)]
    return min(finite, key=lambda each: (abs(Fraction(float(each)) - exact), int(each.view(np.uint32)) & 1))
