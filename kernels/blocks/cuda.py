"""Blocks to samples on CUDA: launches the kernels of blocks.cu on one stream, without waiting."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.blocks import AXES, ZSTD_PART_BYTES, Places, ZstdRoom
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, kernel, multiprocessors, on_stream

OPTIONS: tuple[str, ...] = ()
THREADS = 256
# A block of threads takes this many bytes of a stream or a block.
BYTES_EACH = 16 << 10
# For a stream, as in zstd_encode.cuh.
ZSTD_SCRATCH_BYTES = 49216
TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}


class Streams(ctypes.Structure):
    """struct Streams of blocks.cu."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("sources", "source_bytes", "targets", "target_bytes"))


class ZstdScratch(ctypes.Structure):
    """struct zstd::Scratch of zstd_decode.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("used", "sequences", "parts", "first", "literals")),
        *((name, ctypes.c_ulonglong) for name in ("most_parts", "most_literals", "most_sequences")),
    )


class Placing(ctypes.Structure):
    """struct Placing of blocks.cu."""

    _fields_ = (
        ("strides", ctypes.c_longlong * AXES),
        ("fill", ctypes.c_ulonglong),
        *((name, ctypes.c_int * AXES) for name in ("chunk", "region")),
    )


def copy_streams(streams: Streams, count: int, longest: int, stream: Any) -> None:
    """Copy streams that are stored as they are. longest: the most bytes of one."""
    if count:
        grid = (count, min(blocks_of(longest, BYTES_EACH), 65_535))
        kernel("blocks", "copy_streams<>").launch(grid, (THREADS,), (streams,), stream=stream)


def decode_lz4(streams: Streams, count: int, fault: Any, stream: Any) -> None:
    """Decode streams of LZ4, of any bytes. Lowers `fault`, an int32, to the index of the first that is damaged."""
    if count:
        kernel("blocks", "decode_lz4<>").launch((count,), (32,), (streams, fault), stream=stream)


def decode_zlib(streams: Streams, count: int, fault: Any, stream: Any) -> None:
    """As `decode_lz4`, of zlib with its checksum; the stream may end before `source_bytes`."""
    if count:
        kernel("blocks", "decode_zlib<>").launch((count,), (32,), (streams, fault), stream=stream)


def decode_zstd(streams: Streams, room: ZstdRoom, scratch: Any, fault: Any, stream: Any) -> None:
    """As `decode_lz4`, of Zstandard frames. Those that need more than `room` are refused; scratch: `room.nbytes`."""
    import cupy

    if not room.frames:
        return
    begins = np.cumsum([scratch.data.ptr, 24, 8 * room.sequences, ZSTD_PART_BYTES * room.blocks, 4 * room.frames])
    given = ZstdScratch(*begins.tolist(), room.blocks, room.literals, room.sequences)
    cupy.cuda.runtime.memsetAsync(given.used, 0, 24, stream.ptr)
    args = streams, ctypes.c_uint(room.frames), given
    kernel("blocks", "scan_zstd<>").launch((blocks_of(room.frames, 32),), (32,), args, stream=stream)
    decoding = min(max(room.blocks, 1), 8 * multiprocessors())
    kernel("blocks", "decode_zstd<>").launch((decoding,), (64,), (given,), stream=stream)
    kernel("blocks", "execute_zstd<>").launch((room.frames,), (THREADS,), (streams, given, fault), stream=stream)


def add_rows(decoded: Any, blocks: Any, itemsize: int, row: tuple[int, int], longest: int, stream: Any) -> None:
    """Sum the samples of blocks along their rows. row: columns and samples of a pixel; longest: the most bytes of a
    block."""
    columns, samples = row
    rows = blocks_of(longest, columns * samples * itemsize)
    grid = (blocks.nbytes // 32, min(blocks_of(rows, THREADS // 32), 65_535))
    args = (decoded, blocks, ctypes.c_int(columns), ctypes.c_int(samples))
    kernel("blocks", f"add_rows<{TYPES[itemsize]}>").launch(grid, (THREADS,), args, stream=stream)


def encode_lz4(streams: Streams, count: int, stream: Any) -> None:
    """Encode streams as LZ4; `target_bytes` become the encoded bytes, or the stream's own if it would not shrink.
    The targets have room for the streams as they are."""
    kernel("blocks", "encode_lz4<>").launch((count,), (32,), (streams,), stream=stream)


def encode_zstd(streams: Streams, count: int, scratch: Any, stream: Any) -> None:
    """As `encode_lz4`, to Zstandard frames. scratch: uint8, `ZSTD_SCRATCH_BYTES` for each stream encoded at once."""
    grid = (min(count, scratch.nbytes // ZSTD_SCRATCH_BYTES),)
    args = (streams, ctypes.c_uint(count), scratch)
    kernel("blocks", "encode_zstd<>").launch(grid, (32,), args, stream=stream)


def place(decoded: Any, blocks: Any, origins: Any, region: Any, places: Places, *, stream: Any = None) -> None:
    """Fill `region` from blocks: undo their shuffle and move each sample to its place; those outside are skipped.

    decoded : uint8, the blocks' bytes
    blocks  : uint8, the bytes of (n,) of `kernels.blocks.BLOCK`
    origins : int32 (chunks, AXES): each chunk's first sample in the region, possibly negative; zeros for absent axes
    region  : of any strides, of 1, 2, 4 or 8 bytes a sample; whole samples make a block
    """
    count = blocks.nbytes // 32
    if not count:
        return
    with on_stream(region, stream) as current:
        grid = (count, min(blocks_of(places.longest, BYTES_EACH), 65_535))
        kernel("blocks", f"place<{TYPES[region.itemsize]}>").launch(
            grid, (THREADS,), (decoded, blocks, origins, region, _placing(region, places)), stream=current
        )


def _placing(region: Any, places: Places) -> Placing:
    absent, fill = AXES - region.ndim, np.array(places.fill_value, region.dtype)
    return Placing(
        strides=(ctypes.c_longlong * AXES)(*[0] * absent, *(each // region.itemsize for each in region.strides)),
        fill=int.from_bytes(fill.tobytes(), "little"),
        chunk=(ctypes.c_int * AXES)(*[1] * absent, *places.chunk),
        region=(ctypes.c_int * AXES)(*[1] * absent, *region.shape),
    )


class Packing(ctypes.Structure):
    """struct Packing of blocks.cu."""

    _fields_ = (
        *((name, ctypes.c_ulonglong) for name in ("nbytes", "capacity", "room")),
        *(
            (name, ctypes.c_int)
            for name in ("chunks", "streams", "blocks", "block_bytes", "splits", "typesize", "flags")
        ),
    )


class Packed(ctypes.Structure):
    """struct Packed of blocks.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("shuffled", "encoded", "encoded_bytes", "statuses", "offsets", "starts", "sizes", "out")
        ),
        ("stride", ctypes.c_ulonglong),
    )


