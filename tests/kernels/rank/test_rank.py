"""Rank filters on the CPU: against their definition, against SciPy, and by what does not change a result."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rank import (
    DTYPES,
    MODES,
    ball,
    cross,
    disk,
    maximum_filter,
    median_filter,
    minimum_filter,
    percentile_filter,
    rank_filter,
)
from kernels.rank.cuda import extremes
from kernels.rank.task import Rank, Task, folded
from kernels.smoothing.borders import BORDER_MODES
from tests.kernels.rank.cases import SQUARES, defined, percentiles_of, same_bits, samples_of

# shape, axes, sizes: primes, windows of even size, larger than the image, and along axes that are not neighbours.
WINDOWS: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    ((17, 23), (0, 1), (3, 3)),
    ((7, 31, 3), (0, 1), (3, 3)),
    ((13, 83), (0, 1), (5, 5)),
    ((11, 71), (0, 1), (7, 7)),
    ((11, 13), (0, 1), (7, 7)),
    ((11, 13), (1, 0), (2, 5)),
    ((29,), (0,), (7,)),
    ((13, 17, 3), (0, 1), (4, 3)),
    ((5, 7, 11), (0, 1, 2), (3, 3, 3)),
    ((5, 7, 6), (0, 1, 2), (1, 5, 2)),
    ((5, 3, 7), (0, 2), (3, 3)),
    ((2, 5, 3, 4), (0, 1, 3), (2, 3, 3)),
    ((3, 2, 5, 2, 3), (0, 2, 4), (3, 3, 2)),
    ((3, 5), (0, 1), (11, 13)),
    ((1, 1), (0, 1), (3, 5)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_mode_gives_the_definition(dtype: str, window: Any) -> None:
    shape, axes, sizes = window
    image, mask = samples_of(shape, dtype), np.ones(sizes, bool)
    for index, mode in enumerate(MODES):
        modes = [mode, *(MODES[(index + 1 + at) % 6] for at in range(len(axes) - 1))]
        if any(each == "valid" and shape[axis] < size for each, axis, size in zip(modes, axes, sizes, strict=True)):
            continue
        for percentile in percentiles_of(dtype, sizes):
            found = percentile_filter(image, percentile, sizes, axes=axes, mode=modes, cval=7)
            expected = defined(image, mask, axes, modes, percentile=percentile, cval=7)
            same_bits(found, expected, f"{modes} {percentile}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("footprint", "shape"),
    [(disk(1), (9, 11)), (disk(3), (13, 8)), (ball(2), (5, 7, 6)), (cross(2, 3), (4, 5, 7)), (cross(3, 1), (17,))],
    ids=["disk1", "disk3", "ball2", "cross2", "line3"],
)
def test_footprints_give_the_definition(dtype: str, footprint: Any, shape: tuple[int, ...]) -> None:
    image, axes = samples_of(shape, dtype), tuple(range(len(shape)))
    for mode, percentile in product(BORDER_MODES, (50.0, 75.0)):
        found = percentile_filter(image, percentile, footprint=footprint, mode=mode, cval=3)
        expected = defined(image, footprint, axes, (mode,) * len(axes), percentile=percentile, cval=3)
        same_bits(found, expected, mode)


def test_a_footprint_lies_along_the_axes_in_their_order() -> None:
    image, footprint = samples_of((9, 11), "uint16"), np.array([[True, True, True], [False, True, False], [False] * 3])
    found = median_filter(image, footprint=footprint, axes=(1, 0))
    same_bits(found, median_filter(np.ascontiguousarray(image.T), footprint=footprint).T)


@pytest.mark.parametrize("mode", BORDER_MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scipy_gives_the_same(dtype: str, mode: str) -> None:
    image, options = samples_of((61, 47), dtype), {"mode": mode, "cval": 5}
    for size in (3, 4, 5, 9, (1, 8), 31):
        np.testing.assert_array_equal(
            median_filter(image, size, **options), scipy.ndimage.median_filter(image, size, **options), strict=True
        )
    for size, percentile in product((SQUARES[dtype][-1], 9), (0, 12.5, 99, 100)):
        np.testing.assert_array_equal(
            percentile_filter(image, percentile, size, **options),
            scipy.ndimage.percentile_filter(image, percentile, size, **options),
        )
    for rank in (0, 3, -1, -7):
        np.testing.assert_array_equal(
            rank_filter(image, rank, 4, **options), scipy.ndimage.rank_filter(image, rank, 4, **options)
        )
    for ours, theirs in ((minimum_filter, "minimum_filter"), (maximum_filter, "maximum_filter")):
        for window in ({"size": (3, 70)}, {"footprint": disk(4)}):
            expected = getattr(scipy.ndimage, theirs)(image, **window, **options)
            np.testing.assert_array_equal(ours(image, **window, **options), expected, strict=True)


@pytest.mark.parametrize("radius", [1, 2, 7, 15])
def test_footprints_hold_the_samples_within_a_radius(radius: int) -> None:
    reach = range(-radius, radius + 1)
    assert disk(radius).tolist() == [[y * y + x * x <= radius**2 for x in reach] for y in reach]
    assert ball(radius).sum() == sum(z * z + y * y + x * x <= radius**2 for z in reach for y in reach for x in reach)
    assert cross(radius, 3).sum() == 6 * radius + 1
    assert cross(radius, 2)[radius].all()
    assert cross(radius, 2)[:, radius].all()


# Missing samples


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("policy", ["propagate", "omit"])
def test_nan(dtype: str, policy: str) -> None:
    image = samples_of((23, 19), dtype)
    image[np.random.default_rng(1).random(image.shape) < 0.2] = np.nan
    image[:5, :5] = np.nan
    image[0, 0] = -np.float64(np.nan)
    cases = [(sizes, each) for sizes in ((3, 3), (5, 4), (5, 5), (7, 7)) for each in percentiles_of(dtype, sizes)]
    for sizes, percentile in cases:
        found = percentile_filter(image, percentile, sizes, nan_policy=policy)
        mask = np.ones(sizes, bool)
        expected = defined(image, mask, (0, 1), ("reflect",) * 2, percentile=percentile, nan_policy=policy)
        same_bits(found, expected, f"{sizes} {percentile}")


@pytest.mark.parametrize(
    ("dtype", "nodata"), [("uint8", 255), ("int16", -32768), ("float32", 0.0), ("float64", np.inf)]
)
def test_nodata(dtype: str, nodata: float) -> None:
    image = samples_of((23, 19), dtype)
    image[:7, :8] = nodata
    for footprint, percentile in product((np.ones((3, 3), bool), disk(2)), (50.0, 0.0, 100.0, 80.0)):
        found = percentile_filter(image, percentile, footprint=footprint, nodata=nodata, mode="nearest")
        expected = defined(image, footprint, (0, 1), ("nearest",) * 2, percentile=percentile, nodata=nodata)
        same_bits(found, expected, f"{percentile}")


def test_nodata_and_nan_are_different() -> None:
    image = np.array([[1, 2, -1, np.nan, 5, 6]], np.float32)
    found = median_filter(image, (1, 3), nodata=-1, mode="nearest")
    np.testing.assert_array_equal(found, [[1, 2, np.nan, np.nan, np.nan, 6]])
    found = median_filter(image, (1, 3), nodata=-1, mode="nearest", nan_policy="omit")
    np.testing.assert_array_equal(found, [[1, 2, 2, 5, 6, 6]])
    np.testing.assert_array_equal(
        median_filter(image, (1, 3), nodata=np.nan), median_filter(image, (1, 3), nan_policy="omit")
    )


def test_a_rank_keeps_its_place_among_those_present() -> None:
    image = samples_of((17, 13), "float32")
    image[np.random.default_rng(1).random(image.shape) < 0.4] = np.nan
    for rank in (0, 2, 14):
        found = rank_filter(image, rank, (3, 5), nan_policy="omit")
        expected = defined(image, np.ones((3, 5), bool), (0, 1), ("reflect",) * 2, rank=rank, nan_policy="omit")
        same_bits(found, expected, f"{rank}")


# What does not change a result


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_part_gives_what_the_whole_gives(data: st.DataObject) -> None:
    """With its halo, and any number of threads."""
    shape = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 90), st.integers(1, 3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    sizes = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    percentile = data.draw(st.sampled_from([0.0, 10.0, 50.0, 100.0]))
    image = samples_of(shape, dtype, seed=data.draw(st.integers(0, 99)))
    options: dict[str, Any] = {"axes": (0, 1), "mode": "valid"}
    whole = np.pad(image, [(size // 2, (size - 1) // 2) for size in sizes] + [(0, 0)], "symmetric")
    found = percentile_filter(whole, percentile, sizes, workers=2, **options)
    same_bits(percentile_filter(image, percentile, sizes, channel_axis=2, workers=1), found)
    y, x = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))
    part = percentile_filter(whole[y:, x:], percentile, sizes, **options)
    same_bits(part, found[y:, x:])


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((19, 300, 2), (9, 12)), ((3, 5), (257, 255)), ((1, 90), (1, 255)), ((40, 3), (70, 2))],
    ids=str,
)
def test_boxes_of_bytes(shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    """Strips, channels, and windows of as many samples as counts hold."""
    for image in (samples_of(shape, "uint8"), np.full(shape, 200, np.uint8)):
        for percentile in (50.0, 3.0):
            found = percentile_filter(image, percentile, sizes, axes=(0, 1), mode="mirror")
            expected = defined(image, np.ones(sizes, bool), (0, 1), ("mirror",) * 2, percentile=percentile)
            same_bits(found, expected, f"{percentile}")


@pytest.mark.parametrize(("dtype", "size", "ours"), [("uint8", 7, minimum_filter), ("float32", 5, maximum_filter)])
def test_minima_and_maxima_of_small_squares(dtype: str, size: int, ours: Any) -> None:
    """By networks, in whole blocks and less, of pixels with channels; NaN leave them."""
    theirs = getattr(scipy.ndimage, ours.__name__)
    for shape in ((23, 331), (8, 61), (19, 41, 3)):
        image = samples_of(shape, dtype)
        sizes = (size, size, 1)[: len(shape)]
        for mode in ("mirror", "constant"):
            expected = theirs(image, sizes, mode=mode, cval=3)
            np.testing.assert_array_equal(ours(image, sizes, mode=mode, cval=3), expected, f"{shape} {mode}")
    if dtype == "float32":
        image[3, 5, 1] = np.nan
        found = ours(image, sizes)
        assert np.isnan(found).sum() == size * size
        assert not np.isnan(found[12:]).any()


@pytest.mark.parametrize("size", [3, 5, 9])
def test_a_median_does_not_change_by_any_order_of_values(size: int) -> None:
    """A median of f(x) is f of the median of x, for every f that keeps the order: floats as integers do."""
    image = samples_of((67, 131), "uint16")
    for dtype in ("float32", "float64"):
        found = median_filter(np.sqrt(image.astype(dtype)), size)
        np.testing.assert_array_equal(found, np.sqrt(median_filter(image, size).astype(dtype)))
    as_signed = (image.astype(np.int32) - 32768).astype(np.int16)
    np.testing.assert_array_equal(median_filter(as_signed, size), (median_filter(image, size).astype(int) - 32768))
    np.testing.assert_array_equal(median_filter(image, size), np.iinfo("u2").max - median_filter(65535 - image, size))


def test_views_byte_orders_and_read_only_arrays() -> None:
    image = samples_of((40, 31, 3), "uint16")
    view = image.transpose(1, 0, 2)[::2, 5:, ::-1]
    expected = median_filter(np.ascontiguousarray(view), 5, channel_axis=2)
    same_bits(median_filter(view, 5, channel_axis=2), expected)
    same_bits(median_filter(view.astype(">u2"), 5, channel_axis=2), expected)
    fixed = np.ascontiguousarray(view)
    fixed.flags.writeable = False
    same_bits(median_filter(fixed, 5, channel_axis=2), expected)
    out = np.zeros_like(expected)
    assert median_filter(view, 5, channel_axis=2, out=out) is not None
    same_bits(out, expected)


def test_out_of_axes_that_are_far_apart() -> None:
    image = samples_of((3, 2, 5, 2, 3), "uint8")
    out = np.zeros_like(image)
    result = median_filter(image, 3, axes=(0, 2, 4), out=out)
    assert result is out
    same_bits(out, median_filter(image, 3, axes=(0, 2, 4)))


def test_a_window_of_one_sample_copies() -> None:
    image = samples_of((7, 5), "float32")
    same_bits(median_filter(image, 1), image)
    assert median_filter(image, 1) is not image


# What is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give either size or footprint"),
        ({"size": 3, "footprint": disk(1)}, "give either size or footprint"),
        ({"size": 0}, "size must be 1 or more; got 0"),
        ({"size": 2.5}, "size must be a whole number of samples; got 2.5"),
        ({"size": (3, 3, 3)}, "size has 3 values for 2 filtered axes"),
        ({"size": 2049}, "a window of 4,198,401 samples; at most 4,194,304"),
        ({"size": 3, "mode": "mirrored"}, "mode must be one of reflect"),
        ({"size": 9, "mode": "valid"}, 'a window of 9 along an axis of 7 samples: mode "valid" leaves nothing'),
        ({"size": 3, "cval": 300}, "cval must be a whole number in 0 … 255"),
        ({"size": 3, "nodata": -1}, "nodata must be a whole number in 0 … 255"),
        ({"size": 3, "nan_policy": "drop"}, "nan_policy must be one of"),
        ({"footprint": np.ones((2, 3))}, "footprint of 2×3 has an even side"),
        ({"footprint": np.zeros((3, 3))}, "footprint holds no sample"),
        ({"footprint": np.full((3, 3), 2)}, "footprint must be a boolean array"),
        ({"footprint": np.ones(3)}, "footprint has 1 dimensions for 2 filtered axes"),
        ({"footprint": np.eye(33)}, "footprint reaches 16 samples; at most 15"),
        ({"size": 3, "axes": (0, 0)}, "names an axis twice"),
        ({"size": 3, "workers": 0}, "workers must be a whole number"),
    ],
)  # fmt: skip
def test_bad_parameters_are_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        median_filter(np.zeros((7, 9), np.uint8), **options)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("percentile", [-1, 100.5, float("nan"), "50", True])
def test_percentiles_outside_0_to_100(percentile: Any) -> None:
    with pytest.raises(ValueError, match=r"percentile must lie in 0 … 100"):
        percentile_filter(np.zeros((7, 9), np.uint8), percentile, 3)


@pytest.mark.parametrize("radius", [0, 16, 1.5, True])
def test_radii_of_footprints(radius: Any) -> None:
    with pytest.raises(ValueError, match=r"radius must be a whole number of samples in 1 … 15"):
        disk(radius)


def test_a_mistake_is_found_after_a_call_that_looks_alike() -> None:
    image = samples_of((7, 9), "float32")
    minimum_filter(image, (1, 3), cval=0.0, mode="constant")
    with pytest.raises(TypeError, match="size must be a whole number of samples; got True"):
        minimum_filter(image, (True, 3), cval=0.0, mode="constant")
    found = minimum_filter(np.ones((1, 1), np.float32), 5, cval=-0.0, mode="constant")
    assert np.signbit(found).all()


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"rank must lie in -9 … 8 for 9 samples; got 9"):
        rank_filter(np.zeros((7, 9), np.uint8), 9, 3)
    with pytest.raises(ValueError, match=r"image contains NaN"):
        median_filter(np.array([[1, np.nan]]), 3, nan_policy="raise")
    with pytest.raises(TypeError, match=r"image has dtype int32"):
        median_filter(np.zeros((7, 9), np.int32), 3)
    with pytest.raises(ValueError, match=r"size filters 4 axes; at most 3"):
        median_filter(np.zeros((3, 3, 3, 3), np.uint8), 3)
    image = np.zeros((7, 9), np.uint8)
    with pytest.raises(ValueError, match=r"out shares memory with image"):
        median_filter(image, 3, out=image)


def test_windows_of_many_rows_take_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extremes, "shared_bytes_a_multiprocessor", lambda: 228 << 10)
    window = {0: (131, "reflect", 0, 1), 1: (101, "reflect", 0, 1)}
    for dtype, nodata, passes in (("uint16", None, 1), ("float32", None, 1), ("float32", 0.0, 2), ("float64", None, 2)):
        planes, axes, inner = folded((300, 400), window)
        task = Task(
            dtype=np.dtype(dtype), planes=planes, axes=axes, inner=inner, footprint=None, rank=Rank(percentile=0.0),
            samples=131 * 101, omit_nan=False, nodata=nodata, cval=0,
        )  # fmt: skip
        assert len([*extremes._passes(task)]) == passes, (dtype, nodata)


def test_slabs_are_whole_batches_of_rows_that_a_block_holds() -> None:
    for (itemsize, opens, lie), (least, shapes) in extremes.SLABS.items():
        assert extremes._slab(itemsize, opens, lie, least - 2, 3) is None
        assert extremes._slab(itemsize, opens, lie, 3, shapes[-1].most + 2) is None
        assert [*shapes] == sorted(shapes)
        steps = 1 + opens
        for taps in range(least, shapes[-1].most + 1, 2):
            shape = extremes._slab(itemsize, opens, lie, taps, taps)
            assert shape is not None
            batch = extremes._slab_batch(taps)
            assert batch % (taps - 1) == 0
            rows, lead = shape.rows // batch * batch, -(-steps * (taps - 1) // batch) * batch
            assert rows > 0
            words = rows * (shape.threads + 3) + shape.shares * steps * (taps // 2) * shape.threads
            assert shape.blocks * (4 * words + 1024) <= 228 << 10, (itemsize, opens, lie, taps)
            assert shape.threads % 32 == 0
            for out_rows in (1, 97, 8192):
                band = extremes._slab_band(40, out_rows, rows, batch, lead, 132 * shape.blocks)
                assert band % batch == 0
                assert 0 < band < out_rows + rows + batch
    assert extremes._slab(2, False, "aligned", 32, 31) is None
    assert extremes._slab(8, False, "aligned", 31, 31) is None
