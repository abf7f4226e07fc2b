"""Gaussians of bytes in products of bytes, whose sums are exact in any order, along one axis or two neighbouring ones.

x are the samples along one line, 0 … 255; W = 256 a + b the weights in units of 2**-16, which sum to one, with a from 0
to 255 and b from -128 to 127.

One axis:     result = (sum of W x + 2**15) >> 16.
First axis:   v = (sum of W x) >> 8, which has 16 bits, 8 of them for fractions.
Second axis:  v = 256 h + l;  result = (sum of W h + a l + bias) >> 16.

So the low bits of weights are not multiplied by the low bits of v; `bias` is half a step, and the mean of what that
and v leave out. Sums along the first axis are below 2**24, so float32 holds them.

Results are within 0.6 of a step of the float64 Gaussian: 0.5 for the rounding, 2**-9 for v, and what `halves` adds up.
Gaussians of which this is not certain are computed otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kernels.smoothing.weights import gaussian_half, over_all_taps, rounded_half
from kernels.smoothing.words import Integers

ONE = 1 << 16
MOST_RADIUS = 32
MOST_WRONG = 0.6  # of a step


@dataclass(frozen=True, kw_only=True)
class ByteWeights:
    """Weights at distance 0 … radius along one axis."""

    upper: Integers  # a
    lower: Integers  # b
    bias: int  # as a second axis

    @property
    def whole(self) -> Integers:
        return 256 * self.upper + self.lower


@lru_cache(maxsize=256)
def halves(*gaussians: tuple[float, int]) -> tuple[tuple[float, ...], ...] | None:
    """Weights at distance 0 … radius of Gaussians (sigma, radius) along one axis or two; None if they are not computed
    so."""
    if len(gaussians) not in (1, 2) or max(radius for _, radius in gaussians) > MOST_RADIUS:
        return None
    found = tuple(rounded_half(*each, ONE) for each in gaussians)
    weights = [byte_weights(half) for half in found]
    if max(int(each.upper.max()) for each in weights) > 255:
        return None
    wrong = 0.5
    for half, which in zip(found, gaussians, strict=True):
        wrong += 255 / 2 * over_all_taps(np.abs(np.array(half) - gaussian_half(*which)))
    if len(found) == 2:
        # v, what the sums leave out, and the rounding of its mean.
        wrong += 2.0**-9 + over_all_taps(np.abs(weights[1].lower)) * 127.5 * 2.0**-24 + 2.0**-17
    return found if wrong <= MOST_WRONG else None


@lru_cache(maxsize=64)
def byte_weights(half: tuple[float, ...]) -> ByteWeights:
    whole = np.asarray(np.rint(np.array(half) * ONE), np.int64)
    upper = (whole + 128) >> 8
    lower = whole - 256 * upper
    return ByteWeights(upper=upper, lower=lower, bias=(1 << 15) + round(128 + over_all_taps(lower) * 127.5 / 256))
