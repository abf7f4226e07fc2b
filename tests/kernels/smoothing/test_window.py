"""Windows: how far boxes and Gaussians reach, which Gaussians are exact, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernels.smoothing.decimation import VOLUME_WEIGHT_ERROR, decimation
from kernels.smoothing.window import (
    DIRECT_PLANE_RADIUS,
    DIRECT_RADIUS,
    Window,
    box_window,
    gaussian_radius,
    gaussian_windows,
)

U8, U16, F32 = (np.dtype(name) for name in ("u1", "u2", "f4"))


def test_long_boxes_know_their_place() -> None:
    """Runs of 16 begin at multiples of 16 in the whole image, also before its first sample."""
    for mode, first in (("valid", 21), ("reflect", 21 - 32)):
        window = box_window(0, 65, mode, np.int64(21))
        assert (window.is_long_box, window.step, window.lead) == (True, 16, first % 16)
        assert type(window.offset) is int
    assert box_window(0, 64, "wrap", 21) == box_window(0, 64, "wrap")


@pytest.mark.parametrize(
    ("size", "before", "after"), [(1, 0, 0), (2, 1, 0), (3, 1, 1), (8, 4, 3), (255, 127, 127), (np.int16(5), 2, 2)]
)
@pytest.mark.parametrize("mode", ["valid", "wrap"])
def test_an_even_box_reaches_one_farther_to_the_left(size: Any, before: int, after: int, mode: str) -> None:
    window = box_window(3, size, mode)
    assert window == Window(axis=3, before=before, after=after, mode=mode)
    assert (window.half_weights, window.exact, window.taps) == (None, False, size)
    assert window.output_length(300) == (300 - size + 1 if mode == "valid" else 300)


@pytest.mark.parametrize("size", [0, -1, (1 << 20) + 1, 10**20])
def test_sizes_out_of_range(size: int) -> None:
    with pytest.raises(ValueError, match=f"^size must lie in 1 … 1048576; got {size}$"):
        box_window(0, size, "wrap")


@pytest.mark.parametrize("size", [True, 3.0, "3", None])
def test_sizes_that_are_no_whole_number(size: Any) -> None:
    with pytest.raises(TypeError, match=f"^size must be a whole number of samples; got {size!r}$"):
        box_window(0, size, "wrap")


@pytest.mark.parametrize(
    ("sigma", "options", "reach"),
    [
        (1.0, {}, 4),
        (1.1, {}, 4),
        (1.125, {}, 5),  # 4.5 is rounded up
        (0.1, {}, 0),
        (2, {"truncate": 3}, 6),
        (np.float32(2), {"truncate": 0.7}, 1),
        (31.75, {}, 127),
        (9.0, {"radius": 0}, 0),
        (9.0, {"radius": np.int64(127), "truncate": math.nan}, 127),
    ],
)
def test_how_far_a_gaussian_reaches(sigma: float, options: dict[str, Any], reach: int) -> None:
    assert gaussian_radius(sigma, **options) == reach


@pytest.mark.parametrize(
    ("sigma", "options", "message"),
    [
        (
            2e5,
            {},
            "^a Gaussian of sigma 200000 reaches 800000 samples to each side; at most 524287 are supported: choose a",
        ),
        (1e300, {"truncate": 1e300}, "sigma 1e.300 reaches 1000000000 samples"),
        (1.0, {"radius": 524288}, "reaches 524288 samples"),
        (1.0, {"radius": -1}, "^radius must be a whole number of samples, 0 or more; got -1$"),
        (1.0, {"radius": True}, "^radius must be a whole number of samples, 0 or more; got True$"),
        (1.0, {"radius": 2.0}, "^radius must be a whole number of samples, 0 or more; got 2.0$"),
        (-0.5, {}, "^sigma must be a number of samples, 0 .no smoothing. or more; got -0.5"),
        (math.inf, {}, "^sigma must be a number of samples, .*; got inf"),
        ("1", {}, "^sigma must be a number of samples, .*; got '1'"),
        (1.0, {"truncate": 0}, "^truncate must be a positive number of standard deviations; got 0$"),
        (1.0, {"truncate": math.nan}, "^truncate must be a positive number of standard deviations; got nan$"),
    ],
)
def test_gaussians_out_of_range(sigma: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gaussian_radius(sigma, **options)


def test_gaussians_end_where_they_are_truncated() -> None:
    assert [each.taps for each in gaussian_windows((0, 1), (1, 2), ("wrap", "wrap"), F32)] == [9, 17]
    assert [each.taps for each in gaussian_windows((0, 1), (1, 2), ("wrap", "wrap"), F32, truncate=2)] == [5, 9]
    assert [each.taps for each in gaussian_windows((0, 1), (1, 2), ("wrap", "wrap"), F32, radii=(None, 1))] == [9, 3]
    assert gaussian_windows((), (), (), U8) == []


def test_gaussians_are_decimated_from_one_sample_past_the_direct_radius() -> None:
    for sigma, is_coarse in ((DIRECT_RADIUS / 4, False), ((DIRECT_RADIUS + 1) / 4, True)):
        for dtype in (U8, U16):
            window, narrow = gaussian_windows((0, 1), (sigma, 1.0), ("wrap", "wrap"), dtype)
            assert (window.decimation is not None) == is_coarse
            assert window.offset == 0
            assert narrow.exact == (dtype == U8 and not is_coarse)


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_bytes_have_coarser_grids_along_at_most_two_axes(axes: int) -> None:
    """Each adds up to 0.05 of a step to 0.5, and results are within 0.6."""
    windows = gaussian_windows(range(axes), (9.0,) * axes, ("wrap",) * axes, U8)
    assert {window.decimation for window in windows} == {decimation(9.0, F32, bytewise=axes <= 2)}
    assert decimation(9.0, F32, bytewise=True) != decimation(9.0, F32)


@pytest.mark.parametrize("dtype", ["u2", "i2"])
def test_volumes_of_16_bits_have_finer_grids(dtype: str) -> None:
    """The errors of three axes add up, and results are within 0.6."""
    assert 0.5 + 3 * VOLUME_WEIGHT_ERROR * 65535 / 2 <= 0.595
    for axes in (2, 3):
        windows = gaussian_windows(range(axes), (8.2,) * axes, ("wrap",) * axes, np.dtype(dtype))
        assert {window.decimation for window in windows} == {decimation(8.2, F32, volume=axes == 3)}
    assert decimation(8.2, F32, volume=True) != decimation(8.2, F32)
    assert {each.decimation for each in gaussian_windows(range(3), (8.2,) * 3, ("wrap",) * 3, F32)} == {
        decimation(8.2, F32)
    }


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8"])
def test_neighbouring_axes_that_all_reach_far_are_decimated_earlier(dtype: str) -> None:
    far, less = (DIRECT_PLANE_RADIUS + 1) / 4, DIRECT_PLANE_RADIUS / 4
    rest: dict[str, Any] = {"dtype": np.dtype(dtype)}
    for axes, sigmas, options, earlier in (
        ((0, 1), (far, far), {}, True),
        ((2, 0, 1), (far, far, far), {}, True),
        ((0, 1, 2), (far, 0.0, far), {}, False),
        ((0, 1), (far, less), {}, False),
        ((1,), (far,), {}, False),
        ((0, 1), (far, far), {"truncate": 4.0}, False),
        ((0, 1), (far, far), {"orders": (0, 1)}, False),
        ((0, 1), (far, far), {"direct": True}, False),
    ):
        windows = gaussian_windows(axes, sigmas, ("wrap",) * len(axes), **rest, **options)
        assert any(window.decimation for window in windows) == (earlier and dtype in ("i2", "f4"))
        assert all(window.decimation for window in windows if window.taps > 1) == (earlier and dtype in ("i2", "f4"))


@pytest.mark.parametrize("orders", [None, (1,)])
@pytest.mark.parametrize("sigma", [3.0, 200.0])
def test_weights_for_float64_keep_its_precision(sigma: float, orders: tuple[int, ...] | None) -> None:
    for dtype, is_float32 in (("f4", True), ("f8", False)):
        (window,) = gaussian_windows((0,), (sigma,), ("wrap",), np.dtype(dtype), orders=orders)
        weights = [*(window.half_weights or ()), *(window.derivative or ())]
        assert all(weight == float(np.float32(weight)) for weight in weights) == is_float32


def test_modes_are_known() -> None:
    for window in (lambda: box_window(0, 3, "circular"), lambda: gaussian_windows((0,), (1,), ("circular",), U8)):
        with pytest.raises(ValueError, match=r"^mode must be one of reflect, .*; got 'circular'$"):
            window()
