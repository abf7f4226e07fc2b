"""Density compensation: closed forms, its defining law, and its errors."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.sense import density
from tests.kernels.sense.phantom import radial, spiral


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ramp_weights_are_the_areas_of_rings(dtype):
    """Each sample's share of the plane between circles half a step apart, by the closed form of their areas."""
    spokes, count, n = 8, 32, 32
    points = radial(spokes, count, n)
    weights = density.ramp(points.astype(dtype))
    radius = np.abs((np.arange(count) - count // 2) * (n / count))
    step = n / count
    area = np.where(
        radius > 0, np.pi * ((radius + step / 2) ** 2 - np.maximum(radius - step / 2, 0) ** 2) / (2 * spokes), 0
    )
    area[radius == 0] = np.pi * (step / 2) ** 2 / spokes
    expected = np.broadcast_to(area / (area.sum() * spokes), weights.shape)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected, rtol=2e-6)


def test_ramp_in_three_dimensions_are_the_volumes_of_shells():
    rng = np.random.default_rng(2)
    directions = rng.normal(size=(50, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    radius = np.arange(-8, 8.0)
    weights = density.ramp(radius[None, :, None] * directions[:, None, :])
    outer, inner = np.abs(radius) + 0.5, np.maximum(np.abs(radius) - 0.5, 0)
    volume = 4 / 3 * np.pi * (outer**3 - inner**3) / 2
    volume[radius == 0] *= 2  # the ball is shared by the spokes alone, not by two halves of each
    expected = volume / volume.sum() / 50
    # k² is the shell's volume up to step²/12, the closed form at its centre.
    np.testing.assert_allclose(weights, np.broadcast_to(expected, weights.shape), rtol=0.09, atol=expected.max() * 1e-3)


@pytest.mark.parametrize(
    "points",
    [spiral(8, 64, 32), np.zeros((4, 8, 4)), np.zeros((4, 1, 2)), radial(8, 32, 32) + 3.0],
    ids=["spiral", "four columns", "one sample", "beside the centre"],
)
def test_ramp_refuses_what_is_no_spoke_through_the_centre(points):
    with pytest.raises(ValueError, match="ramp weights take"):
        density.ramp(points)


@pytest.mark.parametrize("make", [lambda: radial(61, 64, 32), lambda: spiral(16, 160, 32)], ids=["radial", "spiral"])
def test_pipe_menon_makes_the_sampling_even(make):
    """The defining law: the weights convolved with the kernel are constant inside the range."""
    points = make().reshape(-1, 2)
    n = 32
    weights = density.pipe_menon(points, (n, n)).astype(np.float64)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    # The kernel by its definition: a Gaussian window's transform, over enough pixels to be exact here.
    wide = 2 * n
    r = np.arange(wide) - wide // 2
    window = np.exp(-3 * (r / (wide / 2)) ** 2)

    def kernel(apart):
        return (np.exp(2j * np.pi * np.outer(apart, r) / wide) @ window).real / window.sum()

    inside = np.linalg.norm(points, axis=1) < 0.35 * n
    chosen = np.random.default_rng(0).choice(np.flatnonzero(inside), 12, replace=False)
    sums = [
        (weights * kernel(points[at, 0] - points[:, 0]) * kernel(points[at, 1] - points[:, 1])).sum() for at in chosen
    ]
    assert np.std(sums) / np.mean(sums) < 0.02


def test_pipe_menon_of_radial_spokes_is_a_ramp_where_they_are_dense():
    points = radial(101, 64, 32)
    found = density.pipe_menon(points.reshape(-1, 2), (32, 32)).reshape(points.shape[:2])
    expected = density.ramp(points)
    radius = np.linalg.norm(points, axis=2)
    inside = (radius > 2) & (radius < 12)
    ratio = found[inside] / expected[inside]
    assert np.std(ratio) / np.mean(ratio) < 0.12


def test_edges_of_k_space_are_no_neighbours():
    """Samples at +n/2 and −n/2 fold onto each other in a transform of n pixels; this must not affect their weights."""
    line = np.arange(-16, 17.0)
    points = np.stack(np.meshgrid(line, line, indexing="ij"), axis=-1).reshape(-1, 2)
    weights = density.pipe_menon(points, (32, 32)).reshape(33, 33)
    # On a grid all inner points are alike, and the rim, without neighbours beyond it, has more weight.
    assert np.ptp(weights[4:-4, 4:-4]) < 0.1 * weights.mean()
    assert weights[0, 16] > 0.98 * weights[16, 16]


def test_three_dimensions():
    rng = np.random.default_rng(4)
    points = rng.uniform(-4, 4, (1500, 3))
    weights = density.pipe_menon(points, (8, 8, 8)).astype(np.float64)
    # Crowded samples count less: twice as many in a corner, half the weight each.
    crowded = np.concatenate([points, points[(points > 0).all(axis=1)] + 1e-9])
    again = density.pipe_menon(crowded, (8, 8, 8)).astype(np.float64)
    twins = np.flatnonzero((points > 1).all(axis=1))
    ratio = (again[twins] / again.sum()) / (weights[twins] / weights.sum())
    assert np.median(ratio) == pytest.approx(0.5, abs=0.05)


def test_given_weights():
    np.testing.assert_allclose(density.given(np.array([1.0, 3.0, 0.0])), [0.25, 0.75, 0])
    for wrong in ([1.0, np.nan], [1.0, -1.0], [0.0, 0.0], [np.inf, 1.0]):
        with pytest.raises(ValueError, match="density weights must be"):
            density.given(np.array(wrong))


def test_even():
    weights = density.even(7, np.zeros(1))
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, 1 / 7)
