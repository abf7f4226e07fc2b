"""Tags of a TIFF that have no meaning here: each is in the result, as tifffile reads it, or named before the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from pipeline.formats import image as images
from pipeline.formats.image.base import Region
from pipeline.workloads.common.crop import RegionParameters

SAMPLES = np.random.default_rng(1).integers(0, 999, (5, 17, 23)).astype(np.uint16)
IPTC, PHOTOSHOP, PAGE_NAME = 33723, 34377, 285
# Code, field type, count, value: every type of TIFF, in the directory and outside of it.
TAGS: list[tuple[int, int, int, Any]] = [
    (PAGE_NAME, 2, 0, "the first section"),
    (IPTC, 7, 29, b"\x1c\x02\x00\x00\x02\x00\x02\x1c\x02\x05\x00\x10Leaf, section 7\0\0"),
    (PHOTOSHOP, 1, 5, b"8BIM\0"),
    (65000, 3, 3, (1, 2, 65535)),
    (65001, 4, 2, (7, 1 << 31)),
    (65002, 5, 2, (1, 3, 2, 7)),
    (65003, 6, 3, (-1, 2, -3)),
    (65004, 8, 2, (-300, 300)),
    (65005, 9, 2, (-70_000, 70_000)),
    (65006, 10, 1, (-1, 3)),
    (65007, 11, 3, (0.5, -1.25, 3e30)),
    (65008, 12, 2, (0.1, -2e300)),
    (65009, 3, 1, 300),
    (65010, 12, 1, 0.1),
]
CODES = {code for code, *_ in TAGS}


def saved(path: Path, samples: Any, tags: Any = tuple(TAGS), **options: Any) -> Path:
    tifffile.imwrite(path, samples, extratags=[(*tag, True) for tag in tags], **{"metadata": None} | options)
    return path


def copied(source: Path, target: Path, crop: str | None = None) -> str | None:
    """Writes an image again; returns what the target does not keep."""
    with RegionParameters(crop=crop).part(images.open_image(source), source) as part:
        samples = np.empty(part.header.shape, part.header.dtype)
        part.read(Region.whole(samples.shape), samples)
        writer = images.create_image(target, part.header)
    writer.write(Region.whole(samples.shape), samples)
    writer.publish()
    return images.not_kept(part.header, target)


def tags_of(path: Path, page: int = 0) -> dict[int, Any]:
    with tifffile.TiffFile(path) as found:
        return {tag.code: (int(tag.dtype), tag.count, tag.value) for tag in found.pages[page].tags if tag.code in CODES}


@pytest.mark.parametrize("target", ["b.tif", "b.ome.tif", "b.btf"])
@pytest.mark.parametrize(
    "options", [{}, {"byteorder": ">"}, {"bigtiff": True}, {"imagej": True, "metadata": {}}], ids=str
)
def test_every_type_of_tag_goes_along(options: dict[str, Any], target: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a.tif", SAMPLES, **options)
    expected = tags_of(source)
    assert expected.keys() == CODES
    assert copied(source, tmp_path / target) is None
    assert tags_of(tmp_path / target) == expected
    assert tags_of(tmp_path / target, 1) == {}
    copied(tmp_path / target, tmp_path / "c.tif", "X=3:9")
    assert tags_of(tmp_path / "c.tif") == expected


def test_other_formats_name_them(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.tif", SAMPLES[0], TAGS[:4])
    assert copied(source, tmp_path / "b.png") == "PageName, IPTC, Photoshop, tag 65000 of the TIFF"
    many = saved(tmp_path / "c.tif", SAMPLES[0])
    words = "PageName, IPTC, Photoshop, tag 65000, tag 65001, tag 65002, tag 65003, tag 65004 and 6 more of the TIFF"
    assert copied(many, tmp_path / "b.zarr") == words


def test_tags_of_the_input_file_are_not_in_the_result_but_named(tmp_path: Path) -> None:
    tags = [(34850, 4, 1, 8), (50706, 1, 4, b"\1\4\0\0"), (65000, 13, 1, 8), (65001, 4, 1, 5), (280, 3, 1, 7)]
    source = saved(tmp_path / "a.tif", SAMPLES[0], tags)
    data = bytearray(source.read_bytes())
    exposure, unknown = (data.index(code.to_bytes(2, "little") + b"\x04\0") for code in (34850, 65001))
    data[exposure : exposure + 2] = (34853).to_bytes(2, "little")  # tifffile writes no GPS directory
    data[unknown + 2] = 99  # a type that TIFF lacks
    source.write_bytes(data)
    assert copied(source, tmp_path / "b.tif") == "GPS, DNGVersion, tag 65000, tag 65001 of the TIFF"
    with tifffile.TiffFile(tmp_path / "b.tif") as found:
        assert not {34853, 50706, 65000, 65001, 280} & {tag.code for tag in found.pages[0].tags}


def test_a_value_beyond_the_file_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.tif", SAMPLES[0], [(65000, 7, 500, bytes(500))])
    data = bytearray(source.read_bytes())
    place = data.index((65000).to_bytes(2, "little") + b"\x07\0")
    data[place + 8 : place + 12] = (1 << 30).to_bytes(4, "little")
    source.write_bytes(data)
    assert copied(source, tmp_path / "b.tif") == "tag 65000 of the TIFF"


def test_tags_of_further_pages_and_of_the_whole_image(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as made:
        for number, plane in enumerate(SAMPLES):
            tags = [(51123, 2, 0, json.dumps({"time": number}), False), (50844, 12, 2, (1.0, 2.0), True)][
                : 1 if number else 2
            ]
            made.write(plane, extratags=tags[: 1 if number else 2], metadata=None, contiguous=False)
    assert copied(tmp_path / "a.tif", tmp_path / "b.tif") == "MicroManagerMetadata of further pages of the TIFF"
    assert "RPC" in str(copied(tmp_path / "a.tif", tmp_path / "c.tif", "X=3:9"))
    with tifffile.TiffFile(tmp_path / "c.tif") as found:
        assert found.pages[0].tags[51123].value == {"time": 0}
        assert 50844 not in found.pages[0].tags
