"""Images of dtypes that no kernel takes: exact where integers promise it, else within the stated error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy import ndimage

from pipeline.engine.devices.device import CudaDevice
from pipeline.errors import InputError, ParameterError
from pipeline.workloads.common.samples import computed_in, narrow, widened
from tests.pipeline.workloads.filters.jobs import filtered

INTEGERS = ("bool", "int8", "int32", "uint32", "int64", "uint64")
SHAPE = (61, 83)


def image(dtype: str, seed: int = 7) -> NDArray[Any]:
    """Noise over the whole range; of 64 bits up to 2**53, which every filter computes exactly."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(SHAPE) < 0.5
    if dtype == "float16":
        return (rng.standard_normal(SHAPE) * 1000).astype(dtype)
    ends = np.iinfo(dtype)
    return rng.integers(max(ends.min, -(2**53)), min(ends.max, 2**53), SHAPE, dtype, endpoint=True)


def chunk(samples: NDArray[Any]) -> int:
    return 6_000 * samples.itemsize


def windows(samples: NDArray[Any], size: int) -> NDArray[Any]:
    """Each sample's window as Python's integers, the border mirrored with the edge."""
    padded = np.pad(samples.astype(object), (size // 2, (size - 1) // 2), mode="symmetric")
    found: NDArray[Any] = sliding_window_view(padded, (size, size)).reshape(*samples.shape, -1)
    return found


# Rounding


@pytest.mark.parametrize("n", [2, 3, 6, 7, 64, 1000, 65536])
def test_means_are_rounded_as_whole_numbers_are(n: int) -> None:
    rng = np.random.default_rng(n)
    sums = rng.integers(-(2**47), 2**47, 4000) // n * n + n // 2 + rng.integers(-1, 2, 4000)
    out = np.empty(sums.shape, np.int64)
    narrow(sums.astype(np.float64) * (1 / n), out)
    np.testing.assert_array_equal(out, (2 * sums + n) // (2 * n))


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32", "int64", "uint64"])
def test_what_is_beyond_the_range_becomes_its_end(dtype: str) -> None:
    ends = np.iinfo(dtype)
    values = np.array([-1e30, float(ends.min), -0.5, 0.49, 0.5, 2.0**52 + 1, float(ends.max), 1e30, np.inf])
    expected = [ends.min, ends.min, 0, 0, 1, min(2**52 + 1, ends.max), ends.max, ends.max, ends.max]
    out = np.empty(values.shape, dtype)
    narrow(values, out)
    assert out.tolist() == expected


def test_whole_numbers_come_back_up_to_2_to_the_53() -> None:
    whole = np.random.default_rng(1).integers(-(2**53), 2**53, 5000)
    whole[:4] = 2**53, 2**53 - 1, -(2**53), 2**52 + 1
    out = np.empty(whole.shape, np.int64)
    narrow(widened(whole, np.dtype(np.float64), exactly=True), out)
    np.testing.assert_array_equal(out, whole)


def test_any_byte_but_zero_is_true() -> None:
    assert widened(np.array([0, 1, 7, 255], np.uint8).view(bool), np.dtype(np.uint8)).tolist() == [0, 1, 1, 1]


# Smoothing


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_boxes_of_integers_are_exact(tmp_path: Path, dtype: str, size: int) -> None:
    samples = image(dtype)
    if np.dtype(dtype).itemsize == 8:
        samples >>= 10  # sums below 2**48
    receipt, found = filtered(tmp_path, "smooth", samples, "YX", chunk_bytes=chunk(samples), size=size)
    assert receipt["chunks"] > 1
    assert receipt["image"]["dtype"] == dtype
    assert receipt["image"]["computed in"] == computed_in(samples.dtype).name
    assert receipt["audit"]["tolerance"] == 0.5
    n = size * size
    expected = (2 * windows(samples, size).sum(axis=-1) + n) // (2 * n)
    np.testing.assert_array_equal(found, expected.astype(dtype))


@pytest.mark.parametrize("sigma", [1.5, 9])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_gaussians_of_integers_are_rounded_to_nearest(tmp_path: Path, dtype: str, sigma: float) -> None:
    samples = image(dtype)
    receipt, found = filtered(
        tmp_path, "smooth", samples, "YX", chunk_bytes=chunk(samples), filter="gaussian", sigma=sigma
    )
    expected = ndimage.gaussian_filter(samples.astype(np.float64), sigma, mode="reflect")
    if dtype == "bool":
        clear = abs(expected - 0.5) > 1e-5
        np.testing.assert_array_equal(found[clear], expected[clear] >= 0.5)
        return
    wide = np.dtype(dtype).itemsize > 1
    method = "float64 sums" if wide else "exact sums of fixed-point weights" if sigma < 8 else "decimated"
    assert receipt["image"]["gaussian"].startswith(f"{method}, within ")
    beyond = 1e-13 * float(np.iinfo(dtype).max) if wide else 0.1
    assert float(abs(found.astype(np.float64) - expected).max()) <= 0.5 + beyond


@pytest.mark.parametrize("given", [{"size": 5}, {"filter": "gaussian", "sigma": 2}, {"filter": "gaussian", "sigma": 9}])
def test_float16_is_computed_in_float32(tmp_path: Path, given: dict[str, Any]) -> None:
    samples = image("float16")
    _, single = filtered(tmp_path, "smooth", samples.astype(np.float32), "YX", **given)
    receipt, found = filtered(tmp_path, "smooth", samples, "YX", chunk_bytes=chunk(samples), statistics=True, **given)
    assert receipt["audit"]["tolerance"] < 1e-3
    assert receipt["image"]["statistics"][0]["max"] == float(found.max())
    np.testing.assert_array_equal(found, single.astype(np.float16))


def test_the_largest_values_of_64_bits_stay(tmp_path: Path) -> None:
    samples = np.full(SHAPE, np.iinfo(np.uint64).max)
    for given in ({"size": 5}, {"filter": "gaussian", "sigma": 2}):
        _, found = filtered(tmp_path, "smooth", samples, "YX", **given)
        assert abs(found.astype(object) - 2**64).max() <= 2**64 * 1e-13


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool"])
def test_derivatives_are_floats(tmp_path: Path, dtype: str) -> None:
    samples = image(dtype)
    given: dict[str, Any] = {"filter": "gaussian", "sigma": 2, "order": (1, 0)}
    _receipt, found = filtered(tmp_path, "smooth", samples, "YX", chunk_bytes=chunk(samples), statistics=True, **given)
    assert found.dtype == (np.float64 if dtype == "uint32" else np.float32)
    expected = ndimage.gaussian_filter(samples.astype(np.float64), 2, order=(1, 0), mode="reflect")
    np.testing.assert_allclose(found, expected, atol=2e-6 * float(abs(expected).max()))


# Other filters


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "int64", "float16"])
def test_ranks_and_morphology_are_exact(tmp_path: Path, dtype: str) -> None:
    samples = image(dtype)
    for name, definition in (("median", ndimage.median_filter), ("dilate", ndimage.grey_dilation)):
        _, found = filtered(tmp_path, name, samples, "YX", chunk_bytes=chunk(samples), size=3)
        np.testing.assert_array_equal(found, definition(samples.astype(np.float64), size=(3, 3)).astype(dtype))
    _, found = filtered(tmp_path, "tophat", samples, "YX", chunk_bytes=chunk(samples), size=3)
    assert found.dtype == dtype
    opened = ndimage.grey_opening(samples.astype(np.float64), size=(3, 3))
    most = {"bool": 1, "float16": np.inf}.get(dtype) or np.iinfo(dtype).max
    np.testing.assert_array_equal(found, np.minimum(samples - opened, most).astype(dtype))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_values_that_float64_does_not_hold_are_refused_with_the_way_out(tmp_path: Path, dtype: str) -> None:
    samples = image(dtype)
    samples[5, 7] = 2**53 + 1
    with pytest.raises(InputError, match=rf"in\.npy, among samples .*: {dtype} values beyond ±2\*\*53 .*: subtract"):
        filtered(tmp_path, "median", samples, "YX", size=3)
    with pytest.raises(ParameterError, match=f"bilateral takes no {dtype} images: convert the input to float64"):
        filtered(tmp_path, "bilateral", samples, "YX", sigma_range=20)


@pytest.mark.parametrize("dtype", ["uint32", "float16"])
def test_bilateral_and_rolling_ball(tmp_path: Path, dtype: str) -> None:
    samples = image(dtype)
    wide = np.float64 if dtype == "uint32" else np.float32
    for name, given in (("bilateral", {"sigma_range": 50}), ("rolling-ball", {"radius": 5})):
        _, real = filtered(tmp_path, name, samples.astype(wide), "YX", **given)
        _, found = filtered(tmp_path, name, samples, "YX", chunk_bytes=chunk(samples), **given)
        assert found.dtype == dtype
        difference = abs(found.astype(np.float64) - real)
        ends = np.inf if dtype == "float16" else np.iinfo(dtype).max
        step = 5e-4 * abs(real) + 1e-3 if dtype == "float16" else 0.5001
        assert (difference <= step)[real < ends].all()


def test_composites_of_wide_integers_are_float64(tmp_path: Path) -> None:
    samples = image("uint32")
    _, found = filtered(tmp_path, "dog", samples, "YX", chunk_bytes=chunk(samples), sigma=1)
    narrow_one, wide_one = (ndimage.gaussian_filter(samples.astype(np.float64), s, mode="reflect") for s in (1, 1.6))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, narrow_one - wide_one, atol=1e-3)


