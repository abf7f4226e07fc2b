"""Gaussians of 16-bit images in exact sums: what the sums rely on, their error, and every bit on the CPU."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from kernels.smoothing import MODES, cpu, gaussian_filter
from kernels.smoothing.cases import CONTENTS, Case
from kernels.smoothing.cpu.words import column_parameters
from kernels.smoothing.weights import WEIGHT_ONE
from kernels.smoothing.window import Window, gaussian_radius, gaussian_windows
from kernels.smoothing.words import (
    LEAST_LONGER,
    LEAST_RADIUS,
    MOST_RADIUS,
    MOST_WRONG,
    WordWeights,
    first_weights,
    halves,
    second_weights,
    sum_of_constant,
)

SIGMAS = (*np.geomspace(0.89, 1000, 60), 1.0, 2.0, 3.0, 4.0)
SHORTEST, FARTHEST = 1.125, 7.6  # sigmas whose default kernels reach 5 and 30
BOTH = 5.87  # the largest of both axes: from 5.875 on they are decimated
sigmas_of_windows = st.floats(1.0, FARTHEST)


def real(sigma: float, radius: int) -> np.ndarray:
    weights = np.exp(-0.5 * (np.arange(radius + 1) / sigma) ** 2)
    return np.asarray(weights / (weights[0] + 2 * weights[1:].sum()))


def over_all(half: np.ndarray) -> float:
    """The sum of a half's values over all taps."""
    return float(half[0] + 2 * half[1:].sum())


@cache
def accepted() -> list[tuple[str, tuple[float, int], tuple[float, int], tuple[tuple[float, ...], tuple[float, ...]]]]:
    """Gaussians (sigma, radius) down and across that are summed so, with their weights."""
    found = []
    for sigma in SIGMAS:
        for radius in range(LEAST_RADIUS, MOST_RADIUS + 1):
            short, longer = (float(sigma), radius), (float(sigma), max(radius, LEAST_LONGER))
            for down, across in {(short, longer), (longer, short)}:
                weights = halves(down, across)
                if weights is not None:
                    found.append((f"{down}, {across}", down, across, weights))
    return found


def windows_of(*sigmas: float, dtype: str = "uint16", **options: object) -> list[Window]:
    axes = tuple(range(len(sigmas)))
    return gaussian_windows(axes, sigmas, ("reflect",) * len(axes), np.dtype(dtype), **options)  # type: ignore[arg-type]


def in_words(windows: list[Window]) -> bool:
    assert len({window.words for window in windows}) == 1
    return windows[0].words


def test_every_factor_fits_and_every_sum_is_exact() -> None:
    assert len(accepted()) > 1000
    for story, *_, weights in accepted():
        first, second = first_weights(weights[0]), second_weights(weights[1])
        assert over_all(np.array(weights[0])) == over_all(np.array(weights[1])) == 1, story
        for each, half in zip((first, second), weights, strict=True):
            whole = 256 * each.upper + each.lower
            assert (whole / (WEIGHT_ONE << each.finer)).tolist() == list(half), story
            assert np.abs(np.concatenate((each.top, each.middle, each.lower)) + 0.5).max() < 128, "bytes: " + story
            # No factor of samples and their bytes is negative, so the largest sums are those of a constant.
            assert min(each.bias, whole.min(), each.upper.min(), each.top.min()) >= 0, story
        assert over_all(first.upper) * 65535 + over_all(first.lower) * 255 + first.bias < 1 << 32 + first.finer, story
        assert sum_of_constant(65535, first) < 1 << 23, story
        last = sum_of_constant(65535, first)
        largest = np.max([weighted(second, v) for v in (last, 128 * (last >> 7) - 1)], axis=0)
        assert over_all(largest) + second.bias < 1 << 32 + second.finer, story
        # Without the top byte, since weights finer than 2**-24 are shifted before it is added.
        assert over_all(second.top) * 127 < 1 << 16 + second.finer, story
        for each in (first, second):
            low, middle, top = (over_all(np.abs(part)) * 255 for part in (each.lower, each.middle, each.top))
            assert (middle + top) * 256 + low + middle + top + each.bias < 1 << 31, story


