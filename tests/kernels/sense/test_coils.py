"""Prewhitening, compression and sensitivities against the known coils of synthetic data."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.sense import centre_images, compression, covariance, density, mixed, sensitivities, whitening
from kernels.sense.arrays import centred_fft
from kernels.sense.calibration import refined
from kernels.sense.sensitivities import _local_correlation
from tests.kernels.sense.phantom import coil_maps, image, radial, samples


def noise(coils, count, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(coils, count)) + 1j * rng.normal(size=(coils, count))) / np.sqrt(2)


def mixture(coils, seed=1):
    rng = np.random.default_rng(seed)
    return np.eye(coils) * 2 + rng.normal(size=(coils, coils)) * 0.4 + 1j * rng.normal(size=(coils, coils)) * 0.4


@pytest.mark.parametrize("coils", [1, 2, 7])
def test_whitened_noise_is_white(coils):
    matrix = mixture(coils)
    correlated = matrix @ noise(coils, 60_000)
    psi = covariance(correlated)
    np.testing.assert_allclose(psi, matrix @ matrix.conj().T, atol=0.05 * np.abs(psi).max())
    white = whitening(psi)
    assert np.allclose(white, np.tril(white))
    np.testing.assert_allclose(white @ psi @ white.conj().T, np.eye(coils), atol=1e-12)
    again = covariance(mixed(correlated.astype(np.complex64), white))
    np.testing.assert_allclose(again, np.eye(coils), atol=1e-5)


def test_the_mean_of_the_noise_does_not_count():
    np.testing.assert_allclose(covariance(noise(3, 1000) + 5), covariance(noise(3, 1000)), atol=1e-12)


@pytest.mark.parametrize(
    ("samples_", "message"),
    [
        (np.zeros((4, 4), complex), "more samples than coils"),
        (np.zeros(9, complex), "more samples than coils"),
        (np.array([[1.0, np.nan, 2.0]], complex), "not finite"),
    ],
)
def test_noise_that_tells_nothing_is_refused(samples_, message):
    with pytest.raises(ValueError, match=message):
        covariance(samples_)


def test_a_dead_channel_is_refused():
    dead = noise(4, 100)
    dead[2] = 0
    twins = noise(4, 100)
    twins[3] = twins[1]
    for each in (dead, twins):
        with pytest.raises(ValueError, match="singular"):
            whitening(covariance(each))


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_compression_is_the_singular_value_decomposition(channels):
    data = (mixture(6, 7) @ np.diag([5, 3, 2, 1, 0.3, 0.1]) @ noise(6, 500, 4)).astype(np.complex64)
    matrix, share = compression(data.reshape(6, 20, 25), channels)
    _, values, _ = np.linalg.svd(data.astype(np.complex128), full_matrices=False)
    assert share == pytest.approx((values[:channels] ** 2).sum() / (values**2).sum(), abs=1e-5)
    np.testing.assert_allclose(matrix @ matrix.conj().T, np.eye(channels), atol=1e-10)
    virtual = mixed(data, matrix)
    assert virtual.dtype == np.complex64
    np.testing.assert_allclose(np.linalg.norm(virtual, axis=1), values[:channels], rtol=1e-4)
    back = matrix.conj().T @ virtual
    np.testing.assert_allclose(np.linalg.norm(data - back), np.sqrt((values[channels:] ** 2).sum()), atol=1e-2)
    with pytest.raises(ValueError, match="choose 1 to 6"):
        compression(data, 7)
    assert compression(np.zeros_like(data), 2)[1] == 1.0


@pytest.mark.parametrize("n", [8, 9, 15])
def test_centred_fft_is_the_definition(n):
    rng = np.random.default_rng(n)
    values = (rng.normal(size=(2, n, n)) + 1j * rng.normal(size=(2, n, n))).astype(np.complex64)
    index = np.arange(n) - n // 2
    matrix = np.exp(-2j * np.pi * np.outer(index, index) / n)
    expected = np.einsum("kx,cxy,ly->ckl", matrix, values.astype(np.complex128), matrix)
    np.testing.assert_allclose(centred_fft(values, (1, 2)), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("coarse", "fine"), [(16, 64), (17, 64), (16, 63), (20, 20)])
def test_refining_keeps_the_middle_and_smooth_values(coarse, fine):
    def wave(n):
        r = (np.arange(n) - n // 2) / n
        return (np.cos(2 * np.pi * r)[:, None] * np.exp(1j * np.pi * r)[None, :]).astype(np.complex64)

    found = refined(wave(coarse)[None], (fine, fine))[0]
    inside = slice(2 * fine // coarse, -2 * fine // coarse)  # edges repeat: there the wave is not continued
    np.testing.assert_allclose(found[inside, inside], wave(fine)[inside, inside], atol=6e-3)
    assert found[fine // 2, fine // 2] == pytest.approx(1, abs=1e-6)


@pytest.fixture(scope="module")
def scan():
    n, coils = 64, 8
    points = radial(101, 128, n)
    flat = points.reshape(-1, 2)
    return n, coils, flat, samples(flat, coils, n).astype(np.complex64), density.pipe_menon(flat, (n, n))


@pytest.mark.parametrize("method", ["walsh", "espirit"])
def test_sensitivities_are_those_of_the_coils(scan, method):
    """The angle between estimated and true coil vectors; each pixel's factor is undetermined."""
    n, coils, points, data, weights = scan
    centre = centre_images(data, points, weights, (n, n), width=24, taper=method == "walsh")
    maps = getattr(sensitivities, method)(centre, (n, n))
    assert maps.shape == (coils, n, n)
    assert maps.dtype == np.complex64
    truth = coil_maps(coils, n)
    truth /= np.linalg.norm(truth, axis=0)
    inside = image(n) > 0.3
    size = np.linalg.norm(maps, axis=0)
    np.testing.assert_allclose(size[inside], 1, atol=1e-5)
    assert (np.isclose(size, 1, atol=1e-4) | (size == 0)).all()
    match = np.abs((maps.conj() * truth).sum(axis=0))[inside]
    angle = np.sqrt(np.maximum(1 - match**2, 0))
    assert np.median(angle) < 0.02
    assert np.percentile(angle, 95) < 0.08


