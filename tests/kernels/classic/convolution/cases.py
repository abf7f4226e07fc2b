"""Test inputs for convolution and their expected results, for the tests and benchmarks of every device.

The oracle adds whole arrays, shifted and weighted, in float64, one weight at a time; for layers it sums over windows by
einsum. The sums of the terms' magnitudes bound the errors. Integers must be exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.convolution import convolve, layer
from tests.kernels.classic.checks import CONTENTS, SMALLEST, UNIT, check_within, made_values

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One convolution of generated samples: one or two axes, or four for a layer."""

    shape: tuple[int, ...]
    mask_shape: tuple[int, ...]
    content: str = "random"

    @property
    def operation(self) -> str:
        return {1: "line", 2: "image", 4: "layer"}[len(self.shape)]

    @property
    def name(self) -> str:
        sizes = ("x".join(map(str, shape)) for shape in (self.shape, self.mask_shape))
        return f"{self.operation}-{'-'.join(sizes)}-{self.content}"

    def arrays(self) -> tuple[Array, Array]:
        """The samples and the mask, or the images and the filters; the same for every call."""
        rng = np.random.default_rng(sum(self.shape) + 31 * sum(self.mask_shape))
        mask_content = "random" if self.content in ("scaled", "impulse") else self.content
        return made_values(self.content, self.shape, rng), made_values(mask_content, self.mask_shape, rng)

    def apply(self, samples: Any, mask: Any, **options: Any) -> Any:
        """The public function on arrays of any supported library."""
        return (layer if self.operation == "layer" else convolve)(samples, mask, **options)

    def out_shape(self) -> tuple[int, ...]:
        if self.operation != "layer":
            return self.shape
        rows, columns = (side - mask + 1 for side, mask in zip(self.shape[2:], self.mask_shape[2:], strict=True))
        return (self.shape[0], self.mask_shape[0], rows, columns)

    def check(self, result: Array) -> None:
        """AssertionError unless every result, copied to the host, is right."""
        check(result, self)

    def terms(self) -> int:
        """Terms of one result."""
        return int(np.prod(self.mask_shape[1:] if self.operation == "layer" else self.mask_shape))

    def bytes(self) -> int:
        """Minimum traffic: samples (and a layer's filters) read once, results written once."""
        filters = int(np.prod(self.mask_shape)) if self.operation == "layer" else 0
        return 4 * (int(np.prod(self.shape)) + filters + int(np.prod(self.out_shape())))

    def flops(self) -> int:
        """Operations of the definition: a product and an addition for each term."""
        return 2 * self.terms() * int(np.prod(self.out_shape()))


def exact(case: Case) -> tuple[Array, Array]:
    """The results and the sums of their terms' magnitudes, both float64."""
    samples, mask = (array.astype(np.float64) for array in case.arrays())
    compute = _layer if case.operation == "layer" else _convolved
    return compute(samples, mask), compute(np.abs(samples), np.abs(mask))


def _convolved(samples: Array, mask: Array) -> Array:
    padded = np.pad(samples, [(side // 2, side // 2) for side in mask.shape])
    result = np.zeros(samples.shape)
    for position, weight in np.ndenumerate(mask):
        begin = [side - 1 - at for side, at in zip(mask.shape, position, strict=True)]
        result += weight * padded[tuple(slice(b, b + n) for b, n in zip(begin, samples.shape, strict=True))]
    return result


def _layer(images: Array, filters: Array) -> Array:
    windows = np.lib.stride_tricks.sliding_window_view(images, filters.shape[2:], axis=(2, 3))
    return np.asarray(np.einsum("ncyxvu,mcvu->nmyx", windows, filters, optimize=True))


def check(result: Array, case: Case) -> None:
    """AssertionError unless every result is within the error bound; integers must be exact."""
    values, sizes = exact(case)
    terms = case.terms()
    whole = case.content == "integers"
    bound = np.zeros_like(sizes) if whole else (terms + 2) * UNIT * sizes + terms * SMALLEST
    check_within(case.name, result, values, bound)


def cases() -> Iterator[Case]:
    """Zero, one, primes, sizes around a block's; masks from one weight to the largest, also larger than the samples;
    every content."""
    for length, taps in ((0, 3), (1, 1), (1, 5), (2, 961), (255, 3), (256, 5), (257, 7), (1021, 31), (2048, 9)):
        yield Case(shape=(length,), mask_shape=(taps,))
    for length, taps in ((4099, 1), (6143, 33), (5003, 259), (2500, 961)):
        yield Case(shape=(length,), mask_shape=(taps,))
    for shape, mask in (
        ((0, 5), (3, 3)), ((5, 0), (3, 3)), ((1, 1), (1, 1)), ((1, 1), (3, 5)), ((1, 300), (31, 31)),
        ((300, 1), (31, 31)), ((31, 37), (3, 3)), ((64, 128), (5, 5)), ((33, 129), (7, 7)), ((65, 257), (9, 9)),
        ((61, 131), (11, 11)), ((40, 132), (1, 31)), ((67, 36), (31, 1)), ((97, 101), (31, 31)), ((37, 140), (5, 3)),
    ):  # fmt: skip
        yield Case(shape=shape, mask_shape=mask)
    for images, filters in (
        ((0, 3, 9, 9), (4, 3, 3, 3)), ((2, 0, 9, 9), (4, 0, 3, 3)), ((2, 3, 9, 9), (0, 3, 3, 3)),
        ((1, 1, 1, 1), (1, 1, 1, 1)), ((2, 3, 17, 19), (5, 3, 3, 3)), ((3, 5, 13, 11), (67, 5, 5, 5)),
        ((1, 2, 40, 37), (64, 2, 7, 3)), ((5, 17, 8, 8), (65, 17, 1, 1)), ((2, 3, 9, 7), (4, 3, 9, 7)),
        ((4, 8, 18, 18), (128, 8, 3, 3)),
    ):  # fmt: skip
        yield Case(shape=images, mask_shape=filters)
    for content in CONTENTS:
        yield Case(shape=(3001,), mask_shape=(17,), content=content)
        yield Case(shape=(45, 139), mask_shape=(5, 5), content=content)
        yield Case(shape=(45, 139), mask_shape=(13, 7), content=content)
        if content != "impulse":
            yield Case(shape=(2, 3, 23, 29), mask_shape=(7, 3, 3, 5), content=content)