def test_sums_of_groups_on_a_cpu_fit() -> None:
    for story, *_, (_, across) in accepted():
        second = second_weights(across)
        _, _, groups, *_ = column_parameters(across)
        if not second.finer:
            assert groups.tolist() == [1, second.top.size], story
            continue
        pairs = np.abs(second.upper) * 32768 + np.abs(second.lower) * 255 + 254 * second.top
        for group, (begin, end) in enumerate(pairwise(groups.tolist())):
            centre = group == 0  # the first group has it, too
            assert 2 * pairs[begin:end].sum() + centre * pairs[0] <= (1 << 31) - 512, story
            assert 2 * 127 * second.top[begin:end].sum() + centre * 127 * second.top[0] < 1 << 16, story


def weighted(weights: WordWeights, v: int) -> np.ndarray:
    return np.asarray(weights.upper * (v >> 7) + weights.lower * (v >> 15) + 2 * weights.top * (v & 127))


def largest_error(down: tuple[float, int], across: tuple[float, int], weights: tuple[tuple[float, ...], ...]) -> float:
    """The last rounding, v, the weights, and what the sums leave out: at most half of a low byte's range."""
    first, second = first_weights(weights[0]), second_weights(weights[1])
    found = 0.5 + 1 / 256
    for half, (sigma, radius) in zip(weights, (down, across), strict=True):
        found += 65535 / 2 * over_all(np.abs(np.array(half) - real(sigma, radius)))
    found += over_all(np.abs(first.lower)) * 255 / 2 / (WEIGHT_ONE << first.finer)
    return float(
        found + over_all(np.abs(second.lower) + np.abs(second.middle)) * 255 / 2 / (WEIGHT_ONE << second.finer)
    )


def test_results_are_within_the_stated_error() -> None:
    assert MOST_WRONG == 0.6
    assert max(largest_error(*what) for _, *what in accepted()) <= MOST_WRONG
    others = [sigma for sigma in np.linspace(SHORTEST, BOTH, 1000) if not in_words(windows_of(sigma, sigma))]
    assert all(3.8 < sigma < 4.125 for sigma in others), "the largest that have no finer units"
    assert len(others) <= 3


@pytest.mark.parametrize("sigmas", [(1.2, 1.2), (2.2, 2.2), (4.0, 3.0), (5.8, 5.8), (7.4, 1.0)])
def test_images_made_to_be_worst_stay_within_the_bound(sigmas: tuple[float, float]) -> None:
    """Bright where a weight is too large, dark elsewhere, and the reverse; with increasing noise, so that sums round
    either way."""
    exact, wrong = np.ones(1), np.ones(1)
    for window, sigma in zip(windows_of(*sigmas), sigmas, strict=True):
        assert window.words
        half, best = np.array(window.half_weights), real(sigma, window.after)
        exact = np.multiply.outer(exact, np.concatenate((best[:0:-1], best)))
        wrong = np.multiply.outer(wrong, np.concatenate((half[:0:-1], half)))
    rng = np.random.default_rng(1)
    worst = 0.0
    for trial in range(60):
        image = np.where((wrong > exact)[0] == bool(trial % 2), 65535, 0)
        noise = rng.integers(-(trial**2), trial**2 + 1, image.shape)
        image = np.clip(image + noise, 0, 65535).astype(np.uint16)
        result = gaussian_filter(image, sigmas, mode="valid").item()
        worst = max(worst, abs(result - float((exact[0] * image).sum())))
    assert 0.3 < worst <= MOST_WRONG


