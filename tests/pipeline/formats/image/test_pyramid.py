"""Levels of pyramids against their definition, written with exact fractions, sample by sample."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats.image.base import ImageHeader, ImageWriter, Region, Storage
from pipeline.formats.image.metadata import Calibration, Step
from pipeline.formats.image.metadata.geotiff import NODATA, GeoTags
from pipeline.formats.image.pyramid import ALIGNED, LABELS, Reduction, at_level, chosen_levels
from pipeline.formats.image.zarr import Zarr
from pipeline.storage.partial import Opening
from tests.pipeline.formats.image.contract import QUICK, assert_same_bits, read_whole, samples

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "float32", "float64")


def header_of(shape: tuple[int, ...], axes: str, dtype: str, **further: Any) -> ImageHeader:
    return ImageHeader(shape=shape, axes=axes, dtype=np.dtype(dtype), **further)


def with_nodata(value: str) -> dict[str, Any]:
    return {"geo": GeoTags({NODATA: value.encode() + b"\0"})}


def box_mean(box: list[Any], dtype: np.dtype[Any], missing: float | None) -> Any:
    """The mean of a box, given as its samples row by row, by the definition."""
    kept = [each for each in box if each != missing and not (dtype.kind == "f" and np.isnan(each))]
    if not kept:
        return np.nan if missing is None else missing
    if dtype.kind != "f":
        return math.floor(sum(map(Fraction, map(int, kept))) / len(kept) + Fraction(1, 2))
    a, b, c, d = (0.0 if each not in kept else float(each) for each in box)
    with np.errstate(all="ignore"):
        return dtype.type(((a + c) + (b + d)) / len(kept))


def defined(image: NDArray[Any], axes: str, missing: float | None = None, *, nearest: bool = False) -> NDArray[Any]:
    """The next level, one sample after another."""
    at = axes.index("Y")
    rows, columns = image.shape[at : at + 2]
    out = np.empty((*image.shape[:at], -(-rows // 2), -(-columns // 2), *image.shape[at + 2 :]), image.dtype)
    for place in np.ndindex(*out.shape):
        ys, xs = ([2 * place[at + n], min(2 * place[at + n] + 1, size - 1)] for n, size in enumerate((rows, columns)))
        box = [image[(*place[:at], y, x, *place[at + 2 :])] for y in ys for x in xs]
        out[place] = box[0] if nearest else box_mean(box, image.dtype, missing)
    return out


def levels_of(image: NDArray[Any], header: ImageHeader, count: int) -> Iterator[NDArray[Any]]:
    reduction = Reduction.of(header)
    for _ in range(count - 1):
        image = reduction.halved(image)
        yield image


class TestDefinition:
    @pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
    @pytest.mark.parametrize(("shape", "axes"), [((2, 7, 5), "ZYX"), ((13, 11, 3), "YXS"), ((1, 1), "YX")])
    def test_the_mean_of_each_box(self, dtype: str, shape: tuple[int, ...], axes: str) -> None:
        header = header_of(shape, axes, dtype)
        image = samples(header) if dtype in INTEGERS else np.full(shape, 0.1, dtype)
        if dtype in FLOATS:
            image += np.random.default_rng(5).standard_normal(shape).astype(dtype)
        assert_same_bits(Reduction.of(header).halved(image), defined(image, axes))

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_extreme_integers_do_not_overflow(self, dtype: str) -> None:
        limits = np.iinfo(dtype)
        extremes = np.array(list(itertools.product([limits.min, limits.max], repeat=4)), dtype).reshape(32, 2)
        assert_same_bits(Reduction.of(header_of((32, 2), "YX", dtype)).halved(extremes), defined(extremes, "YX"))

    @pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
    def test_nodata_is_left_out(self, dtype: str) -> None:
        header = header_of((31, 17), "YX", dtype, metadata=with_nodata("3"))
        image = np.random.default_rng(1).integers(0, 5, header.shape).astype(dtype)
        image[:6, :6] = 3
        assert_same_bits(Reduction.of(header).halved(image), defined(image, "YX", 3.0))

    def test_extreme_values_beside_nodata_do_not_overflow(self) -> None:
        for dtype in INTEGERS:
            limits = np.iinfo(dtype)
            header = header_of((2, 6), "YX", dtype, metadata=with_nodata("7"))
            image = np.array(
                [[limits.max, limits.max, limits.min, limits.min, limits.max, 7], [limits.max, 7, 7, limits.min, 7, 7]],
                dtype,
            )
            assert_same_bits(Reduction.of(header).halved(image), defined(image, "YX", 7))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_nan_is_left_out_and_alone_stays(self, dtype: str) -> None:
        header = header_of((11, 13), "YX", dtype)
        image = np.random.default_rng(2).standard_normal(header.shape).astype(dtype)
        image[np.random.default_rng(3).random(header.shape) < 0.5] = np.nan
        image[4:8, 4:8] = np.nan
        found = Reduction.of(header).halved(image)
        assert np.isnan(found[2:4, 2:4]).all()
        expected = defined(image, "YX")
        np.testing.assert_array_equal(found, expected)

    def test_infinities(self) -> None:
        image = np.array([[np.inf, 1, np.inf, -np.inf], [1, 1, 0, 0]], np.float32)
        found = Reduction.of(header_of((2, 4), "YX", "float32")).halved(image)
        assert found[0, 0] == np.inf
        assert np.isnan(found[0, 1])

    @pytest.mark.parametrize("axes", ["YX", "ZYXS"])
    def test_labels_and_booleans_take_the_first_sample(self, axes: str) -> None:
        shape = (7, 5) if axes == "YX" else (2, 7, 5, 3)
        image = np.random.default_rng(4).integers(0, 2, shape)
        labels = header_of(shape, axes, "int32", metadata={LABELS: {}})
        for header in (header_of(shape, axes, "bool"), labels):
            typed = image.astype(header.dtype)
            assert_same_bits(Reduction.of(header).halved(typed), defined(typed, axes, nearest=True))

    def test_sizes_and_centres_of_levels(self) -> None:
        known = Calibration({"Y": Step(0.5, "micrometer"), "Z": Step(2.0, "micrometer")}, {"Y": 10.0})
        level = at_level(header_of((5, 33, 31), "ZYX", "uint8", calibration=known), 2)
        assert level.shape == (5, 9, 8)
        assert level.calibration.steps == {"Y": Step(2.0, "micrometer"), "Z": Step(2.0, "micrometer")}
        assert level.calibration.origin == {"Y": 10.75}


class TestNumberOfLevels:
    @pytest.mark.parametrize(
        ("shape", "levels"), [((4096, 4096), 1), ((4097, 8), 5), ((20_000, 512), 7), ((100_000, 100_000), 9)]
    )
    def test_large_images_get_as_many_as_viewers_need(self, shape: tuple[int, int], levels: int) -> None:
        assert chosen_levels(None, header_of(shape, "YX", "uint8")) == levels
        assert chosen_levels(None, header_of(shape, "YX", "uint8"), by_default=False) == 1

    def test_pyramids_stay_pyramids(self) -> None:
        assert chosen_levels(None, header_of((600, 700), "YX", "uint8", levels=3), by_default=False) == 2

    def test_no_more_levels_than_halvings(self) -> None:
        header = header_of((3, 37, 9), "ZYX", "uint8")
        assert chosen_levels(7, header) == 7
        with pytest.raises(ParameterError, match=r"--levels 8: 37 × 9 pixels have 7 levels"):
            chosen_levels(8, header)


def aligned_regions(draw: st.DrawFn, header: ImageHeader) -> list[Region]:
    """Regions of a size that pyramids allow, in any order."""
    spans = []
    for letter, size in zip(header.axes, header.shape, strict=True):
        unit = ALIGNED if letter in "YX" else size if letter == "S" else 1
        extent = unit * draw(st.integers(1, max(-(-size // unit), 1)))
        spans.append([(start, min(start + extent, size)) for start in range(0, size, extent)])
    regions = [Region(*map(tuple, zip(*each, strict=True))) for each in itertools.product(*spans)]
    random.Random(draw(st.integers(0, 1000))).shuffle(regions)
    return regions


@st.composite
def pyramids(draw: st.DrawFn) -> tuple[ImageHeader, int, int, list[Region]]:
    """A header, its number of levels, the rows and columns of a chunk, and regions that cover it."""
    axes = draw(st.sampled_from(["YX", "YXS", "CYX", "ZYX"]))
    sizes = {"Y": st.sampled_from([5, 16, 37, 67]), "X": st.sampled_from([3, 31, 48, 83])}
    shape = tuple(draw(sizes.get(letter, st.just(3 if letter == "S" else 2))) for letter in axes)
    header = header_of(shape, axes, draw(st.sampled_from(["uint8", "uint16", "float32"])))
    most = 1 + math.ceil(math.log2(max(shape[axes.index("Y") : axes.index("X") + 1])))
    return header, draw(st.integers(1, most)), draw(st.sampled_from([16, 32, 48])), aligned_regions(draw, header)


def write_regions(writer: ImageWriter, image: NDArray[Any], regions: list[Region]) -> None:
    for region in regions:
        writer.write(region, np.ascontiguousarray(image[region.slices]))


def write_in_two_runs(form: Any, path: Path, header: ImageHeader, image: NDArray[Any], regions: list[Region]) -> None:
    """As a run that is killed and one that resumes it, another process writing; the last regions come again."""
    writer = form.create(path, header)
    half = len(regions) // 2
    write_regions(writer, image, regions[: half + 1])
    writer.keep()
    writer = form.create(path, header, Opening.RESUME)
    joined = form.create(path, header, Opening.JOIN)
    write_regions(joined, image, regions[half:])
    joined.keep()
    writer.publish()


class TestZarr:
    @QUICK
    @given(pyramids(), st.booleans(), st.sampled_from(["none", "zstd"]))
    def test_every_level_is_the_definition_of_the_result(
        self, tmp_path_factory: pytest.TempPathFactory, pyramid: Any, sharded: bool, compression: str
    ) -> None:
        header, levels, chunk, regions = pyramid
        path, image = tmp_path_factory.mktemp("p") / "image.zarr", samples(header)
        shards = tuple(64 if letter in "YX" else n for letter, n in zip(header.axes, header.shape, strict=True))
        chunks = tuple(16 if letter in "YX" else n for letter, n in zip(header.axes, header.shape, strict=True))
        storage = Storage(chunks=chunks, shards=shards) if sharded else Storage(chunks=(chunk,))
        form = Zarr(Storage(**{**vars(storage), "levels": levels, "compression": compression}))
        write_in_two_runs(form, path, header, image, regions)
        group: Any = zarr.open_group(path, mode="r")
        stored = [group[str(level)][...] for level in range(levels)]
        if "S" in header.axes:
            stored = [np.moveaxis(each, 0, -1) for each in stored]
        assert sorted(group.keys()) == sorted(map(str, range(levels)))
        for found, expected in zip(stored, [image, *levels_of(image, header, levels)], strict=True):
            assert_same_bits(np.ascontiguousarray(found), np.ascontiguousarray(expected))
        with form.open(path) as reader:
            assert reader.header.levels == levels
            assert_same_bits(read_whole(form, path), image)

    def test_levels_beyond_those_of_one_region(self, tmp_path: Path) -> None:
        header = header_of((6001, 33), "YX", "uint8")
        image, path = samples(header), tmp_path / "image.zarr"
        form = Zarr(Storage(levels=14))
        writer = form.create(path, header)
        write_regions(writer, image, [Region((y, 0), (min(y + 1600, 6001), 33)) for y in range(0, 6001, 1600)])
        writer.publish()
        group: Any = zarr.open_group(path, mode="r")
        for level, expected in enumerate(levels_of(image, header, 14), 1):
            assert_same_bits(group[str(level)][...], expected)

    def test_metadata_place_the_levels(self, tmp_path: Path) -> None:
        known = Calibration({"Y": Step(0.5, "micrometer"), "X": Step(0.25, "micrometer")}, {"X": 4.0})
        header = header_of((64, 64), "YX", "uint8", calibration=known)
        path = tmp_path / "image.zarr"
        writer = Zarr(Storage(levels=2)).create(path, header)
        writer.write(Region.whole(header.shape), samples(header))
        writer.publish()
        image = zarr.open_group(path, mode="r").attrs.asdict()["ome"]["multiscales"][0]
        assert image["type"] == "mean"
        assert [level["coordinateTransformations"] for level in image["datasets"]] == [
            [{"type": "scale", "scale": [0.5, 0.25]}, {"type": "translation", "translation": [0.0, 4.0]}],
            [{"type": "scale", "scale": [1.0, 0.5]}, {"type": "translation", "translation": [0.25, 4.125]}],
        ]

    def test_a_region_that_parts_boxes_is_refused(self, tmp_path: Path) -> None:
        header = header_of((64, 64), "YX", "uint8")
        writer = Zarr(Storage(levels=2)).create(tmp_path / "image.zarr", header)
        with pytest.raises(ValueError, match="multiples of 16, not 0:10"):
            writer.write(Region((0, 0), (10, 64)), np.zeros((10, 64), np.uint8))
        writer.discard()

    def test_another_number_of_levels_is_not_resumed(self, tmp_path: Path) -> None:
        header = header_of((64, 64), "YX", "uint8")
        Zarr(Storage(levels=2)).create(tmp_path / "image.zarr", header).keep()
        with pytest.raises(OutputError, match="run again without --resume"):
            Zarr(Storage(levels=3)).create(tmp_path / "image.zarr", header, Opening.RESUME)

    def test_a_pyramid_replaces_an_earlier_one(self, tmp_path: Path) -> None:
        header, path = header_of((64, 64), "YX", "uint8"), tmp_path / "image.zarr"
        for levels in (4, 2):
            writer = Zarr(Storage(levels=levels)).create(path, header)
            writer.write(Region.whole(header.shape), samples(header))
            writer.publish()
        assert {entry.name for entry in path.iterdir()} == {"zarr.json", "0", "1"}
        (path / "2").mkdir()
        (path / "notes").mkdir()
        with pytest.raises(OutputError, match="is not an earlier result"):
            Zarr().create(path, header)

    @pytest.mark.parametrize(
        ("shape", "dtype", "fault"),
        [
            ((65, 32), "uint8", r"level 1 of its pyramid \(1\) is \(65, 32\) uint8, and does not fit"),
            ((32, 32), "uint16", "does not fit the level before it of"),
            ((1, 32, 32), "uint8", "does not fit the level before it of"),
            (None, "uint8", "level 1 of its pyramid is missing"),
        ],
    )
    @pytest.mark.parametrize("zarr_format", [2, 3])
    def test_levels_that_do_not_fit_are_named(
        self, tmp_path: Path, shape: Any, dtype: str, fault: str, zarr_format: Any
    ) -> None:
        path = tmp_path / "image.zarr"
        image = {"axes": [{"name": "y", "type": "space"}, {"name": "x", "type": "space"}],
                 "datasets": [{"path": "0"}, {"path": "1"}]}  # fmt: skip
        attributes: dict[str, Any] = {"multiscales": [image]}
        group = zarr.create_group(
            path, zarr_format=zarr_format, attributes={"ome": attributes} if zarr_format == 3 else attributes
        )
        group.create_array("0", shape=(64, 64), chunks=(32, 32), dtype="uint8")
        if shape is not None:
            group.create_array("1", shape=shape, chunks=shape, dtype=dtype)
        with pytest.raises(InputError, match=fault):
            Zarr().open(path)

    def test_labels_stay_labels(self, tmp_path: Path) -> None:
        header = header_of((33, 33), "YX", "uint16", metadata={LABELS: {"version": "0.5"}})
        path, image = tmp_path / "labels.zarr", samples(header)
        writer = Zarr(Storage(levels=3)).create(path, header)
        writer.write(Region.whole(header.shape), image)
        writer.publish()
        with Zarr().open(path) as reader:
            assert reader.header.metadata[LABELS] == {"version": "0.5"}
        group: Any = zarr.open_group(path, mode="r")
        np.testing.assert_array_equal(group["2"][...], image[::4, ::4])
        assert group.attrs.asdict()["ome"]["multiscales"][0]["type"] == "nearest"
