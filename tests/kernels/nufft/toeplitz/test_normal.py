"""The Toeplitz form of the normal operator against AᴴWA of the definition, and its laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel, toeplitz_shape
from kernels.nufft.cases import made_trajectory, random_values
from kernels.nufft.exact import cases as definition
from kernels.nufft.gridding.spreading import fast_size

SHAPES = ((31, 37), (16, 24), (1, 9), (9, 12, 7), (1, 5, 1))


def positive(count: int) -> Any:
    return np.random.default_rng(4).uniform(0, 2, count).astype(np.float32)


def relative(result: Any, expected: Any) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("eps", [1e-3, 1e-6])
@pytest.mark.parametrize("content", ["random", "radial", "edges", "spiral"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_normal_operator(shape: tuple[int, ...], content: str, eps: float) -> None:
    k, weights, images = made_trajectory(content, 211, shape), positive(211), random_values((2, *shape), 1)
    toeplitz = Toeplitz(toeplitz_kernel(k, weights, shape, eps), shape)
    expected = definition.adjoint(definition.forward(images, k), k, shape, weights)
    assert relative(toeplitz.apply(images), expected) <= 2 * eps
    maps, image = random_values((3, *shape), 2), random_values(shape, 3)
    normal = definition.adjoint(definition.forward(maps * image, k), k, shape, weights)
    assert relative(toeplitz.apply_sense(image, maps), (maps.conj() * normal).sum(0)) <= 2 * eps


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_hermitian_and_positive(shape: tuple[int, ...]) -> None:
    toeplitz = Toeplitz(toeplitz_kernel(made_trajectory("radial", 300, shape), positive(300), shape, 1e-6), shape)
    x, y, maps = random_values(shape, 1), random_values(shape, 2), random_values((4, *shape), 3)
    for apply in (toeplitz.apply, lambda image: toeplitz.apply_sense(image, maps)):
        left, right = np.vdot(y, apply(x)), np.vdot(apply(y), x)
        assert abs(left - right) <= 1e-5 * np.linalg.norm(y) * np.linalg.norm(apply(x))
        own = np.vdot(x, apply(x))
        assert own.real > 0
        assert abs(own.imag) <= 1e-5 * own.real


def test_kernels_of_parts_add_up() -> None:
    shape, k, weights = (13, 18), made_trajectory("radial", 301, (13, 18)), positive(301)
    whole = toeplitz_kernel(k, weights, shape, 1e-5)
    parts = [toeplitz_kernel(k[part], weights[part], shape, 1e-5) for part in (slice(0, 100), slice(100, 301))]
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=0, atol=2e-5 * np.abs(whole).max())


def test_float64_and_no_weights() -> None:
    shape, k = (13, 18), made_trajectory("random", 300, (13, 18))
    kernel = toeplitz_kernel(k, None, shape, 1e-10)
    assert kernel.dtype == np.float64
    image = random_values(shape, 1).astype(complex)
    expected = definition.adjoint(definition.forward(image[None], k), k, shape, None)[0]
    assert relative(Toeplitz(kernel, shape).apply(image), expected) <= 1e-10


def test_the_bits_do_not_depend_on_the_number_of_workers() -> None:
    shape, k = (24, 31), made_trajectory("radial", 400, (24, 31))
    kernel, maps, image = toeplitz_kernel(k, None, shape), random_values((5, *shape), 1), random_values(shape, 2)
    alone = Toeplitz(kernel, shape, workers=1)
    for workers in (2, 3, 8):
        many = Toeplitz(kernel, shape, workers=workers)
        np.testing.assert_array_equal(many.apply_sense(image, maps), alone.apply_sense(image, maps), strict=True)
        np.testing.assert_array_equal(many.apply(maps), alone.apply(maps), strict=True)


def test_results_may_overwrite_images() -> None:
    shape = (12, 10)
    toeplitz = Toeplitz(toeplitz_kernel(made_trajectory("random", 99, shape), None, shape), shape)
    images, maps = random_values((3, *shape), 1), random_values((3, *shape), 2)
    separate, sense = toeplitz.apply(images), toeplitz.apply_sense(images[0], maps)
    image = images[0].copy()
    assert toeplitz.apply(images, images) is images
    assert toeplitz.apply_sense(image, maps, image) is image
    np.testing.assert_array_equal(images, separate, strict=True)
    np.testing.assert_array_equal(image, sense, strict=True)


def test_it_is_what_the_transforms_give() -> None:
    shape, k, weights = (64, 48), made_trajectory("spiral", 4000, (64, 48)), positive(4000)
    plan, image = Nufft(k, shape, eps=1e-5), random_values(shape, 1)
    toeplitz = Toeplitz(toeplitz_kernel(k, weights, shape, 1e-5), shape)
    assert relative(toeplitz.apply(image), plan.adjoint(plan.forward(image), weights)) <= 4e-5


def test_sizes() -> None:
    assert toeplitz_shape((256, 251)) == (512, 504)
    assert toeplitz_shape((256, 176, 65), host=False) == (512, 384, 160)
    assert toeplitz_shape((1, 320, 321), host=False) == (128, 640, 768)
    assert toeplitz_shape((600, 100), host=False) == (1200, 200)
    for least in range(1, 400):
        size = fast_size(least)
        assert size >= least
        assert size % 2 == 0
        for factor in (2, 3, 5, 7):
            while size % factor == 0:
                size //= factor
        assert size == 1
