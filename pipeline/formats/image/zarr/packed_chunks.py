"""Gathers the encoded chunks of a region, for a device that decodes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import AXES
from pipeline.codecs.blosc import HEADER_BYTES, BloscHeader, read_header
from pipeline.codecs.chunk_codec import ChunkCodec
from pipeline.codecs.packed import LONGEST_STREAM_BYTES, NotPackedError, Packing
from pipeline.codecs.scratch import scratch
from pipeline.formats.image.zarr.chunk_files import StoredBytes

_LZ4_SIZE_BYTES = 4  # before numcodecs' LZ4
# Of a chunk, read first: the header and a table of a thousand blocks.
HEAD_BYTES = 4096


def can_be_packed(codec: ChunkCodec) -> bool:
    """Whether a device may decode chunks of this codec, as far as their metadata tell."""
    if len(codec.stages) != 1:
        return False
    (stage,) = codec.stages
    is_lz4 = stage.name == "lz4" and codec.nbytes <= LONGEST_STREAM_BYTES
    return (
        (is_lz4 or (stage.name == "blosc" and stage.options.get("cname") == "lz4"))
        and codec.order == tuple(range(len(codec.shape)))
        and len(codec.shape) <= AXES
        and codec.dtype.isnative
        and codec.dtype.itemsize in (1, 2, 4, 8)
    )


def pack_chunk(
    packing: Packing, codec: ChunkCodec, stored: StoredBytes | None, within: Sequence[slice], origin: tuple[int, ...]
) -> None:
    """Add a chunk's blocks that hold the samples `within` it. `origin`: its first sample in the region.

    Only what lies in the first `HEAD_BYTES` is looked at: the rest may be read later.

    NotPackedError if the processor must decode it; raises as `ChunkFiles.read`.
    """
    first, last = _bytes_of(codec, within)
    if stored is None:
        packing.add_fill(origin, codec.nbytes)
        return
    head = scratch("encoded", min(HEAD_BYTES, stored.nbytes))
    stored.read(0, head)
    if codec.stages[0].name == "blosc":
        _pack_blosc(packing, stored, head, codec.nbytes, first, last, origin)
        return
    if head[:_LZ4_SIZE_BYTES].tobytes() != codec.nbytes.to_bytes(_LZ4_SIZE_BYTES, "little"):
        raise NotPackedError("LZ4 of another size")  # of which the processor's decoder tells
    at, data = packing.take(stored.nbytes)
    stored.read(0, data)
    packing.add_stream(origin, at + _LZ4_SIZE_BYTES, stored.nbytes - _LZ4_SIZE_BYTES, codec.nbytes)


def _bytes_of(codec: ChunkCodec, within: Sequence[slice]) -> tuple[int, int]:
    """The first byte of a part of a chunk, and the one after its last."""
    first = last = 0
    for span, length in zip(within, codec.shape, strict=True):
        first, last = first * length + span.start, last * length + span.stop - 1
    return first * codec.dtype.itemsize, (last + 1) * codec.dtype.itemsize


def _pack_blosc(
    packing: Packing, stored: StoredBytes, head: NDArray[np.uint8], nbytes: int, first: int, last: int,
    origin: tuple[int, ...],
) -> None:  # fmt: skip
    header = _header(head, stored.nbytes, nbytes)
    if last - first == nbytes:
        at, data = packing.take(stored.nbytes)
        stored.read(0, data)
        if header.is_stored:
            packing.add_stored(origin, at + HEADER_BYTES, 0, nbytes)
        else:
            packing.add_blosc(origin, header, at, stored.nbytes, range(header.blocks))
        return
    if header.is_stored:
        at, data = packing.take(last - first)
        stored.read(HEADER_BYTES + first, data)
        packing.add_stored(origin, at, first, last - first)
        return
    if header.table_end > len(head):
        raise NotPackedError("many small blocks")
    numbers = range(first // header.block_bytes, -(-last // header.block_bytes))
    table = head[HEADER_BYTES : header.table_end].view("<i4").tolist()
    starts = table[numbers.start : numbers.stop]
    # Encoders with several threads write blocks in any order.
    begin, most = min(starts), max(starts)
    ends = min((start for start in table if start > most), default=stored.nbytes)
    if begin < header.table_end or ends > stored.nbytes or most >= ends:
        raise ValueError("a damaged Blosc table of blocks")
    at, data = packing.take(ends - begin)
    stored.read(begin, data)
    packing.add_blosc(origin, header, at - begin, ends, numbers, starts)


def _header(data: NDArray[np.uint8], stored: int, nbytes: int) -> BloscHeader:
    """The header of a chunk that decodes to `nbytes`."""
    header = read_header(data[:HEADER_BYTES], stored)
    if header.nbytes != nbytes:
        raise ValueError(f"it decodes to {header.nbytes:,} bytes instead of {nbytes:,}")
    return header
