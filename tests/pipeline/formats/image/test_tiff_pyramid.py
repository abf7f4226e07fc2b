"""Pyramids in TIFF: every level against its definition, as our reader and those of others find them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats.image import open_image
from pipeline.formats.image.base import ImageHeader, Region, Storage
from pipeline.formats.image.metadata.geotiff import NODATA, GeoTags
from pipeline.formats.image.tiff import Tiff
from pipeline.storage.partial import Opening
from tests.pipeline.formats.image.contract import QUICK, assert_same_bits, read_whole, samples, write_whole
from tests.pipeline.formats.image.test_pyramid import (
    FLOATS,
    INTEGERS,
    aligned_regions,
    header_of,
    levels_of,
    with_nodata,
    write_in_two_runs,
    write_regions,
)

OVERVIEWS, SUB_IFDS = ("a.tif", "a.btf"), ("a.ome.tif", "a.ome.btf")


def pyramid(levels: int | None = None, compression: str | None = "zstd", tile: int | None = 16) -> Tiff:
    return Tiff(Storage(levels=levels, compression=compression, chunks=None if tile is None else (tile,)))


def levels_by_tifffile(path: Path) -> list[NDArray[Any]]:
    with tifffile.TiffFile(path) as file:
        assert len(file.series) == 1
        return [level.asarray() for level in file.series[0].levels]


def levels_by_us(path: Path) -> list[NDArray[Any]]:
    with open_image(path) as reader:
        found = []
        for level in range(reader.header.levels):
            with reader.at_level(level) if level else nullcontext(reader) as smaller:
                found.append(np.empty(smaller.header.shape, smaller.header.dtype))
                smaller.read(Region.whole(found[-1].shape), found[-1])
        return found


def assert_levels(found: Sequence[NDArray[Any]], image: NDArray[Any], header: ImageHeader, levels: int) -> None:
    assert len(found) == levels
    for level, expected in zip(found, [image, *levels_of(image, header, levels)], strict=True):
        # tifffile leaves out axes of length one.
        assert_same_bits(level.reshape(expected.shape).astype(header.dtype, copy=False), np.ascontiguousarray(expected))


@st.composite
def images(draw: st.DrawFn) -> tuple[str, ImageHeader, int, int, list[Region]]:
    """A file's name, a header, its number of levels, the rows and columns of a tile, and regions that cover it."""
    name = draw(st.sampled_from([*OVERVIEWS, *SUB_IFDS]))
    axes = draw(st.sampled_from(["YX", "YXS", "CYX", "TZYX"]))
    sizes = {"Y": st.sampled_from([37, 67, 101]), "X": st.sampled_from([31, 48, 83])}
    shape = tuple(draw(sizes.get(letter, st.just(3 if letter == "S" else 2))) for letter in axes)
    of_ome = ("bool", "uint8", "int16", "uint32", "float32", "float64")
    dtype = draw(st.sampled_from(of_ome if axes[0] in "CT" or name in SUB_IFDS else ("bool", *INTEGERS, *FLOATS)))
    tile = draw(st.sampled_from([16, 32, 48]))
    header = header_of(shape, axes, dtype)
    return name, header, draw(st.integers(1, 6)), tile, aligned_regions(draw, header)


@QUICK
@given(images(), st.sampled_from(["none", "zstd", "deflate", "lzw"]))
def test_every_level_is_the_definition_of_the_result(
    tmp_path_factory: pytest.TempPathFactory, chosen: Any, compression: str
) -> None:
    name, header, levels, tile, regions = chosen
    path, image, form = tmp_path_factory.mktemp("p") / name, samples(header), pyramid(levels, compression, tile)
    write_in_two_runs(form, path, header, image, regions)
    assert [entry.name for entry in path.parent.iterdir()] == [name]
    assert_levels(levels_by_tifffile(path), image, header, levels)
    assert_levels(levels_by_us(path), image, header, levels)
    assert_same_bits(read_whole(form, path), image)
    with form.open(path) as reader:
        assert reader.header.levels == levels
    found = path.read_bytes()
    write_whole(form, path, header, image)
    assert path.read_bytes() == found


