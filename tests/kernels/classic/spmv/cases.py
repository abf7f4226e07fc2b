"""Test inputs for sparse products and their expected results, for the tests and benchmarks of every device.

The oracle adds the nonzeros one by one in extended precision, from unsorted coordinates. The sums of the terms'
magnitudes bound the errors. Integers must be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.spmv.formats import Coo, Matrix, to_coo, to_csr, to_ell, to_hybrid, to_jds
from tests.kernels.classic.checks import check_within

Array = NDArray[Any]

CONTENTS = ("random", "banded", "power", "gaps", "dense row", "dense column", "twice", "integers", "scaled")
FORMATS: Mapping[str, Callable[[Matrix], Matrix]] = {
    "csr": to_csr,
    "coo": to_coo,
    "ell": to_ell,
    "hybrid": to_hybrid,
    "jds": to_jds,
    "jds transposed": lambda matrix: to_jds(matrix, transposed=True),
}
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float32": 2.0**-126, "float64": 2.0**-1022}  # the smallest normal numbers


@dataclass(frozen=True, kw_only=True)
class Case:
    """One product of a generated matrix with unsorted coordinates."""

    rows: int
    columns: int
    nonzeros: int
    content: str = "random"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns}-{self.nonzeros}-{self.content}-{self.dtype}".replace(" ", "-")

    def matrix(self) -> Coo:
        """The matrix as coordinates; the same for every call."""
        rng = np.random.default_rng(self.rows + 3 * self.columns + 7 * self.nonzeros)
        rows, columns = _coordinates(self, rng)
        values = rng.standard_normal(len(rows))
        if self.content == "integers":
            values = rng.integers(-9, 10, len(rows)).astype(np.float64)
        elif self.content == "scaled":
            values *= 10.0 ** rng.integers(-15, 16, len(rows))
        order = rng.permutation(len(rows))
        rows, columns = (indices[order].astype(np.int32) for indices in (rows, columns))
        return Coo(
            values=values.astype(self.dtype), rows=rows, columns=columns, shape=(self.rows, self.columns), by_rows=False
        )

    def x(self) -> Array:
        """The vector; the same for every call."""
        rng = np.random.default_rng(self.columns)
        if self.content == "integers":
            return rng.integers(-9, 10, self.columns).astype(self.dtype)
        return rng.standard_normal(self.columns).astype(self.dtype)

    def check(self, result: Array, name: str = "") -> None:
        """AssertionError unless every result, copied to the host, is right."""
        check(result, self, name)

    def bytes(self) -> int:
        """Minimum traffic of CSR: values, columns, row starts of 32 bits, both vectors."""
        size = np.dtype(self.dtype).itemsize
        return self.nonzeros * (size + 4) + (self.rows + 1) * 4 + (self.rows + self.columns) * size

    def flops(self) -> int:
        """Operations of the definition: a product and an addition for each nonzero."""
        return 2 * self.nonzeros


def _coordinates(case: Case, rng: np.random.Generator) -> tuple[Array, Array]:
    rows, columns = (rng.integers(0, max(side, 1), case.nonzeros) for side in (case.rows, case.columns))
    if case.content == "banded":
        columns = np.clip(rows + rng.integers(-3, 4, case.nonzeros), 0, case.columns - 1)
    elif case.content == "power":
        rows = (case.rows * rng.random(case.nonzeros) ** 3).astype(np.int64)
    elif case.content == "gaps":  # long stretches of empty rows, also at both ends
        rows = case.rows // 3 + rows % max(case.rows // 50, 1) * 17 % max(case.rows // 3, 1)
    elif case.content == "dense row":
        rows[: 3 * case.nonzeros // 4] = case.rows // 2
    elif case.content == "dense column":
        columns[: 3 * case.nonzeros // 4] = case.columns // 2
    elif case.content == "twice":
        half = case.nonzeros // 2
        rows[half : 2 * half], columns[half : 2 * half] = rows[:half], columns[:half]
    return rows, columns


def exact(matrix: Coo, x: Array) -> tuple[Array, Array, Array]:
    """The products, the sums of their terms' magnitudes, and their numbers of terms."""
    products = matrix.values.astype(np.longdouble) * x.astype(np.longdouble)[matrix.columns]
    values, sizes = (np.zeros(matrix.shape[0], np.longdouble) for _ in range(2))
    np.add.at(values, matrix.rows, products)
    np.add.at(sizes, matrix.rows, np.abs(products))
    return values, sizes, np.bincount(matrix.rows, minlength=matrix.shape[0])


def check(result: Array, case: Case, name: str = "") -> None:
    """AssertionError unless every result is within the error bound; integers must be exact."""
    values, sizes, terms = exact(case.matrix(), case.x())
    whole = case.content == "integers"
    bound = np.zeros_like(sizes) if whole else (terms + 2) * UNIT[case.dtype] * sizes + terms * SMALLEST[case.dtype]
    check_within(f"{case.name} {name}", result, values, bound, case.dtype)


def in_format(matrix: Matrix, name: str) -> Matrix:
    """The matrix in one of FORMATS."""
    return FORMATS[name](matrix)


def cases() -> Iterator[Case]:
    """Zero, one and primes; rows from empty to full; sizes around a block's part; every content and dtype."""
    for rows, columns, nonzeros in ((0, 0, 0), (0, 5, 0), (5, 0, 0), (7, 3, 0), (1, 1, 1), (1, 1, 9), (1, 997, 5003)):
        yield Case(rows=rows, columns=columns, nonzeros=nonzeros)
    for rows, columns, nonzeros in ((997, 1, 313), (2, 3, 4096), (256, 256, 1792), (257, 509, 2048), (5000, 40, 131)):
        yield Case(rows=rows, columns=columns, nonzeros=nonzeros)
    for content in CONTENTS:
        for dtype in ("float32", "float64"):
            yield Case(rows=1009, columns=1013, nonzeros=12_007, content=content, dtype=dtype)
    yield Case(rows=3, columns=4001, nonzeros=30_011, content="dense row")
    yield Case(rows=20_011, columns=101, nonzeros=3001, content="gaps")
    yield Case(rows=4099, columns=8209, nonzeros=30_011, content="power")
