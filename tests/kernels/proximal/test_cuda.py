"""Proximal operators and wavelets on a CUDA device against their CPU bodies in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.proximal import (
    differences,
    differences_adjoint,
    inner,
    low_rank,
    magnitudes,
    next_shift,
    soft_threshold,
)
from kernels.wavelet import FAMILIES, Wavelet
from tests.kernels.sense.phantom import normalised_error, random_complex

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.sanitize("wavelet")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(31, 37), (256, 256), (5, 64, 33), (1, 17), (2, 3), (1, 1), (17,)])
def test_wavelets_are_those_of_the_cpu(cupy: Any, shape: tuple[int, ...], family: str) -> None:
    wavelet, images = Wavelet(shape, family), random_complex((3, *shape), 1)
    shift = np.arange(1, 1 + len(shape))
    expected = wavelet.forward(images.astype(complex), shift=shift, threshold=0.4)
    on_device = cupy.asarray(shift, cupy.int32)
    out = cupy.full(images.shape, complex(np.nan, np.nan), cupy.complex64)
    found = wavelet.forward(cupy.asarray(images), shift=on_device, threshold=cupy.float32(0.4), out=out)
    assert normalised_error(found.get(), expected) < 1e-6
    out = cupy.full(images.shape, complex(np.nan, np.nan), cupy.complex64)
    back = wavelet.inverse(found, shift=on_device, out=out)
    assert normalised_error(back.get(), wavelet.inverse(expected, shift=shift)) < 1e-6
    np.testing.assert_allclose(wavelet.inverse(wavelet.forward(cupy.asarray(images))).get(), images, atol=1e-5)


@pytest.mark.sanitize("proximal")
def test_thresholds_and_sums_are_those_of_the_cpu(cupy: Any) -> None:
    for count in (1, 31, 100_003):
        values, other = random_complex((3, count), 2), random_complex((3, count), 3)
        for vectors in (False, True):
            expected = soft_threshold(values.astype(complex), 0.7, vectors=vectors)
            found = soft_threshold(cupy.asarray(values), 0.7, vectors=vectors).get()
            np.testing.assert_allclose(found, expected, atol=1e-6)
            size = magnitudes(cupy.asarray(values), vectors=vectors)
            assert float(size) == pytest.approx(float(magnitudes(values.astype(complex), vectors=vectors)), rel=1e-6)
        product = inner(cupy.asarray(values), cupy.asarray(other))
        assert float(product) == pytest.approx(np.vdot(values.astype(complex), other).real, rel=1e-9, abs=1e-9)
        again = inner(cupy.asarray(values), cupy.asarray(other))
        assert float(again) == float(product)
    assert np.isnan(soft_threshold(cupy.asarray([complex(np.nan, 0)], cupy.complex64), 1.0).get()).all()


@pytest.mark.sanitize("proximal")
@pytest.mark.parametrize(("shape", "axes"), [((31, 37), (0, 1)), ((4, 13, 1, 11), (1, 3)), ((7, 5, 3), (0,))])
def test_differences_are_those_of_the_cpu(cupy: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    image, fields = random_complex(shape, 1), random_complex((len(axes), *shape), 2)
    np.testing.assert_array_equal(differences(cupy.asarray(image), axes).get(), differences(image, axes))
    found = differences_adjoint(cupy.asarray(fields), axes).get()
    np.testing.assert_allclose(found, differences_adjoint(fields.astype(complex), axes), atol=1e-5)


@pytest.mark.sanitize("proximal")
@pytest.mark.parametrize(
    ("frames", "shape", "block"),
    [(6, (19, 23), (8, 8)), (1, (9,), (4,)), (5, (9, 10, 33), (8, 8, 8)), (48, (9, 12), (8, 8)), (49, (9, 12), (8, 8))],
)
def test_low_rank_is_that_of_the_cpu(cupy: Any, frames: int, shape: tuple[int, ...], block: tuple[int, ...]) -> None:
    """By the kernel; of 49 frames by CuPy's matrices. Two frames are multiples of one another."""
    series = random_complex((frames, *shape), 4)
    series[-1] = 2j * series[0]
    for shift in (None, np.arange(3, 3 + len(shape), dtype=np.int32)):
        on_device = None if shift is None else cupy.asarray(shift)
        found, nuclear = low_rank(cupy.asarray(series), 1.5, block, on_device)
        expected, size = low_rank(series.astype(complex), 1.5, block, shift)
        assert normalised_error(found.get(), expected) < 1e-4
        assert float(nuclear) == pytest.approx(float(size), rel=1e-4)


def test_low_rank_keeps_nan(cupy: Any) -> None:
    series = random_complex((3, 8, 8), 4)
    series[1, 2, 3] = np.nan
    found, nuclear = low_rank(cupy.asarray(series), 1.0, (4, 4))
    lost = np.isnan(found.get()).all(axis=0)
    assert lost[:4, :4].all()
    assert not lost[4:].any()
    assert np.isnan(float(nuclear))


def test_shifts_are_those_of_the_cpu(cupy: Any) -> None:
    host = [np.arange(12, dtype=np.int32).reshape(6, 2), np.array([4], np.int32), np.zeros(2, np.int32)]
    device = [cupy.asarray(each) for each in host]
    for _ in range(3):
        next_shift(*host)
        next_shift(*device)
        for one, other in zip(host, device, strict=True):
            np.testing.assert_array_equal(other.get(), one)
    assert host[2].tolist() == [2, 3]  # after the last row comes the first
