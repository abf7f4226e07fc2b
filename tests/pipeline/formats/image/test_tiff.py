from __future__ import annotations

import random
import struct
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats.image.base import ImageHeader, Region, Storage
from pipeline.formats.image.tiff import Tiff
from tests.pipeline.formats.image.contract import (
    DTYPES,
    QUICK,
    Case,
    FormatContract,
    assert_same_bits,
    input_error,
    one_line,
    read_whole,
    regions_of,
    write_whole,
)
from tests.pipeline.formats.image.decoded_tiles import decoded_tiles

FORMAT = Tiff()


def pixels(*shape: int, dtype: str = "uint16") -> NDArray[Any]:
    """Noise on a ramp: it compresses, and no two rows are alike."""
    values = np.random.default_rng(3).integers(0, 50, shape) + np.arange(shape[-1])
    return (values / 7 if dtype.startswith("float") else values % 251).astype(dtype)


def check_regions(path: Path, array: NDArray[Any]) -> None:
    """Random regions of the file equal slices of `array`."""
    with FORMAT.open(path) as reader:
        assert (reader.header.shape, reader.header.dtype) == (array.shape, array.dtype)

        @QUICK
        @given(regions_of(array.shape))
        def check(region: Region) -> None:
            out = np.empty(region.shape, array.dtype)
            reader.read(region, out)
            assert_same_bits(out, array[region.slices])

        check()
    assert_same_bits(read_whole(FORMAT, path), np.ascontiguousarray(array))


class TestContract(FormatContract):
    format = FORMAT
    cases = (
        *[
            Case(suffix=".tif", axes=axes, dtype="uint16")
            for axes in ("YX", "YXS", "ZYX", "ZYXS", "CYX", "TCZYX", "TCZYXS")
        ],
        Case(suffix=".tif", axes="TCZYX", dtype="uint16", metadata={"dialect": "ImageJ"}),
        *[Case(suffix=".tiff", axes="YX", dtype=dtype) for dtype in DTYPES if dtype != "uint16"],
        *[Case(suffix=".tif", axes="YXS", dtype="uint8", channels=channels) for channels in (2, 4, 7)],
        Case(suffix=".btf", axes="ZYXS", dtype="float32"),
        Case(
            suffix=".tf8",
            axes="YXS",
            dtype="uint16",
            metadata={
                "photometric": 2,
                "resolution": ((300, 1), (300, 1)),
                "resolution_unit": 3,
                "orientation": 3,
                "icc_profile": bytes(range(200)),
            },
        ),
    )
    refused = (
        Case(suffix=".tif", axes="YX", dtype="complex64"),
        Case(suffix=".ome.tif", axes="YX", dtype="uint64"),
    )


