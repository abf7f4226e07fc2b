"""Compressed TIFF: tiles stored whole or by parts, in any order, by several threads and after an interruption."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from pipeline.errors import ParameterError
from pipeline.formats.image.base import ImageHeader, Region, Storage
from pipeline.formats.image.tiff import Tiff, together
from pipeline.storage.partial import Opening
from tests.pipeline.formats.image.contract import Case, FormatContract, assert_same_bits, read_whole, samples

SCHEMES = {"deflate": 8, "lzw": 5, "zstd": 50000}


def stored_as(compression: str, tile: tuple[int, ...] = (16,)) -> Tiff:
    return Tiff().storing(Storage(compression=compression, chunks=tile))


class TestContract(FormatContract):
    format = stored_as("deflate")
    cases = (
        *[Case(suffix=".tif", axes=axes, dtype="uint16") for axes in ("YX", "ZYXS")],
        Case(suffix=".tif", axes="YX", dtype="bool"),
        Case(suffix=".btf", axes="YXS", dtype="float32", metadata={"orientation": 3, "icc_profile": bytes(range(200))}),
    )
    refused = (Case(suffix=".tif", axes="YX", dtype="complex64"),)
    # Every length below and every changed byte is that of the directory.
    header_bytes = 200


def regions(shape: tuple[int, ...], cut: tuple[int, ...]) -> list[Region]:
    """The regions of a grid, in random order."""
    starts = [range(0, size, step) for size, step in zip(shape, cut, strict=True)]
    found = [
        Region(start, tuple(min(a + c, n) for a, c, n in zip(start, cut, shape, strict=True)))
        for start in itertools.product(*starts)
    ]
    random.Random(4).shuffle(found)
    return found


def write(writer: Any, array: NDArray[Any], parts: list[Region]) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda part: writer.write(part, np.ascontiguousarray(array[part.slices])), parts))


@pytest.mark.parametrize("compression", list(SCHEMES))
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
@pytest.mark.parametrize("cut", [(1, 37, 16, 3), (2, 32, 32, 3), (2, 7, 61, 3), (1, 16, 61, 2)])
def test_others_read_what_is_written_in_any_order(
    tmp_path: Path, compression: str, dtype: str, cut: tuple[int, ...]
) -> None:
    header = ImageHeader(shape=(2, 37, 61, 3), axes="ZYXS", dtype=np.dtype(dtype))
    array = samples(header)
    writer = stored_as(compression, (32,)).create(tmp_path / "a.tif", header)
    write(writer, array, regions(header.shape, cut))
    writer.publish()
    assert_same_bits(read_whole(Tiff(), tmp_path / "a.tif"), array)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        page = file.pages[0]
        assert (page.compression, page.predictor) == (SCHEMES[compression], 3 if dtype.startswith("float") else 2)
        assert (page.tilelength, page.tilewidth) == (32, 32)
        assert_same_bits(file.asarray().astype(dtype, copy=False), array)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.tif"]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("tile", [(16, 16), (32, 48)])
def test_jpeg_2000_is_lossless(tmp_path: Path, dtype: str, channels: int, tile: tuple[int, ...]) -> None:
    """All bits of noise, and the extremes, which grow in the transform; in parts and whole."""
    header = ImageHeader(shape=(37, 61, channels), axes="YXS", dtype=np.dtype(dtype))
    limits, random = np.iinfo(dtype), np.random.default_rng(channels)
    array = random.integers(limits.min, limits.max, header.shape, dtype, endpoint=True)
    array[16:] = random.choice(np.array([limits.min, limits.max], dtype), array[16:].shape)
    for cut in ((37, 61, channels), (7, 40, channels)):
        writer = stored_as("jpeg2000", (*tile, channels)).create(tmp_path / "a.tif", header)
        write(writer, array, regions(header.shape, cut))
        writer.publish()
        with tifffile.TiffFile(tmp_path / "a.tif") as file:
            assert (file.pages[0].compression, file.pages[0].predictor) == (34712, 1)
            assert_same_bits(file.asarray().reshape(array.shape), array)
        assert_same_bits(read_whole(Tiff(), tmp_path / "a.tif").reshape(array.shape), array)


@pytest.mark.parametrize(
    ("dtype", "channels"), [("uint32", 1), ("float32", 1), ("float16", 1), ("bool", 1), ("uint8", 5)]
)
def test_jpeg_2000_of_other_samples_is_refused_and_inputs_of_it_become_deflate(
    tmp_path: Path, dtype: str, channels: int
) -> None:
    metadata = {"compression": "jpeg2000"}
    header = ImageHeader(shape=(37, 61, channels), axes="YXS", dtype=np.dtype(dtype), metadata=metadata)
    refusal = stored_as("jpeg2000").refusal(header, tmp_path / "a.tif")
    assert refusal is not None
    assert "JPEG 2000 holds integers of 8 and 16 bits" in refusal
    assert Tiff().refusal(header, tmp_path / "a.tif") is None
    writer = Tiff().create(tmp_path / "a.tif", header)
    writer.write(Region.whole(header.shape), samples(header))
    writer.publish()
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert file.pages[0].compression == 8


def test_noise_that_does_not_shrink_fits_its_slot(tmp_path: Path) -> None:
    header = ImageHeader(shape=(300, 290), axes="YX", dtype=np.dtype("uint16"))
    array = np.random.default_rng(1).integers(0, 1 << 16, header.shape).astype(np.uint16)
    for compression in SCHEMES:
        writer = stored_as(compression, (256,)).create(tmp_path / "a.tif", header)
        writer.write(Region.whole(header.shape), array)
        writer.publish()
        assert_same_bits(tifffile.imread(tmp_path / "a.tif"), array)


def test_an_interrupted_image_is_taken_up_by_another_cut_and_joined(tmp_path: Path) -> None:
    """Tiles that were whole are then stored in parts, and the reverse."""
    header = ImageHeader(shape=(64, 64), axes="YX", dtype=np.dtype("uint16"))
    array, form = samples(header), stored_as("zstd")
    writer = form.create(tmp_path / "a.tif", header)
    write(writer, array[::-1], regions((32, 64), (16, 16)))
    write(writer, np.ascontiguousarray(array[::-1]), [Region((row, 0), (row + 8, 64)) for row in range(32, 64, 8)])
    writer.keep()
    owner = form.create(tmp_path / "a.tif", header, Opening.RESUME)
    joined = form.create(tmp_path / "a.tif", header, Opening.JOIN)
    write(joined, array, [Region((row, 0), (row + 8, 64)) for row in range(0, 32, 8)])
    write(owner, array, [Region((32, 0), (64, 64))])
    joined.flush()
    joined.keep()
    owner.publish()
    assert_same_bits(tifffile.imread(tmp_path / "a.tif"), array)


def test_the_bytes_of_the_file_do_not_depend_on_the_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads gather tiles that were all written whole; others are encoded one after another."""
    monkeypatch.setattr("pipeline.formats.image.tiff.compressed_writer._GATHERED_BYTES", 700)
    header = ImageHeader(shape=(3, 70, 61), axes="ZYX", dtype=np.dtype("uint16"))
    array = samples(header)
    for name, cut in (("whole", (1, 32, 61)), ("parts", (3, 20, 30))):
        writer = stored_as("deflate").create(tmp_path / f"{name}.tif", header)
        write(writer, array, regions(header.shape, cut))
        writer.publish()
    assert_same_bits(tifffile.imread(tmp_path / "whole.tif"), array)
    assert (tmp_path / "whole.tif").read_bytes() == (tmp_path / "parts.tif").read_bytes()


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        (Storage(compression="lz4"), "--compression lz4: TIFF takes none, deflate, lzw, zstd"),
        (Storage(compression="zstd", shards=(64,)), "--shards"),
    ],
)
def test_what_tiff_does_not_hold_is_refused(storage: Storage, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        Tiff().storing(storage)


@pytest.mark.parametrize("tile", [(40,), (16, 16, 16), (16, -16), (0,)])
def test_sizes_of_tiles_that_tiff_does_not_hold_are_refused(tmp_path: Path, tile: tuple[int, ...]) -> None:
    header = ImageHeader(shape=(64, 64), axes="YX", dtype=np.dtype("uint16"))
    with pytest.raises(ParameterError, match=f"--chunks {tile[0]}"):
        stored_as("zstd", tile).create(tmp_path / "a.tif", header)


@pytest.mark.parametrize("compression", [*SCHEMES, "none"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "int64"])
def test_tiles_written_together_and_alone_have_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, dtype: str
) -> None:
    header = ImageHeader(shape=(3, 70, 61, 2), axes="ZYXS", dtype=np.dtype(dtype))
    array, files, left = samples(header), [], []
    write_tiles_of = together.write_tiles_of

    def counted(*given: Any) -> list[int]:
        left.append(len(write_tiles_of(*given)))
        return write_tiles_of(*given)

    def none(file: Any, tiling: Any, header: Any, source: Any, tiles: Any, offsets: Any) -> list[int]:
        return list(range(len(tiles)))

    for name, how in (("together", counted), ("alone", none)):
        monkeypatch.setattr(together, "write_tiles_of", how)
        writer = stored_as(compression, (32,)).create(tmp_path / f"{name}.tif", header)
        writer.write(Region((0, 0, 0, 0), (2, 70, 61, 2)), array[:2])
        writer.write(Region((2, 0, 0, 0), (3, 70, 61, 2)), array[2:])
        writer.publish()
        files.append((tmp_path / f"{name}.tif").read_bytes())
    assert files[0] == files[1]
    assert left == [0, 0]
    assert_same_bits(tifffile.imread(tmp_path / "together.tif"), array)
