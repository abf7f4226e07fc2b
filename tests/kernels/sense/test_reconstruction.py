"""Gridding, CG-SENSE and off-resonance: laws, closed forms, and an analytic phantom recovered."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.sense import (
    OffResonance,
    Segments,
    centre_images,
    cg_sense,
    coil_groups,
    density,
    gridded,
    sense_normal,
    sensitivities,
    toeplitz_normal,
)
from kernels.sense.reconstruction import Transform
from tests.kernels.sense.phantom import (
    coil_maps,
    definition,
    image,
    normalised_error,
    radial,
    random_complex,
    samples,
    spiral,
)

# Operators


@pytest.fixture(scope="module")
def setting():
    n, coils = 32, 5
    points = radial(21, 64, n).reshape(-1, 2)
    maps = coil_maps(coils, n).astype(np.complex64)
    maps /= np.linalg.norm(maps, axis=0)
    return n, points, maps, density.pipe_menon(points, (n, n))


def test_both_normal_operators_are_the_definition(setting):
    n, points, maps, weights = setting
    picture = random_complex((n, n), 6)
    sampled = definition(maps * picture.astype(np.complex128), points) * weights
    back = np.stack([_adjoint(each, points, n) for each in sampled])
    expected = (maps.conj() * back).sum(axis=0)
    transform = Nufft(points, (n, n), eps=1e-5)
    toeplitz = Toeplitz(toeplitz_kernel(points, weights, (n, n), 1e-5), (n, n))
    for normal in (sense_normal(transform, maps, weights), toeplitz_normal(toeplitz, maps)):
        assert normalised_error(normal(picture), expected) < 2e-5
    assert (
        normalised_error(gridded(transform, sampled.astype(np.complex64), maps, np.ones_like(weights)), expected) < 2e-5
    )


def _adjoint(values, points, n):
    r = np.arange(n) - n // 2
    x, y = (np.exp(2j * np.pi * np.outer(points[:, axis], r) / n) for axis in (0, 1))
    return np.einsum("m,mx,my->xy", values, x, y, optimize=True)


def test_coils_in_groups_are_all_coils(setting, monkeypatch):
    n, points, maps, weights = setting
    picture, values = random_complex((n, n), 6), random_complex((len(maps), len(points)), 7)
    transform = Nufft(points, (n, n), eps=1e-5)
    whole = gridded(transform, values, maps, weights), sense_normal(transform, maps, weights)(picture)
    monkeypatch.setattr(coil_groups, "GROUP_VALUES", 2 * n * n)
    parts = gridded(transform, values, maps, weights), sense_normal(transform, maps, weights)(picture)
    for one, other in zip(whole, parts, strict=True):
        assert normalised_error(other, one) < 1e-5


def test_the_normal_operators_diagonal_is_one(setting):
    """The damping is relative because the weights, and the squares of the maps, add up to one."""
    n, points, maps, weights = setting
    toeplitz = Toeplitz(toeplitz_kernel(points, weights, (n, n), 1e-5), (n, n))
    for place in ((0, 0), (16, 16), (31, 5)):
        pixel = np.zeros((n, n), np.complex64)
        pixel[place] = 1
        assert toeplitz.apply_sense(pixel, maps)[place] == pytest.approx(1, abs=1e-4)


# Off resonance


def field(n):
    r = (np.arange(n) - n // 2) / n
    return 60 * r[:, None] + 90 * np.exp(-((r[:, None] - 0.1) ** 2 + r**2) / 0.03)


@pytest.fixture(scope="module")
def slow_spiral():
    n = 32
    points = spiral(4, 300, n)
    times = np.tile(np.arange(300) * 40e-6, 4)  # 12 ms: more than one turn at 100 Hz
    return n, points.reshape(-1, 2), times


def off_definition(picture, points, times, hertz):
    n = len(picture)
    r = np.arange(n) - n // 2
    found = np.empty(len(points), np.complex128)
    for m, ((kx, ky), t) in enumerate(zip(points, times, strict=True)):
        turned = picture * np.exp(-2j * np.pi * hertz * t)
        found[m] = np.exp(-2j * np.pi * kx * r / n) @ turned @ np.exp(-2j * np.pi * ky * r / n)
    return found


def test_segments_are_the_definition_and_fewer_are_worse(slow_spiral):
    n, points, times = slow_spiral
    hertz, picture = field(n), random_complex((n, n), 8)
    expected = off_definition(picture.astype(np.complex128), points, times, hertz)
    transform = Nufft(points, (n, n), eps=1e-6)
    errors = []
    for count in (2, 4, None):
        segments = Segments(hertz, times, segments=count)
        found = OffResonance(transform, hertz, segments).forward(picture)
        errors.append(normalised_error(found, expected))
        assert errors[-1] < 3 * segments.error + 1e-5
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 2e-3


def test_off_resonance_is_adjoint_and_linear(slow_spiral):
    n, points, times = slow_spiral
    corrected: Transform = OffResonance(Nufft(points, (n, n), eps=1e-6), field(n), Segments(field(n), times))
    one, two = random_complex((n, n), 1), random_complex((n, n), 2)
    values = random_complex(len(points), 3)
    left = np.vdot(values, corrected.forward(one))
    right = np.vdot(corrected.adjoint(values), one)
    assert abs(left - right) < 1e-4 * np.linalg.norm(values) * np.linalg.norm(corrected.forward(one))
    both = corrected.forward(one + 2j * two)
    assert normalised_error(both, corrected.forward(one) + 2j * corrected.forward(two)) < 1e-5


def test_correction_takes_the_blur_away(slow_spiral):
    n, points, times = slow_spiral
    hertz, truth = field(n), image(n)
    data = off_definition(truth, points, times, hertz).astype(np.complex64)[None]
    maps, weights = np.ones((1, n, n), np.complex64), density.pipe_menon(points, (n, n))
    transform = Nufft(points, (n, n), eps=1e-5)
    corrected = OffResonance(transform, hertz, Segments(hertz, times))
    errors = []
    for each in (transform, corrected):
        right = gridded(each, data, maps, weights)
        found, _ = cg_sense(sense_normal(each, maps, weights), right, iterations=15)
        errors.append(normalised_error(found, truth))
    assert errors[1] < 0.1
    assert errors[0] > 0.3


def test_a_constant_field_is_one_segment():
    segments = Segments(np.full((4, 4), 35.0), np.linspace(0, 0.01, 7))
    assert len(segments.times_s) == 1
    np.testing.assert_allclose(
        segments.shares[0] * np.exp(-2j * np.pi * 35 * segments.times_s[0]),
        np.exp(-2j * np.pi * 35 * np.linspace(0, 0.01, 7)),
        atol=1e-6,
    )


def test_fields_that_cannot_be_corrected_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        Segments(np.array([1.0, np.nan]), np.zeros(3))
    with pytest.raises(ValueError, match="too often to correct"):
        Segments(np.linspace(-5e4, 5e4, 500), np.linspace(0, 0.05, 200))


# The analytic phantom


def recovered(n, spokes, *, noise=0.0, iterations=20, coils=8, known_maps=True):
    """The image by CG-SENSE from closed-form k-space, and the truth: the phantom times the size of its coils."""
    points = radial(spokes, 2 * n, n).reshape(-1, 2)
    data = samples(points, coils, n)
    rng = np.random.default_rng(9)
    data = data + noise * (rng.normal(size=data.shape) + 1j * rng.normal(size=data.shape))
    data = data.astype(np.complex64)
    weights = density.pipe_menon(points, (n, n))
    true = coil_maps(coils, n)
    size = np.linalg.norm(true, axis=0)
    if known_maps:
        maps = (true / size).astype(np.complex64)
    else:
        maps = sensitivities.walsh(centre_images(data, points, weights, (n, n), width=24, taper=True), (n, n))
    transform = Nufft(points, (n, n), eps=1e-4)
    normal = toeplitz_normal(Toeplitz(toeplitz_kernel(points, weights, (n, n), 1e-4), (n, n)), maps)
    right = gridded(transform, data, maps, weights)
    found, _ = cg_sense(normal, right, iterations=iterations)
    return found, right, image(n) * size


def test_the_phantom_is_recovered_better_the_finer_the_pixels():
    """Edges are not resolved: the squared error falls with the pixel's width, the error as its root."""
    errors = [normalised_error(*recovered(n, 2 * n)[::2]) for n in (24, 48, 96)]
    assert errors[0] < 0.19
    assert errors[1] < 0.14
    assert errors[2] < 0.1
    for coarse, fine in pairwise(errors):
        assert fine < 0.82 * coarse  # √½ = 0.71, and the weighting of the corners of k-space


def test_cg_takes_the_streaks_of_undersampling_away():
    found, right, truth = recovered(64, 20)
    scale = np.vdot(right, truth) / np.vdot(right, right)
    assert normalised_error(found, truth) < 0.6 * normalised_error(scale * right, truth)


def test_estimated_maps_do_as_well_as_known_ones_in_size():
    found, _, truth = recovered(64, 100, known_maps=False)
    assert normalised_error(np.abs(found), truth) < 0.13


def test_noise_comes_through_in_proportion():
    """Nearly: the steps of conjugate gradients depend on the data."""
    quiet = recovered(32, 50)[0]
    spread = [np.linalg.norm(recovered(32, 50, noise=each)[0] - quiet) for each in (0.5, 1.0, 2.0)]
    assert spread[1] == pytest.approx(2 * spread[0], rel=0.1)
    assert spread[2] == pytest.approx(4 * spread[0], rel=0.15)