# What tifffile writes


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("storage", [{"rowsperstrip": 10}, {"tile": (32, 48)}])
def test_missing_samples_of_lerc_are_nan(tmp_path: Path, storage: dict[str, Any], channels: int) -> None:
    """The codec keeps them as a mask beside zeros, as GDAL's files of elevations have them."""
    array = pixels(101, 119, channels, dtype="float32")
    array[3:9, 40:] = np.nan
    array = array[..., 0] if channels == 1 else array
    photometric = "minisblack" if channels == 1 else "rgb"
    for inner in (None, "deflate", "zstd"):
        options = {"compressionargs": {"compression": inner}} if inner else {}
        tifffile.imwrite(tmp_path / "a.tif", array, photometric=photometric, compression="lerc", **options, **storage)
        assert_same_bits(read_whole(FORMAT, tmp_path / "a.tif"), array)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lerc_that_is_missing_in_some_samples_of_a_pixel_is_refused(tmp_path: Path, dtype: str) -> None:
    """The codec stores the least number for them and says nothing of it; planes have masks of their own."""
    array = pixels(40, 50, 3, dtype=dtype)
    array[30, 7, 1] = np.nan
    storage: dict[str, Any] = {"photometric": "rgb", "compression": "lerc", "rowsperstrip": 10}
    tifffile.imwrite(tmp_path / "a.tif", array, **storage)
    with pytest.raises(InputError, match=r"a\.tif: page 0, strip 3 holds -.*e\+.*: store the samples in planes"):
        read_whole(FORMAT, tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "b.tif", array.transpose(2, 0, 1).copy(), planarconfig="separate", **storage)
    assert_same_bits(read_whole(FORMAT, tmp_path / "b.tif"), array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compression", [None, "lzw", "zlib", "packbits", "zstd", "lzma"])
@pytest.mark.parametrize("storage", [{"rowsperstrip": 10}, {"tile": (32, 48)}])
@pytest.mark.parametrize("order", ["<", ">"])
def test_strips_and_tiles_of_every_compression(
    tmp_path: Path, dtype: str, compression: str | None, storage: dict[str, Any], order: Any
) -> None:
    array = pixels(101, 119, 3, dtype=dtype)
    for predictor in (False, True) if compression not in (None, "packbits") else (False,):
        tifffile.imwrite(
            tmp_path / "a.tif",
            array,
            photometric="rgb",
            compression=compression,
            predictor=predictor,
            byteorder=order,
            **storage,
        )
        assert_same_bits(read_whole(FORMAT, tmp_path / "a.tif"), array)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
@pytest.mark.parametrize("compression", ["lzw", "zlib", "packbits", "zstd"])
def test_common_codecs_are_decoded_without_tifffile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, dtype: str
) -> None:
    from pipeline.formats.image.tiff import blocks

    array = pixels(101, 119, 3, dtype=dtype)
    storage: Any = {"predictor": True} if compression != "packbits" else {}
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb", compression=compression, tile=(32, 48), **storage)
    monkeypatch.setattr(blocks, "_decoders", lambda path, encoded: dict.fromkeys(encoded, pytest.fail))
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.tif"), array)


def test_a_damaged_tile_among_several_is_named_and_missing_ones_are_zero(tmp_path: Path) -> None:
    path, array = tmp_path / "a.tif", pixels(60, 397, 3)
    tifffile.imwrite(path, array, photometric="rgb", compression="zlib", tile=(32, 48))
    with tifffile.TiffFile(path) as file:
        page = file.pages[0]
        offsets, tags = page.dataoffsets, [page.tags[name].valueoffset for name in ("TileOffsets", "TileByteCounts")]
    data = bytearray(path.read_bytes())
    for at in tags:  # the third tile is not stored
        struct.pack_into("<I", data, at + 8, 0)
    path.write_bytes(data)
    array[:32, 96:144] = 0
    check_regions(path, array)
    data[offsets[10] : offsets[10] + 40] = bytes(40)
    path.write_bytes(data)
    with input_error(path, "tile 10 does not decode"):
        read_whole(FORMAT, path)


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("tile", [None, (32, 48)])
@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_any_region_of_any_storage(tmp_path: Path, compression: Any, tile: Any, planar: Any, order: Any) -> None:
    array = pixels(4, 70, 61, 3)
    stored = np.moveaxis(array, -1, 1) if planar == "separate" else array
    tifffile.imwrite(
        tmp_path / "a.tif",
        np.ascontiguousarray(stored),
        photometric="rgb",
        planarconfig=planar,
        compression=compression,
        tile=tile,
        rowsperstrip=None if tile else 9,
        byteorder=order,
        bigtiff=order == ">",
    )
    check_regions(tmp_path / "a.tif", array)


@pytest.mark.parametrize("samples_per_pixel", [2, 5])
def test_any_number_of_samples(tmp_path: Path, samples_per_pixel: int) -> None:
    array = pixels(40, 33, samples_per_pixel)
    tifffile.imwrite(
        tmp_path / "a.tif", array, photometric="minisblack", planarconfig="contig", compression="lzw", tile=(16, 16)
    )
    check_regions(tmp_path / "a.tif", array)


