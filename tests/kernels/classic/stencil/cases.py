"""Test inputs for stencil steps and their expected results, for the tests and benchmarks of every device.

The oracle takes the steps in float64, on shifted whole arrays. The sums of the terms' magnitudes bound the errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.stencil import stencil
from tests.kernels.classic.checks import CONTENTS, SMALLEST, UNIT, check_within, made_values

Array = NDArray[Any]

ROUNDINGS = 6  # per point and step, one of them for the factors


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps on one generated field."""

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
        return made_values(self.content, self.shape, np.random.default_rng(sum(self.shape) + self.steps))

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
    whole = case.content == "integers"
    bound = np.zeros_like(sizes) if whole else case.steps * (ROUNDINGS * UNIT * sizes + SMALLEST)
    check_within(case.name, result, values, bound)


def cases() -> Iterator[Case]:
    """Sides of zero, one and two, primes, sizes around a tile's and a warp's; every content; up to eleven steps."""
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