def cut(region: Any, blocks: Any, origins: Any, shuffled: Any, places: Places, *, stream: Any) -> None:
    """Fill `shuffled` with blocks of a region's samples, those beyond it having the fill value; see `place`."""
    grid = (blocks.nbytes // 32, min(blocks_of(places.longest, BYTES_EACH), 65_535))
    kernel("blocks", f"cut<{TYPES[region.itemsize]}>").launch(
        grid, (THREADS,), (region, blocks, origins, shuffled, _placing(region, places)), stream=stream
    )


def pack_chunks(region: Any, origins: Any, places: Places, packing: Packing, packed: Packed, *, stream: Any) -> None:
    """Write a region as Blosc chunks, of its encoded streams: `sizes` become the bytes of each, and those of all or
    -1 if these exceed the capacity."""
    pointers = [ctypes.c_void_p(getattr(packed, name)) for name in ("encoded_bytes", "statuses")]
    results = [ctypes.c_void_p(getattr(packed, name)) for name in ("offsets", "starts", "sizes")]
    kernel("blocks", "measure_chunks<>").launch((1,), (THREADS,), (*pointers, packing, *results), stream=stream)
    grid = (packing.chunks * packing.streams, min(blocks_of(packing.block_bytes, BYTES_EACH), 65_535))
    kernel("blocks", f"pack_chunks<{TYPES[region.itemsize]}>").launch(
        grid, (THREADS,), (region, origins, _placing(region, places), packing, packed), stream=stream
    )


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "place": Variant(
            summary="decoded blocks to a region, a thread a sample",
            entries=(
                "copy_streams<>",
                "decode_lz4<>",
                "decode_zlib<>",
                "scan_zstd<>",
                "decode_zstd<>",
                "execute_zstd<>",
                *(f"{step}<{name}>" for step in ("add_rows", "place") for name in TYPES.values()),
            ),
            run=lambda task: place(*task),
        ),
        "pack": Variant(
            summary="a region to Blosc chunks, a thread a sample or a byte",
            entries=(
                "encode_lz4<>",
                "encode_zstd<>",
                "measure_chunks<>",
                *(f"{step}<{name}>" for step in ("cut", "pack_chunks") for name in TYPES.values()),
            ),
            run=lambda task: pack_chunks(*task, stream=None),
        ),
    }
)