@pytest.mark.parametrize("compression", ["jpeg", "jpeg2000", "webp", "jpegxl"])
def test_image_codecs_decode_as_tifffile_does(tmp_path: Path, compression: Any) -> None:
    array = cv2.GaussianBlur(pixels(64, 96, 3, dtype="uint8"), (0, 0), 3)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="rgb", compression=compression, tile=(32, 32))
    check_regions(tmp_path / "a.tif", tifffile.imread(tmp_path / "a.tif"))


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("tiled", [False, True])
def test_jpegs_of_separate_colours_decode_as_gdal_does(tmp_path: Path, tiled: bool, dtype: str) -> None:
    """tifffile refuses them. JPEG's bytes have no sign; the tag SampleFormat gives them one."""
    import rasterio

    array = cv2.GaussianBlur(pixels(64, 96, 3, dtype="uint8"), (0, 0), 3)
    size = {"width": 96, "height": 64} | ({"tiled": True, "blockxsize": 32, "blockysize": 32} if tiled else {})
    form = {"driver": "GTiff", "count": 3, "dtype": dtype, "compress": "jpeg", "interleave": "band"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no georeference
        with rasterio.open(tmp_path / "a.tif", "w", **size, **form) as file:
            file.write(np.moveaxis(array.view(dtype), 2, 0))
        with rasterio.open(tmp_path / "a.tif") as file:
            decoded = np.moveaxis(file.read(), 0, 2)
    assert decoded.dtype == dtype
    check_regions(tmp_path / "a.tif", decoded)


@pytest.mark.parametrize(
    ("axes", "shape", "options"),
    [
        ("ZYX", (7, 40, 50), {}),
        ("ZYX", (7, 40, 50), {"imagej": True}),
        ("ZCYX", (4, 3, 40, 50), {"imagej": True}),
        ("CYX", (3, 40, 50), {"imagej": True}),
        ("ZYX", (7, 40, 50), {"ome": True}),
        ("CYX", (3, 40, 50), {"ome": True}),
        ("ZCYX", (4, 3, 40, 50), {"ome": True}),
        ("CZYX", (3, 4, 40, 50), {"ome": True}),
        ("TCZYX", (1, 3, 4, 40, 50), {"ome": True}),
        ("ZCYX", (4, 3, 40, 50), {}),
        ("TYX", (5, 20, 21), {"imagej": True}),
        ("TZCYX", (2, 3, 4, 20, 21), {"imagej": True}),
        ("TYX", (5, 20, 21), {"ome": True}),
        ("TZCYX", (2, 3, 4, 20, 21), {"ome": True}),
        ("CTZYX", (2, 3, 4, 20, 21), {"ome": True}),
        ("TCZYX", (2, 3, 4, 20, 21), {}),
    ],
)
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_stacks_and_channels_in_pages(
    tmp_path: Path, axes: str, shape: tuple[int, ...], options: dict[str, Any], compression: Any
) -> None:
    if options.get("imagej") and compression:
        compression = "deflate"
    array = pixels(*shape)
    tifffile.imwrite(
        tmp_path / "a.tif",
        array,
        photometric="minisblack",
        metadata={"axes": axes},
        compression=compression,
        **options,
    )
    if shape[0] == 1:
        array, axes = array[0], axes[1:]
    expected = "".join(axis for axis in "TCZYXS" if axis in axes)
    array = np.ascontiguousarray(array.transpose([axes.index(axis) for axis in expected]))
    with FORMAT.open(tmp_path / "a.tif") as reader:
        assert reader.header.axes == expected
    check_regions(tmp_path / "a.tif", array)


def test_planes_behind_a_single_directory(tmp_path: Path) -> None:
    array = pixels(6, 40, 50)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, array, photometric="minisblack", metadata={"axes": "ZYX"}, truncate=True)
    check_regions(path, array)
    # ImageJ does the same past 4 GiB, with its own description.
    tifffile.imwrite(
        path, array, photometric="minisblack", metadata=None, description="ImageJ=1.53\nimages=6\nslices=6\n"
    )
    check_regions(path, array)
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as tiff:
        after_first = tiff.pages[0].offset + 2 + 12 * len(tiff.pages[0].tags)
    data[after_first : after_first + 4] = bytes(4)
    path.write_bytes(data)
    check_regions(path, array)
    path.write_bytes(data[: len(data) // 2])
    with input_error(path):
        FORMAT.open(path)


@pytest.mark.parametrize(("axes", "shape"), [("ZCYX", (2, 3, 11, 1)), ("ZYX", (5, 7, 1))])
def test_images_of_one_column_that_tifffile_has_turned_are_refused(
    tmp_path: Path, axes: str, shape: tuple[int, ...]
) -> None:
    """Its pages leave the last axis out: channels or planes would be taken for rows."""
    tifffile.imwrite(tmp_path / "a.tif", pixels(*shape), photometric="minisblack", metadata={"axes": axes})
    with input_error(tmp_path / "a.tif", f"declares axes {axes}", ".npy or .zarr"):
        FORMAT.open(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "a.tif", pixels(*shape), imagej=True, metadata={"axes": axes})
    with input_error(tmp_path / "a.tif", "one column", ".npy or .zarr"):
        FORMAT.open(tmp_path / "a.tif")


def test_pages_written_one_by_one(tmp_path: Path) -> None:
    array = pixels(5, 40, 50)
    with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
        for number, page in enumerate(array):
            # Pages may differ in how they are stored.
            tiff.write(page, compression=[None, "lzw", "zlib"][number % 3], tile=(16, 16) if number > 2 else None)
    check_regions(tmp_path / "a.tif", array)


@pytest.mark.parametrize(
    ("axes", "shape", "options", "words"),
    [
        ("QZYX", (2, 3, 20, 21), {}, "Q=2"),
    ],
)
def test_further_axes_are_refused(
    tmp_path: Path, axes: str, shape: tuple[int, ...], options: dict[str, Any], words: str
) -> None:
    options = {"photometric": "minisblack", **options}
    array = pixels(*shape, dtype="uint8")
    tifffile.imwrite(tmp_path / "a.tif", array, metadata={"axes": axes}, **options)
    with pytest.raises(InputError, match=words) as caught:
        FORMAT.open(tmp_path / "a.tif")
    one_line(caught.value, "a.tif")


def test_smaller_copies_are_ignored_and_other_pages_refused(tmp_path: Path) -> None:
    array = pixels(64, 50, 3)
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(array, photometric="rgb", subifds=1)
        tiff.write(array[::2, ::2], photometric="rgb", subfiletype=1)
        tiff.write(array[::4, ::4], photometric="rgb", subfiletype=1)
    check_regions(path, array)
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(array, photometric="rgb")
        tiff.write(array[:32], photometric="rgb")
    with pytest.raises(InputError, match="page 1 is 50 × 32 × 3 uint16, but page 0 is"):
        FORMAT.open(path)
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(array, photometric="rgb")
        tiff.write(array.astype(np.int16), photometric="rgb")
    with pytest.raises(InputError, match=r"page 1 .* int16"):
        FORMAT.open(path)


@pytest.mark.parametrize(
    ("dtype", "bits", "words"),
    [("complex64", None, "save the magnitude, or"), ("uint16", 12, "12-bit unsigned integer samples .* 1, 8, 16, 32")],
)
def test_other_samples_are_refused_by_name(tmp_path: Path, dtype: str, bits: int | None, words: str) -> None:
    array = np.ones((20, 21), dtype)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="minisblack", bitspersample=bits)
    with pytest.raises(InputError, match=words) as caught:
        FORMAT.open(tmp_path / "a.tif")
    one_line(caught.value, "a.tif", "page 0")


def test_colours_that_cannot_be_averaged_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels(20, 21, dtype="uint8"), photometric="palette", colormap=np.zeros((3, 256), "uint16"))
    with pytest.raises(InputError, match="palette"):
        FORMAT.open(path)
    tifffile.imwrite(path, pixels(20, 21, 3, dtype="uint8"), photometric="cielab")
    with pytest.raises(InputError, match="CIELab"):
        FORMAT.open(path)


