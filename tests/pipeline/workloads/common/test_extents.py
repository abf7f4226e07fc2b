from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kernels.rank import median_filter
from kernels.smoothing import gaussian_filter, uniform_filter
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.workloads import JobSpec, workload_named
from pipeline.workloads.common.extents import in_samples
from tests.images import read_image

STEPS = {"Z": Step(800.0, "nanometer"), "Y": Step(0.25, "micrometer"), "X": Step(0.25, "micrometer")}
SAMPLES = np.random.default_rng(2).integers(0, 60_000, (7, 41, 43), dtype=np.uint16)


def header(steps: Any, axes: str = "ZYX", shape: tuple[int, ...] = SAMPLES.shape) -> ImageHeader:
    return ImageHeader(shape=shape, axes=axes, dtype=SAMPLES.dtype, calibration=Calibration(steps))


def resolved(given: Any, steps: Any = STEPS, axes: str = "ZYX", shape: tuple[int, ...] = SAMPLES.shape) -> Any:
    asked = workload_named("smooth").Parameters(**given)
    return in_samples(asked, header(steps, axes, shape), Path("a.tif"))


@pytest.mark.parametrize(
    ("sigma", "axes", "expected"),
    [
        ("0.5um", "ZYX", (0.625, 2.0, 2.0)),
        ("500nm", "ZYX", (0.625, 2.0, 2.0)),
        ("5e-4mm", "ZYX", (0.625, 2.0, 2.0)),
        ("Z=2um,Y=0.5um,X=1µm", "ZYX", (2.5, 2.0, 4.0)),
        ("X=1um,Y=3", "XY", (4.0, 3.0)),
        ("0.4um,0.5um,1um", "ZYX", (0.5, 2.0, 4.0)),
        ("1.5,0.5um,0.75um", "ZYX", (1.5, 2.0, 3.0)),
    ],
)
def test_lengths_by_the_pixel_size(sigma: str, axes: str, expected: tuple[float, ...]) -> None:
    found, remarks = resolved({"filter": "gaussian", "sigma": sigma})
    assert "".join(found.axes) == axes
    assert found.sigma == pytest.approx(expected)
    assert remarks["sigma in samples"].startswith(f"{axes[0]} {expected[0]:g}, ")


def test_chosen_axes_and_their_order_stay() -> None:
    found, _ = resolved({"filter": "gaussian", "sigma": "X=1um,Y=0.5um", "axes": "Y,X"})
    assert (found.axes, found.sigma) == (("Y", "X"), (2.0, 4.0))
    numbers = {"filter": "gaussian", "sigma": "1.5,2"}
    assert resolved(numbers)[0] == workload_named("smooth").Parameters(**numbers)


