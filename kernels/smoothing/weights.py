"""Weights of a Gaussian along one axis, at distance 0 … radius, in the precision of the sums."""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.elementary import exponential

# Weights for integer images are in units of 2**-24: each is exact in float32, and they sum to exactly one.
WEIGHT_ONE = 1 << 24
# Exact Gaussians: one, in units of the weights of the first filtered axis and of later axes. Samples of 8 bits times
# the first, and quarters of -128 … 128 times the others, add up to at most 2**24: exact in float32.
EXACT_FIRST_ONE, EXACT_LATER_ONE = 1 << 16, 1 << 15
EXACT_BITS = 11  # significant bits of an exact weight, as many as a float16 has


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


@functools.lru_cache(maxsize=64)
def exact_half_weights(sigma: float, radius: int, one: int) -> tuple[float, ...]:
    """Multiples of 1 / `one` (a power of two) with at most 11 significant bits, none negative, that sum to exactly one.
    They do not grow with distance, except that the centre may be one step less than its neighbours."""
    exact = [float(weight) * one for weight in gaussian_half(sigma, radius)]
    units = [_nearest(weight) for weight in exact]
    while missing := one - units[0] - 2 * sum(units[1:]):
        units = _nearer(units, exact, missing)
    return tuple(unit / one for unit in units)


def _nearer(units: list[int], exact: list[float], missing: int) -> list[int]:
    """Moves one weight a step up or down, where that costs least, so that the sum comes nearer to one but not past it.

    There is always such a step: all weights, and so the missing amount, are multiples of the smallest change of the sum
    that a step can make.
    """
    way = 1 if missing > 0 else -1
    moves = []
    for distance, unit in enumerate(units):
        step = _spacing(unit) if way > 0 else _spacing(unit - 1)
        if (step if distance == 0 else 2 * step) > abs(missing) or (unit == 0 and way < 0):
            continue
        moved = [*units[:distance], unit + way * step, *units[distance + 1 :]]
        cost = step + 2 * way * (unit - exact[distance])  # added squared error per unit of the sum
        moves.append((moved != sorted(moved, reverse=True), cost, moved))
    return min(moves)[2]


def _nearest(weight: float) -> int:
    step = _spacing(int(weight))
    return round(weight / step) * step


def _spacing(unit: int) -> int:
    """Distance from a number of `EXACT_BITS` significant bits to the next larger one, in units."""
    return 1 << max(unit.bit_length() - EXACT_BITS, 0)


def gaussian_half(sigma: float, radius: int) -> NDArray[np.float64]:
    """The real weights."""
    if radius == 0:
        return np.ones(1)
    distance = np.arange(radius + 1, dtype=np.float64)
    half = exponential(-0.5 * ((distance / sigma) * (distance / sigma)))
    return np.asarray(half / (half[0] + 2 * math.fsum(half[1:])))