def test_segments_that_are_not_stored_are_zero(tmp_path: Path) -> None:
    array = pixels(64, 64)
    path = tmp_path / "a.tif"
    for compression in (None, "zlib"):
        tifffile.imwrite(path, array, tile=(32, 32), compression=compression)
        data = bytearray(path.read_bytes())
        with tifffile.TiffFile(path) as tiff:
            for tag in ("TileOffsets", "TileByteCounts"):
                found = tiff.pages[0].tags[tag]
                width = {3: 2, 4: 4}[found.dtype]
                at = found.valueoffset + width * 2
                data[at : at + width] = bytes(width)
        path.write_bytes(data)
        array[32:, :32] = 0
        check_regions(path, array)


# What OpenCV (libtiff) writes and reads


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_opencv_files_are_read(tmp_path: Path, dtype: str) -> None:
    array = pixels(101, 70, 3, dtype=dtype)
    assert cv2.imwrite(str(tmp_path / "a.tif"), array)
    check_regions(tmp_path / "a.tif", np.ascontiguousarray(array[..., ::-1]))


@pytest.mark.parametrize("suffix", [".tif", ".btf"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("axes", "shape"), [("YX", (300, 500)), ("YXS", (300, 500, 3)), ("ZYX", (3, 300, 500)), ("ZYXS", (3, 300, 500, 3))]
)
def test_results_are_read_by_tifffile_and_libtiff(
    tmp_path: Path, suffix: str, dtype: str, axes: str, shape: tuple[int, ...]
) -> None:
    path, array = tmp_path / f"a{suffix}", pixels(*shape, dtype=dtype)
    write_whole(FORMAT, path, ImageHeader(shape=shape, axes=axes, dtype=np.dtype(dtype)), array)
    assert_same_bits(tifffile.imread(path), array)
    with tifffile.TiffFile(path) as tiff:
        assert tiff.is_bigtiff == (suffix == ".btf")
        assert max(tiff.pages[0].databytecounts) <= 256 << 10
    done, pages = cv2.imreadmulti(str(path), flags=cv2.IMREAD_UNCHANGED)
    assert done
    found = np.stack([page[..., ::-1] if page.ndim == 3 else page for page in pages])
    assert_same_bits(np.ascontiguousarray(found).reshape(shape), array)


def test_grey_with_alpha_and_spectra_are_told_apart(tmp_path: Path) -> None:
    for channels, dtype, expected in (
        (2, "uint8", ("MINISBLACK", (2,))),
        (4, "uint16", ("RGB", (2,))),
        (4, "float32", ("MINISBLACK", (0, 0, 0))),
        (7, "uint8", ("MINISBLACK", (0,) * 6)),
    ):
        array = pixels(20, 21, channels, dtype=dtype)
        header = ImageHeader(shape=array.shape, axes="YXS", dtype=array.dtype)
        write_whole(FORMAT, tmp_path / "a.tif", header, array)
        with tifffile.TiffFile(tmp_path / "a.tif") as tiff:
            page = tiff.pages[0]
            assert (page.photometric.name, tuple(page.extrasamples)) == expected
            assert_same_bits(page.asarray(), array)


def test_resolution_profile_and_colour_are_carried_over(tmp_path: Path) -> None:
    array = pixels(20, 21, 4, dtype="uint8")
    tifffile.imwrite(
        tmp_path / "a.tif",
        array,
        photometric="rgb",
        extrasamples=["assocalpha"],
        resolution=(300, 150),
        resolutionunit="CENTIMETER",
        iccprofile=b"profile" * 9,
    )
    with FORMAT.open(tmp_path / "a.tif") as reader:
        write_whole(FORMAT, tmp_path / "b.tif", reader.header, array)
    with tifffile.TiffFile(tmp_path / "b.tif") as tiff:
        page = tiff.pages[0]
        assert page.extrasamples == (1,)
        assert page.resolution == (300, 150)
        assert page.resolutionunit == 3
        assert page.iccprofile == b"profile" * 9


# Sizes


def test_large_headers_open_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.btf"
    header = ImageHeader(shape=(20_000, 20_000, 3), axes="YXS", dtype=np.dtype(np.uint16))
    writer = FORMAT.create(path, header)
    started = time.process_time()
    with FORMAT.open(tmp_path / "a.btf.partial") as reader:
        assert reader.header.shape == header.shape
        band = np.ones((3, 20_000, 3), np.uint16)
        reader.read(Region((19_997, 0, 0), header.shape), band)
        assert not band.any()
    assert time.process_time() - started < 1
    writer.discard()


def test_more_than_four_gigabytes_make_a_bigtiff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.posix_fallocate", lambda *_: None)
    header = ImageHeader(shape=(3, 30_000, 30_000), axes="ZYX", dtype=np.dtype(np.uint16))
    writer = FORMAT.create(tmp_path / "a.tif", header)
    last = Region((2, 29_999, 0), (3, 30_000, 30_000))
    row = np.arange(30_000, dtype=np.uint16).reshape(last.shape)
    writer.write(last, row)
    with FORMAT.open(tmp_path / "a.tif.partial") as reader:
        found = np.empty_like(row)
        reader.read(last, found)
        assert_same_bits(found, row)
    with tifffile.TiffFile(tmp_path / "a.tif.partial") as tiff:
        assert tiff.is_bigtiff
        assert len(tiff.pages) == 3
    writer.discard()


def test_stacks_of_thousands_of_pages_open_quickly(tmp_path: Path) -> None:
    array = pixels(3000, 8, 9)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="minisblack", metadata={"axes": "ZYX"})
    started = time.process_time()
    with FORMAT.open(tmp_path / "a.tif") as reader:
        assert reader.header.shape == array.shape
    assert time.process_time() - started < 3
    write_whole(FORMAT, tmp_path / "b.tif", ImageHeader(shape=array.shape, axes="ZYX", dtype=array.dtype), array)
    assert_same_bits(tifffile.imread(tmp_path / "b.tif"), array)


