"""Gaussians of bytes in exact sums: what the sums rely on, their error, and every bit on the CPU."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from kernels.smoothing import MODES, cpu, gaussian_filter
from kernels.smoothing.byte_sums import MOST_RADIUS, MOST_WRONG, ONE, byte_weights, halves
from kernels.smoothing.cases import CONTENTS, Case
from kernels.smoothing.window import Window, gaussian_radius, gaussian_windows

SIGMAS = (*np.geomspace(0.13, 1000, 120), 0.2679, 0.3831, 0.6427, 0.7612, *range(1, 9))
LEAST, FARTHEST = 0.27, 7.62  # sigmas of default kernels that are summed so; from there on they are decimated
sigmas_of_windows = st.floats(LEAST, FARTHEST)

Gaussians = tuple[tuple[float, int], ...]


def windows_of(*sigmas: float, dtype: str = "uint8", **options: object) -> list[Window]:
    axes = tuple(range(len(sigmas)))
    return gaussian_windows(axes, sigmas, ("reflect",) * len(axes), np.dtype(dtype), **options)  # type: ignore[arg-type]


def in_bytes(windows: list[Window]) -> bool:
    assert len({window.exact for window in windows}) == 1
    return windows[0].exact


def real(sigma: float, radius: int) -> np.ndarray:
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return np.asarray(weights / weights.sum())


def of_all_taps(half: np.ndarray) -> np.ndarray:
    return np.concatenate((half[:0:-1], half))


@cache
def accepted() -> list[tuple[Gaussians, tuple[tuple[float, ...], ...]]]:
    """Gaussians (sigma, radius) along one axis and two that are summed so, with their weights."""
    found = []
    for sigma in SIGMAS:
        for radius in range(MOST_RADIUS + 1):
            for which in (((sigma, radius),), ((sigma, radius),) * 2):
                weights = halves(*which)
                if weights is not None:
                    found.append((which, weights))
    return found


def test_every_factor_fits_and_every_sum_is_exact() -> None:
    assert len(accepted()) > 7000
    for story, found in accepted():
        for half in found:
            weights = byte_weights(half)
            assert (weights.whole / ONE).tolist() == list(half), story
            assert of_all_taps(weights.whole).sum() == ONE, story
            # So v grows with its samples and is at most that of a constant, and float32 holds the sums.
            assert weights.whole.min() >= 0, story
            assert ONE * 255 + (1 << 15) < 1 << 24
            assert 0 <= weights.upper.min() <= weights.upper.max() <= 255, story
            assert np.abs(weights.lower + 0.5).max() < 128, story
            # v is at most 255 * 256, and results must fit a byte.
            upper, whole = of_all_taps(weights.upper), of_all_taps(weights.whole)
            assert np.maximum(whole * 255, whole * 254 + upper * 255).sum() + weights.bias < 1 << 24, story
            assert weights.bias >= 0, story
            # Pairs of weights must fit 16 bits each, those of the centre after they are halved.
            assert max((weights.whole[0] + 1) // 2, *weights.whole[1:], 0) < 1 << 15, story


def test_results_are_within_the_stated_error() -> None:
    """The last rounding, the weights, v, and what the sums leave out: at most half of the range of v's low byte."""
    assert MOST_WRONG == 0.6
    for which, found in accepted():
        wrong = 0.5
        for half, each in zip(found, which, strict=True):
            wrong += 255 / 2 * float(np.abs(of_all_taps(np.array(half)) - real(*each)).sum())
        if len(which) == 2:
            lower = of_all_taps(byte_weights(found[1]).lower)
            wrong += 2.0**-9 + 255 / 2 * float(np.abs(lower).sum()) / 2**24 + 2.0**-17
        assert wrong <= (MOST_WRONG if len(which) == 2 else 0.56) + 1e-9, which
    for sigma in np.linspace(LEAST, FARTHEST, 400):
        assert in_bytes(windows_of(sigma, sigma)), f"the error at sigma {sigma} is not certain to be that small"
        assert in_bytes(windows_of(sigma))


@pytest.mark.parametrize(
    ("sigmas", "radii"),
    [
        ((1000.0,), (32,)),
        ((1000.0,) * 2, (29,) * 2),
        ((0.6427, 8.0), (6, 32)),
        ((2.0,) * 2, (8,) * 2),
        ((7.6, 7.6), (30, 30)),
        ((0.2, 1000.0), (1, 5)),
        ((0.7612,) * 3, (4,) * 3),
        ((1000.0,) * 3, (5,) * 3),
    ],
)
def test_images_made_to_be_worst_stay_within_the_bound(sigmas: tuple[float, ...], radii: tuple[int, ...]) -> None:
    """Bright where a weight is too large, dark elsewhere, and the reverse; with increasing noise, so that sums round
    either way. The last three are summed in float32."""
    exact, wrong = np.ones(1), np.ones(1)
    for window, sigma in zip(windows_of(*sigmas, radii=radii), sigmas, strict=True):
        assert window.exact == (len(sigmas) < 3 and min(sigmas) > LEAST)
        best = real(sigma, window.after)
        exact = np.multiply.outer(exact, best)
        wrong = np.multiply.outer(wrong, of_all_taps(np.array(window.half_weights)))
    bright = (wrong > exact)[0]
    rng = np.random.default_rng(1)
    worst = 0.0
    for trial in range(60):
        image = np.where(bright == bool(trial % 2), 255, 0)
        image = np.clip(image + rng.integers(-trial, trial + 1, image.shape), 0, 255).astype(np.uint8)
        result = gaussian_filter(image, sigmas, radius=radii, mode="valid").item()
        worst = max(worst, abs(result - float((exact[0] * image).sum())))
    assert 0.3 < worst <= MOST_WRONG


