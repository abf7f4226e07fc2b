from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernels.rank import median_filter
from kernels.smoothing import uniform_filter
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.workloads import JobSpec, workload_named
from pipeline.workloads.common.axes import axes_named, usual_axes
from tests.images import read_image, write_image

UNKNOWN = Calibration()
KNOWN = Calibration({"Z": Step(2.0, "micrometer")})


@pytest.mark.parametrize(
    ("axes", "known", "chosen"),
    [
        ("YX", UNKNOWN, "YX"),
        ("YXS", UNKNOWN, "YX"),
        ("ZYX", UNKNOWN, "ZYX"),
        ("ZYXS", UNKNOWN, "ZYX"),
        ("CZYX", UNKNOWN, "YX"),
        ("TZYX", UNKNOWN, "YX"),
        ("CZYX", Calibration({"X": Step(1.0, "micrometer")}), "YX"),
        ("CZYX", Calibration({"Z": Step(1.0, "micrometer")}), "ZYX"),
        ("TCZYXS", KNOWN, "ZYX"),
        ("TCYX", UNKNOWN, "YX"),
        ("NYX", UNKNOWN, "YX"),
        ("NZYX", UNKNOWN, "ZYX"),
    ],
)
def test_time_points_channels_and_samples_are_never_filtered(axes: str, known: Calibration, chosen: str) -> None:
    header = ImageHeader(shape=(2,) * len(axes), axes=axes, dtype=np.dtype(np.uint8), calibration=known)
    assert "".join(axes[axis] for axis in usual_axes(header)) == chosen


@pytest.mark.parametrize("names", [("YX",), ("yx",), ("Y", "X"), ("3", "4"), ("-2", "-1"), ("y", "4")])
def test_axes_are_named_by_letter_or_number(names: tuple[str, ...]) -> None:
    assert axes_named(names, "TCZYX", Path("a.tif")) == (3, 4)


@pytest.mark.parametrize("names", [("T",), ("C", "X"), ("YY",), ("YX", "Z"), ("0",), ("1",), ("",), ("S",)])
def test_other_axes_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ParameterError, match=r"name each axis once, of those a.tif has: Z \(2\), Y \(3\), X \(4\)"):
        axes_named(names, "TCZYXS", Path("a.tif"))


@pytest.mark.parametrize("workload", ["smooth", "median"])
@pytest.mark.parametrize(("source", "result"), [("in.zarr", "out.ome.tif"), ("in.ome.tif", "out.zarr")])
def test_time_points_and_channels_are_filtered_alone(tmp_path: Path, workload: str, source: str, result: str) -> None:
    samples = np.random.default_rng(7).integers(0, 65536, (2, 3, 3, 37, 41), dtype=np.uint16)
    write_image(tmp_path / source, samples, "TCZYX")
    parameters = workload_named(workload).Parameters(size=5, axes="YX")
    spec = JobSpec(workload=workload, input=tmp_path / source, output=tmp_path / result, parameters=parameters)
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=30_000)
    plan = plan_job(spec, CpuDevice(2), options)
    assert plan.describe()["image"]["filtered along"] == "Y, X"
    run_job(plan, options)
    function = {"smooth": uniform_filter, "median": median_filter}[workload]
    expected = [function(plane, 5) for plane in samples.reshape(-1, 37, 41)]
    np.testing.assert_array_equal(read_image(tmp_path / result), np.reshape(expected, samples.shape), strict=True)
    with images.open_image(tmp_path / result) as reader:
        assert reader.header.axes == "TCZYX"


def test_axes_of_many_files_are_numbered_as_those_of_one() -> None:
    for given in (("0", "1"), ("Y", "X"), ("-2", "-1"), ("YX",)):
        one, many = (axes_named(given, letters, Path("in.tif")) for letters in ("YX", "NYX"))
        assert many == tuple(axis + 1 for axis in one)
    with pytest.raises(ParameterError, match=r"those in.tif has: Y \(0\), X \(1\)"):
        axes_named(("N",), "NYX", Path("in.tif"))
    with pytest.raises(ParameterError, match=r"Y \(0\), X \(1\)"):
        axes_named(("2",), "NYX", Path("in.tif"))
