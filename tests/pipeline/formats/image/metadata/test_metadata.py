"""Sizes, units, channels and places between files: written by others, read here, written here, read by others."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tifffile

from pipeline.errors import InputError
from pipeline.formats import image as images
from pipeline.formats.image.base import Region
from pipeline.formats.image.metadata import Calibration, Channel, Step, in_unit, unit_named
from pipeline.formats.image.metadata.ome_xml import from_xml
from pipeline.formats.image.metadata.resolution import per
from tests.images import read_image

SAMPLES = np.random.default_rng(3).integers(0, 60_000, (2, 3, 5, 31, 37), dtype=np.uint16)  # T, C, Z, Y, X
STEPS = {
    "T": Step(2.5, "second"), "Z": Step(0.7, "micrometer"),
    "Y": Step(0.3, "micrometer"), "X": Step(0.25, "micrometer"),
}  # fmt: skip
CHANNELS = (Channel("DAPI", "0000FF"), Channel("007", "00FF00"), Channel('a<b & "c"', "FF8000"))
KNOWN = Calibration(STEPS, channels=CHANNELS)


def signed(colour: str) -> int:
    value = int(colour + "FF", 16)
    return value - (1 << 32) if value >= 1 << 31 else value


def by_tifffile_ome(path: Path) -> None:
    sizes: dict[str, Any] = {f"PhysicalSize{letter}": STEPS[letter].size for letter in "ZYX"}
    sizes |= {f"PhysicalSize{letter}Unit": "µm" for letter in "ZYX"}
    names = {"Name": [each.name for each in CHANNELS], "Color": [signed(str(each.colour)) for each in CHANNELS]}
    tifffile.imwrite(
        path, SAMPLES, photometric="minisblack",
        metadata={"axes": "TCZYX", **sizes, "TimeIncrement": 2500.0, "TimeIncrementUnit": "ms", "Channel": names},
    )  # fmt: skip


def copied(source: Path, target: Path) -> Path:
    """The same image in another file, written here."""
    samples = read_image(source)
    with images.open_image(source) as reader:
        writer = images.create_image(target, reader.header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    return target


@pytest.mark.parametrize(
    ("unit", "code", "size"), [("inch", 2, 1 / 300), ("centimeter", 3, 1 / 118), ("micrometer", 3, 0.5)]
)
def test_a_plain_tiff_states_pixel_sizes_in_its_resolution(tmp_path: Path, unit: str, code: int, size: float) -> None:
    header = images.ImageHeader(
        shape=(31, 37), axes="YX", dtype=np.dtype(np.uint8),
        calibration=Calibration({"Y": Step(2 * size, unit), "X": Step(size, unit)}),
    )  # fmt: skip
    writer = images.create_image(tmp_path / "a.tif", header)
    writer.publish()
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert not file.is_ome
        page = file.pages[0]
        assert page.tags["ResolutionUnit"].value == code
        x, y = page.tags["XResolution"].value, page.tags["YResolution"].value
    with images.open_image(tmp_path / "a.tif") as reader:
        steps = reader.header.calibration.steps
    for letter, (above, below), times in (("X", x, 1), ("Y", y, 2)):
        tagged = in_unit(below / above, "inch" if code == 2 else "centimeter", unit)
        assert tagged == pytest.approx(size * times, rel=1e-9)
        assert in_unit(steps[letter].size, steps[letter].unit, unit) == pytest.approx(size * times, rel=1e-9)
    copied(tmp_path / "a.tif", tmp_path / "b.tif")
    with tifffile.TiffFile(tmp_path / "b.tif") as file:  # the same fraction
        assert (file.pages[0].tags["XResolution"].value, file.pages[0].tags["YResolution"].value) == (x, y)


@pytest.mark.parametrize("resolution", [(1, 1), (72, 72), (96, 96)])
def test_the_resolution_of_a_screen_is_no_pixel_size(tmp_path: Path, resolution: tuple[int, int]) -> None:
    tifffile.imwrite(tmp_path / "a.tif", SAMPLES[0, 0, 0], resolution=resolution, resolutionunit=2)
    with images.open_image(tmp_path / "a.tif") as reader:
        assert reader.header.calibration == Calibration()


GEO = {
    33550: (12, struct.pack("<3d", 10.0, 10.0, 0.0)),
    33922: (12, struct.pack("<6d", 0, 0, 0, 500_000.0, 4_600_000.0, 0)),
    34735: (3, struct.pack("<8H", 1, 1, 0, 1, 3072, 0, 1, 32633)),
    34736: (12, struct.pack("<1d", 6378137.0)),
    34737: (2, b"WGS 84 / UTM zone 33N|\0"),
    42113: (2, b"-9999\0"),
}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("output", ["b.tif", "b.btf"])
def test_geotiff_tags_go_along(tmp_path: Path, order: Any, output: str) -> None:
    codes = {12: "d", 3: "H"}
    extra: list[Any] = []
    for tag, (kind, data) in GEO.items():
        count = len(data) // struct.calcsize(codes[kind]) if kind in codes else len(data)
        value: Any = data if kind == 2 else struct.unpack(f"<{count}{codes[kind]}", data)
        extra.append((tag, kind, count, value, True))
    tifffile.imwrite(tmp_path / "a.tif", SAMPLES[0, 0, 0].view(np.int16), extratags=extra, byteorder=order)
    copied(tmp_path / "a.tif", tmp_path / output)
    with tifffile.TiffFile(tmp_path / "a.tif") as source, tifffile.TiffFile(tmp_path / output) as made:
        for tag in GEO:
            assert made.pages[0].tags[tag].value == source.pages[0].tags[tag].value
        assert made.geotiff_metadata == source.geotiff_metadata is not None
        assert made.pages[0].nodata == -9999
    with images.open_image(tmp_path / output) as reader:
        header = reader.header
    assert header.metadata["geo"].nodata == -9999
    assert images.not_kept(header, tmp_path / "b.zarr") == "georeference, nodata value"
    moved = header.metadata["geo"].cropped(7, 3)
    assert struct.unpack("<6d", moved.values[33922]) == (-3, -7, 0, 500_000, 4_600_000, 0)


def test_gdals_names_of_bands_go_along_and_statistics_do_not(tmp_path: Path) -> None:
    """As GDAL writes them: red and near infrared by name, a scale, and the input's own statistics."""
    name = '<Item name="DESCRIPTION" sample="0" role="description">red</Item>'
    kept = f'{name}\n  <Item name="SCALE" sample="0">0.5</Item>'
    untrue = '<Item name="STATISTICS_MEAN" sample="0">81</Item>\n  <Item name="OVR_RESAMPLING_ALG">NEAREST</Item>'
    text = f"<GDALMetadata>\n  {kept}\n  {untrue}\n</GDALMetadata>"
    extra = [(42112, 2, len(text) + 1, text, True)]
    tifffile.imwrite(tmp_path / "a.tif", SAMPLES[0, 0, 0], extratags=extra)
    copied(tmp_path / "a.tif", tmp_path / "b.tif")
    with tifffile.TiffFile(tmp_path / "b.tif") as made:
        assert made.pages[0].tags[42112].value == f"<GDALMetadata>\n  {kept}\n</GDALMetadata>"
    with images.open_image(tmp_path / "b.tif") as reader:
        assert images.not_kept(reader.header, tmp_path / "b.npy") is None


