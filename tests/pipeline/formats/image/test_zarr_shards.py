"""Shards whose chunks come in several regions: each chunk is encoded once, each shard put together once."""

from __future__ import annotations

import os
import resource
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from pipeline.errors import MillraceError
from pipeline.formats.image import ImageHeader, Region, Storage, open_image
from pipeline.formats.image.zarr import Zarr, array_writer, together
from pipeline.storage.partial import Opening, PartialFolder

SHAPE = (250, 300)
HEADER = ImageHeader(shape=SHAPE, axes="YX", dtype=np.dtype("uint16"))
SAMPLES = np.random.default_rng(0).integers(1, 900, SHAPE, np.uint16)
BANDS = [Region((row, 0), (min(row + 32, SHAPE[0]), SHAPE[1])) for row in range(0, SHAPE[0], 32)]
COMPRESSIONS = ["none", "zstd", "deflate"]


def form(compression: str = "zstd") -> Zarr:
    return Zarr(Storage(chunks=(32,), shards=(128,), compression=compression))


def write(writer: Any, *regions: Region) -> None:
    for region in regions:
        writer.write(region, np.ascontiguousarray(SAMPLES[region.slices]))


def contents(root: Path) -> dict[str, bytes]:
    return {str(each.relative_to(root)): each.read_bytes() for each in root.rglob("*") if each.is_file()}