@pytest.mark.parametrize(
    ("given", "steps", "said"),
    [
        ({"sigma": "0.5um"}, {}, "--sigma 0.5um: a.tif has no pixel size along Z: pass a number of pixels"),
        ({"sigma": "0.5um"}, {**STEPS, "Z": Step(2.0)}, "along Z without a unit"),
        ({"sigma": "0.5um"}, {**STEPS, "Z": Step(2.0, "furlong")}, "along Z in furlong, which um does not fit"),
        ({"sigma": "0.5s"}, STEPS, "along Z in nanometer, which s does not fit"),
        ({"sigma": "Z=1um,Y=1um", "axes": "YX"}, STEPS, "--axes chooses Y,X"),
        ({"sigma": "Z=1um,2um"}, STEPS, "name each axis once, or none"),
        ({"sigma": "1um,2um"}, STEPS, "a.tif is filtered along Z,Y,X: give 1 or 3"),
        ({"sigma": "T=1um"}, STEPS, "--sigma T=1um: name each axis once"),
        ({"sigma": "1m"}, STEPS, "--sigma: "),
    ],
)
def test_lengths_that_cannot_be_converted(given: Any, steps: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=said) as caught:
        resolved({"filter": "gaussian", **given}, steps)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sigma", "said"),
    [("2furlongs", "furlongs is not a unit"), ("Z=", "valid number"), ("-2um", "'-2um' is negative: give a length")],
)
def test_what_is_no_length(sigma: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        workload_named("smooth").Parameters(filter="gaussian", sigma=sigma)


@pytest.mark.parametrize(
    ("workload", "given", "said"),
    [
        (
            "rolling-ball",
            {"radius": "1um"},
            "--radius 1um: in pixels of a.tif this is 1.25 along Z, 4 along Y, 4 along X",
        ),
        ("rolling-ball", {"radius": "Y=1um"}, "--radius Y=1um: "),
        ("rolling-ball", {"radius": "1m", "axes": "YX"}, "--radius: "),
        (
            "bilateral",
            {"sigma_range": 1, "sigma_spatial": "1s"},
            "--sigma-spatial 1s: a.tif states its pixel size along Z",
        ),
    ],
)
def test_radii_and_spatial_deviations_that_cannot_be_converted(workload: str, given: Any, said: str) -> None:
    with pytest.raises((ParameterError, ValidationError), match=said):
        in_samples(workload_named(workload).Parameters(**given), header(STEPS), Path("a.tif"))


def _result(folder: Path, workload: str, given: Any) -> tuple[dict[str, Any], Any, Any]:
    """The receipt, the samples and the parameters of a job on a.ome.tif."""
    parameters = workload_named(workload).Parameters(**given)
    options = RunOptions(memory_bytes=64 << 20)
    spec = JobSpec(workload=workload, input=folder / "a.ome.tif", output=folder / "b.ome.tif", parameters=parameters)
    receipt = run_job(plan_job(spec, CpuDevice(2), options), options)
    return receipt, read_image(folder / "b.ome.tif"), parameters


@pytest.mark.parametrize(
    ("workload", "given", "expected"),
    [
        (
            "smooth",
            {"filter": "gaussian", "sigma": "Z=0.4um,Y=0.5um,X=0.5um"},
            lambda a: gaussian_filter(a, (0.5, 2, 2)),
        ),
        ("smooth", {"size": "1.25um", "axes": "YX"}, lambda a: np.stack([uniform_filter(plane, 5) for plane in a])),
        ("median", {"size": "Y=3,X=0.8um"}, lambda a: np.stack([median_filter(plane, (3, 3)) for plane in a])),
        ("chain", {"step": "gaussian sigma=Z=0.4um,Y=0.5um,X=0.5um"}, lambda a: gaussian_filter(a, (0.5, 2, 2))),
        (
            "chain",
            {"step": "gaussian sigma=0.5um axes=YX order=1"},
            lambda a: gaussian_filter(a, 2, order=1, axes=(1, 2)),
        ),
        ("dog", {"sigma": "0.5um", "axes": "YX"}, {"sigma": 2, "axes": "YX"}),
        ("divide-background", {"sigma": "Y=1um,X=2um"}, {"sigma": (4, 8), "axes": "YX"}),
        ("deviation", {"size": "1.25um", "axes": "YX"}, {"size": 5, "axes": "YX"}),
        (
            "bilateral",
            {"sigma_range": 9e3, "sigma_spatial": "0.25um"},
            {"sigma_range": 9e3, "sigma_spatial": (0.3125, 1, 1)},
        ),
        ("rolling-ball", {"radius": "1um", "axes": "YX"}, {"radius": 4, "axes": "YX"}),
        (
            "erode",
            {"footprint": "disk", "radius": "0.55um", "axes": "YX"},
            {"footprint": "disk", "radius": 2, "axes": "YX"},
        ),
    ],
)
def test_a_job_in_lengths_is_that_in_samples(tmp_path: Path, workload: str, given: Any, expected: Any) -> None:
    """`expected`: of the samples, or the parameters in samples."""
    writer = images.create_image(tmp_path / "a.ome.tif", header(STEPS))
    writer.write(Region.whole(SAMPLES.shape), SAMPLES)
    writer.publish()
    receipt, found, parameters = _result(tmp_path, workload, given)
    if not callable(expected):
        _, wanted, _ = _result(tmp_path, workload, expected)
    np.testing.assert_array_equal(found, expected(SAMPLES) if callable(expected) else wanted)
    assert any(name.endswith(" in samples") for name in receipt["image"])
    assert workload_named(workload).Parameters(**receipt["request"]) == parameters