# Several threads


@pytest.mark.parametrize("compression", [None, "lzw"])
def test_eight_threads_read_at_once(tmp_path: Path, compression: Any) -> None:
    array = pixels(400, 390)
    tifffile.imwrite(tmp_path / "a.tif", array, tile=(64, 64), compression=compression)
    with FORMAT.open(tmp_path / "a.tif") as reader, ThreadPoolExecutor(8) as threads:

        def check(seed: int) -> None:
            rng = random.Random(seed)
            top, left = rng.randrange(380), rng.randrange(370)
            region = Region((top, left), (rng.randrange(top + 1, 401), rng.randrange(left + 1, 391)))
            out = np.empty(region.shape, np.uint16)
            reader.read(region, out)
            assert_same_bits(out, array[region.slices])

        list(threads.map(check, range(200)))


def test_strips_with_halos_decode_each_tile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = pixels(256, 200)
    tifffile.imwrite(tmp_path / "a.tif", array, tile=(32, 32), compression="zlib")
    decoded = decoded_tiles(monkeypatch)
    with FORMAT.open(tmp_path / "a.tif") as reader, ThreadPoolExecutor(4) as threads:

        def band(top: int) -> None:
            region = Region((max(0, top - 10), 0), (min(256, top + 20), 200))
            out = np.empty(region.shape, np.uint16)
            reader.read(region, out)
            assert_same_bits(out, array[region.slices])

        list(threads.map(band, range(0, 256, 10)))
    assert len(decoded) == decoded.total() == 8 * 7


