"""How an array's chunk becomes bytes and back: axes, byte order, then compressors and checksums, as Zarr describes it.

Decoding never allocates more than the chunk's declared size; no call holds the interpreter's lock for its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.bounded import decode, decode_into, encoded_limit
from pipeline.codecs.scratch import scratch

_CHECKSUM_BYTES = 4
_BLOSC_OVERHEAD_BYTES = 16  # of its header: data that do not shrink are stored as they are
# How the loops of `loops`, which is imported only to read or write, have chunks; the last are written as they are.
RAW, BLOSC, ENCODED = 0, 1, 2
STAGES = ("blosc", "crc32c", "gzip", "lz4", "zlib", "zstd")


@dataclass(frozen=True)
class Stage:
    """One codec from bytes to bytes, by its name in `STAGES`.

    options : of the encoder, under the names of Zarr v3: level; of blosc: cname, clevel, shuffle (0, 1 or 2), typesize,
              and blocksize, by default Blosc's own choice
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ChunkCodec:
    """The encoding of chunks of one shape.

    shape  : of a chunk
    dtype  : as stored, in either byte order; decoded chunks are in native order
    order  : the chunk's axes in stored order
    stages : in the order of encoding
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...]
    stages: tuple[Stage, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a decoded chunk."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_raw(self) -> bool:
        """Whether the bytes are the samples in C order."""
        return not self.stages and self.order == tuple(range(len(self.shape)))

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """The most bytes before each stage, and of the encoded chunk: more are refused."""
        found = [self.nbytes]
        for stage in self.stages:
            found.append(found[-1] + _CHECKSUM_BYTES if stage.name == "crc32c" else encoded_limit(found[-1]))
        return tuple(found)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the decoded bytes are the chunk as it is."""
        return self.dtype.isnative and self.order == tuple(range(len(self.shape)))

    def decode(self, data: NDArray[np.uint8], memory: NDArray[np.uint8] | None = None) -> NDArray[Any]:
        """The chunk, in native byte order. Raises an exception of any type if the data are damaged or too large.

        memory : of `nbytes`, where the chunk is made if it need not be moved; None: new memory
        """
        found: Any = data
        for number in range(len(self.stages) - 1, -1, -1):
            name = self.stages[number].name
            if name == "crc32c":
                found = _checked(found)
            elif number == 0:
                room = np.empty(self.nbytes, np.uint8) if memory is None or not self.is_plain else memory
                decode_into(name, found, room)
                found = room
            else:
                found = np.frombuffer(decode(name, found, self.limits[number]), np.uint8)
        if len(found) != self.nbytes:
            raise ValueError(f"it decodes to {len(found):,} bytes instead of {self.nbytes:,}")
        if self.is_plain:
            if np.may_share_memory(found, data):  # data's memory may be used again
                found = found.copy()
            plain: NDArray[Any] = found.view(self.dtype).reshape(self.shape)
            return plain
        stored: NDArray[Any] = found.view(self.dtype).reshape([self.shape[axis] for axis in self.order])
        return stored.transpose(np.argsort(self.order)).astype(self.dtype.newbyteorder("="))

    def encode(self, chunk: NDArray[Any]) -> NDArray[np.uint8]:
        """The bytes of a chunk of this shape, of any strides, in native byte order.

        They are valid until this thread's next call, or as long as the chunk.
        """
        stored = chunk.transpose(self.order)
        if not stored.flags.c_contiguous or stored.dtype != self.dtype:
            samples = scratch("samples", self.nbytes).view(self.dtype).reshape(stored.shape)
            samples[...] = stored
            stored = samples
        found: NDArray[np.uint8] = stored.reshape(-1).view(np.uint8)
        for stage in self.stages:
            found = _encoded(stage, found)
        return found


def checksum(data: Any) -> bytes:
    """CRC-32C of the data, as stored after them."""
    import google_crc32c

    return int(google_crc32c.value(bytes(data))).to_bytes(_CHECKSUM_BYTES, "little")


def _checked(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if len(data) < _CHECKSUM_BYTES or checksum(data[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:].tobytes():
        raise ValueError("its checksum (crc32c) is wrong")
    return data[:-_CHECKSUM_BYTES]


def _encoded(stage: Stage, data: Any) -> NDArray[np.uint8]:
    import imagecodecs

    options = stage.options
    if stage.name == "crc32c":
        return np.frombuffer(data.tobytes() + checksum(data), np.uint8)
    if stage.name == "blosc":
        room: Any = scratch("encoded", len(data) + _BLOSC_OVERHEAD_BYTES)
        size = options["typesize"]
        samples = data.view(f"V{size}") if len(data) % size == 0 else data  # imagecodecs shuffles items of the array
        found: Any = imagecodecs.blosc_encode(
            samples, options["clevel"], compressor=options["cname"], shuffle=options["shuffle"],
            typesize=size, blocksize=options.get("blocksize", 0), numthreads=1, out=room,
        )  # fmt: skip
        encoded: NDArray[np.uint8] = room[: len(found)]
        return encoded
    return np.frombuffer(getattr(imagecodecs, f"{stage.name}_encode")(data, options["level"]), np.uint8)
