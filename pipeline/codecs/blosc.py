"""Blosc chunks: their header and table of blocks, and a check before decoding.

Blosc's decoder trusts the header, so a damaged one crashes the process.

Source: c-blosc 1.21, README_CHUNK_FORMAT.rst and blosc.c.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import BITS, BYTES, NO_SHUFFLE
from pipeline.errors import counted

_VERSION = 2
CODECS = {"lz4": 1, "zstd": 4}
_SHUFFLED, _STORED, _BITS_SHUFFLED, _NOT_SPLIT = 1, 2, 4, 16  # bits of the flags; the codec is in the three highest
_HEADER = struct.Struct("<4B3I")
HEADER_BYTES = _HEADER.size
_MOST_SPLITS = 16
_LEAST_SPLIT_BYTES = 128
# A warp encodes a stream, so many short ones keep a GPU busy; still shorter ones find fewer repetitions.
_STREAM_BYTES = 32 << 10
_STREAM_ALIGNMENT_BYTES = 16


class BloscHeaders:
    """The headers of many chunks, as arrays of a number for each.

    nbytes      : decoded bytes
    is_stored   : whether they follow the header as they are
    block_bytes : of each block, except perhaps the last
    table_ends  : the first byte after the header and the table of blocks
    codec       : 0: blosclz, 1: lz4, 2: snappy, 3: zlib, 4: zstd
    splits      : whether each whole block has a stream for each byte of its samples
    """

    def __init__(self, heads: NDArray[np.uint8]) -> None:
        """`heads`: (chunks, at least `HEADER_BYTES`)."""
        self.version, _, self.flags, self.typesize = heads[:, :4].astype(np.int64).T
        self.nbytes, block_bytes, self.stored = heads[:, 4:HEADER_BYTES].view("<u4").astype(np.int64).T
        self.is_stored = (self.flags & _STORED) > 0
        self.block_bytes = np.maximum(np.where(self.is_stored, self.nbytes, block_bytes), 1)
        self._is_block = self.is_stored | ((block_bytes > 0) & (block_bytes <= self.nbytes))
        self.blocks = np.where(self.is_stored, 0, -(-self.nbytes // self.block_bytes))
        self.table_ends = HEADER_BYTES + 4 * self.blocks

    def are_damaged(self, nbytes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which chunks are damaged, given the bytes of each."""
        is_right = (nbytes >= HEADER_BYTES) & (self.version == _VERSION) & (self.stored == nbytes) & (self.typesize > 0)
        ends = np.where(self.is_stored, self.nbytes + HEADER_BYTES == nbytes, self.table_ends <= nbytes)
        found: NDArray[np.bool_] = ~(is_right & ends & self._is_block)
        return found

    @property
    def codec(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.flags >> 5
        return found

    @property
    def shuffle(self) -> NDArray[np.int64]:
        """As `kernels.blocks` names it."""
        bits = np.where(self.flags & _BITS_SHUFFLED, BITS, NO_SHUFFLE)
        return np.where((self.flags & _SHUFFLED > 0) & (self.typesize > 1), BYTES, bits)

    @property
    def splits(self) -> NDArray[np.bool_]:
        is_long = self.block_bytes // self.typesize >= _LEAST_SPLIT_BYTES
        found: NDArray[np.bool_] = (self.flags & _NOT_SPLIT == 0) & (self.typesize <= _MOST_SPLITS) & is_long
        return found


@dataclass(frozen=True, kw_only=True)
class BloscLayout:
    """How chunks of `nbytes` are cut into shuffled blocks, and blocks into streams, to be encoded on a GPU."""

    nbytes: int
    typesize: int

    @property
    def splits(self) -> int:
        """The streams of a block: one for each byte of its samples, if each can be aligned."""
        is_even = self.block_bytes % (_STREAM_ALIGNMENT_BYTES * self.typesize) == 0
        return self.typesize if is_even and self.block_bytes // self.typesize >= _LEAST_SPLIT_BYTES else 1

    @property
    def block_bytes(self) -> int:
        return min(self.nbytes, _STREAM_BYTES * self.typesize)

    @property
    def blocks(self) -> int:
        return -(-self.nbytes // self.block_bytes)

    def flags(self, codec: str) -> int:
        """The flags byte of the header."""
        shuffled = _SHUFFLED if self.typesize > 1 else 0
        return CODECS[codec] << 5 | shuffled | (0 if self.splits == self.typesize else _NOT_SPLIT)

    def streams(self) -> list[tuple[int, int]]:
        """Offset and bytes of each in the shuffled chunk."""
        found = []
        for first in range(0, self.nbytes, self.block_bytes):
            size = min(self.block_bytes, self.nbytes - first)
            splits = self.splits if size == self.block_bytes else 1
            found += [(first + number * (size // splits), size // splits) for number in range(splits)]
        return found


def check_blosc(data: NDArray[np.uint8]) -> int:
    """The decoded bytes that a chunk's header declares. ValueError unless it and the table of blocks lie within the
    data; as `BloscHeaders.are_damaged`, but ten times as fast for one chunk."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"too short for Blosc: {counted(len(data), 'byte')}")
    version, _, flags, typesize, nbytes, block_bytes, stored = _HEADER.unpack_from(data.data)
    if version != _VERSION or stored != len(data) or typesize == 0:
        raise ValueError(f"a Blosc header of {stored:,} bytes for {len(data):,}")
    is_stored, decoded = bool(flags & _STORED), int(nbytes)
    if is_stored or decoded == 0:
        is_right, table_end = not is_stored or stored == decoded + HEADER_BYTES, HEADER_BYTES
    else:
        is_right = 0 < block_bytes <= decoded
        table_end = HEADER_BYTES + 4 * -(-decoded // max(block_bytes, 1))
    if not is_right or table_end > stored:
        raise ValueError("a damaged Blosc header")
    if table_end > HEADER_BYTES:
        # A few: min and max of arrays take longer.
        starts = data[HEADER_BYTES:table_end].view("<i4").tolist()
        if min(starts) < table_end or max(starts) > len(data) - 4:
            raise ValueError("a damaged Blosc table of blocks")
    return decoded
