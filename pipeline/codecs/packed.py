"""Encoded blocks of a region, gathered in memory that is copied to a device as one piece and decoded there.

The memory holds the blocks' bytes as the file does, then tables of the streams and blocks among them. A stream is what
a codec decodes; a block is what is shuffled as one, and consists of one stream or of one for each byte of its samples.

Source: c-blosc 1.21, README_CHUNK_FORMAT.rst.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import AXES, BLOCK, FILL, NO_SHUFFLE, Places, ZstdRoom
from pipeline.codecs.blosc import CODECS, BloscHeaders

_ALIGNMENT_BYTES = 256
# A stream of LZ4 or zlib is decoded by a warp, one of Zstandard by many: much larger ones leave the GPU idle, and the
# processor is faster.
LONGEST_STREAM_BYTES = {"lz4": 1 << 20, "zlib": 1 << 20, "zstd": 4 << 20}

# Of a Zstandard frame: on average, blocks are not smaller, but for 8 of each frame.
_ZSTD_BLOCK_BYTES = 2048

Memory = NDArray[np.uint8]
Numbers = NDArray[np.int64]


class NotPackedError(Exception):
    """The blocks cannot be decoded on a device, or do not fit the memory: the processor decodes them."""


@dataclass(frozen=True, kw_only=True)
class PackedBlocks:
    """What a device needs to know of the memory.

    nbytes         : of the memory that are used
    codec          : of encoded streams, a key of `LONGEST_STREAM_BYTES`
    encoded        : the number of encoded streams; those after them are stored as they are
    longest_stored : the most bytes of one of those
    tables         : offsets of the streams (see `streams`), the blocks and the chunks' origins
    counts         : the number of streams, blocks and chunks
    decoded_bytes  : of all streams side by side
    room           : for Zstandard
    view           : of the array that the blocks fill, NumPy's or CuPy's, with the axes of the file's chunks
    target         : the part of the chunk's array that is this array
    complete       : fills the rest of the chunk's array
    differences    : columns and samples of a pixel, if each sample is less the one before it in its row
    """

    nbytes: int
    codec: str
    encoded: int
    longest_stored: int
    tables: tuple[int, int, int]
    counts: tuple[int, int, int]
    decoded_bytes: int
    room: ZstdRoom
    places: Places
    view: Callable[[Any], Any]
    target: tuple[slice, ...] | None = None
    complete: Callable[[Any], None] | None = None
    differences: tuple[int, int] | None = None

    def streams(self, memory: Memory) -> NDArray[np.uint64]:
        """(4, streams): where each begins in the memory, its bytes, where it goes in the decoded bytes, and its bytes
        there."""
        first, count = self.tables[0], self.counts[0]
        return memory[first : first + 32 * count].view(np.uint64).reshape(4, count)

    def blocks(self, memory: Memory) -> Any:
        """Records of `kernels.blocks.BLOCK`."""
        first, count = self.tables[1], self.counts[1]
        return memory[first : first + BLOCK.itemsize * count].view(BLOCK)

    def origins(self, memory: Memory) -> NDArray[np.int32]:
        """(chunks, AXES): each chunk's first sample in the region, after zeros for absent axes."""
        first, count = self.tables[2], self.counts[2]
        return memory[first : first + 4 * AXES * count].view(np.int32).reshape(count, AXES)


@dataclass(frozen=True, kw_only=True)
class ChunkForm:
    """How an output stores a region that consists of whole chunks: in Blosc, after a byte shuffle.

    codec   : lz4 or zstd
    chunk   : samples of a chunk along each axis of the file, at most `AXES`
    origins : int32 (chunks, AXES): each chunk's first sample in the region
    view    : of the region's array, NumPy's or CuPy's, with the file's axes; what a chunk has beyond it is zero
    """

    codec: str
    chunk: tuple[int, ...]
    origins: NDArray[np.int32]
    view: Callable[[Any], Any]


