"""A series as one PNG: where each image lies, and which shade each value has."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.engine.run import run_job
from pipeline.errors import InputError
from pipeline.formats.image.base import Region
from pipeline.formats.series import open_series, series_format_for_output
from pipeline.formats.series.base import SeriesHeader
from tests.images import read_image
from tests.pipeline.workloads.mri.mri_jobs import images, job, write_h5


def write(path, array, window=None):
    header = SeriesHeader(shape=array.shape, dtype=np.dtype(np.float32), is_volume=False, window=window)
    writer = series_format_for_output(path).create(path, header)
    for time in reversed(range(len(array))):
        writer.write(Region((time, 0, 0, 0), (time + 1, *array.shape[1:])), array[time : time + 1])
    writer.publish()
    writer.discard()
    return header


def shades(values, low, high):
    return np.rint(np.clip((values.astype(float) - low) / (high - low), 0, 1) * 255)


@pytest.mark.parametrize(
    ("shape", "across"),
    [((1, 1, 5, 7), 1), ((3, 2, 5, 7), 2), ((1, 5, 5, 7), 3), ((7, 1, 4, 3), 3), ((2, 3, 900, 700), 3)],
)
@pytest.mark.parametrize("window", [None, (0.5, 2.0)])
def test_each_image_is_in_its_place(tmp_path, shape, across, window):
    array = np.random.default_rng(0).uniform(0, 3, shape).astype(np.float32)
    write(tmp_path / "a.png", array, window)
    found = read_image(tmp_path / "a.png").astype(float)
    low, high = window or (0.0, float(np.percentile(array, 99.7)))
    flat = array.reshape(-1, *shape[2:])
    down = -(-len(flat) // across)
    assert found.shape == (down * shape[2], across * shape[3])
    tiles = found.reshape(down, shape[2], across, shape[3]).transpose(0, 2, 1, 3).reshape(-1, *shape[2:])
    # An automatic window is exact to a bin of its histogram; of few pixels, to a pixel.
    tolerance = 0 if window else (2 if len(array.ravel()) > 1000 else 8)
    assert np.abs(tiles[: len(flat)] - shades(flat, low, high)).max() <= tolerance
    assert not tiles[len(flat) :].any()


@pytest.mark.parametrize("value", [0.0, 1e-30, 2.0])
def test_constant_images(tmp_path, value):
    write(tmp_path / "a.png", np.full((1, 2, 3, 4), value, np.float32))
    assert (read_image(tmp_path / "a.png") == (255 if value else 0)).all()


def test_a_job_draws_its_images_in_the_window(tmp_path):
    source = write_h5(tmp_path / "in.h5", slices=2)
    options = {"traj_units": "cycles/pixel", "iterations": 3}
    expected, _ = images(source, tmp_path / "out.npy", **options)
    receipt = run_job(*job(source, tmp_path / "out.png", window="0,0.5", **options))
    assert receipt["parameters"]["window"] == "0,0.5"
    found = read_image(tmp_path / "out.png")
    np.testing.assert_array_equal(found, np.concatenate(list(shades(expected[0], 0, 0.5)), axis=1))


def test_a_png_cannot_be_compared(tmp_path):
    header = write(tmp_path / "a.png", np.ones((1, 1, 3, 4), np.float32))
    with pytest.raises(InputError, match=r"a\.png: a PNG holds shades, not values, which nothing can be compared with"):
        open_series(tmp_path / "a.png", header)