def test_a_large_strip_counts_and_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory: an image in one strip is in memory as a whole while any of it is read."""
    from pipeline.codecs import block_cache

    monkeypatch.setattr(block_cache, "_SMALLEST_BYTES", 1000)
    array = pixels(256, 200)
    tifffile.imwrite(tmp_path / "large.tif", array, rowsperstrip=256, compression="zlib")
    tifffile.imwrite(tmp_path / "small.tif", array, rowsperstrip=2, compression="zlib")
    decoded = decoded_tiles(monkeypatch)
    with FORMAT.open(tmp_path / "small.tif") as reader:
        assert reader.hold_at_most(100) == 100
    with FORMAT.open(tmp_path / "large.tif") as reader:
        assert reader.hold_at_most(100) == array.nbytes
        out = np.empty((1, 200), np.uint16)
        for row in range(256):
            reader.read(Region((row, 0), (row + 1, 200)), out)
            assert_same_bits(out, array[row : row + 1])
    assert decoded == {(0, 0, 0, 0): 1}


# Files that lie


def test_a_circle_of_pages_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels(3, 20, 21), photometric="minisblack", metadata=None)
    data = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as tiff:
        last = tiff.pages[2].offset + 2 + 12 * struct.unpack_from("<H", data, tiff.pages[2].offset)[0]
        data[last : last + 4] = struct.pack("<I", tiff.pages[1].offset)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"page 3: its directory .*is that of an earlier page: a loop"):
        FORMAT.open(path)


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        ("ImageWidth", 0),
        ("ImageWidth", 2**32 - 1),
        ("ImageLength", 2**31),
        ("SamplesPerPixel", 0),
        ("SamplesPerPixel", 65535),
        ("StripOffsets", 2**32 - 5),
        ("StripByteCounts", 1),
        ("RowsPerStrip", 0),
        ("Compression", 9999),
        ("PlanarConfiguration", 7),
    ],
)
def test_a_tag_that_lies_is_named(tmp_path: Path, tag: str, value: int) -> None:
    path = tmp_path / "a.tif"
    array = pixels(20, 21, 3)
    tifffile.imwrite(path, array, photometric="rgb", rowsperstrip=20, metadata=None)
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        found = tiff.pages[0].tags[tag]
        found.overwrite(value, dtype=4 if value > 65535 else None)
    with pytest.raises(InputError) as caught:
        FORMAT.open(path)
    one_line(caught.value, "a.tif", "page 0, tag ")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (1 << 26, "has 1 value, but 67,108,864 are needed"),
        ((1 << 26) + 1, "67,108,865 strips or tiles, more than 67,108,864; write larger tiles"),
    ],
)
def test_as_many_strips_as_allowed_and_one_more(tmp_path: Path, rows: int, words: str) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels(1, 21), rowsperstrip=1, metadata=None)
    with tifffile.TiffFile(path, mode="r+b") as tiff:
        tiff.pages[0].tags["ImageLength"].overwrite(rows)
    with input_error(path, f"page 0, tag StripOffsets: {words}"):
        FORMAT.open(path)


@pytest.mark.parametrize("compression", [None, "lzw", "zlib", "zstd", "packbits", "jpeg"])
@pytest.mark.parametrize("big", [False, True])
def test_damaged_files_are_input_errors_or_images(tmp_path: Path, compression: Any, big: bool) -> None:
    whole_path, path = tmp_path / "whole.tif", tmp_path / "bad.tif"
    array = pixels(3, 40, 50, 3, dtype="uint8")
    tifffile.imwrite(
        whole_path, array, photometric="rgb", compression=compression, tile=(16, 16), bigtiff=big, metadata=None
    )
    whole = whole_path.read_bytes()

    @QUICK
    @given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
    def check(seed: int, changes: int, cut: bool) -> None:
        rng = random.Random(seed)
        data = bytearray(whole)
        for _ in range(changes):
            # Half of the changes hit the first page's directory, the rest anything.
            data[rng.randrange(400) if rng.random() < 0.5 else rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if cut else data)
        try:
            with FORMAT.open(path) as reader:
                if reader.header.nbytes < 100 << 20:
                    out = np.empty(reader.header.shape, reader.header.dtype)
                    reader.read(Region.whole(out.shape), out)
        except InputError as error:
            one_line(error, "bad.tif")

    check()


@pytest.mark.parametrize(
    "ome", ["<OME", "<OME><Image/></OME>", "<OME></OME>", "<OME><Image><Pixels SizeC='x'/></Image></OME>"]
)
def test_ome_xml_that_makes_no_sense_is_refused(tmp_path: Path, ome: str) -> None:
    tifffile.imwrite(tmp_path / "a.tif", pixels(20, 21), description=ome + "<!-- -->OME>", metadata=None)
    with input_error(tmp_path / "a.tif"):
        FORMAT.open(tmp_path / "a.tif")


@pytest.mark.parametrize("shape", ["[1e400, 20, 21]", "[[], 20, 21]", '"x"', "[-1, 20, 21]"])
def test_a_description_that_only_looks_like_one_is_free_text(tmp_path: Path, shape: str) -> None:
    array = pixels(20, 21)
    tifffile.imwrite(tmp_path / "a.tif", array, description=f'{{"shape": {shape}}}', metadata=None)
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.tif"), array)


def test_tags_that_do_not_matter_are_not_remarked_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By tifffile, which decodes: its log lines would stand on stderr."""
    array = pixels(20, 21)
    made_by = (305, 2, 0, b"\x81\x8d no text of any kind \x90", True)
    tifffile.imwrite(
        tmp_path / "a.tif",
        array,
        compression="zlib",
        software=False,
        extratags=[made_by],
        resolutionunit=3,
        metadata=None,
    )
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+b") as tiff:
        tiff.pages[0].tags["ResolutionUnit"].overwrite(999)
    caplog.clear()
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.tif"), array)
    assert caplog.records == []