def test_levels_beyond_those_of_one_region(tmp_path: Path) -> None:
    header, path = header_of((6001, 33), "YX", "uint8"), tmp_path / "a.tif"
    image = samples(header)
    writer = pyramid(14, tile=32).create(path, header)
    write_regions(writer, image, [Region((y, 0), (min(y + 1600, 6001), 33)) for y in range(0, 6001, 1600)])
    writer.publish()
    with tifffile.TiffFile(path) as file:
        assert_levels([page.asarray() for page in file.pages], image, header, 14)


def test_publishing_that_is_interrupted_is_taken_up_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, path, form = header_of((700, 45), "YX", "uint16"), tmp_path / "a.tif", pyramid(10)
    write_whole(form, tmp_path / "whole.tif", header, samples(header))
    writer = form.create(path, header)
    writer.write(Region.whole(header.shape), samples(header))
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.formats.image.tiff.writer.Layout.head", None)  # the last step before the file is whole
        with pytest.raises(TypeError):
            writer.publish()
    writer.keep()
    assert not path.exists()
    form.create(path, header, Opening.RESUME).publish()
    assert path.read_bytes() == (tmp_path / "whole.tif").read_bytes()


def test_another_number_of_levels_is_not_resumed(tmp_path: Path) -> None:
    header, path = header_of((64, 64), "YX", "uint8"), tmp_path / "a.tif"
    pyramid(2).create(path, header).keep()
    with pytest.raises(OutputError, match="run again without --resume"):
        pyramid(3).create(path, header, Opening.RESUME)


def test_a_region_that_parts_boxes_is_refused(tmp_path: Path) -> None:
    writer = pyramid(2).create(tmp_path / "a.tif", header_of((64, 64), "YX", "uint8"))
    with pytest.raises(ValueError, match="multiples of 16, not 0:10"):
        writer.write(Region((0, 0), (10, 64)), np.zeros((10, 64), np.uint8))
    writer.discard()


