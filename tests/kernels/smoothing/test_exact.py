"""Exact Gaussians of uint8: their weights, and their distance from the real Gaussian."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from kernels.smoothing import gaussian_filter
from kernels.smoothing.axis_rounding import NO_ROUNDING, axis_roundings
from kernels.smoothing.window import EXACT_RADIUS, Window, gaussian_windows

UINT8 = np.dtype(np.uint8)
SIGMAS = (*np.geomspace(0.1, 1000, 120), 0.3831, 0.6427, 0.7612, *range(1, 9))
# How far the errors of the weights can move a result along one axis, and a whole filter together with its roundings.
MOST_MOVED = {"first": 0.08, "later": 0.1}
MOST_WRONG = {1: 0.58, 2: 0.81, 3: 1.04}  # by the number of axes


def windows_of(sigmas: tuple[float, ...], radii: tuple[int, ...], dtype: np.dtype = UINT8) -> list[Window]:
    axes = tuple(range(len(sigmas)))
    return gaussian_windows(axes, sigmas, ("reflect",) * len(axes), dtype, radii=radii)


def half(window: Window) -> np.ndarray:
    return np.array(window.half_weights)


def real(sigma: float, radius: int) -> np.ndarray:
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return np.asarray(weights / weights.sum())


def errors(window: Window, sigma: float) -> np.ndarray:
    weights = half(window)
    return np.concatenate((weights[:0:-1], weights)) - real(sigma, window.after)


@cache
def both_axes() -> list[tuple[float, Window, Window]]:
    """Every reach at every sigma: as the first filtered axis, and as a later one."""
    return [(sigma, *windows_of((sigma,) * 2, (radius,) * 2)) for sigma in SIGMAS for radius in range(1, 33)]


def test_weights_are_exact_in_float16_and_sum_to_one() -> None:
    for sigma, first, later in both_axes():
        for window, one in ((first, 1 << 16), (later, 1 << 15)):
            weights, story = half(window), f"sigma {sigma}, radius {window.after}, of {one}"
            assert window.exact, story
            assert weights[0] + 2 * weights[1:].sum() == 1, story
            assert (weights >= 0).all(), story
            assert_array_equal(weights.astype(np.float16), weights, err_msg=story)
            assert_array_equal(np.rint(weights * one), weights * one, err_msg=story)


def test_weights_do_not_grow_with_distance() -> None:
    for sigma, *windows in both_axes():
        for window in windows:
            weights, story = half(window), f"sigma {sigma}, radius {window.after}"
            assert (np.diff(weights[1:]) <= 0).all(), story
            step = max(2.0**-15, float(np.spacing(weights[1].astype(np.float16))))
            assert weights[0] >= weights[1] - step, story


def test_weights_move_a_result_by_little() -> None:
    for sigma, first, later in both_axes():
        for window, most in ((first, MOST_MOVED["first"]), (later, MOST_MOVED["later"])):
            moved = 127.5 * np.abs(errors(window, sigma)).sum()
            assert moved <= most, f"sigma {sigma}, radius {window.after}"
    for axes, wrong in MOST_WRONG.items():
        assert 0.5 + 0.125 * (axes - 1) + MOST_MOVED["first"] + MOST_MOVED["later"] * (axes - 1) <= wrong + 1e-9


@pytest.mark.parametrize(
    ("sigmas", "radii"),
    [
        ((1000.0,), (32,)),
        ((1000.0,) * 2, (29,) * 2),
        ((0.6427, 8.0), (6, 32)),
        ((2.0,) * 2, (8,) * 2),
        ((8.0, 20.0), (32, 32)),
        ((0.7612,) * 3, (4,) * 3),
        ((1000.0,) * 3, (5,) * 3),
    ],
)
def test_images_made_to_be_worst_stay_within_the_bound(sigmas: tuple[float, ...], radii: tuple[int, ...]) -> None:
    """Bright where a weight is too large, dark elsewhere, and the reverse; with increasing noise, so that sums round
    either way."""
    windows = windows_of(sigmas, radii)
    exact, wrong = np.ones(1), np.ones(1)
    for window, sigma in zip(windows, sigmas, strict=True):
        exact = np.multiply.outer(exact, real(sigma, window.after))
        wrong = np.multiply.outer(wrong, errors(window, sigma) + real(sigma, window.after))
    bright = (wrong > exact)[0]
    rng = np.random.default_rng(1)
    worst = 0.0
    for trial in range(60):
        image = np.where(bright == bool(trial % 2), 255, 0)
        image = np.clip(image + rng.integers(-trial, trial + 1, image.shape), 0, 255).astype(np.uint8)
        result = gaussian_filter(image, sigmas, radius=radii, mode="valid").item()
        worst = max(worst, abs(result - float((exact[0] * image).sum())))
    assert 0.3 < worst <= MOST_WRONG[len(sigmas)]


@pytest.mark.parametrize("radii", [(33,), (3, 33), (40, 1)])
def test_reaches_too_far_and_other_types_are_as_they_were(radii: tuple[int, ...]) -> None:
    for window in windows_of((3.0,) * len(radii), radii):
        assert not window.exact
        assert_array_equal(half(window) * 2**24 % 1, 0)
    assert not any(window.exact for window in windows_of((3.0,), (5,), np.dtype(np.uint16)))


def test_the_first_axis_is_the_first_that_is_filtered() -> None:
    lone = half(windows_of((2.0,), (8,))[0])
    identity, alone = windows_of((0.1, 2.0), (0, 8))
    assert identity.taps == 1
    assert_array_equal(half(alone), lone)
    turned = gaussian_windows((1, 0), (2.0, 2.0), ("reflect",) * 2, UINT8)
    assert_array_equal(half(turned[1]), lone)
    assert (half(turned[0]) * 2**15 % 1 == 0).all()
    assert (lone * 2**15 % 1 != 0).any()


def test_axes_round_to_quarters_then_to_wholes_with_ties_to_even() -> None:
    sums = np.arange(0, 255 * 64 + 1, dtype=np.float32) / 64
    first, second, last = axis_roundings(windows_of((1.0,) * 3, (4,) * 3), whole=True)
    centred = np.rint(sums.astype(np.float64) * 4) / 4 - 128
    assert_array_equal([first.of(x) for x in sums], centred)
    assert_array_equal([second.of(x) for x in sums - np.float32(128)], centred)
    assert_array_equal([last.of(x) for x in sums - np.float32(128)], np.rint(sums))
    (alone,) = axis_roundings(windows_of((1.0,), (4,)), whole=True)
    assert_array_equal([alone.of(x) for x in sums], np.rint(sums))


def test_other_sums_are_not_rounded() -> None:
    windows = windows_of((1.0,) * 2, (4,) * 2, np.dtype(np.float32))
    assert axis_roundings(windows, whole=False) == [NO_ROUNDING] * 2
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3.7], np.float32)
    kept = np.array([NO_ROUNDING.of(value) for value in values])
    assert_array_equal(kept.view(np.uint32), values.view(np.uint32))


def test_a_result_rounds_once_where_one_axis_is_filtered() -> None:
    """127.375 … 127.5 rounded to quarters first would come out one too large, or one too small."""
    rng = np.random.default_rng(2)
    weights = half(windows_of((1.7,), (EXACT_RADIUS,))[0])
    whole = np.concatenate((weights[:0:-1], weights)) * 2**16
    for image in rng.integers(0, 256, (400, whole.size), dtype=np.uint8):
        exact = int((whole.astype(np.int64) * image).sum())
        below, rest = divmod(exact, 1 << 16)
        right = below + (rest > 1 << 15 or (rest == 1 << 15 and below % 2 == 1))
        assert gaussian_filter(image, 1.7, radius=EXACT_RADIUS, mode="valid").item() == right
