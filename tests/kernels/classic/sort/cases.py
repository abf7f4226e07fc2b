"""Test inputs for sorting and merging and their expected results.

The oracle orders by value with np.lexsort: NaN or not, value, sign (for zeros), bits (for NaNs). It shares no code with
the sorts under test, and does not map keys to unsigned integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.sort import DTYPES, merge, sort

Array = NDArray[Any]

CONTENTS = ("random", "few", "equal", "sorted", "reversed", "extremes", "organ pipe")
# One tile, a tile and a key, runs that pair evenly and unevenly, primes, powers of two.
COUNTS = (0, 1, 2, 3, 31, 2048, 2049, 3839, 3840, 3841, 4096, 5119, 5121, 7681, 10007, 16384, 40961)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One array to sort, or one pair of sorted arrays to merge."""

    count: int
    content: str = "random"
    dtype: str = "uint32"
    values: str | None = None  # their dtype; None: keys alone
    second_count: int | None = None  # None: sorting

    @property
    def name(self) -> str:
        parts = ["sort" if self.second_count is None else f"merge{self.second_count}", str(self.count)]
        return "-".join([*parts, self.content.replace(" ", "-"), self.dtype, *([self.values] if self.values else [])])

    def inputs(self) -> tuple[Array, Array | None]:
        """Keys and values, or the two arrays to merge; the same for every call."""
        keys = made_keys(self.content, self.count, self.dtype)
        if self.second_count is not None:
            second = made_keys(self.content, self.second_count, self.dtype, seed=1)
            return keys[order_of(keys)], second[order_of(second)]
        if self.values is None:
            return keys, None
        return keys, np.arange(self.count)[::-1].astype(self.values)  # all different, so that wrong moves show

    def apply(self, keys: Any, other: Any = None, **options: Any) -> Any:
        """The public function on arrays of any supported library."""
        return sort(keys, other, **options) if self.second_count is None else merge(keys, other, **options)

    def exact(self) -> tuple[Array, Array | None]:
        keys, other = self.inputs()
        if self.second_count is not None:
            assert other is not None
            keys, other = np.concatenate((keys, other)), None
        order = order_of(keys)
        return keys[order], None if other is None else other[order]

    def check(self, result: Any, expected: tuple[Array, Array | None] | None = None) -> None:
        """AssertionError unless the result, copied to the host, is right to the bit."""
        keys, values = result if isinstance(result, tuple) else (result, None)
        right, right_values = expected or self.exact()
        assert keys.dtype == right.dtype
        unsigned = f"u{keys.dtype.itemsize}"
        np.testing.assert_array_equal(keys.view(unsigned), right.view(unsigned), self.name, strict=True)
        assert (values is None) == (right_values is None)
        if values is not None:
            np.testing.assert_array_equal(values, right_values, self.name, strict=True)

    def bytes(self) -> int:
        """Minimum traffic: everything read once and written once."""
        size = self.count + (self.second_count or 0)
        return 2 * size * (np.dtype(self.dtype).itemsize + (np.dtype(self.values).itemsize if self.values else 0))

    def flops(self) -> int:
        return 0


def made_keys(content: str, count: int, dtype: str, *, seed: int = 0) -> Array:
    """Keys [count]; floating ones of "random" and "extremes" have zeros of both signs, infinities and NaNs."""
    rng = np.random.default_rng([count, seed, DTYPES.index(dtype)])
    kind, size = np.dtype(dtype).kind, np.dtype(dtype).itemsize
    if content == "random":
        return rng.integers(0, 1 << (8 * size), count, dtype=f"u{size}").view(dtype)
    if content == "extremes":
        return rng.choice(_extremes(dtype), count)
    steps = np.arange(count)
    ramps = {
        "few": rng.integers(0, 3, count),
        "equal": np.full(count, 7),
        "sorted": steps // 2,
        "reversed": steps[::-1],
        "organ pipe": np.minimum(steps, steps[::-1]),
    }
    return (ramps[content] - (count // 3 if kind != "u" else 0)).astype(dtype)


def _extremes(dtype: str) -> Array:
    if np.dtype(dtype).kind != "f":
        info = np.iinfo(dtype)
        return np.array([info.min, info.min + 1, 0, 1, info.max - 1, info.max], dtype)
    limits, nan = np.finfo(dtype), np.array([np.nan], dtype)
    bits = nan.view(f"u{nan.itemsize}")
    nans = np.concatenate((nan, -nan, (bits + 1).view(dtype), -(bits + 1).view(dtype)))
    plain = [-np.inf, limits.min, -1, -limits.tiny, -0.0, 0.0, limits.smallest_subnormal, 1, limits.max, np.inf]
    return np.concatenate((np.array(plain, dtype), nans))


def order_of(keys: Array) -> Array:
    """The stable order of keys, by their values."""
    if keys.dtype.kind != "f":
        return np.lexsort((keys,))
    nan, negative = np.isnan(keys), np.signbit(keys)
    bits = keys.view(f"i{keys.dtype.itemsize}") & np.iinfo(f"i{keys.dtype.itemsize}").max
    among_nans = np.where(nan, np.where(negative, -bits, bits), 0)
    sign = np.where(nan, negative, ~negative)
    return np.lexsort((among_nans, sign, np.where(nan, 0, keys), nan))


def cases() -> Iterator[Case]:
    """Every dtype, content and count, with and without values; merges of very different sizes."""
    for count, dtype in itertools.product(COUNTS, ("uint32", "float64")):
        yield Case(count=count, dtype=dtype)
        yield Case(count=count, dtype=dtype, values="uint32", content="few")
    for dtype, content in itertools.product(DTYPES, CONTENTS):
        yield Case(count=9001, dtype=dtype, content=content)
    # Values of 4 bytes move with their keys; for others the indices do.
    for dtype, values, content in itertools.product(DTYPES, ("float32", "int64", "uint8"), ("few", "extremes")):
        yield Case(count=12289, dtype=dtype, values=values, content=content)
    for count, second in ((0, 0), (0, 5), (7, 0), (1, 1), (1, 10007), (10007, 1), (8192, 8192), (5000, 13001)):
        yield Case(count=count, second_count=second)
        yield Case(count=count, second_count=second, dtype="float64", content="extremes")
    for dtype, content in itertools.product(("int32", "uint64", "float32"), CONTENTS):
        yield Case(count=4001, second_count=7919, dtype=dtype, content=content)


def check_order(keys: Array, indices: Array, ordered: Array) -> None:
    """Checks the definition of a stable sort, for arrays too large for `exact`."""
    assert np.array_equal(np.bincount(indices, minlength=len(keys)), np.ones(len(keys), np.int64)), "no permutation"
    unsigned = f"u{keys.dtype.itemsize}"
    np.testing.assert_array_equal(keys[indices].view(unsigned), ordered.view(unsigned))
    assert (ordered[1:] >= ordered[:-1]).all(), "not in order"
    assert (indices[1:] > indices[:-1])[ordered[1:] == ordered[:-1]].all(), "not stable"