@pytest.mark.parametrize(
    ("output", "lost"),
    [
        ("a.png", "Z step, time increment, channel names, channel colours"),
        ("a.npy", "pixel size, Z step, time increment, channel names, channel colours"),
        ("a.zarr", None),
        ("a.tif", None),
    ],
)
def test_what_a_file_cannot_hold_is_named(output: str, lost: str | None) -> None:
    header = images.ImageHeader(
        shape=SAMPLES.shape, axes="TCZYX", dtype=SAMPLES.dtype, calibration=Calibration(STEPS, channels=CHANNELS)
    )
    assert images.not_kept(header, Path(output)) == lost


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("um", "micrometer"), ("µm", "micrometer"), ("\u03bcm", "micrometer"), ("\\u00B5m", "micrometer"),
        ("micron", "micrometer"), ("Microns", "micrometer"), ("micrometre", "micrometer"), ("nm", "nanometer"),
        ("mm", "millimeter"), ("in", "inch"), ("Å", "angstrom"), ("ms", "millisecond"), ("min", "minute"),
        ("pixel", None), ("", None), ("furlong", None),
    ],
)  # fmt: skip
def test_units_by_any_spelling(said: str, name: str | None) -> None:
    assert unit_named(said) == name


def test_sizes_in_other_units() -> None:
    assert in_unit(1.5, "micrometer", "nanometer") == pytest.approx(1500)
    assert in_unit(1.0, "inch", "millimeter") == pytest.approx(25.4)
    assert in_unit(1.0, "second", "micrometer") is None
    assert in_unit(1.0, None, "micrometer") is None


