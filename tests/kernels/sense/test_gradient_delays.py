"""Gradient delays: simulated in the phantom's closed form, found again from the samples alone."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.sense.gradient_delays import delayed, estimated_delays
from tests.kernels.sense.phantom import radial, samples, spiral

N, COILS = 31, 3


def late(points, x, y):
    """The trajectory of gradients that are late by x and y samples: each axis is its own curve, read later."""
    steps = points[:, 1:2] - points[:, :1]
    return points - steps * np.array([x, y])


@pytest.mark.parametrize(("spokes", "x", "y"), [(7, 0.6, -0.4), (23, 1.7, 0.0), (40, -2.2, 1.1), (11, 0.0, 0.0)])
def test_simulated_delays_are_found(spokes, x, y):
    nominal = radial(spokes, 2 * N, N)
    actual = late(nominal, x, y)
    found, error = estimated_delays(samples(actual.reshape(-1, 2), COILS, N).reshape(COILS, spokes, -1), nominal)
    np.testing.assert_allclose(found, np.diag([x, y]), atol=2e-3)
    assert error < 5e-3
    np.testing.assert_allclose(delayed(nominal, np.diag([x, y])), actual, atol=1e-12)


def test_coupled_delays_of_an_oblique_slice_are_found_in_noise():
    nominal, matrix = radial(37, 2 * N, N), np.array([[0.8, 0.3], [0.3, -0.5]])
    actual = delayed(nominal, matrix)
    k = samples(actual.reshape(-1, 2), COILS, N).reshape(COILS, 37, -1)
    rng = np.random.default_rng(0)
    noise = (rng.normal(size=k.shape) + 1j * rng.normal(size=k.shape)) * np.abs(k).max() / 200
    found, error = estimated_delays(k + noise, nominal)
    np.testing.assert_allclose(found, matrix, atol=0.05)
    np.testing.assert_array_equal(found, found.T)
    assert 0 < error < 0.5


def test_what_has_no_delays_is_refused():
    with pytest.raises(ValueError, match="straight, evenly sampled spokes"):
        delayed(spiral(5, 40, N), np.eye(2))
    with pytest.raises(ValueError, match="straight, evenly sampled spokes"):
        delayed(radial(5, 40, N) + 1, np.eye(2))
    with pytest.raises(ValueError, match="two samples or more"):
        delayed(radial(5, 40, N)[:, :1], np.eye(2))
    with pytest.raises(ValueError, match="too few spokes cross"):
        estimated_delays(np.ones((1, 3, 40), complex), np.repeat(radial(1, 40, N), 3, axis=0))
