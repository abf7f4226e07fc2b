"""Samples of every dtype through the formats that take all of them, compared with other libraries' readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from numpy.typing import NDArray

from pipeline.formats import image as images
from pipeline.formats.image.base import DTYPES, ImageHeader, Region, Storage
from pipeline.formats.image.metadata import Calibration, Step
from tests.pipeline.formats.image.contract import assert_same_bits, samples

HEADER = ImageHeader(shape=(2, 37, 53), axes="ZYX", dtype=np.dtype(np.uint8))


def of(dtype: str) -> tuple[ImageHeader, NDArray[Any]]:
    header = ImageHeader(shape=HEADER.shape, axes=HEADER.axes, dtype=np.dtype(dtype))
    return header, samples(header)


def whole(path: Path) -> NDArray[Any]:
    with images.open_image(path) as reader:
        out = np.empty(reader.header.shape, reader.header.dtype)
        reader.read(Region.whole(out.shape), out)
        middle = Region(tuple(n // 3 for n in out.shape), tuple(n // 3 + (n + 1) // 2 for n in out.shape))
        part = np.empty(middle.shape, out.dtype)
        reader.read(middle, part)
    assert_same_bits(part, np.ascontiguousarray(out[middle.slices]))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("a.npy", Storage()),
        ("a.zarr", Storage()),
        ("a.zarr", Storage(compression="none", chunks=(16,))),
        ("a.tif", Storage()),
        ("a.tif", Storage(chunks=(16,))),
        ("a.tif", Storage(compression="deflate", chunks=(32, 16, 16))),
        ("a.tif", Storage(compression="lzw")),
        ("a.btf", Storage(compression="zstd")),
    ],
    ids=str,
)
def test_what_is_written_is_read_alike_here_and_elsewhere(
    dtype: str, name: str, storage: Storage, tmp_path: Path
) -> None:
    header, array = of(dtype)
    path = tmp_path / name
    writer = images.create_image(path, header, storage=storage)
    for rows in (slice(0, 13), slice(13, 37)):
        writer.write(Region((0, rows.start, 0), (2, rows.stop, 53)), np.ascontiguousarray(array[:, rows]))
    writer.publish()
    assert_same_bits(whole(path), array)
    elsewhere: dict[str, Any] = {
        ".npy": np.load,
        ".zarr": lambda path: zarr.open_group(path, mode="r")["0"][...],
        ".tif": tifffile.imread,
        ".btf": tifffile.imread,
    }
    assert_same_bits(elsewhere[path.suffix](path), array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_others_write_is_read(dtype: str, tmp_path: Path) -> None:
    _, array = of(dtype)
    np.save(tmp_path / "a.npy", array)
    tifffile.imwrite(tmp_path / "a.tif", array, photometric="minisblack")
    tifffile.imwrite(tmp_path / "big.tif", array, photometric="minisblack", byteorder=">", tile=(16, 32))
    tifffile.imwrite(tmp_path / "deflate.tif", array, photometric="minisblack", compression="deflate")
    tifffile.imwrite(tmp_path / "packbits.tif", array, photometric="minisblack", compression="packbits")
    for version in (2, 3):
        made = zarr.create_array(
            tmp_path / f"v{version}.zarr", shape=array.shape, chunks=(1, 16, 16), dtype=dtype, zarr_format=version
        )
        made[...] = array
    for path in tmp_path.iterdir():
        assert_same_bits(whole(path), array)


@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_of_bool_have_the_fill_value(version: int, tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    made = zarr.create_array(path, shape=(9, 8), chunks=(4, 4), dtype=bool, fill_value=True, zarr_format=version)
    made[:4] = False
    assert_same_bits(whole(path), made[...])


def test_bool_is_one_bit_in_ome_tiff(tmp_path: Path) -> None:
    header, array = of("bool")
    header = ImageHeader(
        shape=header.shape, axes="ZYX", dtype=header.dtype, calibration=Calibration({"Z": Step(2.0, "micrometer")})
    )
    writer = images.create_image(tmp_path / "a.ome.tif", header)
    writer.write(Region.whole(header.shape), array)
    writer.publish()
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as file:
        assert file.pages[0].bitspersample == 1
        assert 'Type="bit"' in str(file.ome_metadata)
        assert_same_bits(file.asarray(), array)
    assert_same_bits(whole(tmp_path / "a.ome.tif"), array)


# How files are stored unless a scheme is chosen


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [(None, 1), ("deflate", 8), ("lzw", 5), ("zstd", 50000), ("packbits", 8), ("lzma", 8), ("jpeg2000", 34712)],
)
def test_a_tiff_is_compressed_if_its_input_is(scheme: str | None, expected: int, tmp_path: Path) -> None:
    _, array = of("uint16")
    tifffile.imwrite(tmp_path / "in.tif", array, photometric="minisblack", compression=scheme)
    with images.open_image(tmp_path / "in.tif") as reader:
        header = reader.header
    for name, storage, stored in (("out.tif", None, expected), ("none.tif", Storage(compression="none"), 1)):
        writer = images.create_image(tmp_path / name, header, storage=storage)
        writer.write(Region.whole(header.shape), array)
        writer.publish()
        with tifffile.TiffFile(tmp_path / name) as file:
            assert file.pages[0].compression == stored
            assert file.pages[0].is_tiled == (stored != 1)
            assert_same_bits(file.asarray(), array)


@pytest.mark.parametrize(("compression", "expected"), [("none", 1), ("lz4", 8), ("zstd", 8)])
def test_a_tiff_of_a_compressed_zarr_is_compressed(compression: str, expected: int, tmp_path: Path) -> None:
    header, array = of("uint16")
    for name, storage in (("in.zarr", Storage(compression=compression)), ("out.tif", None)):
        writer = images.create_image(tmp_path / name, header, storage=storage)
        writer.write(Region.whole(header.shape), array)
        writer.publish()
        with images.open_image(tmp_path / name) as reader:
            header = reader.header
    with tifffile.TiffFile(tmp_path / "out.tif") as file:
        assert file.pages[0].compression == expected


@pytest.mark.parametrize(
    ("axes", "shape", "dtype", "chunk", "shard"),
    [
        ("YX", (70_000, 70_000), "uint16", (256, 4096), (256, 32768)),
        ("YX", (20_000_000, 500), "uint16", (256, 500), (16640, 500)),
        ("TCZYX", (100, 2, 60, 1024, 1024), "uint16", (1, 1, 1, 256, 1024), (1, 1, 8, 1024, 1024)),
        ("YXS", (60_000, 60_000, 3), "uint8", (256, 8192, 1), (256, 65536, 1)),
    ],
)
def test_large_images_are_sharded(
    axes: str, shape: tuple[int, ...], dtype: str, chunk: tuple[int, ...], shard: tuple[int, ...]
) -> None:
    """In files of up to 16 MiB before compression."""
    header = ImageHeader(shape=shape, axes=axes, dtype=np.dtype(dtype))
    form = images.format_for_output(Path("a.zarr"))
    assert form.block_shape(header) == shard
    assert images.format_for_output(Path("a.zarr"), Storage(chunks=chunk)).block_shape(header) == chunk
    small = ImageHeader(shape=(shape[0] // 1000 or 1, *shape[1:]), axes=axes, dtype=np.dtype(dtype))
    smaller = form.block_shape(small)
    assert smaller is not None
    assert all(a <= b for a, b in zip(smaller, chunk, strict=True))