@pytest.mark.parametrize("size", [1e-9, 1e-5, 2.5e-5, 1 / 3, 0.1, 1.0, 7.3, 3e4, 4e9])
def test_a_fraction_of_the_tag_comes_close_to_any_size(size: float) -> None:
    fraction = per(size)
    assert fraction is not None
    above, below = fraction
    assert 0 < above < 1 << 32 > below > 0
    assert below / above == pytest.approx(size, rel=1e-6)
    assert per(1e-12) is None


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1", "wide", ""])
def test_sizes_that_are_none_are_unknown(size: str) -> None:
    pixels = f'<Pixels SizeC="1" PhysicalSizeX="{size}"><Channel Color="red"/></Pixels>'
    assert from_xml(ElementTree.fromstring(f"<OME><Image>{pixels}</Image></OME>"), 1) == Calibration()


@pytest.mark.parametrize(
    ("words", "instead", "said"),
    [
        ('SizeX="37"', 'SizeX="38"', "OME-XML declares SizeX 38, but page 0 has 37"),
        ('SizeY="31"', 'SizeY="30"', "OME-XML declares SizeY 30, but page 0 has 31"),
        ('Type="uint16"', 'Type="int16" ', "OME-XML declares samples of int16, but page 0 has uint16"),
        ('SizeZ="5"', 'SizeZ="7"', "OME-XML declares 42 planes, but the file has 30 pages"),
        ('IFD="0" PlaneCount="30"', 'IFD="0" PlaneCount="29"', "OME-XML leaves plane 29 without a page"),
        ('IFD="0" PlaneCount="30"', 'IFD="2" PlaneCount="30"', "OME-XML names page 30, which is missing"),
        ('SizeC="3"', 'SizeC="2"', "OME-XML declares 20 planes, none of them page 20"),
        ('<TiffData IFD="0"', '<TiffData FirstT="1"', "OME-XML leaves plane 0 without a page"),
        ("</Image>", "</Image><Image/>", "OME-XML of 2 images"),
        ("<Image ", "<BinaryOnly MetadataFile='a.ome' UUID='1'/><Image ", "OME-XML is in another file, a.ome"),
        ("/></Pixels>", "><UUID FileName='b.tif'>1</UUID></TiffData></Pixels>", "OME-XML keeps planes in .* b.tif"),
    ],
)
def test_ome_xml_that_contradicts_its_pages(tmp_path: Path, words: str, instead: str, said: str) -> None:
    by_tifffile_ome(tmp_path / "a.ome.tif")
    xml = tifffile.tiffcomment(tmp_path / "a.ome.tif")
    assert xml.count(words) == 1
    tifffile.tiffcomment(tmp_path / "a.ome.tif", xml.replace(words, instead).encode())
    with pytest.raises(InputError, match=rf"a\.ome\.tif: page 0, tag ImageDescription: {said}.*[:;] ") as caught:
        images.open_image(tmp_path / "a.ome.tif")
    assert "\n" not in str(caught.value)


def test_pages_of_several_compressions_and_tiles_of_another_than_the_tag_states(tmp_path: Path) -> None:
    path, samples = tmp_path / "a.tif", SAMPLES[0, 0, :4]
    with tifffile.TiffWriter(path) as file:
        for plane, how in zip(samples, ("deflate", None, "lzw", "zstd"), strict=True):
            file.write(plane, compression=how, tile=(16, 16), contiguous=False, metadata=None)
    np.testing.assert_array_equal(read_image(path), samples)
    with tifffile.TiffFile(path) as file:
        at = file.pages[2].tags["Compression"].valueoffset
    data = path.read_bytes()
    for scheme, said in (
        (8, r"page 2, tile \d does not decode as tag Compression states"),
        (999, "page 2, tag Compression"),
    ):
        path.write_bytes(data[:at] + struct.pack("<H", scheme) + data[at + 2 :])
        with pytest.raises(InputError, match=rf"a\.tif: {said}.*[:;] ") as caught:
            read_image(path)
        assert "\n" not in str(caught.value)


def test_pages_with_pixels_of_two_sizes(tmp_path: Path) -> None:
    for name, sizes in (("a.tif", (300, 300, 150)), ("b.tif", (300, 300, 300))):
        with tifffile.TiffWriter(tmp_path / name) as file:
            for size in sizes:
                options: Any = {"resolution": (size, size), "resolutionunit": 2}
                file.write(SAMPLES[0, 0, 0], contiguous=False, metadata=None, photometric="minisblack", **options)
    with pytest.raises(InputError, match=r"a\.tif: page 2, tag XResolution: is 150, but page 0 has 300: pixels of two"):
        images.open_image(tmp_path / "a.tif")
    with images.open_image(tmp_path / "b.tif") as reader:
        assert reader.header.calibration.steps["X"] == Step(1 / 300, "inch")
