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
from kernels.smoothing import box
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import ParameterError
from pipeline.workloads import JobSpec, workload_named
from tests.images import read_image


def elevations(path: Path, dtype: str, nodata: float) -> Any:
    """A GeoTIFF with holes: single pixels, and one wider than any window."""
    rng = np.random.default_rng(5)
    samples = rng.integers(0, 3000, (157, 131)).astype(dtype)
    samples[rng.random(samples.shape) < 0.1] = nodata
    samples[40:60, 30:70] = nodata
    text = f"{nodata!r}\0".encode()
    tifffile.imwrite(path, samples, extratags=[(42113, 2, len(text), text, True)])
    return samples


def run(workload: str, source: Path, target: Path, **given: Any) -> tuple[dict[str, Any], Any]:
    parameters = workload_named(workload).Parameters(**given)
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=60_000)
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
    expected = box(np.where(missing, np.nan, samples).astype(np.float32), 5, nan_policy="omit")
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
