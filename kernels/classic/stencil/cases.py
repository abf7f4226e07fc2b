"""Test inputs for stencil steps and their expected results, for the tests and benchmarks of every device.

The oracle takes the steps in float64, on whole arrays shifted against one another, and along with them the sums of the
terms' magnitudes, which bound the errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.stencil import stencil

Array = NDArray[Any]

CONTENTS = ("random", "integers", "constant", "impulse", "scaled")
UNIT = 2.0**-24  # half a last bit of float32, relative
ROUNDINGS = 6  # that a step can add to a point, one of them for the factors
SMALLEST = 2.0**-126  # below it float32 has fewer bits


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps on one made field."""

    shape: tuple[int, int, int]
    steps: int = 1
    content: str = "random"
    centre: float = 0.4
    neighbour: float = 0.1

    @property
    def name(self) -> str:
        return f"{'x'.join(map(str, self.shape))}-{self.steps}-{self.content}-{self.centre:g}-{self.neighbour:g}"

    def field(self) -> Array:
        """The input [z, y, x]; the same for every call."""
        rng = np.random.default_rng(sum(self.shape) + self.steps)
        if self.content == "integers":
            return rng.integers(-9, 10, self.shape).astype(np.float32)
        if self.content == "constant":
            return np.full(self.shape, 1 / 3, np.float32)
        if self.content == "impulse":
            field = np.zeros(self.shape, np.float32)
            field[tuple(n // 2 for n in self.shape)] = 1
            return field
        wide = rng.standard_normal(self.shape)
        if self.content == "scaled":
            wide *= 10.0 ** rng.integers(-30, 31, self.shape)
        return wide.astype(np.float32)

    def apply(self, field: Any, **options: Any) -> Any:
        """The public function on `field`, an array of any supported library."""
        return stencil(field, centre=self.centre, neighbour=self.neighbour, steps=self.steps, **options)

    def check(self, result: Array) -> None:
        """AssertionError unless every point, copied to the host, is right: integers to the last bit."""
        check(result, self, exact(self))

    def bytes(self) -> int:
        """Minimum traffic: each point read once and written once."""
        return 8 * int(np.prod(self.shape))

    def flops(self) -> int:
        """Operations of the definition: six additions and two products a point and step."""
        return 8 * int(np.prod(self.shape)) * self.steps


def exact(case: Case) -> tuple[Array, Array]:
    """The field after the steps and the sums of its terms' magnitudes, both float64."""
    values = case.field().astype(np.float64)
    sizes = np.abs(values)
    centre, neighbour = float(np.float32(case.centre)), float(np.float32(case.neighbour))
    for _ in range(case.steps):
        values = _stepped(values, centre, neighbour)
        sizes = _stepped(sizes, abs(centre), abs(neighbour))
    return values, sizes


def _stepped(field: Array, centre: float, neighbour: float) -> Array:
    around = sum(np.roll(field, shift, axis) for axis in range(3) for shift in (-1, 1))
    inside = np.zeros(field.shape, bool)
    inside[1:-1, 1:-1, 1:-1] = True
    return np.where(inside, centre * field + neighbour * around, field)


def check(result: Array, case: Case, expected: tuple[Array, Array]) -> None:
    """AssertionError unless `result` is what the oracle expects."""
    values, sizes = expected
    assert result.shape == values.shape, f"{case.name}: shape {result.shape}, expected {values.shape}"
    assert result.dtype == np.float32, f"{case.name}: dtype {result.dtype}"
    if not result.size:
        return
    whole = case.content == "integers"
    bound = np.zeros_like(sizes) if whole else case.steps * (ROUNDINGS * UNIT * sizes + SMALLEST)
    over = np.abs(result - values) - bound
    over[np.isnan(over)] = np.inf
    worst = tuple(map(int, np.unravel_index(int(np.argmax(over)), over.shape)))
    assert over[worst] <= 0, f"{case.name}: at {worst} got {result[worst]}, expected {values[worst]} ± {bound[worst]}"


def cases() -> Iterator[Case]:
    """Zero, one and two a side, primes, sizes around a tile's and a warp's; every content; up to eleven steps."""
    for shape in ((0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (2, 2, 2), (1, 5, 7), (5, 1, 7), (5, 7, 1), (3, 3, 3)):
        yield Case(shape=shape)
        yield Case(shape=shape, steps=5)
    for content in CONTENTS:
        for steps in (0, 1, 2, 3, 4, 7):
            whole = content == "integers" and steps < 6
            factors = {"centre": 3.0, "neighbour": -2.0} if whole else {}
            if content != "integers" or whole:
                yield Case(shape=(13, 17, 19), steps=steps, content=content, **factors)
    for shape in ((11, 31, 127), (9, 33, 129), (7, 32, 128), (12, 29, 120), (10, 57, 241), (67, 9, 36)):
        for steps in (1, 4, 6):
            yield Case(shape=shape, steps=steps)
    yield Case(shape=(37, 41, 43), steps=11, centre=-0.3, neighbour=0.21)
    yield Case(shape=(64, 64, 64), steps=8, centre=0.0, neighbour=1 / 6)
