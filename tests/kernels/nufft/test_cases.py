"""Every case on the CPU, by both methods, against the definition in float64; and laws that the transforms obey."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kernels.nufft import Nufft, adjoint, forward
from kernels.nufft.cases import Case, cases, made_trajectory, random_values
from kernels.nufft.exact import cases as definition

ALL = list(cases())
SHAPES = ((31, 37), (9, 12, 7))


@pytest.mark.parametrize(
    ("case", "method"),
    # The exact method has tests of its own.
    [*((case, "gridding") for case in ALL), *((case, "exact") for case in ALL[::4])],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_case(case: Case, method: str) -> None:
    plan = case.plan(case.trajectory(), method=method, workers=1)
    assert plan.method == method
    case.check_forward(plan.forward(case.images()))
    case.check_adjoint(plan.adjoint(case.samples(), case.weights()))


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 0.5])
def test_the_check_notices_one_wrong_value(spoil: float) -> None:
    case = Case(shape=(8, 9))
    plan = case.plan(case.trajectory())
    image, samples = plan.adjoint(case.samples(), case.weights()), plan.forward(case.images())
    image[1, 7, 3] += spoil * np.abs(image).max()
    samples[0, 11] += spoil * np.abs(samples).max()
    with pytest.raises(AssertionError):
        case.check_adjoint(image)
    with pytest.raises(AssertionError):
        case.check_forward(samples)


@pytest.mark.parametrize("method", ["gridding", "exact"])
@pytest.mark.parametrize("eps", [1e-3, 1e-6])
@pytest.mark.parametrize("content", ["random", "radial", "edges", "equal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_adjoint_is_the_adjoint(shape: tuple[int, ...], content: str, eps: float, method: str) -> None:
    """⟨Ax, y⟩ = ⟨x, Aᴴy⟩ to rounding, not only to eps, if both directions use one kernel."""
    plan = Nufft(made_trajectory(content, 400, shape), shape, eps=eps, method=method)
    x, y = random_values(shape, 5), random_values((400,), 6)
    ahead, back = plan.forward(x), plan.adjoint(y)
    left, right = np.vdot(y, ahead), np.vdot(back, x)
    scale = np.linalg.norm(y) * np.linalg.norm(ahead)
    assert abs(left - right) <= 2e-5 * scale


@pytest.mark.parametrize("method", ["gridding", "exact"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_transforms_are_linear(shape: tuple[int, ...], method: str) -> None:
    plan = Nufft(made_trajectory("radial", 300, shape), shape, method=method)
    for transform, of in ((plan.forward, shape), (plan.adjoint, (300,))):
        a, b = random_values(of, 1), random_values(of, 2)
        both = transform((2 - 1j) * a + 0.5 * b)
        apart = (2 - 1j) * transform(a) + 0.5 * transform(b)
        assert np.linalg.norm(both - apart) <= 1e-5 * np.linalg.norm(apart)


@pytest.mark.parametrize("shape", SHAPES)
def test_complex128_is_good_to_1e_12(shape: tuple[int, ...]) -> None:
    k = made_trajectory("random", 300, shape)
    plan = Nufft(k, shape, eps=1e-12)
    images, samples = random_values((2, *shape), 1).astype(complex), random_values((2, 300), 2).astype(complex)
    ahead, back = definition.forward(images, k), definition.adjoint(samples, k, shape, None)
    for result, expected in ((plan.forward(images), ahead), (plan.adjoint(samples), back)):
        assert result.dtype == np.complex128
        assert np.linalg.norm(result - expected) <= 1e-12 * np.linalg.norm(expected)


@pytest.mark.parametrize("method", ["gridding", "exact"])
def test_leading_axes_outs_and_layouts(method: str) -> None:
    shape = (13, 18)
    k = made_trajectory("random", 101, shape)
    plan = Nufft(np.asfortranarray(k), shape, method=method)
    images, samples = random_values((3, 2, *shape), 1), random_values((3, 2, 101), 2)
    weights = np.linspace(0, 1, 202)[::2]
    ahead, back = plan.forward(images), plan.adjoint(samples, weights)
    assert ahead.shape == (3, 2, 101)
    assert back.shape == (3, 2, *shape)
    for i, j in np.ndindex(3, 2):
        np.testing.assert_allclose(plan.forward(images[i, j]), ahead[i, j], rtol=0, atol=1e-4)
        np.testing.assert_allclose(plan.adjoint(samples[i, j] * weights.astype(np.float32)), back[i, j], atol=1e-4)
    out, image = np.full_like(ahead, np.nan), np.full_like(back, np.nan)
    assert plan.forward(np.asfortranarray(images), out) is out
    assert plan.adjoint(np.asfortranarray(samples), weights, image) is image
    np.testing.assert_array_equal(out, ahead, strict=True)
    np.testing.assert_array_equal(image, back, strict=True)
    once = forward(images, k, method=method), adjoint(samples, k, shape, weights=weights, method=method)
    np.testing.assert_array_equal(once[0], ahead, strict=True)
    np.testing.assert_array_equal(once[1], back, strict=True)


def test_the_order_of_the_points_does_not_matter() -> None:
    shape, order = (21, 16), np.random.default_rng(1).permutation(300)
    k, samples = made_trajectory("spiral", 300, shape), random_values((300,), 2)
    straight, mixed = adjoint(samples, k, shape, eps=1e-5), adjoint(samples[order], k[order], shape, eps=1e-5)
    np.testing.assert_allclose(mixed, straight, rtol=0, atol=2e-5 * np.linalg.norm(samples))
    images = random_values(shape, 3)
    np.testing.assert_allclose(
        forward(images, k[order], eps=1e-5), forward(images, k, eps=1e-5)[order], atol=2e-5 * np.linalg.norm(images)
    )


def test_one_plan_in_many_threads() -> None:
    shape = (32, 32)
    plan = Nufft(made_trajectory("radial", 2000, shape), shape, method="gridding")
    images = [random_values((n + 1, *shape), n) for n in range(6)]
    alone = [plan.forward(image) for image in images]
    with ThreadPoolExecutor(6) as pool:
        for result, expected in zip(pool.map(plan.forward, images), alone, strict=True):
            np.testing.assert_array_equal(result, expected, strict=True)


def test_small_problems_are_summed_and_large_ones_gridded() -> None:
    assert Nufft(np.zeros((5, 2)), (8, 8)).method == "exact"
    assert Nufft(np.zeros((50_000, 2)), (64, 64)).method == "gridding"
