"""Gaussians of 16-bit images in products of 16-bit integers, whose sums are exact in any order.

x are the samples along one line, 0 … 65535 (signed ones plus 32768); W the weights, which sum to one.

First axis:   W = 256 u + f in units of 2**-(24 + finer), f in -128 … 127;  V = bias + sum of u x + f (x >> 8);
    v = V >> (11 + finer), which has 21 bits, 5 of them for fractions.
Second axis:  W = 1024 h + l in units of 2**-24;  v = 1024 a + b;  A = sum of h (a - 1024);
    B = sum of l (a - 1024) + h (b - 512);
    result = A 2**-9 + B 2**-19 + 32784 in float32, as fma(fma(B, 2**-10, A), 2**-9, 1.5 * 2**23 + 32784), rounded to
    nearest, ties to even.

So the low bits of weights are not multiplied by the low bits of samples. `bias` is half a step of v and the mean of
what that leaves out. u and f fit bytes (u two of them), h has at most 11 significant bits, and so have l, a and b, so
that int8 and float16 matrix products are exact; CPUs multiply pairs of 16-bit integers.

Results are within 0.6 of a step of the float64 Gaussian: 0.5 for the rounding, 1/64 for v, and what `halves` adds up.
Gaussians of which this is not certain are computed otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.weights import FLOAT16_BITS, WEIGHT_ONE, gaussian_half, over_all_taps, rounded_half

LEAST_RADIUS, LEAST_LONGER, MOST_RADIUS = 4, 9, 30  # of either axis, of the one that reaches farther, of both
RADII = (16, 24, 32)  # of the kernels on tensor cores
FINER = 2  # past the first of these, where rounded weights would add up to too large an error
MOST_UPPER = 127 * 257  # the largest u of two signed bytes
MOST_WRONG = 0.6  # of a step
MIDDLE = 1 << 15

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FirstWeights:
    """Weights at distance 0 … radius along the first axis."""

    upper: Integers  # u
    lower: Integers  # f
    bias: int
    finer: int


@dataclass(frozen=True, kw_only=True)
class SecondWeights:
    """Weights at distance 0 … radius along the second axis."""

    upper: Integers  # h
    lower: Integers  # l


@lru_cache(maxsize=256)
def halves(*gaussians: tuple[float, int]) -> tuple[tuple[float, ...], ...] | None:
    """Weights at distance 0 … radius of Gaussians (sigma, radius) along two axes; None if they are not computed so."""
    if len(gaussians) != 2:
        return None
    down, across = gaussians
    radii = down[1], across[1]
    if min(radii) < LEAST_RADIUS or not LEAST_LONGER <= max(radii) <= MOST_RADIUS:
        return None
    found = rounded_half(*down, WEIGHT_ONE << _finer(down[1])), rounded_half(*across, WEIGHT_ONE)
    first, second = first_weights(found[0]), second_weights(found[1])
    exact = first.upper.max() <= MOST_UPPER and first.bias >= 0 and _sums_are_exact(second.lower, max(radii))
    wrong = 0.502 + 2.0**-6  # the last rounding, to which float32 adds 2**-10, and v
    wrong += over_all_taps(np.abs(first.lower)) * 127.5 / (WEIGHT_ONE << first.finer)  # what the sums leave out
    wrong += over_all_taps(np.abs(second.lower)) * 2.0**-20
    for half, which in zip(found, (down, across), strict=True):
        wrong += 65535 / 2 * over_all_taps(np.abs(np.array(half) - gaussian_half(*which)))
    return found if exact and wrong <= MOST_WRONG else None


def _sums_are_exact(lower: Integers, radius: int) -> bool:
    """Whether sums on tensor cores stay below 2**24. Those of l (a - 1024) are over all blocks of 16 positions that
    windows see if there are three; else over the inner ones, and the two outer ones are added to h (b - 512), of which
    sums stay below 2**23."""
    magnitudes = np.abs(np.concatenate((lower[:0:-1], lower)))
    if radius <= RADII[0]:
        return int(magnitudes.sum()) <= 1 << 14
    reach = next(each for each in RADII if each >= radius)
    padded = np.pad(magnitudes, reach + 16)
    begin = padded.size // 2 + 16 - reach
    inner = [int(padded[begin - result : begin - result + 2 * reach - 16].sum()) for result in range(16)]
    return max(inner) <= 1 << 14 and int(magnitudes.sum()) - min(inner) <= 1 << 13


def _finer(radius: int) -> int:
    return FINER if radius > RADII[0] else 0


def sum_of_constant(x: int, weights: FirstWeights) -> int:
    """v where all samples are x."""
    whole = int(over_all_taps(weights.upper)) * x + int(over_all_taps(weights.lower)) * (x >> 8) + weights.bias
    return whole >> (11 + weights.finer)


@lru_cache(maxsize=64)
def first_weights(half: tuple[float, ...]) -> FirstWeights:
    finer = _finer(len(half) - 1)
    units = _units(half, WEIGHT_ONE << finer)
    upper = (units + 128) >> 8
    lower = units - 256 * upper
    # x >> 8 leaves out 0 … 255 units of 1 / 256, on average 127.5.
    missing = round(over_all_taps(lower) * 127.5 / 256)
    return FirstWeights(upper=upper, lower=lower, bias=(1 << (10 + finer)) + missing, finer=finer)


@lru_cache(maxsize=64)
def second_weights(half: tuple[float, ...]) -> SecondWeights:
    units = _units(half, WEIGHT_ONE)
    spacing = np.array([1 << max(int(unit >> 10).bit_length() - FLOAT16_BITS, 0) for unit in units])
    upper = np.rint(units / (1024 * spacing)).astype(np.int64) * spacing
    # h (a - 1024), at most 1024 times their sum, must not exceed 2**24.
    while over_all_taps(upper) > 1 << 14:
        lower = units - 1024 * upper
        finest = np.where(spacing == spacing.min(), lower, WEIGHT_ONE)
        upper[int(np.argmin(finest))] -= spacing.min()
    return SecondWeights(upper=upper, lower=units - 1024 * upper)


def _units(half: tuple[float, ...], one: int) -> Integers:
    return np.asarray(np.rint(np.array(half) * one), np.int64)
