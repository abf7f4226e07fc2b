"""Gathers the encoded chunks of a region, for a device that decodes them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import AXES
from pipeline.codecs import file_loops as loops
from pipeline.codecs.blosc import HEADER_BYTES, BloscHeader, read_header
from pipeline.codecs.chunk_codec import ChunkCodec
from pipeline.codecs.packed import LONGEST_STREAM_BYTES, NotPackedError, Packing
from pipeline.codecs.scratch import scratch
from pipeline.formats.image.zarr.chunk_files import ChunkFiles, StoredBytes
from pipeline.formats.image.zarr.stored_array import Place
from pipeline.formats.image.zarr.together import ChunkPart
from pipeline.storage.confinement import is_confined, open_beneath

_LZ4_SIZE_BYTES = 4  # before numcodecs' LZ4


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
    packing: Packing, files: ChunkFiles, place: Place, within: Sequence[slice], origin: tuple[int, ...]
) -> None:
    """Add a chunk's blocks that hold the samples `within` it. `origin`: its first sample in the region.

    NotPackedError if the processor must decode it; raises as `ChunkFiles.read`.
    """
    codec = files.array.codec
    first, last = _bytes_of(codec, within)
    with files.stored(place) as stored:
        if stored is None:
            packing.add_fill(origin, codec.nbytes)
        elif codec.stages[0].name == "blosc":
            _pack_blosc(packing, stored, codec.nbytes, first, last, origin)
        else:
            at, data = packing.take(stored.nbytes)
            stored.read(0, data)
            if data[:_LZ4_SIZE_BYTES].tobytes() != codec.nbytes.to_bytes(_LZ4_SIZE_BYTES, "little"):
                raise NotPackedError("LZ4 of another size")  # of which the processor's decoder tells
            packing.add_stream(origin, at + _LZ4_SIZE_BYTES, stored.nbytes - _LZ4_SIZE_BYTES, codec.nbytes)


def _bytes_of(codec: ChunkCodec, within: Sequence[slice]) -> tuple[int, int]:
    """The first byte of a part of a chunk, and the one after its last."""
    first = last = 0
    for span, length in zip(within, codec.shape, strict=True):
        first, last = first * length + span.start, last * length + span.stop - 1
    return first * codec.dtype.itemsize, (last + 1) * codec.dtype.itemsize


def _pack_blosc(
    packing: Packing, stored: StoredBytes, nbytes: int, first: int, last: int, origin: tuple[int, ...]
) -> None:
    head = scratch("encoded", min(loops.GATHERED_HEAD_BYTES, stored.nbytes))
    stored.read(0, head)
    header = _header(head, stored.nbytes, nbytes)
    if header.is_stored:
        begin, ends = HEADER_BYTES + first, HEADER_BYTES + last
    else:
        if header.table_end > len(head):
            raise NotPackedError("many small blocks")
        table = head[HEADER_BYTES : header.table_end].view("<i4").tolist()
        starts = table[first // header.block_bytes : -(-last // header.block_bytes)]
        # Encoders with several threads write blocks in any order.
        begin, most = min(starts), max(starts)
        ends = min((start for start in table if start > most), default=stored.nbytes)
        if begin < header.table_end or ends > stored.nbytes or most >= ends:
            raise ValueError("a damaged Blosc table of blocks")
    at, data = packing.take(ends - begin)
    stored.read(begin, data)
    _add_blosc(packing, header, head, first, last, origin, at, begin, ends)


def _add_blosc(
    packing: Packing, header: BloscHeader, head: NDArray[np.uint8], first: int, last: int, origin: tuple[int, ...],
    at: int, begin: int, ends: int,
) -> None:  # fmt: skip
    """Add the blocks of decoded bytes `first` to `last`. `at`: of the chunk's bytes `begin` to `ends` in the memory."""
    if header.is_stored:
        packing.add_stored(origin, at, first, last - first)
        return
    numbers = range(first // header.block_bytes, -(-last // header.block_bytes))
    starts = head[HEADER_BYTES : header.table_end].view("<i4")[numbers.start : numbers.stop].tolist()
    packing.add_blosc(origin, header, at - begin, ends, numbers, starts)


def pack_together(
    packing: Packing, files: ChunkFiles, parts: Sequence[ChunkPart], origins: Sequence[Place]
) -> list[int]:
    """As `pack_chunk`, for many chunks in one call that does not hold the interpreter's lock.

    Returns those that are left: add each alone, to read it another way, or to name its fault.
    """
    array = files.array
    left = list(range(len(parts)))
    if array.index is not None or array.codec.stages[0].name != "blosc":
        return left
    try:
        folder = open_beneath(files.folder, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        return left
    rows, names = np.zeros((len(parts), loops.AT + 1), np.int64), bytearray()
    for row, part in zip(rows, parts, strict=True):
        row[loops.NAME] = len(names)
        row[loops.FIRST], row[loops.LAST] = _bytes_of(array.codec, part.within)
        names += os.fsencode(array.name(part.place)) + b"\0"
    heads, ends = np.empty((len(parts), loops.GATHERED_HEAD_BYTES), np.uint8), np.full(len(parts), loops.LEFT, np.int8)
    resolve = loops.NO_LINKS if is_confined(files.folder) else 0
    named = np.frombuffer(names, np.uint8)

    def fill(memory: NDArray[np.uint8]) -> int:
        return loops.gather_chunks(rows, ends, named, folder, resolve, array.codec.nbytes, heads, memory)

    try:
        start = packing.gather(fill)
    finally:
        os.close(folder)
    done = ends == loops.DONE
    for head, origin, row in zip(heads[done], itertools.compress(origins, done), rows[done].tolist(), strict=True):
        _, first, last, size, begin, end, at = row
        if size < 0:
            packing.add_fill(origin, array.codec.nbytes)
        else:
            header = _header(head, size, array.codec.nbytes)
            _add_blosc(packing, header, head, first, last, origin, start + at, begin, end)
    return np.flatnonzero(~done).tolist()


def _header(data: NDArray[np.uint8], stored: int, nbytes: int) -> BloscHeader:
    """The header of a chunk that decodes to `nbytes`."""
    header = read_header(data[:HEADER_BYTES], stored)
    if header.nbytes != nbytes:
        raise ValueError(f"it decodes to {header.nbytes:,} bytes instead of {nbytes:,}")
    return header