def test_planes_in_other_files_are_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("a.ome.tif", "b.ome.tif")):
        xml = (
            '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:a">'
            '<Image ID="Image:0"><Pixels DimensionOrder="XYZCT" SizeX="21" SizeY="20" SizeZ="2" SizeC="1" SizeT="1" '
            'Type="uint16"><Channel SamplesPerPixel="1"/>'
            '<TiffData IFD="0" FirstZ="0"><UUID FileName="a.ome.tif">urn:uuid:a</UUID></TiffData>'
            '<TiffData IFD="0" FirstZ="1"><UUID FileName="b.ome.tif">urn:uuid:b</UUID></TiffData>'
            "</Pixels></Image></OME>"
        )
        tifffile.imwrite(tmp_path / name, pixels(20, 21) + np.uint16(number), description=xml, metadata=None)
    with input_error(tmp_path / "a.ome.tif"):
        FORMAT.open(tmp_path / "a.ome.tif")


ARRAYS = {"CYX": (3, 20, 21), "TYX": (4, 20, 21), "TCZYX": (2, 3, 4, 20, 21), "CZYXS": (2, 4, 20, 21, 3)}


@pytest.mark.parametrize("axes", ARRAYS)
@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize("dialect", ["OME", "ImageJ"])
def test_others_read_channels_and_time_points(tmp_path: Path, axes: str, compression: Any, dialect: str) -> None:
    dtype = "uint8" if axes.endswith("S") else "uint16"
    array = pixels(*ARRAYS[axes], dtype=dtype)
    header = ImageHeader(shape=array.shape, axes=axes, dtype=array.dtype, metadata={"dialect": dialect})
    form = FORMAT.storing(Storage(compression=compression))
    write_whole(form, tmp_path / "a.tif", header, array)
    with tifffile.TiffFile(tmp_path / "a.tif") as tiff:
        (series,) = tiff.series
        assert (tiff.is_ome, tiff.is_imagej) == (dialect == "OME", dialect == "ImageJ")
        assert sorted(series.axes) == sorted(axes)
        assert all("ImageDescription" not in page.aspage().tags for page in tiff.pages[1:])
        found = series.asarray().transpose([series.axes.index(letter) for letter in axes])
        assert_same_bits(np.ascontiguousarray(found), array)
    with FORMAT.open(tmp_path / "a.tif") as reader:
        assert reader.header.axes == axes
    check_regions(tmp_path / "a.tif", array)


def test_a_stack_with_an_omes_name_gets_ome_xml(tmp_path: Path) -> None:
    array = pixels(3, 20, 21)
    write_whole(FORMAT, tmp_path / "a.ome.tif", ImageHeader(shape=array.shape, axes="ZYX", dtype=array.dtype), array)
    first = (tmp_path / "a.ome.tif").read_bytes()
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as tiff:
        assert (tiff.is_ome, tiff.series[0].axes) == (True, "ZYX")
    write_whole(FORMAT, tmp_path / "a.ome.tif", ImageHeader(shape=array.shape, axes="ZYX", dtype=array.dtype), array)
    assert (tmp_path / "a.ome.tif").read_bytes() == first