class TestLayout:
    def tags(self, directory: Any) -> dict[str, Any]:
        return {tag.name: tag.value for tag in directory.tags.values()}

    @pytest.mark.parametrize("name", ["a.ome.tif", "a.ome.btf"])
    def test_ome_tiff_has_levels_in_sub_ifds_of_each_plane(self, tmp_path: Path, name: str) -> None:
        header = header_of((2, 3, 64, 48), "CZYX", "uint16", metadata={"icc_profile": bytes(999)})
        write_whole(pyramid(3), tmp_path / name, header, samples(header))
        with tifffile.TiffFile(tmp_path / name) as file:
            assert file.is_ome
            assert file.is_bigtiff == name.endswith("btf")
            assert (len(file.pages), file.series[0].axes) == (6, "CZYX")
            for frame in file.pages:
                page = frame.aspage()
                assert page.subfiletype == 0
                assert page.tags[330].dtype == (18 if file.is_bigtiff else 13)
                levels = list(page.pages or ())
                assert [each.shape for each in levels] == [(32, 24), (16, 12)]
                for level in levels:
                    assert level.subfiletype == 1
                    assert {"ImageDescription", "InterColorProfile", "SubIFDs"}.isdisjoint(self.tags(level))
                    assert self.tags(level)["TileWidth"] == self.tags(page)["TileWidth"] == 16

    @pytest.mark.parametrize(
        ("axes", "shape", "dialect", "pages"),
        [
            ("YX", (64, 48), None, 3),  # GDAL's overviews follow the image
            ("ZYX", (3, 64, 48), None, 3),  # of several pages the chain holds only these
            ("CYX", (3, 64, 48), "ImageJ", 3),
            ("YX", (64, 48), "ImageJ", 1),
        ],
    )
    def test_levels_never_stand_between_pages(
        self, tmp_path: Path, axes: str, shape: tuple[int, ...], dialect: str | None, pages: int
    ) -> None:
        header = header_of(shape, axes, "uint16", metadata={"dialect": dialect} if dialect else {})
        write_whole(pyramid(3), tmp_path / "a.tif", header, samples(header))
        with tifffile.TiffFile(tmp_path / "a.tif") as file:
            assert len(file.pages) == pages
            assert_same_bits(file.series[0].asarray().reshape(shape), samples(header))
        with Tiff().open(tmp_path / "a.tif") as reader:
            assert (reader.header.shape, reader.header.axes, reader.header.levels) == (shape, axes, 3)
        assert_same_bits(read_whole(Tiff(), tmp_path / "a.tif"), samples(header))

    def test_nodata_is_left_out_of_means_and_stated_on_every_level(self, tmp_path: Path) -> None:
        header = header_of((64, 48), "YX", "int16", metadata=with_nodata("-9999"))
        image = samples(header)
        image[np.random.default_rng(1).random(image.shape) < 0.5] = -9999
        write_whole(pyramid(4), tmp_path / "a.tif", header, image)
        assert_levels(levels_by_tifffile(tmp_path / "a.tif"), image, header, 4)
        with tifffile.TiffFile(tmp_path / "a.tif") as file:
            assert [page.tags[NODATA].value for page in file.pages] == ["-9999"] * 4

    def test_a_pyramid_past_four_gigabytes_is_a_bigtiff(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The levels count: the image alone would fit."""
        monkeypatch.setattr("pipeline.formats.image.tiff.writer._CLASSIC_LIMIT_BYTES", 35_000)
        header = header_of((80, 80), "YX", "uint16")
        for levels in (1, 3):
            write_whole(pyramid(levels, "none", 80), tmp_path / "a.tif", header, samples(header))
            with tifffile.TiffFile(tmp_path / "a.tif") as file:
                assert file.is_bigtiff == (levels == 3)
        assert_levels(levels_by_tifffile(tmp_path / "a.tif"), samples(header), header, 3)


class TestNumberOfLevels:
    @pytest.mark.parametrize(
        ("storage", "metadata", "levels"),
        [
            (Storage(), {}, 1),  # strips
            (Storage(compression="zstd"), {}, 5),
            (Storage(), {"compression": "deflate"}, 5),
            (Storage(compression="none"), {"compression": "deflate"}, 1),
            (Storage(chunks=(512,)), {}, 5),
            (Storage(levels=1, compression="zstd"), {}, 1),
            (Storage(levels=3), {}, 3),
        ],
    )
    def test_large_tiled_images_are_pyramids_by_default(
        self, storage: Storage, metadata: dict[str, Any], levels: int
    ) -> None:
        header = header_of((4097, 8), "YX", "uint8", metadata=metadata)
        assert Tiff(storage).levels(header, Path("a.tif")) == levels
        assert (Tiff(storage).block_shape(header) is None) == (levels == 1 and storage.compression != "zstd")

    def test_small_images_are_not(self) -> None:
        assert pyramid().levels(header_of((4096, 8), "YX", "uint8"), Path("a.tif")) == 1

    def test_pyramids_stay_pyramids(self, tmp_path: Path) -> None:
        header, image = header_of((1100, 20), "YX", "uint8"), np.ones((1100, 20), np.uint8)
        write_whole(pyramid(2, "none"), tmp_path / "in.tif", header, image)
        with Tiff().open(tmp_path / "in.tif") as reader:
            assert Tiff().levels(reader.header, Path("a.tif")) == 3
            assert Tiff().block_shape(reader.header) == (256, 20)
            assert Tiff().head(reader.header, tmp_path / "a.tif") is None
            assert Tiff(Storage(levels=1)).block_shape(reader.header) is None

    def test_no_more_levels_than_halvings(self) -> None:
        with pytest.raises(ParameterError, match=r"--levels 8: 37 × 9 pixels have 7 levels"):
            pyramid(8).levels(header_of((37, 9), "YX", "uint8"), Path("a.tif"))


class TestReading:
    """Levels are no further pages, whoever wrote them."""

    image = np.random.default_rng(3).integers(0, 1000, (64, 48, 3)).astype(np.uint16)

    def levels(self, path: Path) -> int:
        assert_same_bits(read_whole(Tiff(), path), self.image)
        with Tiff().open(path) as reader:
            return reader.header.levels

    @pytest.mark.parametrize("marked", [0, 1])
    def test_sub_ifds(self, tmp_path: Path, marked: int) -> None:
        with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
            tiff.write(self.image, photometric="rgb", tile=(16, 16), subifds=2)
            for step in (2, 4):
                tiff.write(self.image[::step, ::step], photometric="rgb", tile=(16, 16), subfiletype=marked)
        assert self.levels(tmp_path / "a.tif") == 3

    def test_thumbnails_and_masks_are_no_levels(self, tmp_path: Path) -> None:
        with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
            tiff.write(self.image, photometric="rgb", subifds=1)
            tiff.write(self.image[..., 0].astype(np.uint8))  # whatever it is
            tiff.write(self.image[::2, ::2].astype(np.uint8), photometric="rgb", subfiletype=1)
            tiff.write(self.image[..., 0] > 0, photometric="minisblack", subfiletype=4)
        assert self.levels(tmp_path / "a.tif") == 1

    @pytest.mark.parametrize(
        ("level", "fault"),
        [
            (image[::2, ::2].astype(np.uint8), "it is 24 × 32 × 3 uint8 after one of 48 × 64 × 3 uint16"),
            (image[::2, ::2, 0], "it is 24 × 32 × 1 uint16 after one of"),
            (np.concatenate([image, image]), "it is 48 × 128 × 3 uint16 after one of"),
        ],
    )
    def test_sub_ifds_that_do_not_fit_are_named(self, tmp_path: Path, level: NDArray[Any], fault: str) -> None:
        with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
            tiff.write(self.image, photometric="rgb", subifds=1)
            tiff.write(level, photometric="rgb" if level.ndim == 3 else "minisblack", subfiletype=1)
        with pytest.raises(
            InputError, match=r"a.tif: page 0, SubIFD 0, tag NewSubfileType: declares a level.*" + fault
        ):
            Tiff().open(tmp_path / "a.tif")

    def test_an_overview_larger_than_the_image_is_named(self, tmp_path: Path) -> None:
        with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
            tiff.write(self.image[::2, ::2], photometric="rgb")
            tiff.write(self.image, photometric="rgb", subfiletype=1)
        with pytest.raises(InputError, match=r"page 1, tag NewSubfileType: declares a smaller copy, but it is 48 × 64"):
            Tiff().open(tmp_path / "a.tif")

    def test_pages_with_other_levels_are_named(self, tmp_path: Path) -> None:
        with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
            for levels in (2, 1):
                tiff.write(self.image, photometric="rgb", subifds=levels, metadata=None)
                for step in (2, 4)[:levels]:
                    tiff.write(self.image[::step, ::step], photometric="rgb", subfiletype=1)
        with pytest.raises(InputError, match=r"page 1, tag SubIFDs: has 1, but page 0 has 2"):
            Tiff().open(tmp_path / "a.tif")

    def test_a_sub_ifd_beyond_the_file_is_named(self, tmp_path: Path) -> None:
        header, path = header_of((64, 48), "YX", "uint8"), tmp_path / "a.ome.tif"
        write_whole(pyramid(2), path, header, samples(header))
        with tifffile.TiffFile(path) as file:
            at = file.pages[0].tags[330].valueoffset
        data = bytearray(path.read_bytes())
        data[at : at + 4] = (1 << 31).to_bytes(4, "little")
        path.write_bytes(data)
        with pytest.raises(
            InputError, match="page 0, tag SubIFDs: directory 0 lies at byte 2,147,483,648, but the file"
        ):
            Tiff().open(path)


@pytest.mark.parametrize("compression", ["jpeg", "packbits", "lzw", "zlib", None])
@pytest.mark.parametrize("in_chain", [True, False])
def test_levels_of_other_programs_are_read_whatever_their_codec(
    tmp_path: Path, compression: str | None, in_chain: bool
) -> None:
    planes = np.random.default_rng(3).integers(0, 256, (1 if in_chain else 3, 67, 83), np.uint8)
    options: dict[str, Any] = {"compression": compression, "tile": (16, 16), "metadata": None, "photometric": 1}
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for plane in planes:
            file.write(plane, **options, subifds=None if in_chain else 2)
            for step in (2, 4):
                file.write(plane[::step, ::step], **options, subfiletype=1)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        for level, found in enumerate(levels_by_us(tmp_path / "a.tif")):
            for plane, page in enumerate([file.pages[0]] if in_chain else file.pages):
                chosen = page if level == 0 else file.pages[level] if in_chain else page.pages[level - 1]
                assert_same_bits(found.reshape(-1, *found.shape[-2:])[plane], chosen.asarray())
    assert len(levels_by_us(tmp_path / "a.tif")) == 3


def test_levels_that_differ_between_pages_are_refused(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for plane, step in enumerate((2, 3)):
            file.write(np.full((60, 48), plane, np.uint8), subifds=1, metadata=None)
            file.write(np.zeros((60 // step, 48 // step), np.uint8), subfiletype=1, metadata=None)
    with open_image(tmp_path / "a.tif") as reader:
        assert reader.header.levels == 2
        with pytest.raises(InputError, match="level 1 of page 1 is 16 × 20 × 1 uint8, but that of page 0 is 24 × 30"):
            reader.at_level(1)


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def output_of(*command: str | Path) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "ERROR" not in done.stderr
    return done.stdout


class TestReadersOfOthers:
    @pytest.mark.parametrize("name", ["a.tif", "a.btf", "a.ome.tif"])
    def test_gdal_finds_every_level(self, tmp_path: Path, name: str) -> None:
        info, translate = tool("gdalinfo"), tool("gdal_translate")
        header = header_of((101, 67, 3), "YXS", "uint8", metadata={"geo": GeoTags({NODATA: b"0\0"})})
        image, path = samples(header), tmp_path / name
        write_whole(pyramid(4, "deflate", 32), path, header, image)
        for band in json.loads(output_of(info, "-json", path))["bands"]:
            assert [each["size"] for each in band["overviews"]] == [[34, 51], [17, 26], [9, 13]]
        found = [image]
        for level in range(3):
            plain = tmp_path / f"{level}.npy.tif"
            output_of(translate, "-q", "-oo", f"OVERVIEW_LEVEL={level}", path, plain)
            found.append(tifffile.imread(plain))
        assert_levels(found, image, header, 4)

    def test_overviews_that_gdal_adds_are_levels(self, tmp_path: Path) -> None:
        add = tool("gdaladdo")
        header, path = header_of((101, 67), "YX", "uint16"), tmp_path / "a.tif"
        write_whole(pyramid(1), path, header, samples(header))
        output_of(add, "-q", "-r", "average", path, "2", "4")
        with Tiff().open(path) as reader:
            assert (reader.header.shape, reader.header.levels) == ((101, 67), 3)
        assert_same_bits(read_whole(Tiff(), path), samples(header))

    @pytest.mark.parametrize("name", ["a.tif", "a.ome.tif"])
    def test_libtiff_reads_the_directories(self, tmp_path: Path, name: str) -> None:
        info = tool("tiffinfo")
        header = header_of((101, 67), "YX", "uint16")
        write_whole(pyramid(4, "deflate"), tmp_path / name, header, samples(header))
        shown = subprocess.run([info, "-D", tmp_path / name], check=True, capture_output=True, text=True)
        assert shown.stderr == ""
        assert shown.stdout.count("reduced-resolution image") == 3
        assert ("SubIFD Offsets" in shown.stdout) == (name == "a.ome.tif")
