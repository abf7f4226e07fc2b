"""Blocks of compressed files to and from the samples of a region, on NumPy arrays (CPU) and CuPy arrays (CUDA).

A file's chunk is an array in C order, cut into blocks of bytes that may be shuffled as by Blosc. `place` undoes the
shuffle and moves each sample to its place in a region; what lies outside the region is skipped.

Source: c-blosc 1.21, README_CHUNK_FORMAT.rst.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["AXES", "BITS", "BLOCK", "BYTES", "FILL", "NO_SHUFFLE", "Places", "place"]

AXES = 6
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


def place(decoded: Any, blocks: Any, origins: Any, region: Any, places: Places, *, stream: Any = None) -> None:
    """Fill `region` from blocks.

    decoded : uint8, the blocks' bytes
    blocks  : (n,) of `BLOCK`; on a GPU uint8 of the same bytes
    origins : int32 (chunks, axes): each chunk's first sample in the region, possibly negative
    region  : of any strides, of 1, 2, 4 or 8 bytes a sample; whole samples make a block
    stream  : CUDA stream to launch on; default CuPy's current stream
    """
    if isinstance(region, np.ndarray):
        from kernels.blocks import cpu

        cpu.place(decoded, blocks, origins, region, places)
    else:
        from kernels.blocks import cuda

        cuda.place(decoded, blocks, origins, region, places, stream=stream)


def fill_bits(places: Places, dtype: np.dtype[Any]) -> int:
    """The fill value's bits."""
    value: NDArray[Any] = np.array(places.fill_value, dtype)
    return int.from_bytes(value.tobytes(), "little")
