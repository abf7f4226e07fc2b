"""Weights of a Gaussian along one axis, at distance 0 … radius, in the precision of the sums."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.elementary import exponential

# Weights for integer images are in units of 2**-24: each is exact in float32, and they sum to exactly one.
WEIGHT_ONE = 1 << 24
FLOAT16_BITS = 11  # significant bits of a float16


@functools.lru_cache(maxsize=64)
def half_weights(sigma: float, radius: int, dtype: np.dtype) -> tuple[float, ...]:
    """Float images: rounded to their precision. Integer images: multiples of 2**-24 that sum to exactly one."""
    half = gaussian_half(sigma, radius)
    if dtype.kind == "f":
        return tuple(float(weight) for weight in half.astype(dtype))
    units = np.rint(half * WEIGHT_ONE).astype(np.int64)
    units[0] = WEIGHT_ONE - 2 * units[1:].sum()  # the centre absorbs the rounding errors, so the sum is one
    return tuple(float(unit) / WEIGHT_ONE for unit in units)


def rounded_half(sigma: float, radius: int, one: int) -> tuple[float, ...]:
    """Multiples of 1 / `one` that sum to exactly one, with a small sum of errors over all taps: each is rounded to
    nearest, then those that were rounded farthest move back by one unit."""
    exact = gaussian_half(sigma, radius) * one
    units = np.rint(exact)
    missing = one - units[0] - 2 * units[1:].sum()
    pairs = int(abs(missing)) // 2
    step = np.sign(missing)
    units[1 + np.argsort(step * (units[1:] - exact[1:]), kind="stable")[:pairs]] += step
    units[0] += missing - 2 * step * pairs
    return tuple(float(unit) / one for unit in units)


@functools.lru_cache(maxsize=64)
def derivative_weights(sigma: float, radius: int, order: int, dtype: np.dtype) -> tuple[float, ...]:
    """Weights of samples i - radius … i + radius in the derivative of order 1 … 3 at i, per sample: those of the
    derivative of the real Gaussian, whose own weights sum to one."""
    half = gaussian_half(sigma, radius)
    gaussian = np.concatenate((half[:0:-1], half))
    distance = np.arange(-radius, radius + 1) / sigma
    # The Hermite polynomials; a sample after i has the sign of a positive slope.
    square = distance * distance
    polynomial = {1: distance, 2: square - 1, 3: (square - 3) * distance}[order]
    scaled = polynomial * gaussian / math.prod([sigma] * order)
    return tuple(float(weight) for weight in scaled.astype(dtype))


def over_all_taps(half: NDArray[Any]) -> Any:
    """The sum over all taps of values at distance 0 … radius."""
    return half[0] + 2 * math.fsum(half[1:])


def gaussian_half(sigma: float, radius: int) -> NDArray[np.float64]:
    """The real weights."""
    if radius == 0:
        return np.ones(1)
    distance = np.arange(radius + 1, dtype=np.float64)
    half = exponential(-0.5 * ((distance / sigma) * (distance / sigma)))
    return np.asarray(half / (half[0] + 2 * math.fsum(half[1:])))
