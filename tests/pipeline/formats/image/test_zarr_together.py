"""Chunk files read and written together: as alone, in every case, and left to that way where something is unusual."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec

from pipeline.codecs.blosc import check_blosc
from pipeline.codecs.chunk_codec import checksum
from pipeline.codecs.loops import chunk_files
from pipeline.errors import InputError
from pipeline.formats.image import ImageHeader, Region, Storage, open_image
from pipeline.formats.image.zarr import Zarr, array_writer, reader, together
from pipeline.formats.image.zarr.stored_array import kind_of

SHAPE, CHUNK, SHARD = (29, 41), (8, 11), (16, 22)
MANY = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks of each call were left to the other way."""
    found: list[int] = []
    for name in ("read_together", "write_together"):
        inner = getattr(together, name)

        def counted(*given: Any, inner: Any = inner) -> list[int]:
            rows: list[int] = inner(*given)
            found.append(len(rows))
            return rows

        monkeypatch.setattr(together, name, counted)
    encode = together.encode

    def encoded(*given: Any) -> list[int]:
        lengths = encode(*given)
        found.append(lengths.count(0))
        return lengths

    monkeypatch.setattr(together, "encode", encoded)
    return found


def image_of(path: Path, compressors: Any = None, dtype: str = "uint16", shards: Any = None) -> Any:
    """Writes a Zarr array of no zeros, of samples that compress."""
    samples = (np.arange(np.prod(SHAPE)).reshape(SHAPE) // 3 % 200 + 1).astype(dtype)
    made = zarr.create_array(
        store=str(path), shape=SHAPE, chunks=CHUNK, shards=shards, dtype=dtype, fill_value=7, compressors=compressors
    )
    made[:] = samples
    return samples


def read(path: Path, region: Region, dtype: Any) -> Any:
    out = np.empty(region.shape, dtype)
    with open_image(path) as opened:
        opened.read(region, out)
    return out


COMPRESSORS = [None, BloscCodec(cname="lz4", shuffle="shuffle"), BloscCodec(cname="zstd", shuffle="bitshuffle")]


@MANY
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 19), min_size=2, max_size=4),
    compressor=st.sampled_from(COMPRESSORS),
    dtype=st.sampled_from(["uint8", "int16", "float32", "float64"]),
    location=st.sampled_from([None, "start", "end"]),
)
def test_regions_are_read_as_the_zarr_library_reads_them(
    data: st.DataObject, shape: list[int], compressor: Any, dtype: str, location: Any, left: list[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("in") / "ä b" / "a.zarr"
    chunk = [data.draw(st.integers(1, size)) for size in shape]
    shard = [size * data.draw(st.integers(1, 3)) for size in chunk]
    array = zarr.create_array(
        store=str(path), shape=shape, chunks=chunk, dtype=dtype, fill_value=5, compressors=compressor,
        shards=None if location is None else {"shape": shard, "index_location": location},
        dimension_names=list("tzyx"[-len(shape) :]),
    )  # fmt: skip
    array[:] = np.random.default_rng(1).integers(0, 9, shape)
    files = sorted(each for each in (path / "c").rglob("*") if each.is_file())
    for number in data.draw(st.sets(st.integers(0, len(files) - 1), max_size=3)) if files else ():
        files[number].unlink()
    whole = zarr.open_array(str(path), mode="r")[:]
    with open_image(path) as opened:
        cuts = [[(0, size // 2), (max(size // 2 - 1, 0), size)] if size > 1 else [(0, 1)] for size in shape]
        if data.draw(st.booleans()):
            opened.expect(cuts)
        for corner in np.ndindex(*map(len, cuts)):
            spans = [each[number] for each, number in zip(cuts, corner, strict=True)]
            region = Region(tuple(start for start, _ in spans), tuple(stop for _, stop in spans))
            out = np.empty(region.shape, dtype)
            opened.read(region, out)
            np.testing.assert_array_equal(out, whole[region.slices])
    assert sum(left) == 0


@pytest.mark.parametrize("shard", [None, SHARD])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_nothing_usual_is_left(tmp_path: Path, left: list[int], compressor: Any, shard: Any) -> None:
    samples = image_of(tmp_path / "a.zarr", compressor, shards=shard)
    (tmp_path / "a.zarr" / "c" / "1" / "1").unlink()
    height, width = shard or CHUNK
    samples[height : 2 * height, width : 2 * width] = 7
    assert (read(tmp_path / "a.zarr", Region.whole(SHAPE), samples.dtype) == samples).all()
    header = ImageHeader(shape=SHAPE, axes="YX", dtype=samples.dtype)
    storage = Storage(chunks=CHUNK, shards=shard, compression="lz4" if compressor else "none")
    made = Zarr(storage).create(tmp_path / "b.zarr", header)
    made.write(Region.whole(SHAPE), samples)
    made.publish()
    assert sum(left) == 0
    assert len(left) == (5 if shard else 2)
    assert (zarr.open_array(str(tmp_path / "b.zarr" / "0"), mode="r")[:] == samples).all()


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_part_of_a_shard_keeps_the_chunks_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[int], compression: str
) -> None:
    monkeypatch.setattr(array_writer, "_HELD_BYTES", 0)
    samples = np.random.default_rng(0).integers(1, 99, (61, 190), np.uint16)
    header = ImageHeader(shape=samples.shape, axes="YX", dtype=samples.dtype)
    made = Zarr(Storage(chunks=(16,), shards=(64,), compression=compression)).create(tmp_path / "a.zarr", header)
    for first, last in [(0, 16), (48, 61), (16, 40), (40, 48)]:
        made.write(Region((first, 0), (last, 190)), samples[first:last])
    made.publish()
    assert (zarr.open_array(str(tmp_path / "a.zarr" / "0"), mode="r")[:] == samples).all()
    assert sum(left) == 0
    assert len(left) == 3  # for each region with whole chunks


def truncate(chunk: Path) -> None:
    chunk.write_bytes(chunk.read_bytes()[:-3])


def lengthen(chunk: Path) -> None:
    chunk.write_bytes(chunk.read_bytes() * 9000)


def empty(chunk: Path) -> None:
    chunk.write_bytes(b"")


def garble(chunk: Path) -> None:
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 255]) + chunk.read_bytes()[1:])


def with_entry(shard: Path, offset: int, nbytes: int) -> None:
    """Gives its first chunk another place in its index, which stays sound."""
    data = shard.read_bytes()
    index = np.frombuffer(data[-68:-4], "<u8").copy()
    index[:2] = offset, nbytes
    shard.write_bytes(data[:-68] + index.tobytes() + checksum(index))


def replace_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(chunk: Path) -> None:
        chunk.unlink()
        make(chunk)

    replace.__name__ = make.__name__
    return replace


FAULTS = [
    truncate, lengthen, empty, garble,
    replace_by(Path.mkdir), replace_by(lambda chunk: os.mkfifo(chunk)),  # noqa: PLW0108
    replace_by(lambda chunk: chunk.symlink_to("nowhere")), replace_by(lambda chunk: chunk.symlink_to(chunk.name)),
    replace_by(lambda chunk: chunk.symlink_to("/dev/zero")), replace_by(lambda chunk: chunk.symlink_to("n" * 300)),
]  # fmt: skip


FAULTS_OF_SHARDS = [
    lambda shard: with_entry(shard, 0, 5), lambda shard: with_entry(shard, 3, len(shard.read_bytes()) - 3),
    lambda shard: with_entry(shard, 0, 1 << 40), lambda shard: with_entry(shard, (1 << 64) - 1, 3),
    lambda shard: shard.write_bytes(shard.read_bytes()[:-1] + b"?"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "shards"), [*itertools.product(FAULTS, [None, SHARD]), *((fault, SHARD) for fault in FAULTS_OF_SHARDS)]
)
@pytest.mark.parametrize("compressor", COMPRESSORS[:2])
def test_faults_are_named_as_if_each_chunk_were_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None], shards: Any, compressor: Any
) -> None:
    path = tmp_path / "a.zarr"
    samples = image_of(path, compressor, "uint8", shards)
    fault(path / "c" / "1" / "1")
    outcomes = []
    for kind in (kind_of, lambda array: None):
        monkeypatch.setattr(reader, "kind_of", kind)
        try:
            outcomes.append(read(path, Region.whole(SHAPE), samples.dtype).tolist())
        except InputError as error:
            # The chunks of a shard are read by several threads, and any of them may be named.
            outcomes.append(re.sub("chunk ./.", "chunk", str(error)) if shards else str(error))
    assert outcomes[0] == outcomes[1]
    # Uncompressed samples may have any bytes, and a shard's index may follow other shards.
    if (fault, compressor) != (garble, None) and (fault, shards) != (lengthen, SHARD):
        assert str(path) in outcomes[0]
        assert "\n" not in outcomes[0]


