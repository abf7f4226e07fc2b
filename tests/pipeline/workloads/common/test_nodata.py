from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

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


def test_integers_are_smoothed_with_a_remark_and_refused_if_asked(tmp_path: Path) -> None:
    samples = elevations(tmp_path / "a.tif", "int16", -32768)
    receipt, found = run("smooth", tmp_path / "a.tif", tmp_path / "b.tif", size=3)
    assert receipt["image"]["nodata"] == "-32768, smoothed like any other value"
    np.testing.assert_array_equal(found, box(samples, 3))
    with pytest.raises(ParameterError, match=r"--nodata -1: .*a\.tif is int16, .*: convert it to float32"):
        run("smooth", tmp_path / "a.tif", tmp_path / "c.tif", nodata=-1)
