"""Zarr chunks that a device decodes: the same samples as the processor reads, for every codec, shuffle and region."""

from __future__ import annotations

import itertools

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

from pipeline.errors import InputError
from pipeline.formats.image import Region, open_image
from tests.pipeline.unpacking import unpack

SHAPE, CHUNK = (211, 307), (53, 101)
COMPRESSORS = [
    *(
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": shuffle, "blocksize": size}
        for shuffle, size in itertools.product((0, 1, 2), (0, 1000))
    ),
    {"id": "lz4", "acceleration": 1},
    {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 1000},
    {"id": "zstd", "level": 3},
]


def samples(dtype, shape=SHAPE):
    rng = np.random.default_rng(3)
    steps = np.add.outer(np.arange(shape[0]), np.arange(shape[-1])) * 7
    values = np.broadcast_to(steps.reshape(shape[0], *[1] * (len(shape) - 2), shape[-1]), shape)
    return (values + rng.integers(0, 4, shape)).astype(dtype)


def regions(shape):
    yield Region.whole(shape)
    yield Region(tuple(n // 3 for n in shape), tuple(n // 3 + 1 for n in shape))
    yield Region(tuple(n // 4 for n in shape), tuple(n - n // 5 for n in shape))


def check(path, image, region):
    """Whether the region is packed; then its samples are compared."""
    memory = np.full(2 * image.nbytes + (1 << 20), 0x5A, np.uint8)
    with open_image(path) as reader:
        packed = reader.read_packed(region, memory)
        if packed is None:
            return False
        expected = np.empty(region.shape, image.dtype)
        reader.read(region, expected)
    out = np.full(region.shape, 77, image.dtype)
    assert unpack(packed, memory, out)
    np.testing.assert_array_equal(expected, image[region.slices])
    np.testing.assert_array_equal(out, image[region.slices])
    return True


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float64"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: "-".join(map(str, c.values())))
def test_every_codec_and_shuffle(tmp_path, compressor, dtype):
    image = samples(dtype)
    array = zarr.open_array(
        tmp_path / "a.zarr", mode="w", shape=SHAPE, chunks=CHUNK, dtype=dtype, zarr_format=2,
        compressor=numcodecs.get_codec(compressor), fill_value=5,
    )  # fmt: skip
    array[...] = image
    for region in regions(SHAPE):
        assert check(tmp_path / "a.zarr", image, region)


@pytest.mark.parametrize(("axes", "shape", "chunk"), [("TCZYX", (2, 3, 5, 37, 41), (1, 2, 3, 16, 41))])
def test_many_axes_and_stored_sizes(tmp_path, axes, shape, chunk):
    """Of an array that has other axes than the image, in shards, with chunks that are not stored."""
    image = samples("uint16", shape)
    image[1, :2, :3] = 0
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=shape, chunks=chunk, shards=tuple(2 * n for n in chunk), dtype="uint16",
        compressors=BloscCodec(cname="lz4", shuffle="shuffle"), dimension_names=list(axes.lower()), fill_value=0,
        config={"write_empty_chunks": False},
    )  # fmt: skip
    array[...] = image
    for region in regions(shape):
        assert check(tmp_path / "a.zarr", image, region)


def test_noise_is_stored_as_it_is(tmp_path):
    image = np.random.default_rng(1).integers(0, 1 << 16, SHAPE).astype(np.uint16)
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=SHAPE, chunks=CHUNK, dtype="uint16", compressors=BloscCodec(cname="lz4")
    )
    array[...] = image
    for region in regions(SHAPE):
        assert check(tmp_path / "a.zarr", image, region)


@pytest.mark.parametrize(
    "compressors",
    [
        *(None, [BloscCodec(cname="blosclz")], [ZstdCodec(checksum=True)]),
        [BloscCodec(cname="lz4"), ZstdCodec()],
    ],
    ids=["none", "blosclz", "checksum", "two"],
)
def test_what_only_the_processor_decodes(tmp_path, compressors):
    image = samples("uint16")
    array = zarr.create_array(tmp_path / "a.zarr", shape=SHAPE, chunks=CHUNK, dtype="uint16", compressors=compressors)
    array[...] = image
    assert not check(tmp_path / "a.zarr", image, Region.whole(SHAPE))


@pytest.mark.parametrize("fault", ["link", "long", "folder"])
def test_files_that_do_not_open_are_left_to_the_processor(tmp_path, fault):
    image = samples("uint16")
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=SHAPE,
        chunks=CHUNK,
        dtype="uint16",
        fill_value=3,
        compressors=BloscCodec(cname="lz4"),
    )
    array[:] = image
    chunk = tmp_path / "a.zarr" / "c" / "1" / "1"
    data = chunk.read_bytes()
    chunk.unlink()
    image[53:106, 101:202] = 3
    assert check(tmp_path / "a.zarr", image, Region.whole(SHAPE))  # a chunk that is not stored
    if fault == "link":
        chunk.symlink_to("nowhere")
    elif fault == "long":
        chunk.write_bytes(data * 3)
    else:
        chunk.mkdir()
    with open_image(tmp_path / "a.zarr") as reader:
        assert reader.read_packed(Region.whole(SHAPE), np.empty(2 * image.nbytes + (1 << 20), np.uint8)) is None
        with pytest.raises(InputError, match="1/1"):
            reader.read(Region.whole(SHAPE), np.empty(SHAPE, np.uint16))


def test_a_full_memory_leaves_the_region_to_the_processor(tmp_path):
    image = samples("uint16")
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=SHAPE, chunks=CHUNK, dtype="uint16", compressors=BloscCodec(cname="lz4")
    )
    array[...] = image
    whole = Region.whole(SHAPE)
    with open_image(tmp_path / "a.zarr") as reader:
        needed = reader.read_packed(whole, np.zeros(1 << 20, np.uint8)).nbytes
        assert reader.read_packed(whole, np.zeros(needed, np.uint8)) is not None
        assert reader.read_packed(whole, np.zeros(needed - 8, np.uint8)) is None
        assert reader.read_packed(whole, np.zeros(1000, np.uint8)) is None


