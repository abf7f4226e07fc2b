"""Test values and error checks that the cases of several operations share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CONTENTS = ("random", "integers", "constant", "impulse", "scaled")
UNIT = 2.0**-24  # half a unit in the last place of float32, relative
SMALLEST = 2.0**-126  # the smallest normal float32


def made_values(content: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """A float32 array with one of CONTENTS."""
    if content == "integers":
        return rng.integers(-9, 10, shape).astype(np.float32)
    if content == "constant":
        return np.full(shape, 1 / 3, np.float32)
    if content == "impulse":
        values = np.zeros(shape, np.float32)
        values[tuple(n // 2 for n in shape)] = 1
        return values
    wide = rng.standard_normal(shape)
    if content == "scaled":
        wide *= 10.0 ** rng.integers(-30, 31, shape)
    return wide.astype(np.float32)


def check_within(name: str, result: Array, values: Array, bound: Array, dtype: Any = np.float32) -> None:
    """AssertionError unless `result` has the shape of `values`, the dtype, and errors of at most `bound`; NaN fails."""
    assert result.shape == values.shape, f"{name}: shape {result.shape}, expected {values.shape}"
    assert result.dtype == dtype, f"{name}: dtype {result.dtype}"
    if not result.size:
        return
    over = np.abs(result - values) - bound
    over[np.isnan(over)] = np.inf
    worst = tuple(map(int, np.unravel_index(int(np.argmax(over)), over.shape)))
    assert over[worst] <= 0, f"{name}: at {worst} got {result[worst]}, expected {values[worst]} ± {bound[worst]}"
