"""Exponentials and cosines with the same bits on every machine, for tables of weights.

NumPy and the C library use other instructions on other CPUs, and their results differ in the last bit. These functions
only add, multiply, divide and round to integers, and IEEE 754 defines the result of each to the last bit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOG_2_HIGH, LOG_2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")  # their sum is log 2
LEAST_EXPONENT = -800.0  # exp(-800) is 0 in float64


def exponential(exponents: ArrayLike) -> NDArray[np.float64]:
    """exp(x) for x <= 0, to 2 units in the last place."""
    x = np.maximum(np.asarray(exponents, np.float64), LEAST_EXPONENT)
    twos = np.rint(x / (LOG_2_HIGH + LOG_2_LOW))
    rest = (x - twos * LOG_2_HIGH) - twos * LOG_2_LOW
    series = np.ones_like(rest)
    for n in range(14, 0, -1):
        series = 1 + series * rest / n
    return np.asarray(np.ldexp(series, twos.astype(np.int32)))


def cosine(turns: ArrayLike) -> NDArray[np.float64]:
    """cos(2 pi x), to 2**-51."""
    x = np.asarray(turns, np.float64)
    apart = np.abs(x - np.rint(x))
    angle = 2 * math.pi * np.minimum(apart, 0.5 - apart)
    series = np.ones_like(angle)
    for n in range(22, 0, -2):
        series = 1 - series * (angle * angle) / (n * (n - 1))
    return np.where(apart > 0.25, -series, series)