@pytest.mark.parametrize("shards", [None, SHARD])
def test_links_to_chunks_are_followed(tmp_path: Path, left: list[int], shards: Any) -> None:
    samples = image_of(tmp_path / "a.zarr", shards=shards)
    chunk = tmp_path / "a.zarr" / "c" / "1" / "1"
    chunk.rename(tmp_path / "elsewhere")
    chunk.symlink_to(tmp_path / "elsewhere")
    assert (read(tmp_path / "a.zarr", Region.whole(SHAPE), samples.dtype) == samples).all()
    assert left == [0]


@pytest.mark.parametrize("storage", [
    Storage(chunks=CHUNK), Storage(chunks=CHUNK, shards=SHARD), Storage(chunks=CHUNK, shards=SHARD, compression="none"),
])  # fmt: skip
def test_a_system_without_these_calls_reads_and_writes_chunk_by_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage
) -> None:
    samples = image_of(tmp_path / "a.zarr", COMPRESSORS[1], shards=storage.shards)
    for name in ("read_chunks", "write_chunks"):
        monkeypatch.setattr(chunk_files, name, lambda *given: None)
    assert (read(tmp_path / "a.zarr", Region.whole(SHAPE), samples.dtype) == samples).all()
    made = Zarr(storage).create(tmp_path / "b.zarr", ImageHeader(shape=SHAPE, axes="YX", dtype=samples.dtype))
    made.write(Region.whole(SHAPE), samples)
    made.publish()
    assert (read(tmp_path / "b.zarr", Region.whole(SHAPE), samples.dtype) == samples).all()


