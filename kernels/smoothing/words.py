"""Gaussians of 16-bit images in products of 16-bit integers, whose sums are exact in any order.

x are the samples along one line, 0 … 65535 (signed ones plus 32768); W the weights in units of 2**-24; they sum to one.

First axis:   W = 256 u + f, f in -128 … 127;  V = bias + sum of u x + f (x >> 8), in units of 2**-16;  v = V >> 11.
Second axis:  W = 1024 h + l;  v = 2048 a + b;  A = sum of h (a - 512);  B = sum of 2 l (a - 512) + h (b - 1024);
    result = A 2**-8 + B 2**-19 + 32800 in float32, as fma(fma(B, 2**-11, A), 2**-8, 1.5 * 2**23 + 32800), rounded to
    nearest, ties to even.

So the low bits of weights are not multiplied by the low bits of samples. `bias` is half a step of v and the mean of
what that leaves out. u and f fit bytes (u two of them), h has at most 11 significant bits, and a and b at most 11, so
that int8 and float16 matrix products are exact; CPUs multiply pairs of 16-bit integers.

The error is at most 0.63 of a step up to sigma 4.1 and 0.69 up to 7.6: 0.5 for the rounding, 0.05 for the weights of
each axis, 1/64 for v, and the rest for what the sums leave out (tests/kernels/smoothing/test_words.py computes it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.weights import EXACT_BITS, WEIGHT_ONE

LEAST_RADIUS, LEAST_LONGER, MOST_RADIUS = 4, 9, 30  # of either axis, of the one that reaches farther, of both
MOST_WEIGHT = 0.45  # u must fit two signed bytes
MIDDLE = 1 << 15

Integers = NDArray[np.int64]


def possible(dtype: np.dtype, halves: Sequence[tuple[float, ...]]) -> bool:
    """Whether Gaussians with these weights along two neighbouring axes are computed so."""
    words = dtype.kind in "ui" and dtype.itemsize == 2
    radii = [len(half) - 1 for half in halves]
    in_reach = min(radii) >= LEAST_RADIUS and LEAST_LONGER <= max(radii) <= MOST_RADIUS
    return words and in_reach and all(half[0] <= MOST_WEIGHT for half in halves)


@dataclass(frozen=True, kw_only=True)
class FirstWeights:
    """Weights at distance 0 … radius along the first axis."""

    upper: Integers  # u
    lower: Integers  # f
    bias: int


@dataclass(frozen=True, kw_only=True)
class SecondWeights:
    """Weights at distance 0 … radius along the second axis."""

    upper: Integers  # h
    lower: Integers  # l


def over_all_taps(half: Integers) -> int:
    return int(half[0] + 2 * half[1:].sum())


def sum_of_constant(x: int, weights: FirstWeights) -> int:
    """v where all samples are x."""
    return (over_all_taps(weights.upper) * x + over_all_taps(weights.lower) * (x >> 8) + weights.bias) >> 11


def _units(half: Sequence[float]) -> Integers:
    return np.asarray(np.rint(np.array(half) * WEIGHT_ONE), np.int64)


@lru_cache(maxsize=64)
def first_weights(half: tuple[float, ...]) -> FirstWeights:
    units = _units(half)
    upper = (units + 128) >> 8
    lower = units - 256 * upper
    # x >> 8 leaves out 0 … 255 units of 1 / 256, on average 127.5.
    missing = round(over_all_taps(lower) * 127.5 / 256)
    return FirstWeights(upper=upper, lower=lower, bias=max((1 << 10) + missing, 0))


@lru_cache(maxsize=64)
def second_weights(half: tuple[float, ...]) -> SecondWeights:
    units = _units(half)
    spacing = np.array([1 << max(int(unit >> 10).bit_length() - EXACT_BITS, 0) for unit in units])
    upper = np.rint(units / (1024 * spacing)).astype(np.int64) * spacing
    # B's terms in h, at most 1024 times their sum, must not exceed 2**24.
    while over_all_taps(upper) > 1 << 14:
        lower = units - 1024 * upper
        finest = np.where(spacing == spacing.min(), lower, WEIGHT_ONE)
        upper[int(np.argmin(finest))] -= spacing.min()
    return SecondWeights(upper=upper, lower=units - 1024 * upper)
