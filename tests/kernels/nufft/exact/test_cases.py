"""The exact transforms on the CPU against the definition in float64; and laws that they obey."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.nufft.exact import cases as exact_cases
from kernels.nufft.exact import exact_adjoint, exact_forward, exact_point_spread
from kernels.nufft.exact.cases import ExactCase, check

CASES = list(exact_cases.exact_cases())
SHAPES = [(31, 37), (16, 24), (7, 6, 9), (4, 5, 8)]
EPS = {np.complex64: 2e-6, np.complex128: 1e-13}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: ExactCase) -> None:
    trajectory, weights, random = case.trajectory(), case.weights(), case.content == "random"
    image = exact_cases.adjoint(case.samples(), trajectory, case.shape, weights)
    lines = exact_cases.forward(case.images(), trajectory)
    for dtype, eps in EPS.items():
        samples, images = case.samples().astype(dtype), case.images().astype(dtype)
        weighted = samples if weights is None else samples * weights
        result = exact_adjoint(samples, trajectory, case.shape, weights=weights)
        assert result.dtype == dtype
        check(result, image, weighted, eps, f"adjoint {case.name}", random=random)
        result = exact_forward(images, trajectory)
        assert result.dtype == dtype
        check(result, lines, images, eps, f"forward {case.name}", random=random)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 1e-3])
def test_the_check_notices_one_wrong_value(spoil: float) -> None:
    case = ExactCase(shape=(9, 10))
    samples = case.samples()
    expected = exact_cases.adjoint(samples, case.trajectory(), case.shape, None)
    result = expected.astype(np.complex64)
    check(result, expected, samples, 2e-6, "right", random=True)
    result[1, 3, 4] += spoil * np.linalg.norm(samples[1])
    with pytest.raises(AssertionError):
        check(result, expected, samples, 2e-6, "wrong", random=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_adjoint_is_the_conjugate_transpose(shape: tuple[int, ...]) -> None:
    case = ExactCase(shape=shape, points=173)
    trajectory = case.trajectory()
    x, y = case.images().astype(np.complex128), case.samples().astype(np.complex128)
    left = np.vdot(y, exact_forward(x, trajectory))
    assert left == pytest.approx(np.vdot(exact_adjoint(y, trajectory, shape), x), rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_are_linear(shape: tuple[int, ...]) -> None:
    case = ExactCase(shape=shape, points=173)
    trajectory = case.trajectory()
    x, y = case.images().astype(np.complex128), case.samples().astype(np.complex128)
    a, b = 2.5 - 1j, -0.25j
    sums = a * exact_forward(x[0], trajectory) + b * exact_forward(x[1], trajectory)
    np.testing.assert_allclose(exact_forward(a * x[0] + b * x[1], trajectory), sums, atol=1e-11)
    sums = a * exact_adjoint(y[0], trajectory, shape) + b * exact_adjoint(y[1], trajectory, shape)
    np.testing.assert_allclose(exact_adjoint(a * y[0] + b * y[1], trajectory, shape), sums, atol=1e-11)


def test_whole_cycles_beyond_the_field_change_nothing() -> None:
    case = ExactCase(shape=(12, 35))
    trajectory, folded = case.trajectory(), case.trajectory() + np.array([3 * 12, -2 * 35])
    np.testing.assert_allclose(
        exact_forward(case.images(), folded), exact_forward(case.images(), trajectory), atol=1e-4
    )


@pytest.mark.parametrize("shape", [(16, 13), (5, 6, 7)])
def test_convolution_with_the_point_spread_is_the_normal_operator(shape: tuple[int, ...]) -> None:
    case = ExactCase(shape=shape, points=97, coils=1)
    trajectory, weights, image = case.trajectory(), case.weights(), case.images()[0].astype(np.complex128)
    assert weights is not None
    normal = exact_adjoint(exact_forward(image, trajectory), trajectory, shape, weights=weights)
    spread = exact_point_spread(trajectory, shape, weights=weights)
    assert spread.shape == tuple(2 * n for n in shape)
    centred = np.fft.ifftshift(spread)  # r = 0 first
    padded = np.zeros(spread.shape, np.complex128)
    padded[tuple(slice(n) for n in shape)] = image
    padded = np.fft.fftn(padded) * np.fft.fftn(centred)
    convolved = np.fft.ifftn(padded)[tuple(slice(n) for n in shape)]
    assert np.linalg.norm(convolved - normal) <= 2e-6 * np.linalg.norm(normal)


def test_leading_axes_are_kept_and_each_coil_is_transformed_by_itself() -> None:
    case = ExactCase(shape=(9, 14), coils=6)
    trajectory, images = case.trajectory(), case.images().reshape(2, 3, 9, 14)
    together = exact_forward(images, trajectory)
    assert together.shape == (2, 3, case.points)
    np.testing.assert_array_equal(exact_forward(images[1, 2], trajectory), together[1, 2], strict=True)
    back = exact_adjoint(together, trajectory, case.shape)
    assert back.shape == images.shape
    np.testing.assert_array_equal(exact_adjoint(together[0, 1], trajectory, case.shape), back[0, 1], strict=True)
