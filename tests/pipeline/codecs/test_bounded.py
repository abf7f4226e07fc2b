"""Blocks that inflate without bound end in one error, in the memory that their file declares."""

from __future__ import annotations

import bz2
import gzip
import lzma
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import imagecodecs
import numcodecs
import numpy as np
import pytest
import tifffile
import zarr

from pipeline.codecs.bounded import DECODERS, TooLarge, check_image, decode
from pipeline.codecs.zarr_codecs import use_bounded_codecs
from pipeline.errors import InputError
from pipeline.formats.image import Region, open_image
from pipeline.formats.image.array_reader import file_array

BOMB = bytes(100 << 20)
ROOM_BYTES = 50 << 20  # half of the bomb
SIDE = 64

ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "blosc": lambda data: numcodecs.blosc.compress(data, b"zstd", 1),
    "bz2": lambda data: bz2.compress(data, 1),
    "gzip": lambda data: gzip.compress(data, 1),
    "lz4": numcodecs.lz4.compress,
    "lzma": lambda data: lzma.compress(data, preset=0),
    "zlib": lambda data: zlib.compress(data, 1),
    "zstd": lambda data: numcodecs.Zstd(1).encode(data),
}


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    return {name: bytes(encode(BOMB)) for name, encode in ENCODERS.items()}


