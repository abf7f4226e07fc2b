"""Test inputs of the exact transforms and the expected results, for the tests of every device.

The oracle is the definition in float64, one exponential per pair of pixel and sample. It shares neither factors,
symmetry nor fixed-point phases with the code under test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CONTENTS = ("random", "edges", "beyond", "centre", "equal", "zeros", "extreme", "one loud")
AT_ONCE = 1 << 20  # pairs


@dataclass(frozen=True, kw_only=True)
class ExactCase:
    """One trajectory with images and samples, for both transforms."""

    shape: tuple[int, ...]
    points: int = 101
    coils: int = 2
    content: str = "random"
    dtype: str = "float64"  # of the trajectory
    weighted: bool = True

    @property
    def name(self) -> str:
        parts = ["x".join(map(str, self.shape)), self.points, self.coils, self.content.replace(" ", "-"), self.dtype]
        return "-".join(map(str, parts + ["weighted"] * self.weighted))

    def trajectory(self) -> Array:
        """[M, d] in cycles per field of view; the same for every call."""
        rng = np.random.default_rng(self.points + sum(self.shape))
        half = np.array(self.shape) / 2
        k = rng.uniform(-half, half, (self.points, len(self.shape)))
        if self.content == "edges":
            k = half * rng.integers(-1, 2, k.shape)
        elif self.content == "beyond":
            k = k * rng.choice([1.0, 3.7, 1000.25], (self.points, 1))
        elif self.content == "centre":
            k = k * 0
        elif self.content == "equal":
            k[:] = k[:1]
        return k.astype(self.dtype)

    def weights(self) -> Array | None:
        return np.random.default_rng(3).uniform(0, 2, self.points).astype(np.float32) if self.weighted else None

    def samples(self) -> Array:
        """[coils, M] complex64."""
        return self._values((self.coils, self.points), 1)

    def images(self) -> Array:
        """[coils, *shape] complex64."""
        return self._values((self.coils, *self.shape), 2)

    def _values(self, shape: tuple[int, ...], seed: int) -> Array:
        rng = np.random.default_rng(seed)
        values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        if self.content == "zeros":
            values[::2] = 0
        elif self.content == "extreme":  # each coil has its own scale
            values *= np.resize([1e-30, 1e15, 1.0], len(values)).reshape(-1, *[1] * (len(shape) - 1))
        elif self.content == "one loud":
            values = values * 10.0 ** rng.uniform(-7, 0, shape)
        return values.astype(np.complex64)

    def flops(self) -> int:
        """Operations of the definition, for one transform: a complex product and a sum for each pair."""
        return 8 * self.coils * self.points * math.prod(self.shape)

    def bytes(self) -> int:
        """Least traffic of one transform: images and samples, one read and one written, and the trajectory."""
        moved = 8 * self.coils * (self.points + math.prod(self.shape))
        return moved + self.points * len(self.shape) * np.dtype(self.dtype).itemsize


def exponentials(trajectory: Array, shape: tuple[int, ...]) -> Iterator[tuple[slice, Array]]:
    """exp(2πi k·r/N) for a batch of samples at a time, [m, pixels]."""
    step = max(AT_ONCE // max(math.prod(shape), 1), 1)
    for begin in range(0, len(trajectory), step):
        some = slice(begin, begin + step)
        waves = np.ones((len(trajectory[some]), 1), np.complex128)
        for k, n in zip(trajectory[some].T.astype(np.float64), shape, strict=True):
            turns = (k % n / n)[:, None] * (np.arange(n) - n // 2)  # folded into the period n, exactly
            waves = (waves[:, :, None] * np.exp(2j * np.pi * turns)[:, None]).reshape(len(turns), -1)
        yield some, waves


def adjoint(samples: Array, trajectory: Array, shape: tuple[int, ...], weights: Array | None) -> Array:
    """The definition: complex128 [coils, *shape]."""
    weighted = samples.astype(np.complex128) * (1.0 if weights is None else weights.astype(np.float64))
    image = np.zeros((len(samples), math.prod(shape)), np.complex128)
    for some, waves in exponentials(trajectory, shape):
        image += weighted[:, some] @ waves
    return image.reshape(len(samples), *shape)


def forward(images: Array, trajectory: Array) -> Array:
    """The definition: complex128 [coils, M]."""
    flat = images.astype(np.complex128).reshape(len(images), math.prod(images.shape[1:]))
    samples = np.zeros((len(images), len(trajectory)), np.complex128)
    for some, waves in exponentials(trajectory, images.shape[1:]):
        samples[:, some] = flat @ np.conj(waves).T
    return samples


def check(result: Array, expected: Array, inputs: Array, eps: float, name: str, *, random: bool) -> None:
    """AssertionError unless every element of every coil is right.

    inputs : the weighted input, [coils, …]; bounds are relative to its norms
    random : the data have no structure, so that errors add up like noise and eps bounds them together
    """
    assert result.shape == expected.shape, name
    assert np.isfinite(result).all(), f"{name}: not finite"
    for coil, (got, wanted, values) in enumerate(zip(result, expected, inputs, strict=True)):
        error = np.abs(got.astype(np.complex128) - wanted)
        one = float(np.abs(values.astype(np.complex128)).sum())
        assert error.max(initial=0) <= 4 * eps * one, f"{name}: coil {coil}, {error.max() / one:.2e} of the 1-norm"
        if random:
            two = np.linalg.norm(values.astype(np.complex128))
            assert error.max(initial=0) <= 6 * eps * two, f"{name}: coil {coil}, {error.max() / two:.2e} of the 2-norm"
            # The expected norm of the result, since a few values may cancel.
            whole = max(np.linalg.norm(wanted), two * error.size**0.5)
            bound = eps * (1 + 4 / max(error.size, 1) ** 0.5)
            assert np.linalg.norm(error) <= bound * whole, f"{name}: coil {coil}, {np.linalg.norm(error) / whole:.2e}"


def exact_cases() -> Iterator[ExactCase]:
    """Every content in two and three dimensions; prime, single and even sizes; 0, 1 and prime numbers of samples."""
    for content, shape in itertools.product(CONTENTS, ((31, 37), (16, 24), (7, 6, 9))):
        yield ExactCase(shape=shape, content=content, coils=3)
    for shape in ((1, 1), (1, 37), (37, 1), (2, 3), (5, 131), (67, 9), (1, 1, 5), (5, 1, 1), (2, 17, 3), (3, 8, 33)):
        yield ExactCase(shape=shape, dtype="float32", weighted=False)
    for points, coils in itertools.product((0, 1, 2, 31, 32, 33, 251), (1, 2)):
        yield ExactCase(shape=(13, 22), points=points, coils=coils)
    yield ExactCase(shape=(9, 11), coils=0)
    yield ExactCase(shape=(5, 7), coils=17)
