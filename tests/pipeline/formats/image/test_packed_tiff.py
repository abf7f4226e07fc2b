"""TIFF strips and tiles that a device decodes: the same samples as the processor reads."""

from __future__ import annotations

import numpy as np
import pytest
import tifffile

from pipeline.formats.image import Region, open_image
from tests.pipeline.formats.image.test_packed_zarr import check, regions, samples
from tests.pipeline.unpacking import unpack

SHAPES = {"gray": (211, 307), "RGB": (97, 141, 3), "stack": (5, 83, 61)}


def write(path, image, **options):
    photometric = "rgb" if image.shape[-1] == 3 else "minisblack"
    tifffile.imwrite(path, image, photometric=photometric, **({"compression": "zlib"} | options))


@pytest.mark.parametrize("predictor", [False, True])
@pytest.mark.parametrize("blocks", [{"tile": (48, 64)}, {"rowsperstrip": 17}, {"tile": (256, 256)}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_every_layout(tmp_path, shape, dtype, blocks, predictor):
    image = samples(dtype, SHAPES[shape])
    write(tmp_path / "a.tif", image, predictor=predictor, **blocks)
    for region in regions(image.shape):
        assert check(tmp_path / "a.tif", image, region)


@pytest.mark.parametrize("options", [{}, {"bigtiff": True}, {"compressionargs": {"level": 0}}], ids=str)
def test_floats_are_packed_without_a_predictor(tmp_path, options):
    image = samples("float32")
    write(tmp_path / "a.tif", image, tile=(64, 64), **options)
    assert check(tmp_path / "a.tif", image, Region.whole(image.shape))


def test_tiles_that_are_not_stored_are_zero(tmp_path):
    image = samples("uint16")
    image[:64, 64:128] = image[128:192] = 0
    tiles = (
        tile if tile.any() else None
        for y in range(0, 256, 64)
        for x in range(0, 320, 64)
        for tile in [np.pad(image, ((0, 45), (0, 13)))[y : y + 64, x : x + 64]]
    )
    tifffile.imwrite(
        tmp_path / "a.tif", tiles, shape=image.shape, dtype="uint16", tile=(64, 64), compression="zlib",
        photometric="minisblack",
    )  # fmt: skip
    for region in regions(image.shape):
        assert check(tmp_path / "a.tif", image, region)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("uint16", {"compression": "lzw"}),
        ("uint16", {"compression": None}),
        ("uint16", {"byteorder": ">"}),
        ("float32", {"predictor": True}),
        ("uint16", {"rowsperstrip": 211, "planarconfig": "separate", "shape": (3, 211, 307)}),
        ("float64", {"tile": (400, 400)}),
    ],
    ids=str,
)
def test_what_only_the_processor_decodes(tmp_path, dtype, options):
    options = dict(options)
    image = samples(dtype, options.pop("shape", (211, 307)))
    if "planarconfig" in options:
        tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", compression="zlib", **options)
    else:
        write(tmp_path / "a.tif", image, **options)
    with open_image(tmp_path / "a.tif") as reader:
        assert reader.read_packed(Region.whole(reader.header.shape), np.zeros(1 << 21, np.uint8)) is None


def test_what_does_not_fit_the_memory_is_left_to_the_processor(tmp_path):
    image = samples("uint16")
    write(tmp_path / "a.tif", image, tile=(48, 64))
    with open_image(tmp_path / "a.tif") as reader:
        assert reader.read_packed(Region.whole(image.shape), np.zeros(1 << 12, np.uint8)) is None


def test_a_damaged_tile_is_noticed(tmp_path):
    image, path = samples("uint16"), tmp_path / "a.tif"
    write(path, image, tile=(48, 64))
    with tifffile.TiffFile(path) as tiff:
        first, length = tiff.pages[0].dataoffsets[3], tiff.pages[0].databytecounts[3]
    whole, rng, noticed = path.read_bytes(), np.random.default_rng(1), 0
    for turn in range(60):
        data = bytearray(whole)
        data[first + (turn if turn < 3 else int(rng.integers(length)))] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        memory = np.zeros(1 << 19, np.uint8)
        with open_image(path) as reader:
            packed = reader.read_packed(Region.whole(image.shape), memory)
        noticed += packed is None or not unpack(packed, memory, np.zeros(image.shape, image.dtype))
    assert noticed >= 58  # flags of the header may change without harm
