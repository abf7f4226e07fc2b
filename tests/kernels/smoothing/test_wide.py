"""Wide windows, beyond the cases: decimated Gaussians against SciPy in float64, and pieces against the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from scipy import ndimage

from kernels.smoothing import BORDER_MODES, DTYPES, gaussian_filter, uniform_filter
from kernels.smoothing.decimation import BYTE_WEIGHT_ERROR, VOLUME_WEIGHT_ERROR, WEIGHT_ERROR, Decimation, decimation
from kernels.smoothing.window import gaussian_windows
from tests.kernels.smoothing.noise import noise

FLOAT32 = np.dtype(np.float32)


def effective_weights(coarse: Decimation, at: int) -> tuple[int, np.ndarray]:
    """The place of the first, and the weights that the samples of a line receive in result `at`, in float64."""
    found = {at: 1.0}
    for stage in coarse.stages:
        finer, found = found, {}
        for position, weight in finer.items():
            for tap, up in enumerate(stage.up[position % stage.factor]):
                place = position // stage.factor - stage.order // 2 + 1 + tap
                found[place] = found.get(place, 0.0) + weight * up
    first, half = min(found), coarse.half_weights
    weights = np.array([found.get(place, 0.0) for place in range(first, max(found) + 1)])
    weights, first = np.convolve(weights, (*half[:0:-1], *half)), first - len(half) + 1
    for stage in reversed(coarse.stages):
        spread = np.zeros((len(weights) - 1) * stage.factor + 1)
        spread[:: stage.factor] = weights
        weights, first = np.convolve(spread, stage.down), first * stage.factor - stage.reach
    return first, weights


SIGMAS = (
    7.63,
    7.8,
    8.0,
    8.125,
    8.5,
    10.0,
    11.3,
    12.99,
    13.0,
    16.0,
    17.7,
    25.99,
    26.0,
    52.0,
    104.0,
    61.0,
    120.0,
    128.0,
    160.0,
    208.0,
    333.3,
)


@pytest.mark.parametrize(
    ("sigma", "kind"),
    [
        *((sigma, kind) for sigma in (5.875, 6.5, *SIGMAS) for kind in ("plane", "volume")),
        *((sigma, "volume") for sigma in (8.5, 13.6, 17.0, 27.2, 68.0, 108.8, 217.6)),
        *((sigma, "bytes") for sigma in SIGMAS),
    ],
)
def test_the_weights_are_the_gaussians_at_every_phase(sigma: float, kind: str) -> None:
    coarse = decimation(sigma, FLOAT32, bytewise=kind == "bytes", volume=kind == "volume")
    most = {"bytes": BYTE_WEIGHT_ERROR, "plane": WEIGHT_ERROR, "volume": VOLUME_WEIGHT_ERROR}[kind]
    far = np.exp(-0.5 * (np.arange(-int(12 * sigma), int(12 * sigma) + 1) / sigma) ** 2).sum()
    before, after = coarse.extent
    for at in range(0, coarse.factor, max(1, coarse.factor // 8)):
        first, weights = effective_weights(coarse, at)
        distance = np.arange(first, first + len(weights)) - at
        real = np.exp(-0.5 * (distance / sigma) ** 2) / far
        assert np.abs(weights - real).sum() <= most
        assert -distance[0] <= before
        assert distance[-1] <= after


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", BORDER_MODES)
@pytest.mark.parametrize("sigmas", [(9.0, 30.0), (0.0, 14.0), (70.0, 7.7)])
def test_is_within_the_bound_of_scipys_float64(dtype: str, mode: str, sigmas: tuple[float, float]) -> None:
    image = noise(1, (61, 47), dtype)
    ours = gaussian_filter(image, sigmas, mode=mode, cval=2).astype(np.float64)
    theirs = ndimage.gaussian_filter(image.astype(np.float64), sigmas, mode=mode, cval=2, truncate=8)
    bound = 1e-5 * np.ptp(image) if np.dtype(dtype).kind == "f" else 0.6
    assert np.abs(ours - theirs).max() <= bound


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32"])
def test_every_third_sample_is_within_the_bound_of_scipys_float64(dtype: str) -> None:
    image = noise(2, (61, 47), dtype)
    ours = gaussian_filter(image, (5.9, 7.0), mode=("reflect", "wrap"), offset=(1, 2)).astype(np.float64)
    theirs = ndimage.gaussian_filter(image.astype(np.float64), (5.9, 7.0), mode=("reflect", "wrap"), truncate=8)
    bound = 1e-5 * np.ptp(image) if np.dtype(dtype).kind == "f" else 0.6
    assert np.abs(ours - theirs).max() <= bound


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), data=st.data(), sigma=st.sampled_from([5.9, 7.7, 8.3, 13.0, 27.0]))
def test_pieces_at_any_offset_equal_the_whole(dtype: str, seed: int, data: st.DataObject, sigma: float) -> None:
    image = noise(seed, (23, 31, 2), dtype)
    where = data.draw(st.integers(-50, 50))
    whole = gaussian_filter(image, sigma, mode="nearest", channel_axis=-1, offset=where)
    (window, _) = gaussian_windows((0, 1), (sigma,) * 2, ("nearest",) * 2, image.dtype)
    first = data.draw(st.integers(0, 22))
    last = data.draw(st.integers(first + 1, 23))
    extended = np.pad(image, [(window.before, window.after), (0, 0), (0, 0)], "edge")
    piece = gaussian_filter(
        extended[first : last + window.taps - 1], sigma, mode=("valid", "nearest"), channel_axis=-1,
        offset=(where + first - window.before, where),
    )  # fmt: skip
    assert_array_equal(piece, whole[first:last])


@pytest.mark.parametrize("dtype", ["uint16", "float32", "float64"])
@pytest.mark.parametrize("mode", BORDER_MODES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 99), data=st.data(), sizes=st.sampled_from([(256, 3), (257, 300), (272, 1), (5, 529)]))
def test_pieces_of_long_boxes_equal_the_whole(
    dtype: str, mode: str, seed: int, data: st.DataObject, sizes: tuple[int, int]
) -> None:
    """Also beyond the edge: a constant's sums depend on where a window lies."""
    image = noise(seed, (23, 31, 2), dtype)
    where = data.draw(st.tuples(st.integers(-50, 50), st.integers(-50, 50)))
    options = {"channel_axis": -1, "cval": 5}
    whole = uniform_filter(image, sizes, mode=mode, offset=where, **options)
    cuts, margins, first = [], [], []
    for length, size, place in zip(image.shape, sizes, where, strict=False):
        start = data.draw(st.integers(0, length - 1))
        cuts.append(slice(start, data.draw(st.integers(start + 1, length))))
        margins.append((size // 2, size - 1 - size // 2))
        first.append(place + start - size // 2)
    names = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge", "wrap": "wrap", "constant": "constant"}
    further = {"constant_values": 5} if mode == "constant" else {}
    extended = np.pad(image, [*margins, (0, 0)], names[mode], **further)
    piece = extended[tuple(slice(cut.start, cut.stop + sum(margin)) for cut, margin in zip(cuts, margins, strict=True))]
    assert_array_equal(uniform_filter(piece, sizes, mode="valid", offset=first, **options), whole[tuple(cuts)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_long_box_keeps_nan_and_infinity_in_their_windows(dtype: str, axis: int, bad: float) -> None:
    image = noise(4, (601, 607), dtype)
    spoilt = image.copy()
    place = (293, 311)[axis]
    np.moveaxis(spoilt, axis, 0)[place] = bad
    clean, got = (np.moveaxis(uniform_filter(each, 289, axes=axis), axis, 0) for each in (image, spoilt))
    touched = slice(place - 144, place + 145)
    assert_array_equal(np.delete(got, touched, 0), np.delete(clean, touched, 0))
    assert_array_equal(got[touched], np.full(got[touched].shape, bad, dtype))


@settings(max_examples=50, deadline=None)
@given(sigma=st.floats(7.7, 400), first=st.integers(-500, 500), outputs=st.integers(1, 500), multiple=st.integers(1, 9))
def test_the_coarsest_grid_is_filled_up_to_a_multiple(sigma: float, first: int, outputs: int, multiple: int) -> None:
    coarse = decimation(sigma, FLOAT32)
    fewest, filled = (coarse.decimated(first, first + outputs - 1, multiple=each) for each in (1, multiple))
    for level, (low, high) in enumerate(filled):
        assert low == fewest[level][0]
        assert high >= fewest[level][1]
    low, high = filled[-1]
    assert (high - low + 1) % multiple == 0
    assert high - fewest[-1][1] < multiple
    for stage, fine, (low, high) in zip(coarse.stages, filled, filled[1:], strict=False):
        assert fine == (low * stage.factor - stage.reach, high * stage.factor + stage.reach)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
@settings(max_examples=10, deadline=None)
@given(share=st.floats(0, 1), sigma=st.floats(7.7, 400))
def test_a_constant_stays_constant(dtype: str, share: float, sigma: float) -> None:
    held = np.iinfo(dtype)
    image = np.full((19, 23), round(held.min + share * (held.max - held.min)), dtype)
    assert_array_equal(gaussian_filter(image, sigma), image)


@pytest.mark.parametrize(
    ("sigma", "dtype"),
    [
        (5.875, "uint16"),
        (7.63, "uint16"),
        (8.0, "uint16"),
        (8.2, "uint16"),
        (13.0, "uint16"),
        (16.0, "uint16"),
        (26.0, "uint16"),
        (7.63, "uint8"),
        (8.2, "uint8"),
        (16.0, "uint8"),
    ],
)
def test_integers_stay_within_the_bound_on_the_worst_images(sigma: float, dtype: str) -> None:
    """Samples of 0 and 65535 by the sign of the weights' error, moved from result to result until none gets worse."""
    coarse, most = decimation(sigma, FLOAT32, bytewise=dtype == "uint8"), np.iinfo(dtype).max
    before, after = coarse.extent
    length = before + after + 1 + coarse.factor
    for at in range(before, before + coarse.factor, max(1, coarse.factor // 2)):
        first, weights = effective_weights(coarse, at)
        distance = np.arange(first, first + len(weights)) - at
        real = np.exp(-0.5 * (distance / sigma) ** 2)
        line = np.zeros(length, dtype)
        line[first : first + len(weights)] = np.where(weights > real / real.sum(), most, 0)
        for image in (np.tile(line, (2, 1)), np.tile(most - line, (2, 1))):
            got = gaussian_filter(image, sigma, mode="nearest").astype(np.float64)
            exact = ndimage.gaussian_filter(image.astype(np.float64), sigma, mode="nearest", truncate=8)
            assert np.abs(got - exact).max() <= 0.6


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("options", [{"truncate": 4.0}, {"radius": 260}, {"truncate": 3, "mode": "wrap"}])
def test_a_given_end_of_the_kernel_is_scipys(dtype: str, options: dict) -> None:
    image = noise(2, (41, 600), dtype)
    ours = gaussian_filter(image, (0, 70), **options).astype(np.float64)
    theirs = ndimage.gaussian_filter(image.astype(np.float64), (0, 70), **options)
    assert np.abs(ours - theirs).max() <= (0.9 if dtype == "uint16" else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigma_0_leaves_an_axis_as_it_is(dtype: str) -> None:
    image = noise(3, (19, 23), dtype)
    assert_array_equal(gaussian_filter(image, 0), image)
    assert_array_equal(gaussian_filter(image, (0, 2.0)), gaussian_filter(image, 2.0, axes=1))
    assert_array_equal(gaussian_filter(image, (9.0, 0)), gaussian_filter(image, 9.0, axes=0))


@pytest.mark.parametrize("dtype", ["uint16", "float32", "float64"])
@pytest.mark.parametrize("mode", BORDER_MODES)
@pytest.mark.parametrize(
    ("sigmas", "orders"),
    [((2.0, 1.0), (1, 0)), ((0.6, 2.0), (0, 3)), ((9.0, 9.0), 1), ((2.0, 30.0), (2, 3)), ((70.0, 1.5), (2, 0))],
)
def test_derivatives_are_scipys(
    dtype: str, mode: str, sigmas: tuple[float, float], orders: int | tuple[int, int]
) -> None:
    """Within 1e-6 of the largest that the derivative's weights could make of samples of this size."""
    image = noise(5, (61, 47), dtype)
    found = gaussian_filter(image, sigmas, order=orders, mode=mode)
    assert found.dtype == (dtype if np.dtype(dtype).kind == "f" else np.float32)
    exact, largest = image.astype(np.float64), float(np.abs(image.astype(np.float64)).max())
    impulse = np.zeros(2001)
    impulse[1000] = 1
    for axis, (sigma, order) in enumerate(zip(sigmas, np.broadcast_to(orders, 2), strict=True)):
        options: dict = {"order": int(order), "truncate": 8 if sigma > 8.1 else 4}
        exact = ndimage.gaussian_filter1d(exact, sigma, axis=axis, mode=mode, **options)
        largest *= np.abs(ndimage.gaussian_filter1d(impulse, sigma, **options)).sum()
    assert np.abs(found - exact).max() <= 2e-6 * largest


@settings(max_examples=15, deadline=None)
@given(data=st.data(), sigma=st.sampled_from([1.5, 9.0, 27.0]), order=st.integers(1, 3))
def test_pieces_of_a_derivative_equal_the_whole(data: st.DataObject, sigma: float, order: int) -> None:
    image = noise(6, (23, 31), "uint16")
    whole = gaussian_filter(image, sigma, order=(order, 1), mode="wrap", offset=(5, 0))
    (window, _) = gaussian_windows((0, 1), (sigma,) * 2, ("wrap",) * 2, image.dtype, orders=(order, 1))
    first = data.draw(st.integers(0, 22))
    last = data.draw(st.integers(first + 1, 23))
    extended = np.pad(image, [(window.before, window.after), (0, 0)], "wrap")
    piece = gaussian_filter(
        extended[first : last + window.taps - 1], sigma, order=(order, 1), mode=("valid", "wrap"),
        offset=(5 + first - window.before, 0),
    )  # fmt: skip
    assert_array_equal(piece, whole[first:last])


def test_missing_samples_are_left_out_of_wide_gaussians() -> None:
    image = noise(4, (50, 61), "float32")
    image[10:30, 5:50] = np.nan
    got = gaussian_filter(image, 12.0, nan_policy="omit")
    counted = ~np.isnan(image)
    exact = [ndimage.gaussian_filter(np.where(counted, x, 0).astype(float), 12.0) for x in (image, 1)]
    np.testing.assert_allclose(got, exact[0] / exact[1], rtol=1e-4, atol=1e-5)


def test_nan_stays_within_reach() -> None:
    line = np.zeros(1000, np.float32)
    line[500] = np.nan
    window = gaussian_windows((0,), (20.0,), ("reflect",), FLOAT32)[0]
    got = np.flatnonzero(np.isnan(gaussian_filter(line, 20.0)))
    assert 500 - window.after <= got[0] <= 500 - 100
    assert 500 + 100 <= got[-1] <= 500 + window.before


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 99),
    sizes=st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    mode=st.sampled_from(BORDER_MODES),
)
def test_boxes_of_any_size_are_exact(dtype: str, seed: int, sizes: tuple[int, int], mode: str) -> None:
    image = noise(seed, (37, 41), dtype)
    padded, count = image.astype(object), sizes[0] * sizes[1]
    for axis, size in enumerate(sizes):
        before, after = size // 2, size - 1 - size // 2
        names = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge", "wrap": "wrap", "constant": "constant"}
        pads = [(before, after) if each == axis else (0, 0) for each in range(2)]
        sums = np.cumsum(np.pad(padded.astype(np.int64), pads, names[mode]), axis=axis)
        sums = np.concatenate((np.zeros_like(np.take(sums, [0], axis)), sums), axis)
        high = np.take(sums, np.arange(size, sums.shape[axis]), axis)
        padded = high - np.take(sums, np.arange(sums.shape[axis] - size), axis)
    assert_array_equal(uniform_filter(image, sizes, mode=mode), (2 * padded + count) // (2 * count))


def test_a_box_far_larger_than_the_image_takes_no_time_for_the_corners_of_its_halo() -> None:
    image, size = noise(1, (40, 50), "uint16"), 300_000
    sums = int(image.sum(dtype=np.int64)) + 7 * (size**2 - image.size)
    found = uniform_filter(image, size, mode="constant", cval=7)
    assert_array_equal(found, np.full(image.shape, (2 * sums + size**2) // (2 * size**2), np.uint16))
