"""Laws of the Gaussian filter, beyond the cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import ndimage

from kernels.smoothing import BORDER_MODES, DTYPES, cpu, gaussian_filter
from kernels.smoothing.window import gaussian_radius, gaussian_windows
from tests.kernels.smoothing.noise import noise

INTEGERS = [dtype for dtype in DTYPES if np.dtype(dtype).kind != "f"]
FLOATS = [dtype for dtype in DTYPES if np.dtype(dtype).kind == "f"]
sides = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, height=sides, width=sides, radius=st.integers(1, 12), data=st.data())
def test_a_strip_with_its_halo_equals_the_whole(dtype, seed, height, width, radius, data) -> None:
    image = noise(seed, (height, width, 3), dtype)
    whole = gaussian_filter(image, 2.0, radius=radius, mode="nearest", channel_axis=-1)
    first = data.draw(st.integers(0, height - 1))
    last = data.draw(st.integers(first + 1, height))
    extended = np.pad(image, [(radius, radius), (0, 0), (0, 0)], "edge")
    strip = gaussian_filter(
        extended[first : last + 2 * radius], 2.0, radius=radius, mode=("valid", "nearest"), channel_axis=-1
    )
    assert_array_equal(strip, whole[first:last])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("shape", [(500, 701), (1201, 97, 3), (3, 200_003), (300_001,), (7, 90, 501)])
def test_workers_do_not_change_the_bits(dtype: str, shape: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setattr(cpu, "MIN_SAMPLES_PER_WORKER", 1000)
    image = noise(1, shape, dtype)
    channel_axis = -1 if shape[-1] == 3 else None
    alone = gaussian_filter(image, 1.5, channel_axis=channel_axis, workers=1)
    for workers in (2, 3, 5):
        assert_array_equal(gaussian_filter(image, 1.5, channel_axis=channel_axis, workers=workers), alone)


@pytest.mark.parametrize("dtype", INTEGERS)
@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 1), sigma=st.floats(0.05, 30), height=sides, width=sides)
def test_a_constant_stays_constant(dtype, share, sigma, height, width) -> None:
    held = np.iinfo(dtype)
    image = np.full((height, width), round(held.min + share * (held.max - held.min)), dtype)
    assert_array_equal(gaussian_filter(image, sigma), image)


@settings(max_examples=100, deadline=None)
@given(sigma=st.floats(0.05, 1000), radius=st.integers(0, 300))
def test_weights_of_integer_images_are_exact_and_sum_to_one(sigma: float, radius: int) -> None:
    (window,) = gaussian_windows((0,), (sigma,), ("reflect",), np.dtype(np.uint16), radii=(radius,))
    half = window.half_weights
    assert half is not None
    assert half[0] + 2 * sum(half[1:]) == 1
    assert all(weight == float(np.float32(weight)) and weight >= 0 for weight in half)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("radius", [1, 4, 7])
def test_nan_and_infinity_stay_in_their_windows(dtype: str, bad: float, radius: int) -> None:
    image = noise(2, (41, 43), dtype)
    spoilt = image.copy()
    spoilt[20, 17] = bad
    clean, got = gaussian_filter(image, 2.0, radius=radius), gaussian_filter(spoilt, 2.0, radius=radius)
    touched = np.zeros(image.shape, bool)
    touched[20 - radius : 21 + radius, 17 - radius : 18 + radius] = True
    assert_array_equal(got[~touched], clean[~touched])
    assert_array_equal(got[touched], np.full(touched.sum(), bad, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", BORDER_MODES)
@pytest.mark.parametrize("options", [{}, {"truncate": 2.5}, {"radius": 6}])
def test_agrees_with_scipy(dtype: str, mode: str, options: dict) -> None:
    image = noise(3, (61, 47), dtype)
    ours = gaussian_filter(image, (1.5, 2.0), mode=mode, cval=2, **options).astype(np.float64)
    theirs = ndimage.gaussian_filter(image.astype(np.float64), (1.5, 2.0), mode=mode, cval=2, **options)
    if np.dtype(dtype).kind == "f":
        assert_allclose(ours, theirs, rtol=1e-5 if dtype == "float32" else 1e-11, atol=1e-6)
    else:
        assert np.abs(ours - theirs).max() <= 0.6


@pytest.mark.parametrize("dtype", FLOATS)
def test_omitting_nan_weighs_the_rest(dtype: str) -> None:
    image = noise(4, (19, 23), dtype)
    image[np.random.default_rng(5).random(image.shape) < 0.3] = np.nan
    image[:12, :12] = np.nan
    counted = ~np.isnan(image)
    got = gaussian_filter(image, 1.0, nan_policy="omit")
    exact = [ndimage.gaussian_filter(np.where(counted, x, 0).astype(float), 1.0) for x in (image, 1)]
    weighted = np.divide(exact[0], exact[1], out=np.full(image.shape, np.nan), where=exact[1] > 0)
    assert_allclose(got, weighted, rtol=1e-4, atol=1e-5)
    assert np.isnan(got).any()


def test_the_default_reach_is_scipys() -> None:
    assert [gaussian_radius(sigma) for sigma in (0.1, 1, 2.13, 31.7)] == [0, 4, 9, 127]


def test_a_sigma_too_small_to_reach_a_neighbour_changes_nothing() -> None:
    image = noise(6, (9, 11), "uint16")
    assert_array_equal(gaussian_filter(image, 0.1), image)
