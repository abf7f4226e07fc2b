"""Pictures of planes against means computed from the whole array."""

from __future__ import annotations

import itertools
from dataclasses import replace

import imagecodecs
import numpy as np
import pytest

from pipeline.errors import InputError, ParameterError
from pipeline.formats import image as images
from pipeline.formats.image.base import ImageHeader, Region, Storage
from pipeline.formats.image.metadata import Calibration, Channel, Step
from pipeline.formats.image.tiff.reader import TiffReader
from pipeline.formats.image.zarr.reader import ZarrReader
from pipeline.formats.slices import Cut, describe, draw, drawing
from tests.images import write_image

RANDOM = np.random.default_rng(5)


def shades_of(values, low, high):
    scaled = (np.asarray(values, np.longdouble) - low) / ((high - low) or 1)
    return np.clip(scaled, 0, 1) * 255


def boxes(plane, step):
    """The mean of each box, by differences of running sums."""
    edges = [np.minimum(np.arange(0, n + step, step), n) for n in plane.shape]
    sums = np.pad(plane.astype(np.longdouble).cumsum(0).cumsum(1), ((1, 0), (1, 0)))[np.ix_(*edges)]
    return np.diff(np.diff(sums, axis=0), axis=1) / np.outer(*map(np.diff, edges))


def assert_shows(picture, values, low=None, high=None):
    low, high = picture.low if low is None else low, picture.high if high is None else high
    found = imagecodecs.png_decode(picture.png)
    assert found.shape == values.shape
    np.testing.assert_allclose(found, shades_of(values, low, high), rtol=0, atol=0.501)


