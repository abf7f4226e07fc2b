from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.lib.stride_tricks import sliding_window_view
from scipy import ndimage

from kernels.rank import median_filter
from kernels.smoothing import uniform_filter
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import InputError, ParameterError
from pipeline.formats.image.base import Region
from pipeline.workloads import JobSpec, workload_named
from tests.images import read_image, write_image


def elevations(path: Path, dtype: str, nodata: float) -> Any:
    """A GeoTIFF with holes: single pixels, and one wider than any window."""
    rng = np.random.default_rng(5)
    samples = rng.integers(0, 3000, (157, 131)).astype(dtype)
    samples[rng.random(samples.shape) < 0.1] = nodata
    samples[40:60, 30:70] = nodata
    text = f"{nodata!r}\0".encode()
    tifffile.imwrite(path, samples, extratags=[(42113, 2, len(text), text, True)])
    return samples


def run(
    workload: str, source: Path, target: Path, *, chunk_bytes: int | None = 60_000, **given: Any
) -> tuple[dict[str, Any], Any]:
    parameters = workload_named(workload).Parameters(**given)
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=chunk_bytes)
    spec = JobSpec(workload=workload, input=source, output=target, parameters=parameters)
    receipt = run_job(plan_job(spec, CpuDevice(2), options), options)
    return receipt, read_image(target)


@pytest.mark.parametrize("nodata", [-9999.0, -3.4028234663852886e38, float("nan")])
def test_float_elevations_are_smoothed_without_their_holes(tmp_path: Path, nodata: float) -> None:
    samples = elevations(tmp_path / "a.tif", "float32", nodata)
    receipt, found = run("smooth", tmp_path / "a.tif", tmp_path / "b.tif", size=5)
    assert receipt["chunks"] > 1
    assert receipt["image"]["nodata"] == f"{nodata:g}, left out"
    missing = np.isnan(samples) | (samples == np.float32(nodata))
    expected = uniform_filter(np.where(missing, np.nan, samples).astype(np.float32), 5, nan_policy="omit")
    np.testing.assert_array_equal(found, np.where(np.isnan(expected), np.float32(nodata), expected))
    assert np.isnan(nodata) != np.any(found == np.float32(nodata))
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert file.pages[0].tags["GDAL_NODATA"].value == repr(nodata)


def test_a_rank_filter_takes_the_files_nodata_unless_another_is_given(tmp_path: Path) -> None:
    samples = elevations(tmp_path / "a.tif", "int16", -32768)
    receipt, found = run("median", tmp_path / "a.tif", tmp_path / "b.tif", size=3)
    assert receipt["image"]["nodata"] == "-32768, left out"
    np.testing.assert_array_equal(found, median_filter(samples, 3, nodata=-32768))
    _, other = run("median", tmp_path / "a.tif", tmp_path / "c.tif", size=3, nodata=7)
    np.testing.assert_array_equal(other, median_filter(samples, 3, nodata=7))