def scratch_files() -> int:
    """How many files without a name this process has open."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the folder itself
            found += str(each.readlink()).endswith("-scratch (deleted)")
    return found


@pytest.fixture
def whole(tmp_path: Path) -> Any:
    """The files of an image that is written at once."""

    def made(compression: str) -> dict[str, bytes]:
        writer = form(compression).create(tmp_path / "whole.zarr", HEADER)
        write(writer, Region.whole(SHAPE))
        writer.publish()
        return contents(tmp_path / "whole.zarr" / "0")

    return made


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_bands_of_whole_chunks_are_encoded_and_put_together_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, compression: str
) -> None:
    expected = whole(compression)
    put, stored = PartialFolder.put, Counter[str]()

    def counted(folder: PartialFolder, name: str, buffers: Any) -> None:
        stored[name] += 1
        put(folder, name, buffers)

    monkeypatch.setattr(PartialFolder, "put", counted)
    monkeypatch.setattr(array_writer, "_HELD_BYTES", 0)
    monkeypatch.setattr(array_writer.ChunkFiles, "read", lambda *_: pytest.fail("a shard is read back"))
    writer = form(compression).create(tmp_path / "a.zarr", HEADER)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda band: write(writer, band), BANDS[::-1]))
    assert stored == {f"0/c/{row}/{column}": 1 for row in range(2) for column in range(3)} | {
        "zarr.json": 1, "0/zarr.json": 1,
    }  # fmt: skip
    assert scratch_files() > 0
    writer.publish()
    assert scratch_files() == 0
    assert contents(tmp_path / "a.zarr" / "0") == expected


def test_what_is_spooled_takes_the_memory_of_others_again(tmp_path: Path) -> None:
    """Shards of many rows: the file without a name has no more slots than shards that are not whole have chunks."""
    writer = form().create(tmp_path / "a.zarr", HEADER)
    write(writer, *BANDS)
    (spool,) = writer._levels[0]._spools.values()
    assert len(spool.free) == spool._slots
    assert spool._slots <= 4 * 10
    writer.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_killed_writer_goes_on_to_the_same_bytes(tmp_path: Path, whole: Any, compression: str) -> None:
    path, (ours, theirs) = tmp_path / "a.zarr", os.pipe()
    child = os.fork()
    if not child:
        try:
            writer = form(compression).create(path, HEADER)
            write(writer, *BANDS[:2], Region((64, 0), (90, 300)))
            writer.flush()
            write(writer, BANDS[3])
            os.write(theirs, b".")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(ours, 1) == b"."
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    writer = form(compression).create(path, HEADER, Opening.RESUME)
    write(writer, Region((90, 0), (96, 300)), *BANDS[3:])
    writer.publish()
    assert contents(path / "0") == whole(compression)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_chunks_that_come_again_replace_those_that_wait_or_are_stored(
    tmp_path: Path, whole: Any, compression: str
) -> None:
    """As when a job is cut anew: whole chunks, and parts of some that were whole."""
    writer = form(compression).create(tmp_path / "a.zarr", HEADER)
    writer.write(BANDS[0], np.zeros(BANDS[0].shape, np.uint16))
    writer.write(BANDS[1], np.zeros(BANDS[1].shape, np.uint16))
    write(writer, BANDS[0], Region((20, 10), (50, 290)))
    writer.flush()
    write(writer, Region((40, 0), (70, 300)), Region((32, 0), (40, 300)), *BANDS)
    writer.publish()
    assert contents(tmp_path / "a.zarr" / "0") == whole(compression)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_spool_that_finds_no_room_is_an_error_in_one_line(tmp_path: Path, compression: str) -> None:
    writer, before = form(compression).create(tmp_path / "a.zarr", HEADER), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(MillraceError, match=r"a\.zarr: larger than") as found:
            write(writer, BANDS[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(found.value)
    writer.discard()


def test_a_region_of_a_pyramid_smaller_than_its_shards(tmp_path: Path) -> None:
    header = ImageHeader(shape=(256, 300), axes="YX", dtype=np.dtype("uint16"))
    samples, levels = np.random.default_rng(1).integers(0, 99, header.shape, np.uint16), []
    for rows in (64, 256):
        path = tmp_path / f"{rows}.zarr"
        writer = Zarr(Storage(chunks=(32,), shards=(128,), levels=3)).create(path, header)
        for row in range(0, 256, rows):
            writer.write(Region((row, 0), (row + rows, 300)), samples[row : row + rows])
        writer.publish()
        levels.append(contents(path))
    assert {name: data for name, data in levels[0].items() if name != "zarr.json"} == {
        name: data for name, data in levels[1].items() if name != "zarr.json"
    }
    assert (zarr.open_group(tmp_path / "64.zarr", mode="r")["0"][...] == samples).all()


def test_encoded_chunks_of_a_device_wait_for_their_shard(tmp_path: Path, whole: Any) -> None:
    writer = form().create(tmp_path / "a.zarr", HEADER)
    parts = form().create(tmp_path / "b.zarr", HEADER)
    assert writer.chunk_form(Region((8, 0), (40, 300))) is None
    write(parts, Region.whole(SHAPE))
    parts.publish()
    array = writer._levels[0]._array
    files = array_writer.ChunkFiles(tmp_path / "b.zarr" / "0", array)
    for band in BANDS:
        chunk_form = writer.chunk_form(band)
        assert chunk_form is not None
        assert len(chunk_form.origins) == 10
        encoded = [files.read((band.start[0] // 32, column)).copy() for column in range(10)]
        writer.write_packed(band, np.ascontiguousarray(SAMPLES[band.slices]), encoded)
    writer.publish()
    assert contents(tmp_path / "a.zarr" / "0") == whole("zstd")


@pytest.mark.parametrize("shards", [None, (128,)])
def test_a_device_opens_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: tuple[int, ...] | None
) -> None:
    writer = Zarr(Storage(chunks=(32,), shards=shards, compression="lz4")).create(tmp_path / "a.zarr", HEADER)
    write(writer, Region.whole(SHAPE))
    writer.publish()
    opened: list[int] = []
    open_files = together.loops.open_files

    def counted(files: Any, *given: Any) -> None:
        opened.append(len(files))
        open_files(files, *given)

    monkeypatch.setattr(together.loops, "open_files", counted)
    monkeypatch.setattr(array_writer.ChunkFiles, "opened", lambda *_: pytest.fail("opened once more"))
    with open_image(tmp_path / "a.zarr") as reader:
        packed = reader.read_packed(Region((10, 10), (240, 290)), np.empty(1 << 20, np.uint8))
    assert packed is not None
    assert opened == [6 if shards else 80]
