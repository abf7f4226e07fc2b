"""Gathers the encoded chunks of a region, for a device that decodes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import AXES
from pipeline.codecs.blosc import HEADER_BYTES, BloscHeaders
from pipeline.codecs.chunk_codec import ChunkCodec
from pipeline.codecs.packed import LONGEST_STREAM_BYTES, NotPackedError, Packing

_LZ4_SIZE_BYTES = 4  # before numcodecs' LZ4
# Of a Zstandard frame: the byte of its flags, and of these the one of a checksum.
_ZSTD_FLAGS, _ZSTD_CHECKSUM = 4, 4
# Of a chunk, read first: the header and a table of a thousand blocks.
HEAD_BYTES = 4096


class StoredTogether(NamedTuple):
    """Encoded chunks that are open.

    nbytes : (chunks,): of each; negative if it is not stored
    heads  : uint8 (chunks, HEAD_BYTES): how each begins
    read   : for some chunks, by number: from which byte on, to which address, and how many bytes
    """

    nbytes: NDArray[np.int64]
    heads: NDArray[np.uint8]
    read: Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], None]


def packed_codec(codec: ChunkCodec) -> str | None:
    """What the streams of these chunks are encoded with, if a device may decode them as far as their metadata tell."""
    if len(codec.stages) != 1:
        return None
    (stage,) = codec.stages
    is_blosc = stage.name == "blosc"
    name = stage.options.get("cname") if is_blosc else stage.name
    is_fit = (
        name in ("lz4", "zstd")
        and (is_blosc or codec.nbytes <= LONGEST_STREAM_BYTES[name])
        and codec.order == tuple(range(len(codec.shape)))
        and len(codec.shape) <= AXES
        and codec.dtype.isnative
        and codec.dtype.itemsize in (1, 2, 4, 8)
    )
    return name if is_fit else None


def pack_chunks(
    packing: Packing, codec: ChunkCodec, stored: StoredTogether, within: NDArray[np.int64], origins: NDArray[np.int64]
) -> None:
    """Add chunks' blocks that hold some of their samples, without a step of the interpreter for each chunk.

    within  : (chunks, axes, 2): the samples of each, start and stop along each axis
    origins : (chunks, axes): each chunk's first sample in the region

    Only `heads` are looked at: the rest may be read later. NotPackedError if the processor must decode one.
    """
    is_there = stored.nbytes >= 0
    packing.add_fill(origins[~is_there], codec.nbytes)
    there = np.flatnonzero(is_there)
    if not len(there):
        return
    steps = np.array([math.prod(codec.shape[axis + 1 :]) for axis in range(len(codec.shape))]) * codec.dtype.itemsize
    firsts, ends = within[there, :, 0] @ steps, (within[there, :, 1] - 1) @ steps + codec.dtype.itemsize
    if codec.stages[0].name == "blosc":
        _pack_blosc(packing, stored, there, codec.nbytes, firsts, ends, origins[there])
        return
    sizes, heads = stored.nbytes[there], stored.heads[there]
    head_bytes = _LZ4_SIZE_BYTES if codec.stages[0].name == "lz4" else 0
    if head_bytes and (np.any(sizes < head_bytes) or np.any(heads[:, :head_bytes].view("<u4") != codec.nbytes)):
        raise NotPackedError("LZ4 of another size")  # of which the processor's decoder tells
    if not head_bytes and np.any(heads[:, _ZSTD_FLAGS] & _ZSTD_CHECKSUM):
        raise NotPackedError("a checksum of Zstandard")
    at = _read(packing, stored, there, np.zeros_like(sizes), sizes)
    packing.add_streams(origins[there], at + head_bytes, sizes - head_bytes, codec.nbytes)


def _read(
    packing: Packing, stored: StoredTogether, chunks: NDArray[np.int64], firsts: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> NDArray[np.int64]:  # fmt: skip
    """Read parts of chunks side by side; returns where each begins in the memory."""
    starts = np.cumsum(sizes) - sizes
    at, data = packing.take(int(sizes.sum()))
    stored.read(chunks, firsts, data.ctypes.data + starts, sizes)
    return at + starts


def _pack_blosc(
    packing: Packing, stored: StoredTogether, chunks: NDArray[np.int64], nbytes: int, firsts: NDArray[np.int64],
    ends: NDArray[np.int64], origins: NDArray[np.int64],
) -> None:  # fmt: skip
    most, headers = stored.nbytes[chunks], BloscHeaders(stored.heads[chunks, :HEADER_BYTES])
    if np.any(headers.are_damaged(most)) or np.any(headers.nbytes != nbytes):
        raise NotPackedError("a damaged Blosc header")  # the processor names it
    is_whole, is_stored = ends - firsts == nbytes, headers.is_stored
    begins, sizes = np.zeros_like(most), most.copy()
    parts = np.flatnonzero(is_stored & ~is_whole)
    begins[parts], sizes[parts] = HEADER_BYTES + firsts[parts], (ends - firsts)[parts]
    encoded, parts = np.flatnonzero(~is_stored), np.flatnonzero(~is_stored & ~is_whole)
    blocks = firsts // headers.block_bytes, -(-ends // headers.block_bytes)
    starts = np.zeros(0, np.int64)
    if len(parts):
        begins[parts], sizes[parts], starts = _parts_of(stored.heads, chunks, headers, parts, blocks, most[parts])
    at = _read(packing, stored, chunks, begins, sizes) - begins
    some = np.flatnonzero(is_stored)
    packing.add_stored(origins[some], (at + HEADER_BYTES + firsts)[some], firsts[some], (ends - firsts)[some])
    packing.add_blosc(
        origins[encoded], BloscHeaders(stored.heads[chunks[encoded], :HEADER_BYTES]), at[encoded],
        (begins + sizes)[encoded], (blocks[0][encoded], blocks[1][encoded]), is_whole[encoded], starts,
    )  # fmt: skip


def _parts_of(
    heads: NDArray[np.uint8], chunks: NDArray[np.int64], headers: BloscHeaders, parts: NDArray[np.int64],
    blocks: tuple[NDArray[np.int64], NDArray[np.int64]], nbytes: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:  # fmt: skip
    """The first byte and the bytes of some blocks of chunks, and where each block begins in its chunk."""
    counts, table_ends = headers.blocks[parts], headers.table_ends[parts]
    if np.any(table_ends > HEAD_BYTES):
        raise NotPackedError("many small blocks")
    table_end = HEADER_BYTES + 4 * int(counts.max())
    table = heads[chunks[parts], HEADER_BYTES:table_end].view("<i4").astype(np.int64)
    number, beyond = np.arange(table.shape[1]), np.iinfo(np.int64).max
    wanted = (number >= blocks[0][parts, np.newaxis]) & (number < blocks[1][parts, np.newaxis])
    # Encoders with several threads write blocks in any order.
    first, last = np.where(wanted, table, beyond).min(1), np.where(wanted, table, -1).max(1)
    is_later = (number < counts[:, np.newaxis]) & (table > last[:, np.newaxis])
    ends = np.minimum(np.where(is_later, table, beyond).min(1), nbytes)
    if np.any((first < table_ends) | (last >= ends)):
        raise NotPackedError("a damaged Blosc table of blocks")
    return first, ends - first, table[wanted]