@pytest.mark.parametrize("suffix", [".npy", ".tif", ".zarr"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "float32"])
def test_a_part_of_a_plane_is_averaged(tmp_path, suffix, dtype):
    samples = (RANDOM.random((5, 101, 67)) * 200).astype(dtype)
    path = write_image(tmp_path / f"a{suffix}", samples, "ZYX")
    for size, rows, columns in ((1024, None, None), (20, None, None), (9, (13, 90), (2, 67)), (7, (100, 101), (0, 1))):
        picture = draw(path, Cut(at={"Z": 3}, size=size, rows=rows, columns=columns, low=10, high=150))
        (top, bottom), (left, right) = rows or (0, 101), columns or (0, 67)
        step = max(-(-(bottom - top) // size), -(-(right - left) // size))
        assert_shows(picture, boxes(samples[3, top:bottom, left:right], step), 10, 150)
        assert (picture.level, picture.one_of, picture.rows[0], picture.columns[0]) == (0, 1, top, left)
        assert bottom <= picture.rows[1] < bottom + step
        assert right <= picture.columns[1] < right + step


def test_without_a_choice_the_middle_plane_and_percentiles(tmp_path):
    samples = RANDOM.normal(size=(6, 83, 31)).astype(np.float32)
    samples[3, 5, 7], samples[3, 0, 0] = np.nan, np.inf
    picture = draw(write_image(tmp_path / "a.npy", samples, "ZYX"), Cut())
    shown = np.sort(samples[3][np.isfinite(samples[3])])
    assert picture.low == shown[int(np.ceil(0.001 * len(shown))) - 1]
    assert picture.high == shown[int(np.ceil(0.999 * len(shown))) - 1]
    expected = np.where(np.isnan(samples[3]), picture.low, np.where(np.isinf(samples[3]), picture.high, samples[3]))
    assert_shows(picture, expected)


def test_eight_bits_stay_as_they_are_and_colours_stay_together(tmp_path):
    samples = RANDOM.integers(0, 256, (41, 53, 4), np.uint8)
    picture = draw(write_image(tmp_path / "a.png", samples), Cut())
    assert (picture.low, picture.high) == (0, 255)
    np.testing.assert_array_equal(imagecodecs.png_decode(picture.png), samples)
    found = imagecodecs.png_decode(draw(tmp_path / "a.png", Cut(low=50, high=100)).png)
    np.testing.assert_allclose(found[..., :3], shades_of(samples[..., :3], 50, 100), rtol=0, atol=0.501)
    np.testing.assert_array_equal(found[..., 3], samples[..., 3])


@pytest.mark.parametrize("plane", ["".join(each) for each in itertools.permutations("ZYX", 2)])
@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_any_two_axes_make_a_plane(tmp_path, plane, suffix):
    samples = RANDOM.random((11, 13, 17)).astype(np.float32)
    path = write_image(tmp_path / f"a{suffix}", samples, "ZYX")
    (other,) = set("ZYX") - set(plane)
    picture = draw(path, Cut(plane=plane, at={other: 4}, low=0, high=1))
    taken = np.take(samples, 4, axis="ZYX".index(other))
    assert_shows(picture, taken if "ZYX".index(plane[0]) < "ZYX".index(plane[1]) else taken.T)


@pytest.mark.parametrize(("part", "of"), [("magnitude", np.abs), ("real", np.real), ("imaginary", np.imag)])
def test_parts_of_complex_samples(tmp_path, part, of):
    samples = (RANDOM.normal(size=(29, 23)) + 1j * RANDOM.normal(size=(29, 23))).astype(np.complex64)
    np.save(tmp_path / "a.npy", samples)
    assert_shows(draw(tmp_path / "a.npy", Cut(part=part, size=10)), boxes(of(samples.astype(np.complex128)), 3))


def test_the_phase_is_that_of_the_mean(tmp_path):
    samples = np.exp(1j * (np.pi + 0.1 * RANDOM.normal(size=(20, 20)))).astype(np.complex64)
    np.save(tmp_path / "a.npy", samples)
    means = samples.astype(np.complex128).reshape(5, 4, 5, 4).mean(axis=(1, 3))
    picture = draw(tmp_path / "a.npy", Cut(part="phase", size=5, low=-4, high=4))
    assert_shows(picture, np.angle(means))
    assert describe(tmp_path / "a.npy").dtype == "complex64"


def pyramid(path, samples, axes, levels):
    header = ImageHeader(shape=samples.shape, axes=axes, dtype=samples.dtype)
    writer = images.format_for_output(path, Storage(levels=levels)).create(path, header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()


@pytest.mark.parametrize(("name", "kind"), [("a.zarr", ZarrReader), ("a.tif", TiffReader), ("a.ome.tif", TiffReader)])
def test_the_level_of_a_pyramid_that_suffices_is_read(tmp_path, monkeypatch, name, kind):
    samples = RANDOM.random((3, 256, 320)).astype(np.float32)
    pyramid(tmp_path / name, samples, "ZYX", 5)
    read = []
    plain = kind.read
    monkeypatch.setattr(
        kind, "read", lambda self, region, out: (read.append(self.header.shape), plain(self, region, out))
    )
    whole = samples[1].astype(np.float64)
    cases = (
        (Cut(size=320), 0, 1), (Cut(size=319), 1, 2), (Cut(size=160), 1, 2), (Cut(size=20), 4, 16),
        (Cut(size=107), 1, 4), (Cut(size=64, rows=(32, 96), columns=(0, 64)), 0, 1),
        (Cut(size=16, rows=(32, 96), columns=(0, 64)), 2, 4),
    )  # fmt: skip
    for cut, level, step in cases:
        read.clear()
        factor = 2**level
        picture = draw(tmp_path / name, cut)
        assert picture.level == level, cut
        assert set(read) == {(3, 256 // factor, 320 // factor)}
        (top, bottom), (left, right) = cut.rows or (0, 256), cut.columns or (0, 320)
        assert_shows(picture, boxes(whole[top:bottom, left:right], step))
        assert picture.rows == (top, top + step * imagecodecs.png_decode(picture.png).shape[0])


@pytest.mark.parametrize(("shape", "levels"), [((101, 67), [(51, 34), (26, 17)]), ((101, 67), [(50, 33), (25, 16)]),
                                               ((96, 60), [(24, 15)]), ((101, 67), [(40, 30)])])  # fmt: skip
def test_pyramids_of_other_programs(tmp_path, shape, levels):
    """Sizes rounded up or down, and factors other than 2: any part is shown, at most one sample of its level away."""
    zarr = pytest.importorskip("zarr")
    samples = np.add.outer(np.arange(shape[0]) / shape[0], np.arange(shape[1]) / shape[1])
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    for number, size in enumerate([shape, *levels]):
        rows, columns = ((np.arange(n) + 0.5) * m / n for n, m in zip(size, shape, strict=True))
        level = np.add.outer(rows / shape[0], columns / shape[1]).astype(np.float32)
        group.create_array(str(number), data=samples.astype(np.float32) if number == 0 else level, chunks=(16, 16))
    axes = [{"name": name, "type": "space"} for name in "yx"]
    datasets = [
        {"path": str(n), "coordinateTransformations": [{"type": "scale", "scale": [2.0**n] * 2}]}
        for n in range(1 + len(levels))
    ]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    used = set()
    for size in (101, 50, 34, 25, 13, 1):
        for rows, columns in (((0, shape[0]), (0, shape[1])), ((shape[0] - 1, shape[0]), (0, 1)), ((20, 70), (11, 50))):
            picture = draw(tmp_path / "a.zarr", Cut(size=size, rows=rows, columns=columns, low=0, high=2))
            used.add(picture.level)
            found = imagecodecs.png_decode(picture.png) / 127.5
            assert max(found.shape) <= size
            pixel = (picture.rows[1] - picture.rows[0]) / found.shape[0]
            shown = samples[rows[0] : rows[1], columns[0] : columns[1]]
            assert found.mean() == pytest.approx(shown.mean(), abs=2.5 * pixel / min(shape) + 0.01)
    assert used == ({0, 1} if len(levels) == 1 else {0, 1, 2})


def test_planes_of_a_level_that_has_fewer(tmp_path):
    """Some programs reduce Z too."""
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    smaller = RANDOM.random((3, 16, 16)).astype(np.float32)
    group.create_array("0", data=np.zeros((5, 32, 32), np.float32), chunks=(1, 16, 16))
    group.create_array("1", data=smaller, chunks=(1, 16, 16))
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    datasets = [{"path": n, "coordinateTransformations": [{"type": "scale", "scale": [1.0] * 3}]} for n in "01"]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    for index in range(5):
        picture = draw(tmp_path / "a.zarr", Cut(size=16, at={"Z": index}, low=0, high=1))
        assert picture.level == 1
        assert_shows(picture, smaller[index // 2])


@pytest.mark.parametrize("suffix", [".npy", ".zarr", ".tif"])
def test_of_a_large_part_a_bounded_share_is_read(tmp_path, monkeypatch, suffix):
    samples = np.repeat(np.repeat(RANDOM.random((64, 64)).astype(np.float32), 16, 0), 16, 1)
    path = tmp_path / f"a{suffix}"
    chunks = None if suffix == ".npy" else (32, 32)
    header = ImageHeader(shape=samples.shape, axes="YX", dtype=samples.dtype)
    writer = images.format_for_output(path, Storage(chunks=chunks)).create(path, header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    limit = samples.nbytes // 5
    monkeypatch.setattr(drawing, "MOST_READ_BYTES", limit)
    monkeypatch.setattr(drawing, "_RUN_BYTES", samples.nbytes // 256)
    read = []

    def noted(path):
        reader = opened(path)
        plain = reader.read
        monkeypatch.setattr(reader, "read", lambda region, out: (read.append(region), plain(region, out)))
        return reader

    opened = drawing.open_stack
    monkeypatch.setattr(drawing, "open_stack", noted)
    picture = draw(path, Cut(size=128, low=0, high=1))
    assert picture.one_of > 1
    nbytes = sum(np.prod(region.shape) * 4 for region in read)
    assert 0.3 * limit < nbytes <= limit
    seen = np.zeros(samples.shape, bool)
    for region in read:
        seen[region.slices] = True
    found = imagecodecs.png_decode(picture.png)
    right = np.abs(found - shades_of(boxes(samples, 8), 0, 1)) <= 0.501
    partly = seen.reshape(128, 8, 128, 8).any(axis=(1, 3))  # samples are the same in boxes of 16
    assert partly.sum() > 1000
    assert right[partly].all()
    # In between there is the mean of a block that was read, never nothing.
    assert found[~partly].min(initial=255) > 0
    assert draw(path, Cut(rows=(0, 64), columns=(0, 64))).one_of == 1, "a small part is whole"


def test_many_small_blocks_are_read_together(tmp_path, monkeypatch):
    samples = RANDOM.random((640, 96)).astype(np.float32)
    header = ImageHeader(shape=samples.shape, axes="YX", dtype=samples.dtype)
    writer = images.format_for_output(tmp_path / "a.zarr", Storage(chunks=(16, 16))).create(tmp_path / "a.zarr", header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    monkeypatch.setattr(drawing, "MOST_READ_BYTES", samples.nbytes // 4)
    regions, plain = [], ZarrReader.read
    monkeypatch.setattr(ZarrReader, "read", lambda self, *given: (regions.append(given[0]), plain(self, *given)))
    picture = draw(tmp_path / "a.zarr", Cut(size=640, low=0, high=1))
    assert picture.one_of > 1
    assert len(regions) <= 2, "not one for each chunk of a kibibyte"
    found = imagecodecs.png_decode(picture.png)
    for region in regions:
        np.testing.assert_allclose(found[region.slices], shades_of(samples[region.slices], 0, 1), rtol=0, atol=0.501)


def test_more_samples_of_a_pixel_than_a_picture_has(tmp_path):
    samples = RANDOM.integers(0, 256, (23, 31, 6), np.uint8)
    path = write_image(tmp_path / "a.tif", samples)
    assert describe(path).axes == (("Y", 23), ("X", 31), ("S", 6))
    for index in (0, 5):
        assert_shows(draw(path, Cut(at={"S": index})), samples[..., index])


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (Cut(at={"Z": 5}), "at Z:5: indices along Z go from 0 to 4"),
        (Cut(at={"T": 0}), "at T: the axes beside the plane YX are Z"),
        (Cut(plane="YT"), "plane YT: name two of the axes Z, Y, X"),
        (Cut(plane="YY"), "plane YY: name two of the axes"),
        (Cut(rows=(0, 8)), "rows 0:8: choose a part of 0:7 along Y"),
        (Cut(columns=(4, 4)), "columns 4:4: choose a part of 0:9 along X"),
    ],
)
def test_what_is_not_there_is_refused_in_a_line(tmp_path, cut, said):
    path = write_image(tmp_path / "a.npy", np.zeros((5, 7, 9), np.uint8), "ZYX")
    with pytest.raises(ParameterError, match=said):
        draw(path, cut)


def test_a_description(tmp_path):
    path = write_image(tmp_path / "a.tif", np.zeros((2, 3, 5, 7, 11), np.uint16), "TCZYX")
    found = describe(path)
    assert found.axes == (("T", 2), ("C", 3), ("Z", 5), ("Y", 7), ("X", 11))
    assert (found.plane, found.at, found.dtype, found.samples, found.levels) == (
        "YX", {"T": 0, "C": 0, "Z": 2}, "uint16", 1, 1,
    )  # fmt: skip
    colours = describe(write_image(tmp_path / "b.ppm", np.zeros((5, 7, 3), np.uint8)))
    assert (colours.axes, colours.samples) == ((("Y", 5), ("X", 7)), 3)
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(InputError, match="unsupported image format"):
        describe(tmp_path / "c.txt")


# Channels together

COLOURS = ("0000FF", "FF8000", "00FFFF")
RGB = np.array([[0, 0, 255], [255, 128, 0], [0, 255, 255]], np.longdouble)


@pytest.fixture
def stained(tmp_path):
    """Three channels of two planes, and their file."""
    samples = (RANDOM.random((3, 2, 61, 43)) * 1000).astype(np.uint16)
    channels = tuple(Channel(f"stain {number}", colour) for number, colour in enumerate(COLOURS))
    steps = {"Z": Step(2.0), "Y": Step(0.5, "micrometer"), "X": Step(0.5, "micrometer")}
    calibration = Calibration(steps, channels=channels)
    return samples, write_image(tmp_path / "a.ome.tif", samples, "CZYX", calibration=calibration)


def assert_composed(picture, planes, limits):
    shades = [np.rint(shades_of(plane, *pair)) for plane, pair in zip(planes, limits, strict=True)]
    expected = np.clip(sum(shade[..., None] / 255 * colour for shade, colour in zip(shades, RGB, strict=True)), 0, 255)
    # A mean next to the middle of two shades may be rounded to either, in each channel.
    np.testing.assert_allclose(imagecodecs.png_decode(picture.png), expected, rtol=0, atol=3.51)


def test_a_composite_is_the_sum_of_the_channels_in_their_colours(stained):
    samples, path = stained
    assert describe(path).colours == COLOURS
    limits = ((0.0, 900.0), (100.0, 500.0), (300.0, 301.0))
    for size, rows, columns in ((1024, None, None), (20, None, None), (9, (13, 60), (2, 43))):
        (top, bottom), (left, right) = rows or (0, 61), columns or (0, 43)
        step = max(-(-(bottom - top) // size), -(-(right - left) // size))
        planes = [boxes(channel[1, top:bottom, left:right], step) for channel in samples]
        asked = Cut(composite=True, at={"Z": 1}, size=size, rows=rows, columns=columns)
        picture = draw(path, replace(asked, limits=limits))
        assert picture.limits == limits
        assert_composed(picture, planes, limits)
        picture = draw(path, replace(asked, low=10.0, high=700.0))
        assert_composed(picture, planes, [(10, 700)] * 3)
        picture = draw(path, asked)
        alone = [draw(path, replace(asked, composite=False, at={"C": number, "Z": 1})) for number in range(3)]
        assert picture.limits == tuple(each.limits[0] for each in alone)
        assert_composed(picture, planes, picture.limits)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"plane": "CX"}, "composite: there are no channels beside the plane CX"),
        ({"limits": ((0.0, 1.0),)}, "limits: name low and high of each of the 3 channels"),
    ],
)
def test_a_composite_needs_channels_and_as_many_limits(stained, asked, said):
    with pytest.raises(ParameterError, match=f"^{said}$"):
        draw(stained[1], Cut(composite=True, **asked))


@pytest.mark.parametrize("axes", ["ZYX", "YXS", "CYX"])
def test_gray_images_and_those_in_colour_have_no_composite(tmp_path, axes):
    shape = {"ZYX": (3, 5, 7), "YXS": (5, 7, 3), "CYX": (1, 5, 7)}[axes]
    path = write_image(tmp_path / "a.ome.tif", np.zeros(shape, np.uint8), axes)
    assert describe(path).colours == ()
    with pytest.raises(ParameterError, match=r"^composite: there are no channels beside the plane YX$"):
        draw(path, Cut(composite=True))


def test_steps_are_said_as_people_write_them(stained):
    assert describe(stained[1]).steps == {"Z": "2", "Y": "0.5 µm", "X": "0.5 µm"}
