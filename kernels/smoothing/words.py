"""Gaussians of 16-bit images in products of bytes, whose sums are exact in any order.

x are the samples along one line, 0 … 65535 (signed ones plus 32768); W the weights, which sum to one.

First axis:   W = 256 u + f in units of 2**-(24 + finer), f in -128 … 127;
    v = (bias + sum of u x + f (x >> 8)) >> (9 + finer), which has 23 bits, 7 of them for fractions.
Second axis:  W as along the first, u = 256 g + e, e in -128 … 127;  v = 128 p + q;
    result = (bias + sum of u p + f (p >> 8) + 2 g q) >> (16 + finer).

So the low bytes of weights are not multiplied by the low bytes of samples. Each `bias` is half a step of the result,
and the mean of what it leaves out; the first also makes v larger by `RAISED`, which the second takes back. All bytes of
weights are signed, so that products on tensor cores are exact; CPUs multiply pairs of 16-bit integers.

Results are within 0.6 of a step of the float64 Gaussian: 0.5 for the rounding, 2**-8 for v, and what `halves` adds up.
Gaussians of which this is not certain are computed otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.weights import WEIGHT_ONE, gaussian_half, over_all_taps, rounded_half

LEAST_RADIUS, LEAST_LONGER, MOST_RADIUS = 4, 5, 30  # of either axis, of the one that reaches farther, of both
RADII = (8, 16, 24, 32)  # of the kernels on tensor cores
FINER, COARSE_RADIUS = 2, 16  # beyond this radius, where rounded weights would add up to too large an error
RAISED = 2  # units of v, which is so much too large, so that no sum is negative
MOST_UPPER = 127 * 257  # the largest u of two signed bytes
MOST_WRONG = 0.6  # of a step
MIDDLE = 1 << 15

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WordWeights:
    """Weights at distance 0 … radius along one axis."""

    upper: Integers  # u
    lower: Integers  # f
    bias: int
    finer: int

    @property
    def top(self) -> Integers:  # g
        return (self.upper + 128) >> 8

    @property
    def middle(self) -> Integers:  # e
        return self.upper - 256 * self.top


@lru_cache(maxsize=256)
def halves(*gaussians: tuple[float, int]) -> tuple[tuple[float, ...], ...] | None:
    """Weights at distance 0 … radius of Gaussians (sigma, radius) along two axes; None if they are not computed so."""
    if len(gaussians) != 2:
        return None
    down, across = gaussians
    radii = down[1], across[1]
    if min(radii) < LEAST_RADIUS or not LEAST_LONGER <= max(radii) <= MOST_RADIUS:
        return None
    found = tuple(rounded_half(*each, WEIGHT_ONE << _finer(each[1])) for each in gaussians)
    first, second = first_weights(found[0]), second_weights(found[1])
    exact = max(first.upper.max(), second.upper.max()) <= MOST_UPPER and min(first.bias, second.bias) >= 0
    wrong = 0.5 + 2.0**-8
    for half, which in zip(found, (down, across), strict=True):
        wrong += 65535 / 2 * over_all_taps(np.abs(np.array(half) - gaussian_half(*which)))
    # What the sums leave out.
    wrong += (over_all_taps(np.abs(first.lower)) * 127.5 / 256 + 0.5) * 2.0 ** -(16 + first.finer)
    wrong += (over_all_taps(np.abs(second.lower) + np.abs(second.middle)) * 127.5 / 256 + 0.5) * 2.0 ** -(
        16 + second.finer
    )
    wrong += over_all_taps(np.abs(second.lower)) * 2.0 ** -(24 + second.finer)
    return found if exact and wrong <= MOST_WRONG else None


def _finer(radius: int) -> int:
    return FINER if radius > COARSE_RADIUS else 0


def sum_of_constant(x: int, weights: WordWeights) -> int:
    """v where all samples are x."""
    whole = int(over_all_taps(weights.upper)) * x + int(over_all_taps(weights.lower)) * (x >> 8) + weights.bias
    return whole >> (9 + weights.finer)


@lru_cache(maxsize=64)
def first_weights(half: tuple[float, ...]) -> WordWeights:
    weights = _weights(half)
    bias = (256 + 512 * RAISED << weights.finer) + _missing(weights.lower)
    return replace(weights, bias=bias)


@lru_cache(maxsize=64)
def second_weights(half: tuple[float, ...]) -> WordWeights:
    weights = _weights(half)
    bias = ((1 << 15) - 512 * RAISED << weights.finer) + _missing(weights.lower + weights.middle)
    return replace(weights, bias=bias)


def _weights(half: tuple[float, ...]) -> WordWeights:
    finer = _finer(len(half) - 1)
    units = np.asarray(np.rint(np.array(half) * (WEIGHT_ONE << finer)), np.int64)
    upper = (units + 128) >> 8
    return WordWeights(upper=upper, lower=units - 256 * upper, bias=0, finer=finer)


def _missing(weights: Integers) -> int:
    """The mean of what sums leave out that do not multiply these by low bytes, 0 … 255 units of 1 / 256."""
    return round(float(over_all_taps(weights)) * 127.5 / 256)