def test_which_gaussians_are_summed_so() -> None:
    assert in_words(windows_of(SHORTEST, SHORTEST))
    assert in_words(windows_of(FARTHEST, 1.0, dtype="int16"))
    assert in_words(windows_of(0.1, 3.0, 3.0)), "an axis of one tap is not filtered"
    assert in_words(windows_of(20.0, 20.0, radii=(LEAST_LONGER, LEAST_RADIUS)))
    assert not in_words(windows_of(1.1, 1.1))
    assert not in_words(windows_of(3.0, 0.8))
    assert not in_words(windows_of(3.0))
    assert not in_words(windows_of(3.0, 3.0, 3.0))
    assert not in_words(windows_of(3.0, 0.1, 3.0))
    assert not in_words(windows_of(7.7, 3.0))
    assert not in_words(windows_of(5.9, 5.9))
    assert not in_words(windows_of(8.0, 8.0, radii=(MOST_RADIUS + 1,) * 2))
    assert not in_words(windows_of(3.0, 3.0, orders=(1, 0)))
    assert not in_words(windows_of(0.8, 3.0, radii=(4, 12))), "u does not fit two bytes"
    assert not in_words(windows_of(1.0, 3.0, radii=(20, 12))), "nor does that of finer weights"
    assert not in_words(windows_of(20.1, 20.1, radii=(16, 16))), "the error may be larger"
    assert not any(in_words(windows_of(3.0, 3.0, dtype=dtype)) for dtype in ("uint8", "float32", "float64"))


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(["uint16", "int16"]),
    content=st.sampled_from(CONTENTS),
    modes=st.tuples(st.sampled_from(MODES), st.sampled_from(MODES)),
    sides=st.tuples(st.sampled_from([1, 2, 7, 31, 67]), st.sampled_from([1, 3, 29, 71, 139])),
    planes=st.sampled_from([0, 2]),
    channels=st.sampled_from([0, 2, 3, 4, 7]),
    sigmas=st.tuples(sigmas_of_windows, sigmas_of_windows),
    cval=st.sampled_from([0, 5, 32767]),
    workers=st.integers(1, 3),
)
def test_cpu_bits_are_the_definitions(
    dtype, content, modes, sides, planes, channels, sigmas, cval, workers, monkeypatch_module
) -> None:
    axes = (1, 2) if planes else (0, 1)
    reaches = [2 * gaussian_radius(sigma) * (mode == "valid") for sigma, mode in zip(sigmas, modes, strict=True)]
    sides = tuple(side + reach for side, reach in zip(sides, reaches, strict=True))
    shape = (planes,) * bool(planes) + sides + (channels,) * bool(channels)
    case = Case(shape=shape, dtype=dtype, axes=axes, sigmas=sigmas, modes=modes, cval=cval, content=content)
    assert_array_equal(case.apply(case.image(), workers=workers), case.bits(), err_msg=case.name)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu, "MIN_SAMPLES_PER_WORKER", 300)
        yield patched


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sigmas=st.tuples(sigmas_of_windows, st.floats(SHORTEST, BOTH)), data=st.data())
def test_pieces_with_their_halos_equal_the_whole(seed: int, sigmas: tuple[float, float], data) -> None:
    shape = (23, 41, 3)
    image = np.random.default_rng(seed).integers(0, 65535, shape, np.uint16, endpoint=True)
    whole = gaussian_filter(image, sigmas, mode="nearest", channel_axis=-1)
    radii = [gaussian_radius(sigma) for sigma in sigmas]
    extended = np.pad(image, [(radii[0],) * 2, (radii[1],) * 2, (0, 0)], "edge")
    starts = [data.draw(st.integers(0, side - 1)) for side in shape[:2]]
    ends = [data.draw(st.integers(start + 1, side)) for start, side in zip(starts, shape, strict=False)]
    part = tuple(slice(start, end + 2 * reach) for start, end, reach in zip(starts, ends, radii, strict=True))
    piece = gaussian_filter(extended[part], sigmas, mode="valid", channel_axis=-1)
    assert_array_equal(piece, whole[starts[0] : ends[0], starts[1] : ends[1]])


@pytest.mark.parametrize("sigmas", [(2.2, 4.0), (7.6, 1.0)])
def test_signed_samples_are_unsigned_ones_moved(sigmas: tuple[float, float]) -> None:
    unsigned = np.random.default_rng(3).integers(0, 65535, (67, 71), np.uint16, endpoint=True)
    signed = (unsigned.astype(np.int32) - 32768).astype(np.int16)
    assert_array_equal(gaussian_filter(signed, sigmas).astype(np.int32) + 32768, gaussian_filter(unsigned, sigmas))


@settings(max_examples=40, deadline=None)
@given(value=st.integers(0, 65535), sigmas=st.tuples(sigmas_of_windows, sigmas_of_windows))
def test_a_constant_stays_constant(value: int, sigmas: tuple[float, float]) -> None:
    image = np.full((7, 11), value, np.uint16)
    assert_array_equal(gaussian_filter(image, sigmas), image)