@contextmanager
def room_of(nbytes: int) -> Iterator[None]:
    """A limit on new memory: what inflates the bomb raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    used = int(status.split("VmData:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture
def little_room() -> Iterator[None]:
    with room_of(ROOM_BYTES):
        yield


def test_every_codec_has_a_bomb_here() -> None:
    assert ENCODERS.keys() == DECODERS.keys()


@pytest.mark.parametrize("codec", ENCODERS)
def test_a_block_is_decoded_up_to_its_limit_and_no_byte_further(codec: str) -> None:
    data = np.random.default_rng(1).integers(0, 4, 10_007).astype(np.uint8).tobytes()
    packed = ENCODERS[codec](data)
    assert bytes(decode(codec, packed, len(data))) == data
    with pytest.raises(TooLarge):
        decode(codec, packed, len(data) - 1)


@pytest.mark.parametrize("codec", ENCODERS)
def test_a_bomb_takes_no_more_memory_than_its_limit(codec: str, bombs: dict[str, bytes], little_room: None) -> None:
    with pytest.raises(TooLarge):
        decode(codec, bombs[codec], 4096)


@pytest.mark.parametrize("codec", ["bz2", "gzip", "lzma"])
def test_streams_one_after_another_are_one_block_under_one_limit(codec: str) -> None:
    data = ENCODERS[codec](bytes(5000)) * 3
    assert bytes(decode(codec, data, 15_000)) == bytes(15_000)
    with pytest.raises(TooLarge):
        decode(codec, data, 14_999)
    with pytest.raises(ValueError, match="truncated"):
        decode(codec, data[:-12], 15_000)


ZARR_CODECS: list[tuple[int, dict[str, Any], str]] = [
    (3, {"compressors": zarr.codecs.BloscCodec()}, "blosc"),
    (3, {"compressors": zarr.codecs.GzipCodec()}, "gzip"),
    (3, {"compressors": zarr.codecs.ZstdCodec()}, "zstd"),
    *((2, {"compressors": numcodecs.get_codec({"id": name})}, name) for name in sorted(ENCODERS)),
]


@pytest.mark.parametrize(("version", "options", "codec"), ZARR_CODECS)
def test_a_zarr_chunk_that_inflates_is_named(
    version: Any, options: dict[str, Any], codec: str, bombs: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "in.zarr"
    array = zarr.create_array(
        store=str(path), shape=(SIDE, SIDE), chunks=(SIDE // 2, SIDE), dtype="u1", zarr_format=version, **options
    )
    array[:] = 1
    with open_image(path) as reader:  # compiles what reads, outside the limit
        reader.read(Region.whole((SIDE, SIDE)), np.empty((SIDE, SIDE), np.uint8))
    (path / ("c/1/0" if version == 3 else "1.0")).write_bytes(bombs[codec])
    with open_image(path) as reader, room_of(ROOM_BYTES):
        with pytest.raises(InputError, match=r"chunk 1/0 .*declared") as error:
            reader.read(Region.whole((SIDE, SIDE)), np.empty((SIDE, SIDE), np.uint8))
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)


def test_a_chunk_within_a_shard_is_bounded_by_its_own_size(
    bombs: dict[str, bytes], tmp_path: Path, little_room: None
) -> None:
    use_bounded_codecs()
    path = tmp_path / "in.zarr"
    array = zarr.create_array(
        store=str(path), shape=(SIDE, SIDE), chunks=(SIDE // 2, SIDE), shards=(SIDE, SIDE), dtype="u1",
        compressors=zarr.codecs.ZstdCodec(),
    )  # fmt: skip
    array[:] = 1
    shard = path / "c" / "0" / "0"
    index = np.frombuffer(shard.read_bytes()[-36:-4], "<u8").copy()
    index[:] = 2**64 - 1, 2**64 - 1, 0, len(bombs["zstd"])  # the first chunk is not stored
    packed = index.tobytes()
    shard.write_bytes(bombs["zstd"] + packed + google_crc32c.value(packed).to_bytes(4, "little"))
    with open_image(path) as reader, pytest.raises(InputError, match="declared"):
        reader.read(Region.whole((SIDE, SIDE)), np.empty((SIDE, SIDE), np.uint8))


@pytest.mark.parametrize("filters", [[numcodecs.Delta("u1", "f8")], [numcodecs.FixedScaleOffset(0, 1, "u1", "f8")]])
def test_a_filter_that_widens_samples_is_no_bomb(filters: list[Any], tmp_path: Path) -> None:
    samples = np.random.default_rng(1).integers(0, 255, (SIDE, SIDE)).astype(np.uint8)
    array = zarr.create_array(
        store=str(tmp_path / "in.zarr"), shape=samples.shape, chunks=samples.shape, dtype="u1", zarr_format=2,
        filters=filters, compressors=numcodecs.Zlib(),
    )  # fmt: skip
    array[:] = samples
    found = np.empty_like(samples)
    with open_image(tmp_path / "in.zarr") as reader:
        reader.read(Region.whole(samples.shape), found)
    np.testing.assert_array_equal(found, samples)


IMAGES: dict[str, str] = {
    "jpeg": "jpeg8_encode", "jpeg2k": "jpeg2k_encode", "jpegxl": "jpegxl_encode", "lerc": "lerc_encode",
    "webp": "webp_encode",
}  # fmt: skip


@pytest.mark.parametrize("codec", IMAGES)
def test_an_encoded_image_is_refused_by_its_header(codec: str) -> None:
    data = getattr(imagecodecs, IMAGES[codec])(np.zeros((70, 50, 3), np.uint8))
    check_image(codec, data, 70 * 50 * 3, np.dtype(np.uint8))
    with pytest.raises(TooLarge):
        check_image(codec, data, 70 * 50 * 3 - 1, np.dtype(np.uint8))


@pytest.mark.parametrize(
    ("scheme", "codec"),
    [("jpeg", "jpeg8"), ("jpeg_2000_lossy", "jpeg2k"), ("jpegxl", "jpegxl"), ("lerc", "lerc"), ("webp", "webp"),
     ("deflate", "zlib"), ("lzma", "lzma"), ("zstd", "zstd"), ("lzw", "lzw"), ("packbits", "packbits")],
)  # fmt: skip
def test_a_tiff_tile_that_inflates_is_named_or_cut_off(scheme: str, codec: str, tmp_path: Path) -> None:
    """Those that are no images are cut off at the tile's size by tifffile, or refused."""
    path, encode = tmp_path / "in.tif", getattr(imagecodecs, f"{codec}_encode")
    is_image = codec in ("jpeg8", "jpeg2k", "jpegxl", "lerc", "webp")
    # PackBits: runs of 128 zeros; imagecodecs takes minutes for them.
    data: Any = np.zeros((1000, 1000, 3), np.uint8) if is_image else bytes(8 << 20)
    bomb = b"\x81\x00" * (1 << 16) if codec == "packbits" else encode(data)
    tifffile.imwrite(
        path, iter([bomb]), shape=(SIDE, SIDE, 3), dtype=np.uint8, tile=(SIDE, SIDE), photometric="rgb",
        compression=scheme,
    )  # fmt: skip
    out = np.empty((SIDE, SIDE, 3), np.uint8)
    with open_image(path) as reader, room_of(ROOM_BYTES):
        if codec in ("lzma", "lzw"):
            reader.read(Region.whole(out.shape), out)
            assert not out.any()
        else:
            with pytest.raises(InputError, match="page 0, tile 0 does not decode"):
                reader.read(Region.whole(out.shape), out)


def test_a_gzipped_result_is_read_back_up_to_its_size(
    bombs: dict[str, bytes], tmp_path: Path, little_room: None
) -> None:
    path = tmp_path / "map.nii.gz"
    path.write_bytes(bombs["gzip"])
    with pytest.raises(InputError, match="inflates past"):
        file_array(path, np.float32, (4, 4))