class Packing:
    """Gathers the blocks of one region. Chunks are added many at once, as arrays of a number for each.

    origins : (chunks, axes): each chunk's first sample in the region
    """

    def __init__(self, memory: Memory, codec: str, chunk: tuple[int, ...], itemsize: int, fill_value: Any) -> None:
        """`memory`: aligned to 8 bytes; `chunk`, `itemsize`: of the file's chunks, of `AXES` axes at most."""
        self._memory, self._codec = memory, codec
        self._chunk, self._itemsize, self._fill_value = chunk, itemsize, fill_value
        self._used = self._decoded_bytes = self._chunks = 0
        self._encoded: list[NDArray[np.uint64]] = []
        self._stored: list[NDArray[np.uint64]] = []
        self._blocks: list[Any] = []
        self._origins: list[Numbers] = []
        self._blosc_chunks: list[Numbers] = []
        self._starts: list[Numbers] = []

    def take(self, nbytes: int) -> tuple[int, Memory]:
        """Memory for some of the file's bytes, and its offset. NotPackedError if there is no more."""
        first = self._used
        self._used += nbytes
        if self._used > len(self._memory):
            raise NotPackedError("the memory is full")
        return first, self._memory[first : self._used]

    def add_fill(self, origins: Numbers, nbytes: int) -> None:
        """Chunks of `nbytes` that are not stored."""
        blocks = _blocks(np.full(len(origins), FILL), 0, nbytes, 1, NO_SHUFFLE)
        self._add(origins, blocks)

    def add_stored(self, origins: Numbers, at: Numbers, firsts: Numbers, sizes: Numbers) -> None:
        """Bytes at `at` of the memory that are those of a chunk from a byte on."""
        self._require_whole_samples(firsts, sizes)
        to = self._rooms(sizes)
        self._add(origins, _blocks(to, firsts, sizes, 1, NO_SHUFFLE), stored=_streams(at, sizes, to, sizes))

    def add_streams(self, origins: Numbers, at: Numbers, sizes: Numbers, decoded_bytes: int) -> None:
        """Chunks of `decoded_bytes` that are one encoded stream each: `at` in the memory, of so many bytes."""
        if decoded_bytes > LONGEST_STREAM_BYTES[self._codec]:
            raise NotPackedError("long streams")
        decoded = np.full(len(origins), decoded_bytes)
        to = self._rooms(decoded)
        self._add(origins, _blocks(to, 0, decoded, 1, NO_SHUFFLE), encoded=_streams(at, sizes, to, decoded))

    def add_blosc(
        self, origins: Numbers, headers: BloscHeaders, at: Numbers, ends: Numbers, blocks: tuple[Numbers, Numbers],
        has_table: NDArray[np.bool_], starts: Numbers,
    ) -> None:  # fmt: skip
        """Blocks of Blosc chunks; `packed` looks at them.

        at        : where a chunk's first byte would be in the memory, which may hold a part of the chunk
        ends      : the chunk's byte after the last that the memory holds
        blocks    : the number of the first, and of the last + 1
        has_table : whether the memory holds the chunk with its table
        starts    : of the blocks of all other chunks, where they begin in their chunks
        """
        if np.any(headers.codec != CODECS[self._codec]):
            raise NotPackedError("another of Blosc's codecs")
        self._require_whole_samples(headers.block_bytes, headers.nbytes)
        first, count = blocks[0], blocks[1] - blocks[0]
        self._blosc_chunks.append(
            np.stack(
                [self._chunks + np.arange(len(origins)), headers.nbytes, headers.block_bytes, headers.typesize,
                 headers.shuffle, headers.splits, headers.table_ends, at, ends, first, count, has_table]
            )
        )  # fmt: skip
        all_starts = np.zeros(int(count.sum()), np.int64)
        all_starts[~np.repeat(has_table, count)] = starts
        self._starts.append(all_starts)
        self._add(origins)

    def _look_at_blosc(self) -> None:
        """Find the streams of all blocks of Blosc chunks. NotPackedError if one is damaged: the processor names it."""
        if not any(map(len, self._starts)):
            return
        from pipeline.codecs.loops.streams import blosc_streams

        chunks, starts = np.concatenate(self._blosc_chunks, axis=1), np.concatenate(self._starts)
        targets = self._rooms(chunks[2] * chunks[10])
        blocks = np.zeros(len(starts), BLOCK)
        streams = np.empty((4, int((np.where(chunks[5] > 0, chunks[3], 1) * chunks[10]).sum())), np.uint64)
        encoded, stored = blosc_streams(
            self._memory, np.ascontiguousarray(chunks.T), starts, targets, LONGEST_STREAM_BYTES[self._codec],
            streams.view(np.int64), blocks.view(np.int64).reshape(-1, 4),
        )  # fmt: skip
        if encoded < 0:
            raise NotPackedError("blocks that split unevenly, long streams, or a damaged chunk")
        self._blocks.append(blocks)
        self._encoded.append(streams[:, :encoded])
        self._stored.append(streams[:, streams.shape[1] - stored :])

    def packed(self, *, differences: tuple[int, int] | None = None) -> PackedBlocks:
        """Write the tables behind the bytes; for `PackedBlocks`. NotPackedError if they do not fit, or a block is
        damaged."""
        self._look_at_blosc()
        streams = np.concatenate([np.zeros((4, 0), np.uint64), *self._encoded, *self._stored], axis=1)
        encoded, blocks = sum(each.shape[1] for each in self._encoded), np.concatenate(self._blocks)
        zstd = _zstd_room(self._memory, streams[:, :encoded]) if self._codec == "zstd" else ZstdRoom()
        origins = origin_rows(np.concatenate(self._origins), len(self._chunk))
        tables = []
        for table in (streams, blocks, origins):
            self._used = -(-self._used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            first, room = self.take(table.nbytes)
            room[:] = np.ascontiguousarray(table).reshape(-1).view(np.uint8)
            tables.append(first)
        longest = int(streams[3, encoded:].max(initial=0))
        return PackedBlocks(
            nbytes=self._used, codec=self._codec, encoded=encoded, longest_stored=longest,
            tables=(tables[0], tables[1], tables[2]), counts=(streams.shape[1], len(blocks), len(origins)),
            decoded_bytes=self._decoded_bytes, room=zstd,
            places=Places(chunk=self._chunk, fill_value=self._fill_value, longest=int(blocks["bytes"].max())),
            view=lambda array: array, differences=differences,
        )  # fmt: skip

    def _add(self, origins: Numbers, blocks: Any = None, encoded: Any = None, stored: Any = None) -> None:
        """`blocks`: one for each of these chunks; None: they are looked at later."""
        if blocks is not None:
            blocks["chunk"] = self._chunks + np.arange(len(origins))
            self._blocks.append(blocks)
        self._chunks += len(origins)
        self._origins.append(origins)
        if encoded is not None:
            self._encoded.append(encoded)
        if stored is not None:
            self._stored.append(stored)

    def _rooms(self, sizes: Numbers) -> Numbers:
        """Aligned offsets of the decoded bytes."""
        ends: Numbers = self._decoded_bytes + np.cumsum(-(-sizes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        first, self._decoded_bytes = self._decoded_bytes, int(ends[-1]) if len(ends) else self._decoded_bytes
        return np.concatenate([[first], ends[:-1]]) if len(ends) else ends

    def _require_whole_samples(self, *sizes: Numbers) -> None:
        if any(np.any(size % self._itemsize) for size in sizes):
            raise NotPackedError("blocks that end within samples")


def origin_rows(origins: Sequence[tuple[int, ...]] | Numbers, axes: int) -> NDArray[np.int32]:
    """The origins as rows of `AXES` numbers, zeros first."""
    rows = np.zeros((len(origins), AXES), np.int32)
    rows[:, AXES - axes :] = origins
    return rows


def _zstd_room(memory: Memory, streams: NDArray[np.uint64]) -> ZstdRoom:
    """Scratch memory of frames: as much as they declare, but no more than whole ones need."""
    from pipeline.codecs.loops.streams import zstd_room

    frames, nbytes = streams.shape[1], int(streams[3].sum())
    blocks, literals, sequences = zstd_room(memory, streams[:2].astype(np.int64)).tolist()
    blocks = min(blocks, nbytes // _ZSTD_BLOCK_BYTES + 8 * frames)
    return ZstdRoom(frames, blocks, min(literals, nbytes), min(sequences, nbytes // 3 + blocks))


def _streams(sources: Any, source_bytes: Any, targets: Any, target_bytes: Any) -> NDArray[np.uint64]:
    return np.array([sources, source_bytes, targets, target_bytes], np.uint64)


def _blocks(sources: Any, firsts: Any, sizes: Any, typesize: Any, shuffle: Any) -> Any:
    blocks = np.zeros(len(sources), BLOCK)
    blocks["source"], blocks["first"], blocks["bytes"] = sources, firsts, sizes
    blocks["typesize"], blocks["shuffle"] = typesize, shuffle
    return blocks
