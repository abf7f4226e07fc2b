"""Weights of Gaussians: close to the exact ones, exact in the arithmetic that uses them, and the same for ever."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from scipy import ndimage

from kernels.smoothing.byte_sums import ONE
from kernels.smoothing.decimation import decimation
from kernels.smoothing.weights import WEIGHT_ONE, derivative_weights, half_weights, rounded_half

SIGMAS = st.floats(0.05, 40.0)
RADII = st.integers(0, 127)


def ideal(sigma: float, radius: int) -> list[Fraction]:
    """To 50 digits, but at least exp(-1000): fractions of smaller numbers have thousands of digits."""
    with localcontext(prec=50):
        half = [(-min(Decimal(n * n) / (2 * Decimal(sigma) ** 2), Decimal(1000))).exp() for n in range(radius + 1)]
        total = half[0] + 2 * sum(half[1:])
        return [Fraction(weight / total) for weight in half]


def in_units(weights: tuple[float, ...], one: int) -> list[int]:
    scaled = [Fraction(weight) * one for weight in weights]
    assert all(each.denominator == 1 for each in scaled)
    return [int(each) for each in scaled]


@settings(max_examples=60, deadline=None)
@given(SIGMAS, RADII)
def test_weights_of_floats_are_rounded_to_their_precision(sigma: float, radius: int) -> None:
    for name in ("f4", "f8"):
        found = half_weights(sigma, radius, np.dtype(name))
        expected = np.array([float(weight) for weight in ideal(sigma, radius)])
        ulps = 1.0 if name == "f4" else 2000.0  # of float64 exponents of up to 1e6
        limit = ulps * np.finfo(name).eps * expected + float(np.finfo(name).smallest_subnormal)
        assert (np.abs(np.array(found) - expected) <= limit).all()
        assert found == tuple(np.array(found, name).tolist())


@settings(max_examples=60, deadline=None)
@given(SIGMAS, RADII)
def test_weights_of_whole_numbers_sum_to_one_and_are_the_nearest(sigma: float, radius: int) -> None:
    units = in_units(half_weights(sigma, radius, np.dtype("u2")), WEIGHT_ONE)
    assert units[0] + 2 * sum(units[1:]) == WEIGHT_ONE
    for unit, weight in zip(units[1:], ideal(sigma, radius)[1:], strict=True):
        assert abs(unit - weight * WEIGHT_ONE) <= Fraction(501, 1000)


@settings(max_examples=60, deadline=None)
@given(SIGMAS, RADII, st.sampled_from([ONE, WEIGHT_ONE, 4 * WEIGHT_ONE]))
def test_weights_with_small_errors_sum_to_one_and_are_off_by_less_than_their_unit(
    sigma: float, radius: int, one: int
) -> None:
    units, exact = in_units(rounded_half(sigma, radius, one), one), [each * one for each in ideal(sigma, radius)]
    assert units[0] + 2 * sum(units[1:]) == one
    errors = [unit - each for unit, each in zip(units, exact, strict=True)]
    assert max(map(abs, errors)) < 1 + Fraction(501, 1000), "the centre may move by another unit"
    nearest = [round(each) for each in exact]
    nearest[0] += one - nearest[0] - 2 * sum(nearest[1:])
    others = [unit - each for unit, each in zip(nearest, exact, strict=True)]
    assert abs(errors[0]) + 2 * sum(map(abs, errors[1:])) <= abs(others[0]) + 2 * sum(map(abs, others[1:])) + 1


@pytest.mark.parametrize(
    ("sigma", "radius", "units"),
    [
        (0.5, 2, [51550, 6976, 17]),
        (1.0, 4, [26146, 15858, 3538, 290, 9]),
        (2.3, 9, [11368, 10343, 7789, 4856, 2505, 1070, 378, 111, 27, 5]),
        (3.69, 5, [8190, 7895, 7071, 5885, 4551, 3271]),
        (
            7.6, 30,
            [3440, 3411, 3323, 3183, 2995, 2771, 2519, 2251, 1977, 1706, 1448, 1207, 989, 797, 631, 491, 375, 282, 208,
             151, 108, 76, 52, 35, 24, 15, 10, 6, 4, 2, 1],
        ),
    ],
)  # fmt: skip
def test_weights_with_small_errors_stay_as_they_are(sigma: float, radius: int, units: list[int]) -> None:
    """The bits of jobs on images of bytes depend on them, and jobs are resumed and verified by later versions."""
    assert in_units(rounded_half(sigma, radius, ONE), ONE) == units


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize(("sigma", "radius"), [(0.4, 1), (1.0, 4), (2.7, 11), (9.3, 20)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_of_derivatives_are_those_of_scipy(order: int, sigma: float, radius: int, dtype: type) -> None:
    impulse = np.zeros(2 * radius + 1)
    impulse[radius] = 1.0
    expected = ndimage.gaussian_filter1d(impulse, sigma, order=order, radius=radius, mode="constant")[::-1]
    found = derivative_weights(sigma, radius, order, np.dtype(dtype))
    assert len(found) == 2 * radius + 1
    np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(dtype).eps, atol=1e-15)
    assert all(weight == float(dtype(weight)) for weight in found)


def test_weights_of_integers_are_rounded_to_whole_steps() -> None:
    weights = half_weights(1.3, 5, np.dtype(np.uint16))
    exact = ideal(1.3, 5)
    assert [weight * WEIGHT_ONE for weight in weights[1:]] == [round(each * WEIGHT_ONE) for each in exact[1:]]


def tables() -> Iterator[tuple[float, ...]]:
    real = np.dtype(np.float64)
    for sigma in (0.7, 4.0, 31.0):
        yield half_weights(sigma, round(4 * sigma), real)
    for order in (1, 2, 3):
        yield derivative_weights(2.7, 11, order, real)
    for sigma, order, bytewise in (
        (7.0, 0, False), (13.0, 0, False), (100.0, 0, False), (21.0, 1, False), (21.0, 3, False), (9.0, 0, True),
    ):  # fmt: skip
        coarse = decimation(sigma, real, order, bytewise=bytewise)
        for stage in coarse.stages:
            yield from (stage.down, *stage.up)
        yield coarse.derivative or coarse.half_weights


def digest() -> str:
    return hashlib.sha256(b"".join(struct.pack(f"<{len(each)}d", *each) for each in tables())).hexdigest()


def test_weights_of_float64_stay_as_they_are() -> None:
    """On every machine: chunks of an image may be computed on several."""
    assert digest() == "100d548a4fc86e0399f38945e3ae6cfc5616f45eb91f155d554f18c8da4c0a92"


def test_weights_do_not_depend_on_the_cpus_instructions() -> None:
    older = {
        "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name]),
        "OPENBLAS_CORETYPE": "Nehalem",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4",
    }
    program = f"from {__name__} import digest; print(digest())"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=os.environ | older,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert found.stdout.strip() == digest()