def test_a_chain_rounds_after_each_step(tmp_path: Path) -> None:
    samples = image("uint32")
    _, chained = filtered(
        tmp_path, "chain", samples, "YX", chunk_bytes=chunk(samples), step=["box size=4", "median size=3"]
    )
    _, first = filtered(tmp_path, "smooth", samples, "YX", size=4)
    _, second = filtered(tmp_path, "median", first, "YX", size=3)
    np.testing.assert_array_equal(chained, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*INTEGERS, "float16"])
def test_a_gpu_gives_the_same_bits(tmp_path: Path, dtype: str) -> None:
    samples = image(dtype)
    jobs: list[tuple[str, dict[str, Any]]] = [
        ("smooth", {"size": 4}),
        ("smooth", {"filter": "gaussian", "sigma": 2, "statistics": True}),
        ("median", {"size": 3}),
        ("tophat", {"size": 5}),
        ("chain", {"step": ["box size=4", "median size=3"]}),
    ]
    if dtype not in ("bool", "float16"):
        jobs.append(("smooth", {"size": 5, "nodata": int(samples[3, 4])}))
    for name, given in jobs:
        _, expected = filtered(tmp_path, name, samples, "YX", **given)
        _, found = filtered(tmp_path, name, samples, "YX", device=CudaDevice(0), chunk_bytes=chunk(samples), **given)
        np.testing.assert_array_equal(found, expected, err_msg=f"{name} {given}")
