"""Test inputs of non-uniform Fourier transforms and the expected results, for the tests of every device.

The oracle is the definition in float64 (exact/cases.py): one exponential per pair of sample and pixel. It shares
neither grid, kernel, FFT nor factors with the code under test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft import Nufft
from kernels.nufft.exact.cases import adjoint, forward

Array = NDArray[Any]

CONTENTS = ("random", "radial", "spiral", "clustered", "cartesian", "edges", "beyond", "equal")
GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))
# Bounds on a single element's error, in eps times the input's norms; see the contract.
BY_ONE_NORM, BY_TWO_NORM = 6, 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """One trajectory with images and samples, for both directions."""

    shape: tuple[int, ...]
    points: int = 499
    coils: int = 2
    content: str = "random"
    eps: float = 1e-3
    dtype: str = "float32"  # of the trajectory
    weighted: bool = True

    @property
    def name(self) -> str:
        parts = ["x".join(map(str, self.shape)), self.points, self.coils, self.content, f"{self.eps:g}", self.dtype]
        return "-".join(map(str, parts + ["weighted"] * self.weighted))

    def trajectory(self) -> Array:
        """[M, d] in cycles per field of view; the same for every call."""
        return made_trajectory(self.content, self.points, self.shape).astype(self.dtype)

    def weights(self) -> Array | None:
        return np.random.default_rng(3).uniform(0, 2, self.points).astype(np.float32) if self.weighted else None

    def samples(self) -> Array:
        """[coils, M] complex64."""
        return random_values((self.coils, self.points), 1)

    def images(self) -> Array:
        """[coils, *shape] complex64."""
        return random_values((self.coils, *self.shape), 2)

    def exact_forward(self) -> Array:
        return forward(self.images(), self.trajectory())

    def exact_adjoint(self) -> Array:
        return adjoint(self.samples(), self.trajectory(), self.shape, self.weights())

    def plan(self, trajectory: Any, **options: Any) -> Nufft:
        """The public class on `trajectory`, an array of any supported library."""
        return Nufft(trajectory, self.shape, eps=self.eps, **options)

    def check_forward(self, result: Array, expected: Array | None = None) -> None:
        """AssertionError unless every sample is right."""
        expected = self.exact_forward() if expected is None else expected
        # A bound on the norm needs many different samples.
        whole = self.points > 30 and self.content not in ("equal", "edges")
        check(result, expected, self.images(), self.eps, self.name, whole=whole)

    def check_adjoint(self, result: Array, expected: Array | None = None) -> None:
        """AssertionError unless every pixel is right."""
        weights = self.weights()
        weighted = self.samples() * (1 if weights is None else weights)
        expected = self.exact_adjoint() if expected is None else expected
        check(result, expected, weighted, self.eps, self.name, whole=math.prod(self.shape) > 30)

    def bytes(self) -> int:
        """Least traffic of one direction: images and samples, one read and one written, and the trajectory."""
        moved = 8 * self.coils * (self.points + math.prod(self.shape))
        return moved + self.points * len(self.shape) * np.dtype(self.dtype).itemsize

    def flops(self) -> int:
        """Operations of the definition: a complex product and a sum for each pair of sample and pixel."""
        return 8 * self.coils * self.points * math.prod(self.shape)


def random_values(shape: tuple[int, ...], seed: int) -> Array:
    """Complex normal values, complex64."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)


