"""How the sums along each axis of a Gaussian are rounded before the next axis or the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from kernels.smoothing.window import Window

# Adding a float of this size rounds a small number, ties to even, because such floats are far apart.
QUARTERS = 1.5 * 2**21  # to quarters, |number| < 2**20
WHOLES = 1.5 * 2**23  # to integers, |number| < 2**22
MIDDLE = 128  # of uint8's range; between its first and last axis, an exact Gaussian keeps samples relative to it


@dataclass(frozen=True, kw_only=True)
class AxisRounding:
    """A sum becomes (sum + up) - down, in float32 or float64."""

    up: float
    down: float

    def of(self, total: Any) -> Any:
        """The rounded sum; `total` is a NumPy scalar, and the arithmetic is in its type."""
        return (total + type(total)(self.up)) - type(total)(self.down)


NO_ROUNDING = AxisRounding(up=-0.0, down=0.0)  # adding -0 changes no number, not even 0 or -0


def axis_roundings(windows: Sequence[Window], *, whole: bool) -> list[AxisRounding]:
    """The rounding of the sums along each axis of a Gaussian.

    windows : sorted by axis, at least two taps each
    whole   : whether the result has an integer dtype
    """
    last, exact = len(windows) - 1, windows[0].exact
    found = []
    for place in range(len(windows)):
        rounds_to_wholes = whole and place == last
        if not (exact or rounds_to_wholes):
            found.append(NO_ROUNDING)
            continue
        up = WHOLES if rounds_to_wholes else QUARTERS
        taken = MIDDLE * ((place == 0) - (place == last)) if exact else 0
        found.append(AxisRounding(up=up, down=up + taken))
    return found


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
