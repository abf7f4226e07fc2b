"""Test inputs for reductions and their expected results, for the tests and benchmarks of every device.

The oracle is exact: Python's integers, and fractions of the floats' own values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels.classic.reduce
from kernels.classic.reduce import DTYPES, OPERATIONS

Array = NDArray[Any]

# One value, a row of a tile, a tile and one more of several types, primes.
SIZES = (1, 2, 31, 257, 1024, 1031, 4096, 16384, 16411, 65537, 131101)
CONTENTS = ("random", "equal", "extreme", "offset", "nan", "infinite")
FLOAT64_ROUNDINGS = 64  # allowed error of a sum, in units of 2⁻⁵³ Σ|terms|: the tree has fewer levels


@dataclass(frozen=True, kw_only=True)
class Case:
    """One array of generated values."""

    operation: str
    dtype: str
    size: int
    content: str = "random"

    @property
    def name(self) -> str:
        return f"{self.operation}-{self.dtype}-{self.size}-{self.content}"

    def values(self) -> Array:
        """The input [size]; the same for every call."""
        return made_values(self.content, self.dtype, self.size)

    def apply(self, values: Any, **options: Any) -> Any:
        """The public function on an array of any supported library."""
        return getattr(kernels.classic.reduce, self.operation)(values, **options)

    def check(self, result: Any) -> None:
        """AssertionError unless a result, copied to the host, is right."""
        expected_dtype = _result_dtype(self.operation, np.dtype(self.dtype))
        shape = (2,) if self.operation == "mean_variance" else ()
        assert (result.dtype, result.shape) == (expected_dtype, shape), f"{self.name}: {result.dtype}, {result.shape}"
        check(self.operation, result, self.values(), self.name)

    def bytes(self) -> int:
        """Minimum traffic: every value read once."""
        return self.size * np.dtype(self.dtype).itemsize

    def flops(self) -> int:
        return self.size * (6 if self.operation == "mean_variance" else 1)


def made_values(content: str, dtype: str, size: int) -> Array:
    """Values [size] of a dtype."""
    kind = np.dtype(dtype)
    rng = np.random.default_rng(size)
    if kind.kind != "f":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        if content == "equal":
            return np.full(size, high, kind)
        if content == "extreme":
            return rng.choice(np.array([low, high], kind), size)
        return rng.integers(low, high, size, kind, endpoint=True)
    values = rng.normal(size=size)
    if content == "equal":
        values[:] = 0.1
    elif content == "extreme":
        values *= 10.0 ** rng.integers(-30, 30, size)
    elif content == "offset":  # a naive variance would lose all digits
        values = values * 1e-3 + 4096
    elif content == "nan":
        values[rng.integers(0, size, 1 + size // 1000)] = np.nan
    elif content == "infinite":
        values[rng.integers(0, size, 1 + size // 1000)] = np.inf
    return values.astype(kind)


def check(operation: str, result: Array, values: Array, name: str = "") -> None:
    """AssertionError unless the result is exact, or, for sums of floats, within the rounding errors of a tree."""
    if operation == "argmax":
        nans = np.flatnonzero(np.isnan(values)) if values.dtype.kind == "f" else np.empty(0)
        expected = int(nans[0]) if nans.size else max(range(values.size), key=lambda i: (values[i], -i))
        assert int(result) == expected, f"{name}: got {int(result)}, expected {expected}"
    elif operation in ("minimum", "maximum"):
        pick = min if operation == "minimum" else max
        numbers = values.tolist()
        extreme = math.nan if any(map(math.isnan, numbers)) else pick(numbers)
        got = float(result) if values.dtype.kind == "f" else int(result)
        assert same(got, extreme), f"{name}: got {got}, expected {extreme}"
    elif not np.isfinite(values).all():
        _check_not_finite(operation, result, values, name)
    elif operation == "total":
        _check_total(result, values, name)
    else:
        _check_moments(result, values, name)


def same(a: Any, b: Any) -> bool:
    """Equal, or both NaN."""
    return bool(a == b or (math.isnan(a) and math.isnan(b)))


def _check_not_finite(operation: str, result: Array, values: Array, name: str) -> None:
    """IEEE rules: infinities of one sign have an infinite mean and an undefined variance."""
    expected = math.nan if np.isnan(values).any() else math.inf
    if operation == "total":
        assert same(float(result), expected), f"{name}: got {result}, expected {expected}"
    else:
        assert np.isnan(result[1]), f"{name}: got {result}"
        assert not np.isfinite(result[0]), f"{name}: got {result}"


def _check_total(result: Array, values: Array, name: str) -> None:
    if values.dtype.kind != "f":
        expected = sum(values.tolist())
        assert (int(result) - expected) % (1 << 64) == 0, f"{name}: got {result}, expected {expected} modulo 2⁶⁴"
        return
    expected, sizes = math.fsum(values.tolist()), math.fsum(np.abs(values).tolist())
    error = abs(float(result) - expected)
    assert error <= FLOAT64_ROUNDINGS * 2.0**-53 * sizes, f"{name}: got {result}, expected {expected}"


def _check_moments(result: Array, values: Array, name: str) -> None:
    exact = [Fraction(x) for x in values.tolist()] if values.size <= 1 << 11 else None
    if exact is not None:
        true_mean = sum(exact) / len(exact)
        mean, variance = float(true_mean), float(sum((x - true_mean) ** 2 for x in exact) / len(exact))
    else:
        wide = values.astype(np.longdouble)
        true = wide.mean()
        mean, variance = float(true), float(((wide - true) ** 2).mean())
    size = max(abs(float(x)) for x in (values.min(), values.max()))
    assert abs(result[0] - mean) <= 1e-14 * max(size, 1e-300), f"{name}: mean {result[0]}, expected {mean}"
    # For values of magnitude s, deviations have errors of about 2⁻⁵³ s with random signs.
    allowed = 1e-13 * variance + 4 * 2.0**-53 * size * math.sqrt(variance) + 1e-28 * size * size
    assert abs(result[1] - variance) <= allowed, f"{name}: variance {result[1]}, expected {variance}"


def _result_dtype(operation: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if operation == "argmax":
        return np.dtype(np.int64)
    if operation in ("minimum", "maximum"):
        return dtype
    if operation == "mean_variance":
        return np.dtype(np.float64)
    return np.dtype({"i": np.int64, "u": np.uint64, "f": np.float64}[dtype.kind])


def cases() -> Iterator[Case]:
    """Every operation on every dtype and size; every content; small."""
    for operation in OPERATIONS:
        for dtype in DTYPES:
            for size in SIZES if dtype in ("uint8", "float32") else SIZES[3:8:2]:
                yield Case(operation=operation, dtype=dtype, size=size)
            contents = CONTENTS[1:] if np.dtype(dtype).kind == "f" else CONTENTS[1:3]
            for content in contents:
                yield Case(operation=operation, dtype=dtype, size=1031, content=content)
                yield Case(operation=operation, dtype=dtype, size=16411, content=content)
