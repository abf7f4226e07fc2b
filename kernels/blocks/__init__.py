"""Blocks of compressed files to and from the samples of a region, on CUDA; the processor has libraries for them.

A file's chunk is an array in C order, cut into blocks of bytes that may be shuffled as by Blosc, and encoded as LZ4 or
Zstandard. A TIFF's strip or tile is one block of zlib.

Source: c-blosc 1.21, README_CHUNK_FORMAT.rst.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["AXES", "BITS", "BLOCK", "BYTES", "FILL", "NO_SHUFFLE", "Places", "ZstdRoom"]

AXES = 6
# As in zstd_format.cuh.
ZSTD_PART_BYTES = 88
NO_SHUFFLE, BYTES, BITS = 0, 1, 2
# A block's `source`: it is not stored, and all its samples have the fill value.
FILL = -1
# struct Block of blocks.cu. source: offset of the block's bytes; first: offset in the chunk of its first byte; chunk:
# its row of the origins.
BLOCK = np.dtype(
    [("source", "<i8"), ("first", "<i8"), ("bytes", "<i4"), ("chunk", "<i4"), ("typesize", "<i4"), ("shuffle", "<i4")]
)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where blocks go.

    chunk      : the samples of a chunk along each axis, at most `AXES`
    fill_value : of samples that are not stored
    longest    : the most bytes of a block
    """

    chunk: tuple[int, ...]
    fill_value: Any
    longest: int


class ZstdRoom(NamedTuple):
    """What Zstandard frames need while they are decoded.

    literals  : bytes of those that are encoded or repeated
    sequences : and one more for each block that may have them
    """

    frames: int = 0
    blocks: int = 0
    literals: int = 0
    sequences: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch memory: three counts, sequences, structs zstd::Part, first blocks, and literals, read in
        words."""
        return 24 + 8 * self.sequences + ZSTD_PART_BYTES * self.blocks + 4 * self.frames + self.literals + 4
