"""Test inputs for tessellation and their expected results.

The oracle of the counts is exact: the smallest integer n with 16 n⁴ tolerance² ≥ |a − 2b + c|², in rational arithmetic.
The oracle of the points is de Casteljau's construction in float64, not the polynomial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.tessellation import Polylines, tessellate

Array = NDArray[Any]

CONTENTS = ("random", "straight", "points", "wide", "tiny", "skewed", "exact")
POINT_ERROR = 8 * 2.0**-24  # relative to the largest coordinate: eight roundings per point
KNIFE_EDGE = 1e-12  # relative; closer to an integer number of segments, float64 may round either way


@dataclass(frozen=True, kw_only=True)
class Case:
    """Curves, a tolerance and a limit."""

    count: int
    content: str = "random"
    tolerance: float = 0.01
    max_segments: int = 256

    @property
    def name(self) -> str:
        return f"{self.content}-{self.count}-{self.tolerance:g}-{self.max_segments}"

    def curves(self) -> Array:
        """The input [n, 3, 2]; the same for every call."""
        return made_curves(self.content, self.count)

    def apply(self, curves: Any, **options: Any) -> Polylines:
        """The public function on an array of any supported library."""
        return tessellate(curves, self.tolerance, max_segments=self.max_segments, **options)

    def check(self, offsets: Array, points: Array) -> None:
        """AssertionError unless counts and points, on the host, are right."""
        curves = self.curves()
        assert offsets.dtype == np.int64
        assert offsets.shape == (self.count + 1,)
        assert offsets[0] == 0
        counts = np.diff(offsets) - 1
        for curve, count in zip(curves, counts, strict=True):
            assert_segments(curve, int(count), self.tolerance, self.max_segments)
        assert points.dtype == np.float32
        assert points.shape == (offsets[-1], 2)
        owner = np.repeat(np.arange(self.count), counts + 1)
        step = np.arange(len(points)) - offsets[owner]
        a, b, c = (curves[owner, k].astype(np.float64) for k in range(3))
        t = (step / counts[owner])[:, None]
        first, second = a + t * (b - a), b + t * (c - b)
        largest = np.abs(curves[owner]).astype(np.float64).max((1, 2))[:, None]
        assert (np.abs(points - (first + t * (second - first))) <= POINT_ERROR * largest + 1e-44).all(), self.name
        np.testing.assert_array_equal(points[offsets[:-1]], curves[:, 0] + np.float32(0))
        np.testing.assert_array_equal(points[offsets[1:] - 1], curves[:, 2] + np.float32(0))

    def bytes(self) -> int:
        """Minimum traffic: curves read to count and to fill, offsets written, read and written, points written."""
        result = self.apply(self.curves())
        return int(self.count * (2 * 24 + 8 * 4) + result.points.nbytes)

    def flops(self) -> int:
        """Operations of the definition: 14 per point."""
        return 14 * len(self.apply(self.curves()).points)


def assert_segments(curve: Array, count: int, tolerance: float, most: int) -> None:
    a, b, c = ([Fraction(float(value)) for value in point] for point in curve)
    bend = sum((x - 2 * y + z) ** 2 for x, y, z in zip(a, b, c, strict=True))
    unit = 16 * Fraction(tolerance) ** 2

    def enough(segments: int, slack: float) -> bool:
        return segments**4 * unit * Fraction(1 + slack) >= bend

    assert 1 <= count <= most
    assert count == most or enough(count, KNIFE_EDGE), "too few segments"
    assert count == 1 or not enough(count - 1, -KNIFE_EDGE), "too many segments"


def made_curves(content: str, count: int) -> Array:
    rng = np.random.default_rng([count, CONTENTS.index(content)])
    curves = rng.uniform(-10, 10, (count, 3, 2))
    if content == "straight":
        curves[:, 1] = (curves[:, 0] + curves[:, 2]) / 2
    elif content == "points":
        curves[:] = curves[:, :1]
    elif content == "wide":
        curves *= 10.0 ** rng.integers(0, 30, (count, 1, 1))
    elif content == "tiny":
        curves *= 1e-38
    elif content == "skewed":  # a few curves make almost all the points
        curves *= np.where(rng.random((count, 1, 1)) < 0.02, 1000, 0.001)
    elif content == "exact":  # bends that need exactly an integer number of segments
        curves[:] = 0
        curves[:, 1, 0] = 2 * 0.01 * rng.integers(1, 100, count) ** 2
    return curves.astype(np.float32)


def cases() -> Iterator[Case]:
    """Every content; no curve, one, a warp, a block, primes; limits of one segment to very many."""
    for content in CONTENTS:
        yield Case(count=509, content=content)
    for count in (0, 1, 2, 31, 32, 33, 256, 257, 1021):
        yield Case(count=count, content="skewed", tolerance=0.05)
    for tolerance, most in ((1e-3, 1), (1e-3, 2), (1e-30, 1000), (1e30, 256), (1e-7, 1 << 16), (0.125, 7)):
        yield Case(count=41, tolerance=tolerance, max_segments=most)
    yield Case(count=3000, content="random", tolerance=1.0)