def test_damaged_chunks_are_named_or_left_to_the_processor(tmp_path):
    """Any byte of a chunk may be wrong, or its end missing: nothing outside the memory is touched."""
    shape = (40, 64)
    image = samples("uint16", shape)
    path = tmp_path / "a.zarr"
    array = zarr.create_array(
        path, shape=shape, chunks=shape, dtype="uint16", compressors=BloscCodec(cname="lz4", blocksize=1024)
    )
    array[...] = image
    chunk, rng = path / "c/0/0", np.random.default_rng(5)
    whole, messages, unnoticed = chunk.read_bytes(), [], 0
    for turn in range(300):
        data = bytearray(whole)
        data[turn if turn < 100 else int(rng.integers(len(data)))] ^= int(rng.integers(1, 256))
        chunk.write_bytes(data[: len(data) - int(rng.integers(1, 40))] if turn % 7 == 0 else data)
        memory = np.full(1 << 15, 0x5A, np.uint8)
        with open_image(path) as reader:
            packed = reader.read_packed(Region((3, 0), (30, 64)), memory)
            if packed is None:
                try:
                    reader.read(Region((3, 0), (30, 64)), np.empty((27, 64), np.uint16))
                except InputError as error:
                    messages.append(str(error))
        if packed is not None:
            streams = packed.streams(memory).astype(np.int64)
            assert (streams[0] + streams[1] <= packed.tables[0]).all()
            assert (streams[2] + streams[3] <= packed.decoded_bytes).all()
            unnoticed += unpack(packed, memory, np.zeros((27, 64), np.uint16))
    assert len(messages) > 50
    assert all(message.startswith(f"{path}: chunk 0/0 does not decode (") for message in messages)
    assert unnoticed < 250  # samples alone are wrong


def test_a_chunk_of_another_codec_than_the_metadata_say_is_left_to_the_processor(tmp_path):
    array = zarr.open_array(
        tmp_path / "a.zarr", mode="w", shape=SHAPE, chunks=SHAPE, dtype="uint16", zarr_format=2,
        compressor=numcodecs.Blosc("lz4"),
    )  # fmt: skip
    array[...] = samples("uint16")
    (tmp_path / "a.zarr/0.0").write_bytes(numcodecs.Blosc("zstd").encode(samples("uint16")))
    assert not check(tmp_path / "a.zarr", samples("uint16"), Region.whole(SHAPE))


@pytest.mark.parametrize("columns", [512, 513])
@pytest.mark.parametrize(("codec", "rows"), [(numcodecs.LZ4(), 1024), (numcodecs.Zstd(), 4096)])
def test_longer_streams_are_not_read_for_a_device(tmp_path, codec, rows, columns):
    zarr.open_array(
        tmp_path / "a.zarr", mode="w", shape=(rows, columns), chunks=(rows, columns), dtype="uint16", zarr_format=2,
        compressor=codec,
    )  # fmt: skip
    with open_image(tmp_path / "a.zarr") as reader:
        assert reader.packs == (columns == 512)
