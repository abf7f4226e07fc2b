"""Wavelet transforms: their laws for every size, and the matrix of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.wavelet import FAMILIES, Wavelet, low_pass
from tests.kernels.sense.phantom import random_complex

SHAPES = [(31, 37), (64, 64), (5, 34, 33), (2, 3), (1, 17), (17,), (32,), (1, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_filters_are_orthonormal_and_have_their_moments(family):
    taps = low_pass(family)
    moments = FAMILIES[family]
    assert len(taps) == 2 * moments
    assert taps.sum() == pytest.approx(np.sqrt(2), abs=1e-12)
    for lag in range(moments):
        assert taps[2 * lag :] @ taps[: len(taps) - 2 * lag] == pytest.approx(float(lag == 0), abs=1e-12)
    high = taps[::-1] * (-1.0) ** np.arange(len(taps))
    for power in range(moments):
        assert np.arange(len(taps)) ** power @ high == pytest.approx(0, abs=1e-9)


def test_daubechies_four_taps_are_those_of_the_closed_form():
    root = np.sqrt(3)
    np.testing.assert_allclose(low_pass("db2"), np.array([1 + root, 3 + root, 3 - root, 1 - root]) / (4 * np.sqrt(2)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_orthonormal_whatever_the_size(shape, family):
    wavelet, shift = Wavelet(shape, family), np.arange(2, 2 + len(shape))
    x, y = (random_complex((2, *shape), seed).astype(complex) for seed in (1, 2))
    found = wavelet.forward(x, shift=shift)
    np.testing.assert_allclose(wavelet.inverse(found, shift=shift), x, atol=1e-12)
    assert np.vdot(y, found) == pytest.approx(np.vdot(wavelet.inverse(y, shift=shift), x), abs=1e-9)
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(x))
    single = wavelet.forward(x.astype(np.complex64), shift=shift)
    np.testing.assert_allclose(single, found, atol=3e-6)


@pytest.mark.parametrize("n", [8, 9])
def test_one_level_is_the_definition(n):
    """Shorter than a second level needs: products with rotated filters, the last of an odd line apart."""
    image = random_complex((n,), 3).astype(complex)
    taps = low_pass("db2")
    high = taps[::-1] * (-1.0) ** np.arange(4)
    even = n - n % 2
    rows = [np.array([[(t[(c - 2 * k) % even] if (c - 2 * k) % even < 4 else 0) for c in range(even)]
                      for k in range(even // 2)]) @ image[:even] for t in (taps, high)]  # fmt: skip
    expected = np.concatenate([rows[0], image[even:], rows[1]])
    np.testing.assert_allclose(Wavelet((n,)).forward(image), expected, atol=1e-12)


def test_a_threshold_shrinks_every_coefficient():
    image = random_complex((3, 40, 36), 5).astype(complex)
    wavelet = Wavelet((40, 36), "db3")
    plain, found = wavelet.forward(image), wavelet.forward(image, threshold=0.5)
    expected = plain * np.maximum(1 - 0.5 / np.abs(plain), 0)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_details_of_constants_vanish():
    found = Wavelet((64, 64), "db4").forward(np.full((64, 64), 2 + 1j))
    assert np.count_nonzero(np.abs(found) > 1e-12) == 16 * 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Wavelet((4, 4), "db9"), "family must be one of haar, db2"),
        (lambda: Wavelet((4, 0)), "shape must be"),
        (lambda: Wavelet((2, 2, 2, 2)), "shape must be"),
        (lambda: Wavelet((4, 4)).forward(np.zeros((4, 5), np.complex64)), "image must be complex64"),
        (lambda: Wavelet((4, 4)).forward(np.zeros((4, 4))), "image must be complex64"),
        (lambda: Wavelet((4, 4)).inverse(np.zeros((4, 4), np.complex64), out=np.zeros((4, 4))), "out must be"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