def test_which_gaussians_are_summed_so() -> None:
    assert in_bytes(windows_of(1.0, 7.6))
    assert in_bytes(windows_of(0.1, 3.0)), "an axis of one tap is not filtered"
    assert in_bytes(windows_of(0.1, 3.0, 3.0))
    assert in_bytes(windows_of(3.0))
    assert in_bytes(windows_of(1000.0, 3.0, radii=(20, MOST_RADIUS)))
    assert not in_bytes(windows_of(0.25, 3.0)), "the weight of the centre does not fit a byte"
    assert not in_bytes(windows_of(3.0, 3.0, 3.0))
    assert not in_bytes(windows_of(3.0, 0.1, 3.0)), "no neighbours"
    assert not in_bytes(windows_of(7.7, 3.0))
    assert not in_bytes(windows_of(8.0, 8.0, radii=(MOST_RADIUS + 1, 3)))
    assert not in_bytes(windows_of(3.0, 3.0, orders=(1, 0)))
    assert not any(in_bytes(windows_of(3.0, dtype=dtype)) for dtype in ("uint16", "int16", "float32", "float64"))
    wide = {sigma: halves((sigma, MOST_RADIUS), (sigma, MOST_RADIUS)) for sigma in SIGMAS}
    assert any(found is None for sigma, found in wide.items() if sigma > 8), "the error may be larger"


def test_axes_are_taken_in_ascending_order() -> None:
    turned = gaussian_windows((1, 0), (2.0, 3.0), ("reflect", "wrap"), np.dtype(np.uint8))
    assert turned[::-1] == gaussian_windows((0, 1), (3.0, 2.0), ("wrap", "reflect"), np.dtype(np.uint8))


@settings(max_examples=80, deadline=None)
@given(
    content=st.sampled_from(CONTENTS),
    modes=st.tuples(st.sampled_from(MODES), st.sampled_from(MODES)),
    sides=st.tuples(st.sampled_from([1, 2, 7, 31, 67]), st.sampled_from([1, 3, 29, 71, 139])),
    planes=st.sampled_from([0, 2]),
    channels=st.sampled_from([0, 2, 3, 4, 9]),
    sigmas=st.tuples(sigmas_of_windows, sigmas_of_windows),
    filtered=st.sampled_from([(0, 1), (0, 1), (0,), (1,)]),
    cval=st.sampled_from([0, 5, 255]),
    workers=st.integers(1, 3),
)
def test_cpu_bits_are_the_definitions(
    content, modes, sides, planes, channels, sigmas, filtered, cval, workers, monkeypatch_module
) -> None:
    reaches = [2 * gaussian_radius(sigma) * (mode == "valid") for sigma, mode in zip(sigmas, modes, strict=True)]
    sides = tuple(side + reach for side, reach in zip(sides, reaches, strict=True))
    shape = (planes,) * bool(planes) + sides + (channels,) * bool(channels)
    axes = tuple(axis + bool(planes) for axis in filtered)
    sigmas, modes = (tuple(each[axis] for axis in filtered) for each in (sigmas, modes))
    case = Case(shape=shape, dtype="uint8", axes=axes, sigmas=sigmas, modes=modes, cval=cval, content=content)
    assert_array_equal(case.apply(case.image(), workers=workers), case.bits(), err_msg=case.name)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu, "MIN_SAMPLES_PER_WORKER", 300)
        yield patched


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sigmas=st.tuples(sigmas_of_windows, sigmas_of_windows), data=st.data())
def test_pieces_with_their_halos_equal_the_whole(seed: int, sigmas: tuple[float, float], data) -> None:
    shape = (23, 41, 3)
    image = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    whole = gaussian_filter(image, sigmas, mode="nearest", channel_axis=-1)
    radii = [gaussian_radius(sigma) for sigma in sigmas]
    extended = np.pad(image, [(radii[0],) * 2, (radii[1],) * 2, (0, 0)], "edge")
    starts = [data.draw(st.integers(0, side - 1)) for side in shape[:2]]
    ends = [data.draw(st.integers(start + 1, side)) for start, side in zip(starts, shape, strict=False)]
    part = tuple(slice(start, end + 2 * reach) for start, end, reach in zip(starts, ends, radii, strict=True))
    piece = gaussian_filter(extended[part], sigmas, mode="valid", channel_axis=-1)
    assert_array_equal(piece, whole[starts[0] : ends[0], starts[1] : ends[1]])


@settings(max_examples=40, deadline=None)
@given(value=st.integers(0, 255), sigmas=st.lists(sigmas_of_windows, min_size=1, max_size=2))
def test_a_constant_stays_constant(value: int, sigmas: list[float]) -> None:
    image = np.full((7, 11)[: len(sigmas)], value, np.uint8)
    assert_array_equal(gaussian_filter(image, sigmas), image)


def test_results_stay_as_they_are() -> None:
    """Jobs are resumed and verified by later versions."""
    image = np.random.default_rng(7).integers(0, 256, (61, 67), np.uint8)
    found = hashlib.sha256()
    for sigmas in ((0.3, 0.5), (1.0, 1.0), (2.0, 4.0), (7.6, 7.6), (0.0, 3.0), (3.0, 0.0), (0.2, 2.0)):
        found.update(gaussian_filter(image, sigmas).tobytes())
    assert found.hexdigest() == "b596e0e3c0007b8b21f4cb7a7fa70128166d4e2272bd3a16b7a87909c2a11ad8"
