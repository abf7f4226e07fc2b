"""Test inputs for matrix products and their expected results, for the tests and benchmarks of every device.

The oracle sums outer products in float64; for integers every bit must be right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.gemm import gemm, gram
from tests.kernels.classic.checks import SMALLEST, UNIT, check_within

Array = NDArray[Any]

CONTENTS = ("random", "integers", "constant", "scaled", "cancelling")

# By the precision of a kernel: the relative error of each product, and the error of its sums relative to float32
PRECISIONS = {"float32": (0.0, 1.0), "3xtf32": (2.0**-21, 2.0), "tf32": (2.0**-10 + 2.0**-22, 2.0)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One product of generated matrices; n is None for A Aᵀ."""

    m: int
    k: int
    n: int | None
    content: str = "random"

    @property
    def name(self) -> str:
        return f"{self.operation}-{self.m}x{self.k}x{self.m if self.n is None else self.n}-{self.content}"

    @property
    def operation(self) -> str:
        return "gram" if self.n is None else "gemm"

    def matrices(self) -> tuple[Array, ...]:
        """The inputs, A and B or A alone; the same for every call."""
        rng = np.random.default_rng(self.m + 3 * self.k + 7 * (self.n or 0))
        a = made(self.content, (self.m, self.k), rng)
        return (a,) if self.n is None else (a, np.ascontiguousarray(made(self.content, (self.n, self.k), rng).T))

    def apply(self, *matrices: Any, **options: Any) -> Any:
        """The public function on `matrices`, arrays of any supported library."""
        return gram(*matrices, **options) if self.n is None else gemm(*matrices, **options)

    def check(self, result: Array, *, precision: str = "float32") -> None:
        """AssertionError unless every element, copied to the host, is within the bound of that precision."""
        a, *rest = self.matrices()
        b = rest[0] if rest else a.T
        check(result, a, b, self.name, precision=precision, exact=self.content == "integers")

    def bytes(self) -> int:
        """Minimum traffic: each matrix read once and the result written once."""
        n = 0 if self.n is None else self.n
        return 4 * (self.m * self.k + self.k * n + self.m * (n or self.m))

    def flops(self) -> int:
        """Operations of the definition: a multiplication and an addition for each term."""
        return 2 * self.m * self.k * (self.m if self.n is None else self.n)


def made(content: str, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """A float32 matrix; its rows are multiplied with those of another."""
    if content == "integers":  # at most 11 bits (TF32), sums below 2²⁴: nothing is rounded
        return rng.integers(-99, 100, shape).astype(np.float32)
    if content == "constant":
        return np.full(shape, 1 / 3, np.float32)
    matrix = rng.standard_normal(shape)
    if content == "scaled":
        matrix *= 10.0 ** rng.integers(-15, 16, (shape[0], 1))
    elif content == "cancelling":
        matrix[:, 1::2] = -matrix[:, : shape[1] - 1 : 2]
    return matrix.astype(np.float32)


def exact(a: Array, b: Array) -> tuple[Array, Array]:
    """A B and the sums of its terms' magnitudes, both float64 [m, n]."""
    shape = (a.shape[0], b.shape[1])
    values, sizes = np.zeros(shape), np.zeros(shape)
    for column, row in zip(a.T.astype(np.float64), b.astype(np.float64), strict=True):
        term = np.outer(column, row)
        values += term
        sizes += np.abs(term)
    return values, sizes


def error_bound(sizes: Array, k: int, precision: str) -> Array:
    """The largest allowed error of an element: a random walk of roundings, eight standard deviations wide, or k
    roundings in one direction if that is less."""
    product, worse = PRECISIONS[precision]
    walk = min(k + 2, 8 * math.sqrt(k) + 4)
    return np.asarray((product + worse * walk * UNIT) * sizes + k * SMALLEST)


def check(
    result: Array, a: Array, b: Array, name: str = "", *, precision: str = "float32", exact: bool = False
) -> None:
    """AssertionError unless `result` is A B: within the precision's bound, or, if exact, to the last bit."""
    values, sizes = _exact(a, b)
    bound = np.zeros_like(sizes) if exact else error_bound(sizes, a.shape[1], precision)
    check_within(name, result, values, bound)


_exact = exact  # a parameter of `check` has the same name


def cases() -> Iterator[Case]:
    """Zero, one, primes, powers of two and their neighbours; sizes that are no multiple of a tile; every content."""
    for m, k, n in ((0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0), (1, 1, 1), (1, 37, 1), (1, 5, 131), (131, 5, 1)):
        yield Case(m=m, k=k, n=n)
    for m, k, n in ((16, 16, 16), (31, 33, 37), (64, 64, 64), (127, 129, 131), (128, 128, 128), (129, 8, 260)):
        yield Case(m=m, k=k, n=n)
        yield Case(m=m, k=k, n=n, content="integers")
    for content in CONTENTS:
        yield Case(m=61, k=103, n=157, content=content)
        yield Case(m=132, k=100, n=68, content=content)
        yield Case(m=67, k=41, n=None, content=content)
    for m, k in ((0, 3), (3, 0), (1, 1), (32, 32), (33, 31), (128, 64), (101, 211)):
        yield Case(m=m, k=k, n=None)
    yield Case(m=257, k=521, n=263)
