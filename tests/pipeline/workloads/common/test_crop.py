from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.errors import ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region
from pipeline.formats.image.metadata import Calibration, Channel, Step
from pipeline.workloads import JobSpec, workload_named
from tests.images import read_image, write_image

SHAPE = (5, 3, 11, 97, 101)  # T, C, Z, Y, X


def run(workload: str, source: Path, target: Path, chunk_bytes: int = 40_000, **given: Any) -> NDArray[Any]:
    parameters = workload_named(workload).Parameters(**given)
    options = RunOptions(memory_bytes=64 << 20, chunk_bytes=chunk_bytes)
    spec = JobSpec(workload=workload, input=source, output=target, parameters=parameters)
    receipt = run_job(plan_job(spec, CpuDevice(2), options), options)
    assert receipt["audit"]["samples"] > 0
    return read_image(target)


def volume(dtype: str, shape: tuple[int, ...] = SHAPE[2:]) -> NDArray[Any]:
    return (np.random.default_rng(9).random(shape) * 250).astype(dtype)


@pytest.mark.parametrize("mode", ["reflect", "wrap", "constant"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("given", [
    {"size": 5}, {"size": (3, 9, 41)}, {"filter": "gaussian", "sigma": 1.5}, {"filter": "gaussian", "sigma": (1, 9, 9)},
])  # fmt: skip
def test_the_part_of_the_whole_result_bit_by_bit(tmp_path: Path, given: Any, dtype: str, mode: str) -> None:
    samples = volume(dtype)
    write_image(tmp_path / "a.npy", samples, "ZYX")
    whole = run("smooth", tmp_path / "a.npy", tmp_path / "b.npy", 800_000, mode=mode, **given)
    crop = "Z=2:9,Y=13:60,X=0:71"
    part = run("smooth", tmp_path / "a.npy", tmp_path / "c.npy", 300_000, mode=mode, crop=crop, **given)
    np.testing.assert_array_equal(part, whole[2:9, 13:60, :71], strict=True)


@pytest.mark.parametrize("mode", ["reflect", "constant"])
@pytest.mark.parametrize(
    ("workload", "given"),
    [
        ("dog", {"sigma": 9.0}),  # on a coarse grid, which begins where the image does
        ("tophat", {"size": (4, 6)}),  # of two steps, with edges between them
        ("rolling-ball", {"radius": 5}),
        ("deviation", {"size": 3, "nan_policy": "omit"}),
        ("chain", {"step": ["median size=3", "gaussian sigma=9"]}),
        ("chain", {"step": ["close size=4", "dog sigma=2"]}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_depends_on_places_and_edges(tmp_path: Path, workload: str, given: Any, mode: str) -> None:
    """The image goes on around a part of it."""
    write_image(tmp_path / "a.npy", np.random.default_rng(1).integers(0, 60_000, (101, 143), np.uint16), "YX")
    whole = run(workload, tmp_path / "a.npy", tmp_path / "b.npy", 1 << 20, mode=mode, **given)
    for crop, kept in (("Y=21:90,X=37:130", np.s_[21:90, 37:130]), ("X=5:18", np.s_[:, 5:18])):
        part = run(workload, tmp_path / "a.npy", tmp_path / "c.npy", 1 << 20, mode=mode, crop=crop, **given)
        np.testing.assert_array_equal(part, whole[kept], strict=True)


@pytest.mark.parametrize("workload", ["median", "maximum"])
def test_rank_filters_too(tmp_path: Path, workload: str) -> None:
    write_image(tmp_path / "a.npy", volume("uint16"), "ZYX")
    whole = run(workload, tmp_path / "a.npy", tmp_path / "b.npy", size=5, axes="YX")
    part = run(workload, tmp_path / "a.npy", tmp_path / "c.npy", size=5, axes="YX", crop="z=-3:,x=90:")
    np.testing.assert_array_equal(part, whole[-3:, :, 90:], strict=True)


@pytest.mark.parametrize("output", ["b.zarr", "b.ome.tif"])
def test_time_points_and_channels_with_their_names_places_and_intervals(tmp_path: Path, output: str) -> None:
    samples = volume("uint16", (*SHAPE[:2], 1, 37, 41))[:, :, 0]
    header = ImageHeader(
        shape=samples.shape, axes="TCYX", dtype=samples.dtype,
        calibration=Calibration(
            {"T": Step(0.5, "second"), "Y": Step(2.0, "micrometer"), "X": Step(2.0, "micrometer")},
            channels=tuple(map(Channel, ("a", "b", "c"), ("FF0000", "00FF00", "0000FF"))),
        ),
    )  # fmt: skip
    writer = images.create_image(tmp_path / "a.zarr", header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    whole = run("smooth", tmp_path / "a.zarr", tmp_path / "whole.zarr")
    part = run("smooth", tmp_path / "a.zarr", tmp_path / output, crop="C=1:,Y=3:30", times="1::2")
    np.testing.assert_array_equal(part, whole[1::2, 1:, 3:30], strict=True)
    with images.open_image(tmp_path / output) as reader:
        known = reader.header.calibration
    assert [channel.name for channel in known.channels] == ["b", "c"]
    assert known.steps["T"] == Step(1.0, "second")
    if output == "b.zarr":
        assert known.origin == {"T": 0.5, "Y": 6.0}
    alone = run("smooth", tmp_path / "a.zarr", tmp_path / "one.zarr", times="4", crop="C=0:3:2")
    np.testing.assert_array_equal(alone, whole[4:, ::2], strict=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"crop": "Y=0:200"}, "--crop Y=0:200: chooses more than there are; .*a.npy has 97"),
        ({"crop": "Z=20:30"}, "--crop Z=20:30: chooses none"),
        ({"crop": "C=0:1"}, "--crop: .*a.npy has the axes Z,Y,X, and not C"),
        ({"times": "3"}, "--times: .*a.npy has the axes Z,Y,X, and not T"),
    ],
)
def test_parts_that_an_image_does_not_have(tmp_path: Path, given: Any, said: str) -> None:
    write_image(tmp_path / "a.npy", volume("uint8"), "ZYX")
    with pytest.raises(ParameterError, match=said):
        run("smooth", tmp_path / "a.npy", tmp_path / "b.npy", **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"crop": "Y=0:20:2"}, "only time points and channels are taken with one"),
        ({"crop": "Y=0:20,y=3:4"}, "at most once"),
        ({"crop": "0:20"}, "as in Z=10:20,Y=0:4096"),
        ({"crop": "Q=0:20"}, "name each of T, C, Z, Y, X"),
        ({"crop": "T=0:10:500"}, "the step last"),
        ({"crop": "T=0:10", "times": "3"}, "give one"),
        ({"times": "0:10:500"}, "the step last, as in Python: 0:500:10"),
    ],
)
def test_parts_that_are_not_clear(given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        workload_named("smooth").Parameters(**given)