@pytest.mark.parametrize("seed", range(3))
def test_headers_are_judged_as_by_check_blosc(seed: int) -> None:
    import imagecodecs

    rng = np.random.default_rng(seed)
    data = np.frombuffer(
        imagecodecs.blosc_encode(rng.integers(0, 5, 20_000, np.uint8), compressor="lz4", blocksize=4096), np.uint8
    )
    judged = set()
    for _ in range(400):
        damaged = data[: len(data) - rng.integers(0, 3) * rng.integers(0, len(data))].copy()
        for _ in range(rng.integers(0, 3)):
            if len(damaged):
                damaged[rng.integers(0, min(len(damaged), 40))] = rng.choice([0, 1, 2, 3, 16, 127, 255])
        try:
            is_sound = check_blosc(damaged) == 20_000
        except ValueError:
            is_sound = False
        assert chunk_files.is_sound(damaged.ctypes.data, len(damaged), 20_000) == is_sound
        judged.add(is_sound)
    assert judged == {True, False}


@pytest.mark.parametrize(("shards", "count"), [(None, 16), ((32,), 4)])
def test_files_are_old_or_new_after_a_kill(tmp_path: Path, shards: Any, count: int) -> None:
    """A process that writes the same chunks again and again, of ever other values, is killed in its midst."""
    header = ImageHeader(shape=(64, 64), axes="YX", dtype=np.dtype("uint16"))
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            made = Zarr(Storage(chunks=(16,), shards=shards, compression="none")).create(tmp_path / "a.zarr", header)
            for value in range(1, 1 << 16):
                made.write(Region.whole(header.shape), np.full(header.shape, value, np.uint16))
                os.write(theirs, b".")
        finally:
            os._exit(1)
    assert len([os.read(ours, 1) for _ in range(20)]) == 20
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    files = [each for each in (tmp_path / "a.zarr.partial" / "0" / "c").rglob("*") if each.is_file()]
    assert len(files) == count
    for each in files:
        data, samples = each.read_bytes(), 64 * 64 // count
        assert len(data) == 2 * samples + (68 if shards else 0)
        assert len(set(np.frombuffer(data[: 2 * samples], np.uint16).tolist())) == 1


@pytest.mark.parametrize(
    ("compression", "dtype", "shards"),
    [
        *itertools.product(["lz4", "zstd"], ["uint8", "uint16", "float64"], [None]),
        *itertools.product(["none", "lz4", "zstd"], ["uint16"], [(1200,)]),
    ],
)
def test_encoders_together_and_alone_make_the_same_shuffled_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, dtype: str, shards: Any
) -> None:
    samples = np.random.default_rng(0).normal(20, 2, (700, 700)).astype(dtype)
    header, files = ImageHeader(shape=samples.shape, axes="YX", dtype=samples.dtype), []
    for kind in (kind_of, lambda array: None):
        monkeypatch.setattr("pipeline.formats.image.zarr.array_writer.kind_of", kind)
        path = tmp_path / f"{len(files)}.zarr"
        made = Zarr(Storage(chunks=(600,), shards=shards, compression=compression)).create(path, header)
        made.write(Region.whole(samples.shape), samples)
        made.publish()
        files.append((path / "0" / "c" / "0" / "0").read_bytes())
    assert files[0] == files[1]
    assert compression == "none" or files[0][3] == samples.itemsize
