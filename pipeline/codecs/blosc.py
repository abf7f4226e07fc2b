"""Checks Blosc chunks before decoding: Blosc's decoder trusts their header, so a damaged one crashes the process.

Source: c-blosc 1.21, README_CHUNK_FORMAT.rst.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import counted

_VERSION = 2
_STORED = 2  # bit of the flags: not compressed
_HEADER = struct.Struct("<4B3I")
_HEADER_BYTES = _HEADER.size


def check_blosc(data: NDArray[np.uint8]) -> int:
    """The decoded bytes that the header declares. ValueError unless it and the table of blocks lie within the data."""
    if len(data) < _HEADER_BYTES:
        raise ValueError(f"too short for Blosc: {counted(len(data), 'byte')}")
    version, _, flags, item_bytes, nbytes, block_bytes, stored = _HEADER.unpack_from(data.data)
    if version != _VERSION or stored != len(data) or item_bytes == 0:
        raise ValueError(f"a Blosc header of {stored:,} bytes for {len(data):,}")
    if flags & _STORED:
        if stored != nbytes + _HEADER_BYTES:
            raise ValueError("a damaged Blosc header")
        return int(nbytes)
    if nbytes == 0:
        return 0
    blocks = -(-nbytes // block_bytes) if 0 < block_bytes <= nbytes else 0
    end = _HEADER_BYTES + 4 * blocks
    if blocks == 0 or end > len(data):
        raise ValueError("a damaged Blosc header")
    starts = data[_HEADER_BYTES:end].view("<i4").tolist()  # a few: min and max of arrays take longer
    if min(starts) < end or max(starts) > len(data) - 4:
        raise ValueError("a damaged Blosc table of blocks")
    return int(nbytes)
