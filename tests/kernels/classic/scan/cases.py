"""Test inputs for prefix sums and their expected results, for the tests and benchmarks of every device.

The oracle adds one value after another in extended precision (integers: exactly, modulo a power of two).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels.classic.scan
from kernels.classic.scan import DTYPES

Array = NDArray[Any]

# One value, rows, tiles of 2048 and 4096 and one more, primes.
SIZES = (0, 1, 2, 31, 257, 1024, 1031, 2048, 4096, 4099, 65537, 131101)
CONTENTS = ("random", "ones", "extreme", "one sign", "nan")
KINDS = ("inclusive", "exclusive", "segmented", "segmented exclusive")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One array of generated values."""

    kind: str
    dtype: str
    size: int
    content: str = "random"
    heads_every: int = 100  # average values per segment

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.dtype}-{self.size}-{self.content}-{self.heads_every}".replace(" ", "-")

    @property
    def segmented(self) -> bool:
        return self.kind.startswith("segmented")

    @property
    def exclusive(self) -> bool:
        return self.kind.endswith("exclusive")

    def values(self) -> Array:
        """The input [size]; the same for every call."""
        dtype, rng = np.dtype(self.dtype), np.random.default_rng(self.size)
        if self.content == "ones":
            return np.ones(self.size, dtype)
        if dtype.kind != "f":
            return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, self.size, dtype, endpoint=True)
        values = rng.normal(size=self.size)
        if self.content == "extreme":
            values *= 10.0 ** rng.integers(-15, 15, self.size)
        elif self.content == "one sign":
            values = np.abs(values)
        elif self.content == "nan":
            values[self.size // 2 :: 5003] = np.nan
        return values.astype(dtype)

    def heads(self) -> Array:
        """Heads [size], uint8: nonzero where segments begin, not only 1."""
        rng = np.random.default_rng(self.size + 1)
        return np.where(rng.random(self.size) < 1 / self.heads_every, rng.integers(1, 256, self.size), 0).astype(
            np.uint8
        )

    def apply(self, values: Any, heads: Any = None, **options: Any) -> Any:
        """The public function on arrays of any supported library; `heads` only for segmented cases."""
        if self.segmented:
            return kernels.classic.scan.segmented(values, heads, exclusive=self.exclusive, **options)
        return getattr(kernels.classic.scan, self.kind)(values, **options)

    def exact(self) -> tuple[Array, Array]:
        """(sums, sums of magnitudes) of each result: integers exactly, floats in extended precision."""
        values = self.values()
        heads = self.heads() if self.segmented else np.zeros(self.size, np.uint8)
        return exact(values, heads, self.exclusive)

    def check(self, result: Any, *, single: bool = False) -> None:
        """AssertionError unless a result, copied to the host, is right; `single`: sums were float32."""
        values = self.values()
        assert (result.shape, result.dtype) == (values.shape, values.dtype), f"{self.name}: {result.dtype}"
        check(result, *self.exact(), self.name, single=single)

    def bytes(self) -> int:
        """Minimum traffic: values (and heads) read once, sums written once."""
        return self.size * (2 * np.dtype(self.dtype).itemsize + self.segmented)

    def flops(self) -> int:
        return self.size


def exact(values: Array, heads: Array, exclusive: bool) -> tuple[Array, Array]:
    """Adds one value after another, segment by segment."""
    wide = values.astype(np.longdouble) if values.dtype.kind == "f" else values
    sums, sizes = np.zeros_like(wide), np.zeros(values.size, np.longdouble)
    starts = np.unique(np.concatenate([[0], np.flatnonzero(heads), [values.size]])).astype(np.int64)
    magnitudes = np.abs(values.astype(np.longdouble))
    with np.errstate(all="ignore"):
        for first, end in itertools.pairwise(starts):
            for terms, totals in ((wide, sums), (magnitudes, sizes)):
                running = np.cumsum(terms[first:end], dtype=totals.dtype)
                if exclusive:
                    totals[first + 1 : end] = running[:-1]
                else:
                    totals[first:end] = running
    return sums, sizes


def check(result: Array, sums: Array, sizes: Array, name: str = "", *, single: bool = False) -> None:
    """AssertionError unless every sum is right: integers exactly, floats within the contract's bound."""
    if result.dtype.kind != "f":
        np.testing.assert_array_equal(result, sums, err_msg=name)
        return
    np.testing.assert_array_equal(np.isnan(result), np.isnan(sums), err_msg=f"{name}: NaNs")
    last = 2.0**-24 if result.dtype == np.float32 else 0
    allowed = last * np.abs(sums) + (2.0**-17 if single else 2.0**-45) * sizes
    wrong = ~np.isnan(sums) & (np.abs(result - sums) > allowed)
    place = int(np.argmax(wrong)) if wrong.size else 0
    assert not wrong.any(), f"{name}: at {place} got {result[place]}, expected {sums[place]} ± {allowed[place]}"


def cases() -> Iterator[Case]:
    """Every kind with every dtype and size; every content; segments of one value up to the whole array; small."""
    for kind in KINDS:
        for dtype in DTYPES:
            for size in SIZES:
                yield Case(kind=kind, dtype=dtype, size=size)
            contents = CONTENTS[1:] if np.dtype(dtype).kind == "f" else CONTENTS[1:2]
            for content in contents:
                yield Case(kind=kind, dtype=dtype, size=70001, content=content)
            if kind.startswith("segmented"):
                for every, size in ((1, 4211), (3, 9001), (5000, 70001), (10**9, 70001)):
                    yield Case(kind=kind, dtype=dtype, size=size, heads_every=every)
