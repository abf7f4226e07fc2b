"""Checks Blosc chunks before decoding: Blosc's decoder trusts their header, so a damaged one crashes the process.

Source: c-blosc 1.21, README_CHUNK_FORMAT.rst.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import counted

_VERSION = 2
_STORED = 2  # bit of the flags: not compressed
_HEADER_BYTES = 16
_LARGEST_BYTES = 1 << 30


def check_blosc(data: NDArray[np.uint8]) -> None:
    """ValueError unless the header and the table of blocks lie within the data."""
    if len(data) < _HEADER_BYTES:
        raise ValueError(f"too short for Blosc: {counted(len(data), 'byte')}")
    version, _, flags, item_bytes, nbytes, block_bytes, stored = struct.unpack("<4B3I", data[:_HEADER_BYTES].tobytes())
    if version != _VERSION or stored != len(data) or item_bytes == 0 or nbytes > _LARGEST_BYTES:
        raise ValueError(f"a Blosc header of {stored:,} bytes for {len(data):,}")
    if flags & _STORED:
        if stored != nbytes + _HEADER_BYTES:
            raise ValueError("a damaged Blosc header")
        return
    if nbytes == 0:
        return
    blocks = -(-nbytes // block_bytes) if 0 < block_bytes <= nbytes else 0
    end = _HEADER_BYTES + 4 * blocks
    if blocks == 0 or end > len(data):
        raise ValueError("a damaged Blosc header")
    starts = np.frombuffer(data, "<i4", blocks, _HEADER_BYTES)
    if starts.min() < end or starts.max() > len(data) - 4:
        raise ValueError("a damaged Blosc table of blocks")


@functools.cache
def use_checked_blosc() -> None:
    """Make zarr check Blosc chunks before decoding, through zarr's and numcodecs' codec registries."""
    import numcodecs  # type: ignore[import-untyped]
    import zarr
    from zarr.codecs import BloscCodec
    from zarr.registry import register_codec

    class CheckedBlosc(BloscCodec):  # type: ignore[misc] # zarr is imported only when it is needed
        async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
            check_blosc(chunk_bytes.as_numpy_array())
            return await super()._decode_single(chunk_bytes, chunk_spec)

    class CheckedNumcodecsBlosc(numcodecs.Blosc):  # type: ignore[misc]
        codec_id = "blosc"

        def decode(self, buf: Any, out: Any = None) -> Any:
            check_blosc(np.frombuffer(buf, np.uint8))
            return super().decode(buf, out)

    register_codec("blosc", CheckedBlosc)
    zarr.config.set({"codecs.blosc": f"{CheckedBlosc.__module__}.{CheckedBlosc.__qualname__}"})
    numcodecs.register_codec(CheckedNumcodecsBlosc)