@pytest.mark.parametrize("shape", [(9, 7), (5, 4, 6), (1, 8)])
@pytest.mark.parametrize("block", [1, 3, 7])
def test_local_correlation_is_its_definition(shape, block):
    rng = np.random.default_rng(0)
    images = (rng.normal(size=(3, *shape)) + 1j * rng.normal(size=(3, *shape))).astype(np.complex64)
    rows = slice(0, shape[0]) if shape[0] < 3 else slice(1, shape[0] - 1)
    found = _local_correlation(images, rows, block)
    reach = block // 2
    for place in np.ndindex(found.shape[:-2]):
        at = (place[0] + rows.start, *place[1:])
        box = tuple(slice(max(index - reach, 0), index + reach + 1) for index in at)
        near = images[(slice(None), *box)].reshape(3, -1).astype(np.complex128)
        np.testing.assert_allclose(found[place], near @ near.conj().T, rtol=1e-12, atol=1e-12)


def test_maps_do_not_depend_on_a_common_phase(scan):
    n, _, points, data, weights = scan
    found = [
        sensitivities.walsh(centre_images(each, points, weights, (n, n), width=16, taper=True), (n, n))
        for each in (data, (data * np.exp(1.3j)).astype(np.complex64))
    ]
    inside = image(n) > 0.3
    np.testing.assert_allclose(found[0][:, inside], found[1][:, inside], atol=2e-3)


def test_three_dimensional_maps():
    n = 16
    rng = np.random.default_rng(0)
    points = rng.uniform(-8, 8, (6000, 3))
    r = (np.arange(n) - n // 2) / n
    true = np.stack(
        [each + np.zeros((n, n, n)) for each in (1 + 0.5j * r[:, None, None], np.exp(1j * r)[:, None] * (1 + r), 1.0)]
    )
    blob = np.exp(-((r[:, None, None] / 0.3) ** 2) - (r[:, None] / 0.25) ** 2 - (r / 0.3) ** 2)
    from kernels.nufft import Nufft

    data = Nufft(points, (n, n, n), eps=1e-5).forward((true * blob).astype(np.complex64))
    weights = density.even(len(points), points)
    truth = true / np.linalg.norm(true, axis=0)
    for method, width in (("walsh", 12), ("espirit", 12)):
        centre = centre_images(data, points, weights, (n, n, n), width=width, taper=method == "walsh")
        options = {} if method == "walsh" else {"kernel": 4}
        maps = getattr(sensitivities, method)(centre, (n, n, n), **options)
        match = np.abs((maps.conj() * truth).sum(axis=0))[blob > 0.3]
        assert np.median(match) > 0.995, method


def test_a_centre_without_samples_is_refused(scan):
    n, _, points, data, weights = scan
    outside = np.linalg.norm(points, axis=1) > 20
    with pytest.raises(ValueError, match="no sample lies within"):
        centre_images(data[:, outside], points[outside], weights[outside], (n, n), width=24, taper=True)


def test_no_signal_gives_no_maps(scan):
    n, _, points, data, weights = scan
    centre = centre_images(np.zeros_like(data), points, weights, (n, n), width=24, taper=True)
    assert (sensitivities.walsh(centre, (n, n)) == 0).all()


def test_given_maps_are_scaled():
    maps = np.array([[[3.0, 0.0]], [[4.0, 0.0]]], np.complex64)
    np.testing.assert_allclose(sensitivities.given(maps), [[[0.6, 0]], [[0.8, 0]]], rtol=1e-6)
    for wrong in (maps * np.nan, maps * 0):
        with pytest.raises(ValueError, match="sensitivities must be finite"):
            sensitivities.given(wrong)