def made_trajectory(content: str, points: int, shape: tuple[int, ...]) -> Array:
    """[M, d] float64 in cycles per field of view."""
    rng = np.random.default_rng(points + sum(shape))
    size = np.array(shape, np.float64)
    k: Array = rng.uniform(-0.5, 0.5, (points, len(shape)))
    if content == "radial":
        k = radial(points, len(shape), readout=max(min(64, points // 7), 1))
    elif content == "spiral":
        turn = np.sqrt(np.arange(points) / max(points, 1)) / 2
        k[:, 0], k[:, 1] = turn * np.cos(64 * math.pi * turn), turn * np.sin(64 * math.pi * turn)
    elif content == "clustered":  # all in a few cells, like the centre of a radial trajectory
        k = rng.normal(0, 1, k.shape) * 0.3 / size + 0.01
    elif content == "cartesian":  # exactly on pixels of k-space
        k = np.floor(k * size) / size
    elif content == "edges":
        k = 0.5 * rng.integers(-1, 2, k.shape)
    elif content == "beyond":
        k = k * rng.choice([1.0, 3.7, 100.25], (points, 1))
    elif content == "equal":
        k[:] = k[:1]
    return np.asarray(k * size)


def radial(points: int, axes: int, *, readout: int) -> Array:
    """The first `points` of spokes through the centre, [M, d] in cycles per pixel: golden angles in 2-D, directions
    along a spiral on the sphere in 3-D."""
    spokes = -(-points // readout)
    angle, along = np.arange(spokes) * GOLDEN_ANGLE, np.arange(readout) / readout - 0.5
    if axes == 2:
        directions = np.stack([np.cos(angle), np.sin(angle)], -1)
    else:
        height = 1 - 2 * (np.arange(spokes) + 0.5) / max(spokes, 1)
        flat = np.sqrt(1 - height**2)
        directions = np.stack([flat * np.cos(angle), flat * np.sin(angle), height], -1)
    return np.asarray((along[:, None] * directions[:, None, :]).reshape(-1, axes)[:points])


def check(result: Array, expected: Array, inputs: Array, eps: float, name: str, *, whole: bool) -> None:
    """AssertionError unless every element of every coil is right.

    inputs : the weighted input, [coils, …]
    whole  : also bound the error of all elements together by eps, if they are many and different
    """
    assert result.shape == expected.shape, f"{name}: shape {result.shape}, expected {expected.shape}"
    assert np.isfinite(result).all(), f"{name}: not finite"
    for coil, (got, wanted, values) in enumerate(zip(result, expected, inputs, strict=True)):
        error = np.abs(got.astype(np.complex128) - wanted)
        values = values.astype(np.complex128)
        one, two = float(np.abs(values).sum()), float(np.linalg.norm(values))
        worst = error.max(initial=0)
        assert worst <= BY_ONE_NORM * eps * one, f"{name}: coil {coil}, {worst / max(one, 1e-300):.2e} of the 1-norm"
        assert worst <= BY_TWO_NORM * eps * two, f"{name}: coil {coil}, {worst / max(two, 1e-300):.2e} of the 2-norm"
        if whole:
            relative = np.linalg.norm(error) / max(float(np.linalg.norm(wanted)), 1e-300)
            assert relative <= eps, f"{name}: coil {coil}, relative error {relative:.2e}"


def cases() -> Iterator[Case]:
    """Every content and error in two and three dimensions; prime, single and even sizes; from no points on."""
    for content, shape in itertools.product(CONTENTS, ((31, 37), (16, 24), (7, 6, 11))):
        yield Case(shape=shape, content=content, points=997 if content == "clustered" else 499)
    for eps, shape in itertools.product((1e-2, 1e-4, 1e-5, 1e-6), ((31, 37), (64, 18), (13, 9, 16))):
        yield Case(shape=shape, eps=eps, dtype="float64")
    for shape in ((1, 1), (1, 37), (37, 1), (2, 3), (5, 131), (1, 1, 5), (5, 1, 1), (2, 17, 3), (3, 8, 33)):
        yield Case(shape=shape, weighted=False, points=211)
    for points in (0, 1, 2, 31, 32, 33):
        yield Case(shape=(13, 22), points=points)
        yield Case(shape=(5, 4, 6), points=points, weighted=False)
    for coils in (0, 1, 3, 8, 17, 33):
        yield Case(shape=(9, 11), coils=coils, points=127)
        yield Case(shape=(4, 5, 6), coils=coils, points=127, content="radial")
