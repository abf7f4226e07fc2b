"""The spreading kernels have their stated errors, for any position of a point between the cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernels.nufft.gridding.spreading import KERNELS, Spreading, kernel_for

EVERY = [pytest.param(kernel, id=f"{axes}-{kernel.width}") for axes, found in KERNELS.items() for kernel in found]


def values_of(kernel: Spreading, places: Any) -> Any:
    kept = np.array(kernel.coefficients, np.float32).astype(np.float64)  # as the device has them
    return np.polynomial.polynomial.polyval(1 - (2 * places / kernel.width) ** 2, kept)


def errors(kernel: Spreading, places: Any) -> list[float]:
    """For each distance of a sample from its cell, the root mean square over the image of its relative error."""
    frequencies = np.linspace(0, 0.5 / kernel.oversampling, 101)
    expected = kernel.transform(frequencies)

    def error(place: float) -> float:
        cells = np.arange(-kernel.width / 2, kernel.width / 2) + place
        found = np.exp(-2j * math.pi * np.multiply.outer(frequencies, cells)) @ values_of(kernel, cells)
        return float(np.sqrt(np.mean(np.abs(found / expected - 1) ** 2)))

    return [error(place) for place in places]


@pytest.mark.parametrize("kernel", EVERY)
def test_the_error_said_is_that_of_the_worst_place(kernel):
    assert max(errors(kernel, np.linspace(0, 1, 101))) == pytest.approx(kernel.error, rel=0.01)


@pytest.mark.parametrize("eps", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize("axes", [2, 3])
def test_the_narrowest_that_keeps_the_error_is_chosen(eps, axes):
    chosen = kernel_for(eps, axes)
    assert chosen.error * math.sqrt(axes) <= eps
    narrower = KERNELS[axes][: KERNELS[axes].index(chosen)]
    assert all(other.error * math.sqrt(axes) > eps for other in narrower)


@pytest.mark.parametrize("kernel", EVERY)
def test_the_transform_is_that_of_a_finer_quadrature(kernel):
    nodes, weights = np.polynomial.legendre.leggauss(600)
    frequencies, half = np.linspace(0, 0.5 / kernel.oversampling, 41), kernel.width / 2
    waves = np.cos(2 * math.pi * half * np.multiply.outer(frequencies, nodes))
    expected = waves @ (values_of(kernel, half * nodes) * weights * half)
    np.testing.assert_allclose(kernel.transform(frequencies), expected, rtol=1e-12)
