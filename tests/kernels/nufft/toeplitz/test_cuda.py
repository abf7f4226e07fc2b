"""The Toeplitz form of the normal operator on a CUDA device: both variants against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.nufft.cases import made_trajectory, random_values
from kernels.nufft.exact import cases as definition
from kernels.nufft.toeplitz import cuda as toeplitz_cuda
from kernels.nufft.toeplitz.cuda import VARIANTS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


def poisoned(cupy: Any, *shape: int) -> Any:
    return cupy.full(shape, complex(np.nan, np.nan), cupy.complex64)


def relative(result: Any, expected: Any) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


@pytest.mark.sanitize("nufft")
@pytest.mark.parametrize("eps", [1e-3, 1e-6])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(31, 37), (1, 9), (200, 128), (130, 70), (9, 12, 7), (65, 33, 40), (3, 65, 1)])
def test_toeplitz_is_the_normal_operator(cupy: Any, shape: tuple[int, ...], variant: str, eps: float) -> None:
    k, weights = made_trajectory("radial", 301, shape), np.random.default_rng(1).uniform(0, 2, 301).astype(np.float32)
    maps, image, images = random_values((5, *shape), 1), random_values(shape, 2), random_values((3, *shape), 3)
    kernel = toeplitz_kernel(cupy.asarray(k), cupy.asarray(weights), shape, eps)
    body = Toeplitz(kernel, shape)._body
    # The definition by FINUFFT in float64, with another kernel, grid and FFT.
    right = Nufft(k, shape, eps=1e-10)
    expected = right.adjoint(right.forward(images.astype(complex)), weights)
    out = poisoned(cupy, 3, *shape)
    assert relative(body.apply(cupy.asarray(images), out, None, variant).get(), expected) <= 2 * eps
    normal = right.adjoint(right.forward((maps * image).astype(complex)), weights)
    out = poisoned(cupy, *shape)
    result = body.apply_sense(cupy.asarray(image), cupy.asarray(maps), out, None, variant).get()
    assert relative(result, (maps.conj() * normal).sum(0)) <= 2 * eps


def test_a_long_axis_takes_the_librarys_transforms(cupy: Any) -> None:
    shape = (520, 20)
    k = made_trajectory("random", 999, shape)
    toeplitz = Toeplitz(toeplitz_kernel(cupy.asarray(k), None, shape), shape)
    assert toeplitz._body.variant == "convolve"
    image = random_values((1, *shape), 1)
    expected = definition.adjoint(definition.forward(image, k), k, shape, None)
    assert relative(toeplitz.apply(cupy.asarray(image)).get(), expected) <= 2e-3


@pytest.mark.sanitize("nufft")
@pytest.mark.parametrize("variant", VARIANTS)
def test_coils_in_parts_and_in_place(cupy: Any, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (40, 50)
    kernel = toeplitz_kernel(cupy.asarray(made_trajectory("radial", 301, shape)), None, shape)
    maps, image = cupy.asarray(random_values((11, *shape), 1)), cupy.asarray(random_values(shape, 2))
    whole = Toeplitz(kernel, shape)._body.apply_sense(image, maps, None, None, variant).get()
    monkeypatch.setattr(toeplitz_cuda, "MAX_WORK", 3 * 40 * 128)
    monkeypatch.setattr(toeplitz_cuda, "MAX_CELLS_AT_ONCE", 3 * 128 * 128)
    in_place = image.copy()
    body = Toeplitz(kernel, shape)._body
    assert body.apply_sense(in_place, maps, in_place, None, variant) is in_place
    assert relative(in_place.get(), whole) <= 1e-6
    several = maps.copy()
    body.apply(several, several, None, variant)
    assert relative(several.get(), body.apply(maps, None, None, variant).get()) == 0


@pytest.mark.parametrize("shape", [(40, 50), (9, 12, 7)])
def test_operators_side_by_side_share_their_work_space(cupy: Any, shape: tuple[int, ...]) -> None:
    maps, image = cupy.asarray(random_values((5, *shape), 1)), cupy.asarray(random_values(shape, 2))
    kernels = [toeplitz_kernel(cupy.asarray(made_trajectory("radial", n, shape)), None, shape) for n in (301, 207)]
    alone = [Toeplitz(kernel, shape).apply_sense(image, maps).get() for kernel in kernels]
    first = Toeplitz(kernels[0], shape)
    second = Toeplitz(kernels[1], shape, beside=first)
    for operator, expected in ((first, alone[0]), (second, alone[1]), (first, alone[0])):
        np.testing.assert_array_equal(operator.apply_sense(image, maps).get(), expected, strict=True)
    assert second._body._work is first._body._work
    with pytest.raises(ValueError, match="beside must be of shape"):
        Toeplitz(toeplitz_kernel(cupy.zeros((3, 2)), None, (8, 8)), (8, 8), beside=first)


def test_a_graph_captures_the_normal_operator(cupy: Any) -> None:
    shape = (64, 64)
    toeplitz = Toeplitz(toeplitz_kernel(cupy.asarray(made_trajectory("radial", 999, shape)), None, shape), shape)
    maps, image = cupy.asarray(random_values((8, *shape), 1)), cupy.asarray(random_values(shape, 2))
    out, expected = poisoned(cupy, *shape), toeplitz.apply_sense(image, maps).get()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    toeplitz.apply_sense(image, maps, out, stream)
    stream.synchronize()
    with stream:
        stream.begin_capture()
        toeplitz.apply_sense(image, maps, out, stream)
        graph = stream.end_capture()
        for _ in range(3):
            out.fill(cupy.nan)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(out.get(), expected, strict=True)


def test_no_coils(cupy: Any) -> None:
    shape = (8, 9)
    toeplitz = Toeplitz(toeplitz_kernel(cupy.zeros((4, 2)), None, shape), shape)
    image = cupy.asarray(random_values(shape, 1))
    assert not toeplitz.apply_sense(image, cupy.empty((0, *shape), cupy.complex64)).any()
    assert toeplitz.apply(cupy.empty((0, *shape), cupy.complex64)).shape == (0, *shape)
