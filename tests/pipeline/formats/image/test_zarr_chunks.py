"""Chunks read and written without the zarr library, against what that library, TensorStore and zarrs read of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import tensorstore
import zarr
import zarrs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec

from pipeline.errors import OutputError, ParameterError
from pipeline.formats.image.base import ImageHeader, Region, Storage
from pipeline.formats.image.zarr import Zarr, array_writer
from pipeline.formats.image.zarr.reader import ZarrReader
from pipeline.formats.image.zarr.writer import COMPRESSIONS, ZarrWriter
from pipeline.storage.partial import Opening
from tests.pipeline.formats.image.contract import assert_same_bits, input_error, read_whole

FORMAT = Zarr()
MANY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SHAPE = (5, 13, 11)
DTYPES = ("uint8", "uint16", "int16", "float32", "float64")

FILL_VALUES: dict[str, st.SearchStrategy[float]] = {
    "u": st.sampled_from([0, 1, 255]),
    "i": st.sampled_from([0, -1, 32767]),
    "f": st.sampled_from([0.0, -1.5, 1e30, float("nan"), float("inf"), float("-inf")]),
}


def noise(dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 250, SHAPE).astype(dtype)


def blosc(cname: str, shuffle: str) -> BloscCodec:
    return BloscCodec(cname=cname, shuffle=shuffle, clevel=3)


BYTES_TO_BYTES = st.sampled_from([
    (), (ZstdCodec(),), (GzipCodec(),), (Crc32cCodec(),), (ZstdCodec(), Crc32cCodec()), (GzipCodec(), ZstdCodec()),
    (blosc("lz4", "shuffle"),), (blosc("zstd", "bitshuffle"),), (blosc("blosclz", "noshuffle"), Crc32cCodec()),
])  # fmt: skip


@st.composite
def arrays_of_v3(draw: st.DrawFn) -> tuple[str, float, dict[str, Any]]:
    """A dtype, a fill value, and options of `zarr.create`: chunks, shards, codecs in every combination."""
    dtype = draw(st.sampled_from(DTYPES))
    chunk = tuple(draw(st.integers(3, 7)) for _ in SHAPE)
    codecs: list[Any] = [BytesCodec(endian=draw(st.sampled_from(["little", "big"]))), *draw(BYTES_TO_BYTES)]
    if draw(st.booleans()):
        codecs.insert(0, TransposeCodec(order=draw(st.permutations(range(3)))))
    outer = chunk
    if draw(st.booleans()):
        outer = tuple(size * draw(st.integers(1, 3)) for size in chunk)
        index: list[Any] = [BytesCodec(endian=draw(st.sampled_from(["little", "big"])))]
        index += [Crc32cCodec()] * draw(st.booleans())
        location = draw(st.sampled_from(["start", "end"]))
        codecs = [ShardingCodec(chunk_shape=chunk, codecs=codecs, index_codecs=index, index_location=location)]
    keys = (draw(st.sampled_from(["default", "v2"])), draw(st.sampled_from([".", "/"])))
    options = {"chunks": outer, "codecs": codecs, "chunk_key_encoding": keys, "zarr_format": 3}
    return dtype, draw(FILL_VALUES[np.dtype(dtype).kind]), options


@st.composite
def arrays_of_v2(draw: st.DrawFn) -> tuple[str, float, dict[str, Any]]:
    dtype = draw(st.sampled_from(["|u1", "<u2", ">u2", "<i2", ">f4", "<f8"]))
    compressor = draw(st.sampled_from([
        None, numcodecs.Blosc(), numcodecs.Blosc("zstd", 1, numcodecs.Blosc.BITSHUFFLE), numcodecs.Zstd(),
        numcodecs.GZip(), numcodecs.Zlib(), numcodecs.LZ4(),
    ]))  # fmt: skip
    options = {
        "chunks": tuple(draw(st.integers(3, 16)) for _ in SHAPE),
        "compressor": compressor,
        "order": draw(st.sampled_from("CF")),
        "dimension_separator": draw(st.sampled_from("./")),
        "zarr_format": 2,
    }
    return dtype, draw(FILL_VALUES[np.dtype(dtype).kind]), options


@MANY
@given(st.one_of(arrays_of_v2(), arrays_of_v3()), st.data())
def test_what_the_zarr_library_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[str, float, dict[str, Any]], data: st.DataObject
) -> None:
    dtype, fill, options = made
    path = tmp_path_factory.mktemp("array") / "a.zarr"
    array = zarr.create(store=str(path), shape=SHAPE, dtype=dtype, fill_value=fill, **options)
    given_samples = noise(dtype)
    # A part alone: other chunks, also of shards, are missing.
    stop = [data.draw(st.integers(1, size)) for size in SHAPE]
    part = tuple(slice(0, end) for end in stop)
    array[part] = given_samples[part]
    start = tuple(data.draw(st.integers(0, size - 1)) for size in SHAPE)
    region = Region(start, tuple(data.draw(st.integers(a + 1, size)) for a, size in zip(start, SHAPE, strict=True)))
    with FORMAT.open(path) as reader:
        assert isinstance(reader, ZarrReader)
        assert reader._files is not None, "read here, not by the zarr library"
        out = np.empty(region.shape, reader.header.dtype)
        reader.read(region, out)
    assert_same_bits(out, np.asarray(array[region.slices]).astype(out.dtype))


@MANY
@given(
    dtype=st.sampled_from((*DTYPES, "complex64")),
    compression=st.sampled_from(list(COMPRESSIONS)),
    chunk=st.tuples(*[st.integers(3, 7)] * 3),
    per_shard=st.none() | st.tuples(*[st.integers(1, 3)] * 3),
    data=st.data(),
)
def test_what_is_written_in_any_parts_is_read_by_others_and_has_the_bytes_of_a_whole(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, dtype: str, compression: str, chunk: Any,
    per_shard: Any, data: st.DataObject,
) -> None:  # fmt: skip
    """Parts along chunks or not, in any order, with room for parts of chunks or not, flushed in between, by two."""
    folder = tmp_path_factory.mktemp("array")
    path, given_samples = folder / "a.zarr", noise(dtype, 1)
    shard = None if per_shard is None else tuple(a * b for a, b in zip(chunk, per_shard, strict=True))
    header = ImageHeader(shape=SHAPE, axes="ZYX", dtype=np.dtype(dtype))
    monkeypatch.setattr(array_writer, "_HELD_BYTES", data.draw(st.sampled_from([0, 1 << 20])))

    def create(path: Path, opening: Opening = Opening.NEW) -> ZarrWriter:
        return ZarrWriter(
            path, header, opening, stored="ZYX", chunk=chunk, shard=shard, compression=compression, attributes={}
        )

    cuts = tuple(data.draw(st.sampled_from([size, data.draw(st.integers(4, 14))])) for size in chunk)
    corners = np.ndindex(*[-(-size // cut) for size, cut in zip(SHAPE, cuts, strict=True)])
    owner = create(path)
    writers = [owner, create(path, Opening.JOIN)]
    for corner in data.draw(st.permutations(list(corners))):
        start = tuple(number * cut for number, cut in zip(corner, cuts, strict=True))
        stop = tuple(min(first + cut, size) for first, cut, size in zip(start, cuts, SHAPE, strict=True))
        region, writer = Region(start, stop), writers[data.draw(st.integers(0, 3)) == 3]
        writer.write(region, np.ascontiguousarray(given_samples[region.slices]))
        if data.draw(st.integers(0, 5)) == 5:
            writer.flush()
    writers[1].flush()
    writers[1].keep()
    owner.publish()
    at_once = create(folder / "b.zarr")
    at_once.write(Region.whole(SHAPE), given_samples)
    at_once.publish()
    files = [
        {str(each.relative_to(root)): each.read_bytes() for each in root.rglob("*") if each.is_file()}
        for root in (path / "0", folder / "b.zarr" / "0")
    ]
    assert files[0] == files[1]
    assert sorted(entry.name for entry in path.iterdir()) == ["0", "zarr.json"]
    assert_same_bits(np.asarray(zarr.open_array(path / "0", mode="r")[:]), given_samples)
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        array = zarr.open_array(path / "0", mode="r")
        assert isinstance(array.async_array.codec_pipeline, zarrs.ZarrsCodecPipeline)
        assert_same_bits(np.asarray(array[:]), given_samples)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / "0")}}
    assert_same_bits(np.asarray(tensorstore.open(spec).result().read().result()), given_samples)


def sharded(path: Path) -> Path:
    """An array of checked shards; the file of the first."""
    array = zarr.create_array(
        path, shape=(32, 32), dtype="u2", chunks=(8, 8), shards=(16, 16), compressors=[ZstdCodec(), Crc32cCodec()]
    )
    array[:] = np.arange(1024).reshape(32, 32)
    return path / "c" / "0" / "0"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:40], "too few for an index"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: bytes([*data[:10], data[10] ^ 255, *data[11:]]), "checksum"),
        (lambda data: with_entry(data, 1 << 40, 9), "outside the shard"),
        (lambda data: with_entry(data, 0, (1 << 64) - 2), "outside the shard"),
        (lambda data: with_entry(data, 3, len(data) - 2), "outside the shard"),
    ],
)
def test_a_damaged_shard_is_refused_in_one_line(tmp_path: Path, damage: Any, said: str) -> None:
    file = sharded(tmp_path / "a.zarr")
    file.write_bytes(damage(file.read_bytes()))
    with input_error(tmp_path / "a.zarr", said):
        read_whole(FORMAT, tmp_path / "a.zarr")


def with_entry(data: bytes, offset: int, nbytes: int) -> bytes:
    """A shard whose index has another first entry, under a right checksum."""
    import google_crc32c

    index = np.frombuffer(data[-68:-4], "<u8").copy()
    index[:2] = offset, nbytes
    return data[:-68] + index.tobytes() + google_crc32c.value(index.tobytes()).to_bytes(4, "little")


def test_a_chunk_file_far_longer_than_declared_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=(8, 8), dtype="u1", chunks=(8, 8), compressors=ZstdCodec())[:] = 1
    with (path / "c" / "0" / "0").open("r+b") as file:
        file.truncate(1 << 40)
    with input_error(path, "more than the"):
        read_whole(FORMAT, path)


def test_other_codecs_are_left_to_the_zarr_library(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    given_samples = noise("uint16")
    array = zarr.create(
        store=str(path), shape=SHAPE, dtype="u2", chunks=(5, 8, 8), zarr_format=2, filters=[numcodecs.Delta("u2")]
    )
    array[:] = given_samples
    with FORMAT.open(path) as reader:
        assert isinstance(reader, ZarrReader)
        assert reader._files is None
    assert_same_bits(read_whole(FORMAT, path), given_samples)


def test_a_resumed_output_of_another_kind_is_refused(tmp_path: Path) -> None:
    header = ImageHeader(shape=(30, 31), axes="YX", dtype=np.dtype("uint16"))
    FORMAT.create(tmp_path / "a.zarr", header).keep()
    metadata = tmp_path / "a.zarr.partial" / "0" / "zarr.json"
    metadata.write_text(json.dumps({**json.loads(metadata.read_text()), "data_type": "int16"}))
    with pytest.raises(OutputError, match="run again without --resume"):
        FORMAT.create(tmp_path / "a.zarr", header, Opening.RESUME)


@pytest.mark.parametrize(
    ("storage", "chunk", "shard"),
    [
        (Storage(), (1, 256, 500, 1), None),
        (Storage(chunks=(64,)), (1, 64, 64, 1), None),
        (Storage(chunks=(2, 32, 64, 3)), (2, 32, 64, 3), None),
        (Storage(chunks=(64,), shards=(128,)), (1, 64, 64, 1), (1, 128, 128, 1)),
        (Storage(shards=(512,)), (1, 256, 500, 1), (1, 512, 500, 1)),
        (Storage(shards=(384,)), (1, 128, 4, 1), (1, 384, 384, 1)),
        (Storage(chunks=(64,), shards=(10**20,)), (1, 64, 64, 1), (1, 640, 512, 1)),
    ],
)
def test_chunks_and_shards_are_as_asked(tmp_path: Path, storage: Storage, chunk: Any, shard: Any) -> None:
    header = ImageHeader(shape=(4, 600, 500, 3), axes="ZYXS", dtype=np.dtype("uint16"))
    form = FORMAT.storing(storage)
    assert form.block_shape(header) == (shard or chunk)
    form.create(tmp_path / "a.zarr", header).publish()
    array = zarr.open_array(tmp_path / "a.zarr" / "0", mode="r")
    in_order = [3, 0, 1, 2]  # channels first
    assert array.chunks == tuple(chunk[axis] for axis in in_order)
    assert array.shards == (None if shard is None else tuple(shard[axis] for axis in in_order))


@pytest.mark.parametrize(
    "storage",
    [
        Storage(chunks=(0,)),
        Storage(chunks=(8, 8)),
        Storage(chunks=(48,), shards=(64,)),
        Storage(chunks=(1 << 16,)),
        Storage(chunks=(1, 1, 1, 1), shards=(4, 600, 600, 3)),
        Storage(compression="lzw"),
    ],
)
def test_chunks_and_shards_that_do_not_fit_are_refused(storage: Storage) -> None:
    header = ImageHeader(shape=(4, 600, 500, 3), axes="ZYXS", dtype=np.dtype("uint16"))
    with pytest.raises(ParameterError):
        FORMAT.storing(storage).block_shape(header)


@pytest.mark.parametrize("option", ["chunks", "shards"])
def test_very_many_tiny_files_are_refused(option: str) -> None:
    storage = Storage(**{option: (3,)})
    header = ImageHeader(shape=(2048, 2048), axes="YX", dtype=np.dtype("uint16"))
    with pytest.raises(
        ParameterError, match=f"--{option} 3,3 makes 466,489 files of 18 bytes: .* such as --{option} 256"
    ):
        FORMAT.storing(storage).block_shape(header)
    few = ImageHeader(shape=(900, 900), axes="YX", dtype=np.dtype("uint16"))
    assert FORMAT.storing(storage).block_shape(few) == (3, 3)
    large = ImageHeader(shape=(2048, 2048, 64), axes="ZYX", dtype=np.dtype("uint16"))
    assert FORMAT.storing(Storage(chunks=(1, 32, 64))).block_shape(large) == (1, 32, 64)  # 4 KiB each


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_raw_chunks_of_more_rows_than_a_system_call_takes(tmp_path: Path, dtype: str) -> None:
    shape = (2, 1100, 11)
    given_samples = np.random.default_rng(0).integers(0, 255, shape).astype(dtype)
    header = ImageHeader(shape=shape, axes="ZYX", dtype=np.dtype(dtype))
    writer = FORMAT.storing(Storage(chunks=(2, 1100, 5), compression="none")).create(tmp_path / "a.zarr", header)
    writer.write(Region.whole(shape), given_samples)
    writer.publish()
    assert_same_bits(np.asarray(zarr.open_array(tmp_path / "a.zarr" / "0", mode="r")[:]), given_samples)
    assert_same_bits(read_whole(FORMAT, tmp_path / "a.zarr"), given_samples)
