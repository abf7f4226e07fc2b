"""Laws of the box filter, beyond the cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import ndimage

from kernels.smoothing import BORDER_MODES, DTYPES, cpu, uniform_filter
from kernels.smoothing.cpu import small_box as cpu_small_box
from tests.kernels.smoothing.noise import noise

INTEGERS = [dtype for dtype in DTYPES if np.dtype(dtype).kind != "f"]
FLOATS = [dtype for dtype in DTYPES if np.dtype(dtype).kind == "f"]
sides = st.integers(1, 40)
sizes = st.integers(1, 20)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(seed=seeds, height=sides, width=sides, size=sizes, mode=st.sampled_from(BORDER_MODES), data=st.data())
def test_a_strip_with_its_halo_equals_the_whole(dtype, seed, height, width, size, mode, data) -> None:
    """Mode "valid" on rows with their halo gives the same bits as the whole image, for every cut."""
    image = noise(seed, (height, width, 3), dtype)
    whole = uniform_filter(image, size, mode=mode, channel_axis=-1, cval=5)
    first = data.draw(st.integers(0, height - 1))
    last = data.draw(st.integers(first + 1, height))
    extended = np.pad(image, [(size, size), (0, 0), (0, 0)], **_pad(mode))
    before = size // 2
    strip = extended[size + first - before : size + last - before + size - 1]
    assert_array_equal(uniform_filter(strip, size, mode=("valid", mode), channel_axis=-1, cval=5), whole[first:last])


def _pad(mode: str) -> dict:
    names = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge", "wrap": "wrap", "constant": "constant"}
    return {"mode": names[mode]} | ({"constant_values": 5} if mode == "constant" else {})


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("shape", [(500, 701), (1201, 97, 3), (3, 200_003), (300_001,), (7, 90, 501), (200_003, 3)])
def test_workers_do_not_change_the_bits(dtype: str, shape: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setattr(cpu, "MIN_SAMPLES_PER_WORKER", 1000)
    image = noise(1, shape, dtype)
    channel_axis = -1 if shape[-1] == 3 else None
    alone = uniform_filter(image, 7, channel_axis=channel_axis, workers=1)
    for workers in (2, 3, 5):
        assert_array_equal(uniform_filter(image, 7, channel_axis=channel_axis, workers=workers), alone)


@pytest.mark.parametrize("dtype", INTEGERS)
@settings(max_examples=20, deadline=None)
@given(value=st.integers(-(2**15), 2**16 - 1), size=st.integers(1, 255), height=sides, width=sides)
def test_a_constant_stays_constant(dtype, value, size, height, width) -> None:
    value = int(np.clip(value, np.iinfo(dtype).min, np.iinfo(dtype).max))
    image = np.full((height, width), value, dtype)
    assert_array_equal(uniform_filter(image, size), image)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, height=sides, width=sides, rows=sizes, columns=sizes, mode=st.sampled_from(BORDER_MODES))
def test_signed_images_are_translated_unsigned_ones(seed, height, width, rows, columns, mode) -> None:
    """floor(sum / n + 1/2) moves with the values, negative or not."""
    unsigned = noise(seed, (height, width), "uint16")
    signed = (unsigned.astype(np.int32) - 32768).astype(np.int16)
    a = uniform_filter(unsigned, (rows, columns), mode=mode, cval=40000)
    b = uniform_filter(signed, (rows, columns), mode=mode, cval=40000 - 32768)
    assert_array_equal(a.astype(np.int32) - 32768, b)


@pytest.mark.parametrize("dtype", INTEGERS)
@settings(max_examples=20, deadline=None)
@given(seed=seeds, height=sides, width=sides, rows=sizes, columns=sizes, mode=st.sampled_from(BORDER_MODES))
def test_transposing_commutes(dtype, seed, height, width, rows, columns, mode) -> None:
    image = noise(seed, (height, width), dtype)
    turned = uniform_filter(image.T, (columns, rows), mode=mode, cval=1)
    assert_array_equal(turned.T, uniform_filter(image, (rows, columns), mode=mode, cval=1))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_quotients_are_exact_at_every_boundary(dtype: str) -> None:
    """Sums at k n + n/2 and one to each side, k over the whole range, for every window of 1 × n and n × 1, and for
    large n × n."""
    held = np.iinfo(dtype)
    lines = [shape for n in range(2, 256) for shape in ((1, n), (n, 1))]
    for rows, columns in [*lines, (3, 3), (31, 31), (64, 64), (99, 101), (128, 255), (255, 255)]:
        n = rows * columns
        means = np.unique(np.linspace(held.min, held.max - 1, 173).astype(np.int64))
        for sums in (means * n + n // 2 - 1, means * n + n // 2, means * n + (n + 1) // 2, means * n + n - 1):
            # Each window of n samples spreads its sum as evenly as integers allow.
            level, rest = np.divmod(sums, n)
            boxes = (level[:, None] + (np.arange(n) < rest[:, None])).astype(dtype).reshape(-1, rows, columns)
            got = uniform_filter(boxes, (rows, columns), mode="valid", axes=(1, 2))[:, 0, 0]
            assert_array_equal(got, (2 * sums + n) // (2 * n))


@pytest.mark.parametrize("divisor", range(2, 300))
def test_means_of_bytes_by_one_multiplication(divisor: int) -> None:
    division = cpu_small_box.byte_division(divisor)
    sums = np.arange(255 * divisor + 1, dtype=np.uint64)
    if division is None:
        assert divisor > 180
        return
    half, multiplier, shift = map(int, division)
    assert sums[-1] + half < 1 << 16
    np.testing.assert_array_equal((sums + half) * multiplier >> 16 + shift, (2 * sums + divisor) // (2 * divisor))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [3, 4, 13])
def test_nan_and_infinity_stay_in_their_windows(dtype: str, bad: float, size: int) -> None:
    image = noise(2, (41, 43), dtype)
    spoilt = image.copy()
    spoilt[20, 17] = bad
    clean, got = uniform_filter(image, size), uniform_filter(spoilt, size)
    before, after = size // 2, size - 1 - size // 2
    touched = np.zeros(image.shape, bool)
    touched[20 - after : 20 + before + 1, 17 - after : 17 + before + 1] = True
    assert_array_equal(got[~touched], clean[~touched])
    assert_array_equal(got[touched], np.full(touched.sum(), bad, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", BORDER_MODES)
def test_agrees_with_scipy(dtype: str, mode: str) -> None:
    image = noise(3, (61, 47, 3), dtype)
    ours = uniform_filter(image, (5, 8), mode=mode, cval=2, channel_axis=-1).astype(np.float64)
    theirs = ndimage.uniform_filter(image.astype(np.float64), (5, 8, 1), mode=mode, cval=2)
    if np.dtype(dtype).kind == "f":
        assert_allclose(ours, theirs, rtol=1e-5 if dtype == "float32" else 1e-11, atol=1e-6)
    else:
        assert np.abs(ours - theirs).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", [*BORDER_MODES, "valid"])
def test_omitting_nan_is_the_mean_of_the_rest(dtype: str, mode: str) -> None:
    image = noise(4, (19, 23), dtype)
    image[np.random.default_rng(5).random(image.shape) < 0.3] = np.nan
    image[:6, :6] = np.nan
    got = uniform_filter(image, (3, 4), mode=mode, cval=0.5, nan_policy="omit")
    assert_allclose(got, _mean_of_counted(image, ~np.isnan(image), mode), rtol=1e-5, atol=1e-6)
    assert np.isnan(got).any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_mask_says_which_samples_count(dtype: str) -> None:
    image = noise(6, (19, 23), dtype)
    mask = np.random.default_rng(7).random(image.shape) < 0.4
    image[3, 4], mask[3, 4] = np.nan, False
    got = uniform_filter(image, (3, 4), mask=mask)
    assert_allclose(got, _mean_of_counted(image, mask, "reflect"), rtol=1e-5, atol=1e-6)
    assert_array_equal(uniform_filter(image, 1, mask=mask), np.where(mask, image, np.nan))


def _mean_of_counted(image: np.ndarray, counted: np.ndarray, mode: str) -> np.ndarray:
    """Brute force over windows of 3 × 4, in float64."""
    values, counts = np.where(counted, image, 0).astype(np.float64), counted.astype(np.float64)
    if mode != "valid":
        names = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge", "wrap": "wrap", "constant": "constant"}
        border = [(1, 1), (2, 1)]
        values = np.pad(values, border, names[mode], **({"constant_values": 0.5} if mode == "constant" else {}))
        counts = np.pad(counts, border, names[mode], **({"constant_values": 1} if mode == "constant" else {}))
    total, count = (np.lib.stride_tricks.sliding_window_view(x, (3, 4)).sum((2, 3)) for x in (values, counts))
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_byte_order_and_protection_do_not_matter(dtype: str) -> None:
    image = noise(8, (31, 37), dtype)
    expected = uniform_filter(image, 5)
    swapped = image.astype(np.dtype(dtype).newbyteorder("S"))
    protected = image.copy()
    protected.flags.writeable = False
    larger = noise(9, (62, 74), dtype)
    larger[::2, ::-2] = image
    for same in (np.asfortranarray(image), swapped, protected, larger[::2, ::-2]):
        got = uniform_filter(same, 5)
        assert got.dtype == np.dtype(dtype)
        assert_array_equal(got, expected)
        assert_array_equal(same, image)


def test_the_result_lands_in_out() -> None:
    image = noise(10, (31, 37), "uint16")
    out = np.zeros_like(image)
    assert uniform_filter(image, 3, out=out) is out
    assert_array_equal(out, uniform_filter(image, 3))
    assert uniform_filter(image, 1, out=out) is out
    assert_array_equal(out, image)