@pytest.mark.parametrize(("dtype", "nodata"), [("uint8", 0), ("int16", -32768), ("uint32", 2999), ("uint64", 0)])
@pytest.mark.parametrize("size", [4, 5])
def test_boxes_of_integers_leave_missing_samples_out_exactly(
    tmp_path: Path, dtype: str, nodata: int, size: int
) -> None:
    """The mean of those that count, rounded to nearest, halves up."""
    samples = elevations(tmp_path / "a.tif", dtype, nodata)
    receipt, found = run("smooth", tmp_path / "a.tif", tmp_path / "b.tif", size=size, statistics=True)
    assert receipt["chunks"] > 1
    assert receipt["image"]["nodata"] == f"{nodata}, left out"
    assert receipt["image"]["dtype"] == dtype
    padded = np.pad(samples.astype(np.int64), (size // 2, (size - 1) // 2), mode="symmetric")
    windows = sliding_window_view(padded, (size, size)).reshape(*samples.shape, -1)
    counts = (windows != nodata).sum(axis=-1)
    sums = np.where(windows != nodata, windows, 0).sum(axis=-1)
    assert counts.min() == 0
    expected = np.where(counts > 0, (2 * sums + counts) // (2 * np.maximum(counts, 1)), nodata)
    np.testing.assert_array_equal(found, expected.astype(dtype))
    assert receipt["image"]["statistics"][0]["samples"] == int((found != nodata).sum())
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert float(file.pages[0].tags["GDAL_NODATA"].value) == nodata


@pytest.mark.parametrize("mode", ["reflect", "constant"])
def test_gaussians_of_integers_leave_missing_samples_out(tmp_path: Path, mode: str) -> None:
    """Normalised convolution; the border's value counts, even if it is the nodata value."""
    samples = elevations(tmp_path / "a.tif", "int16", 0)
    given: dict[str, Any] = {"filter": "gaussian", "sigma": 1.5, "mode": mode}
    _, found = run("smooth", tmp_path / "a.tif", tmp_path / "b.tif", **given)
    counted = (samples != 0).astype(np.float64)
    total = ndimage.gaussian_filter(samples * counted, 1.5, mode=mode)
    weight = ndimage.gaussian_filter(counted, 1.5, mode=mode, cval=1)
    expected = np.divide(total, weight, out=np.zeros_like(total), where=weight > 1e-12)
    assert float(abs(found - expected).max()) <= 0.5 + 1e-6


def test_nodata_that_integers_cannot_have_is_refused(tmp_path: Path) -> None:
    elevations(tmp_path / "a.tif", "int16", -32768)
    for nodata in (0.5, 40_000, math.nan):
        with pytest.raises(ParameterError, match=rf"--nodata {nodata:g}: .*a\.tif is int16, which cannot have it"):
            run("smooth", tmp_path / "a.tif", tmp_path / "c.tif", nodata=nodata)


def test_derivatives_take_missing_samples_like_others_with_a_remark(tmp_path: Path) -> None:
    elevations(tmp_path / "a.tif", "int16", -32768)
    receipt, _ = run("smooth", tmp_path / "a.tif", tmp_path / "b.tif", filter="gaussian", sigma=2, order=1)
    assert receipt["image"]["nodata"] == "-32768, smoothed like any other value"


# Steps of chains, and the same filter as a command.
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("gaussian sigma=2", {"filter": "gaussian", "sigma": 2}),
    ("gaussian sigma=9", {"filter": "gaussian", "sigma": 9}),
    ("box size=4", {"size": 4}),
]


@pytest.mark.parametrize(("dtype", "nodata"), [("uint8", 0.0), ("uint32", 2999.0), ("float16", -9999.9)])
def test_a_chain_leaves_missing_samples_out_as_the_command_does(tmp_path: Path, dtype: str, nodata: float) -> None:
    """Also beyond the edges, whose value counts even if it is the nodata value."""
    elevations(tmp_path / "a.tif", dtype, nodata)
    for (step, given), mode in zip(STEPS, ("constant", "reflect", "wrap"), strict=True):
        said, expected = run("smooth", tmp_path / "a.tif", tmp_path / "b.tif", mode=mode, **given)
        receipt, found = run("chain", tmp_path / "a.tif", tmp_path / "c.tif", step=[step], mode=mode)
        np.testing.assert_array_equal(found, expected, strict=True)
        assert receipt["image"]["nodata"] == said["image"]["nodata"] == f"{np.dtype(dtype).type(nodata):g}, left out"
        assert receipt["image"].get("gaussian") == said["image"].get("gaussian")
    # A step's result keeps its missing samples for the next.
    run("smooth", tmp_path / "a.tif", tmp_path / "d.tif", size=3)
    _, expected = run("median", tmp_path / "d.tif", tmp_path / "e.tif", size=3)
    receipt, found = run("chain", tmp_path / "a.tif", tmp_path / "f.tif", step=["box size=3", "median size=3"])
    np.testing.assert_array_equal(found, expected, strict=True)
    assert receipt["image"]["step 2, nodata"] == receipt["image"]["step 1, nodata"]


def _gaussian(values: Any, sigma: float) -> Any:
    """Normalised convolution of the samples that are not NaN."""
    counted = ~np.isnan(values)
    total, weight = (ndimage.gaussian_filter(each, sigma) for each in (np.where(counted, values, 0), counted * 1.0))
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 1e-12)


def _windows(values: Any, size: int) -> Any:
    padded = np.pad(values, (size // 2, (size - 1) // 2), mode="symmetric")
    return sliding_window_view(padded, (size, size)).reshape(*values.shape, -1)


def _deviation(values: Any, size: int) -> Any:
    windows = _windows(values, size)
    found = np.full(values.shape, np.nan)
    some = ~np.isnan(windows).all(axis=-1)
    found[some] = np.nanstd(windows[some], axis=-1)
    return found


def _bilateral(values: Any, sigma_range: float) -> Any:
    windows, place = _windows(values, 7), np.arange(-3, 4)
    distance = np.add.outer(place**2, place**2).ravel()
    weights = np.exp(-0.5 * (((windows - values[..., None]) / sigma_range) ** 2 + distance))
    total = np.nansum(weights * windows, axis=-1)
    return np.divide(total, np.nansum(weights, axis=-1), out=values.copy(), where=~np.isnan(values))


def _without_ball(values: Any, radius: int) -> Any:
    """Missing samples do not stop the ball."""
    place = np.arange(-radius, radius + 1)
    square = np.add.outer(place**2, place**2)
    height = np.sqrt(np.maximum(radius**2 - square, 0.0))
    ball = square <= radius**2
    free = np.where(np.isnan(values), np.inf, values)
    apex = ndimage.grey_erosion(free, footprint=ball, structure=height - radius, mode="constant", cval=np.inf)
    reached = ndimage.grey_dilation(apex, footprint=ball, structure=height - radius, mode="constant", cval=-np.inf)
    return values - reached


COMPOSITES: list[tuple[str, dict[str, Any], Any]] = [
    ("dog", {"sigma": 1}, lambda x: np.where(np.isnan(x), x, _gaussian(x, 1) - _gaussian(x, 1.6))),
    ("unsharp", {"sigma": 2, "amount": 0.5}, lambda x: x + 0.5 * (x - _gaussian(x, 2))),
    ("subtract-background", {"sigma": 1}, lambda x: x - _gaussian(x, 1)),
    ("divide-background", {"sigma": 9}, lambda x: x / _gaussian(x, 9)),
    ("deviation", {"size": 4}, lambda x: _deviation(x, 4)),
    ("bilateral", {"sigma_range": 900}, lambda x: _bilateral(x, 900)),
    ("rolling-ball", {"radius": 3}, lambda x: _without_ball(x, 3)),
]


@pytest.mark.parametrize(("name", "given", "define"), COMPOSITES, ids=[name for name, _, _ in COMPOSITES])
def test_composites_leave_missing_samples_out(tmp_path: Path, name: str, given: dict[str, Any], define: Any) -> None:
    """Against the definition in float64, and for any cut. Differences have NaN where the image has no value."""
    samples = elevations(tmp_path / "a.tif", "int16", -32768)
    expected = define(np.where(samples == -32768, np.nan, samples))
    receipt, found = run(name, tmp_path / "a.tif", tmp_path / "b.tif", **given)
    assert receipt["chunks"] > 1 or name == "divide-background"  # whose halo is as long as the image
    assert receipt["image"]["nodata"] == "-32768, left out"
    keeps = found.dtype == np.int16
    missing = found == -32768 if keeps else np.isnan(found)
    np.testing.assert_array_equal(missing, np.isnan(expected))
    there = ~missing
    np.testing.assert_allclose(found[there], expected[there], rtol=0, atol=0.51 if keeps else 1e-3)
    with tifffile.TiffFile(tmp_path / "b.tif") as file:
        assert file.pages[0].tags["GDAL_NODATA"].value == ("-32768" if keeps else "nan")
    _, whole = run(name, tmp_path / "a.tif", tmp_path / "b.tif", chunk_bytes=None, **given)
    np.testing.assert_array_equal(whole, found)
    # Of floats, NaN may be left out alike.
    image = np.where(samples == -32768, np.nan, samples).astype(np.float32)
    write_image(tmp_path / "a.npy", image, "YX")
    _, found = run(name, tmp_path / "a.npy", tmp_path / "b.npy", nan_policy="omit", **given)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * 900 if name == "bilateral" else 3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, given) for name, given, _ in COMPOSITES),
        *(("median", {"size": 5}), ("percentile", {"size": 4, "percentile": 10}), ("tophat", {"size": 7})),
        ("chain", {"step": ["gaussian sigma=2", "box size=3", "median size=3"]}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_gpu_leaves_the_same_samples_out(tmp_path: Path, name: str, given: dict[str, Any]) -> None:
    import cupy

    for dtype, nodata in (("int16", -32768), ("uint8", 7), ("float32", -9999.0)):
        samples = elevations(tmp_path / "a.tif", dtype, nodata)
        workload: Any = workload_named(name)
        files = {"input": tmp_path / "a.tif", "output": tmp_path / "b.tif"}
        job: Any = workload.open(JobSpec(workload=name, **files, parameters=workload.Parameters(**given)))
        for region in (Region((0, 0), samples.shape), Region((31, 40), (90, 101))):
            block = job.samples(region)
            expected = job.computed(block, region)
            found = job.computed(cupy.asarray(block), region).get()
            assert (block == nodata).any()
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        job.close()


def test_an_even_image_with_holes_has_no_deviation(tmp_path: Path) -> None:
    samples = elevations(tmp_path / "a.tif", "uint16", 0)
    write_image(tmp_path / "even.npy", np.where(samples == 0, 0, 65_533).astype(np.uint16), "YX")
    _, found = run("deviation", tmp_path / "even.npy", tmp_path / "b.npy", nodata=0, size=5)
    assert np.isnan(found).any()
    assert not np.nan_to_num(found).any()


def test_filters_that_cannot_leave_samples_out_say_so(tmp_path: Path) -> None:
    elevations(tmp_path / "a.tif", "int16", -32768)
    for step, name in (("log", "log"), ("gaussian sigma=2 order=1", "gaussian"), ("dog nan_policy=raise", "dog")):
        receipt, _ = run("chain", tmp_path / "a.tif", tmp_path / "b.tif", step=[step])
        assert receipt["image"]["nodata"] == f"-32768, taken by {name} like any other value"


@pytest.mark.parametrize(
    ("step", "shared", "said"),
    [
        ("dog nodata=0.5", {}, r"--step 1, dog: --nodata 0\.5: .*a\.tif is int16, which cannot have it"),
        ("dog nodata=7 nan_policy=raise", {}, "--nodata leaves pixels out, which does not fit --nan-policy raise"),
        ("gaussian sigma=2 order=1 nodata=7", {}, "--nodata leaves pixels out, which does not fit --order: pass one"),
        ("box nan_policy=omit", {"mode": "constant", "cval": math.nan}, "--nan-policy omit .* does not fit --cval nan"),
        ("median nodata=40000", {}, "--nodata 40000: .* is int16, which cannot have it"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, step: str, shared: dict[str, Any], said: str) -> None:
    elevations(tmp_path / "a.tif", "float32" if shared else "int16", 0)
    with pytest.raises(ParameterError, match=said):
        run("chain", tmp_path / "a.tif", tmp_path / "b.tif", step=[step], **shared)


def test_nan_may_be_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.npy", np.full((9, 9), np.nan, np.float32), "YX")
    for name, given in (("dog", {}), ("bilateral", {"sigma_range": 1}), ("rolling-ball", {})):
        with pytest.raises(InputError, match=r"a\.npy, among samples .*: image contains NaN; replace them, or choose"):
            run(name, tmp_path / "a.npy", tmp_path / "b.npy", nan_policy="raise", **given)
