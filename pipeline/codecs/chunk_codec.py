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

_CHECKSUM_BYTES = 4
STAGES = ("blosc", "crc32c", "gzip", "lz4", "zlib", "zstd")


@dataclass(frozen=True)
class Stage:
    """One codec from bytes to bytes, by its name in `STAGES`.

    options : of the encoder, under the names of Zarr v3: level; of blosc: cname, clevel, shuffle (0, 1 or 2), typesize
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

    def decode(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        """The chunk, in native byte order. Raises an exception of any type if the data are damaged or too large."""
        found: Any = data
        for number, stage in reversed(list(enumerate(self.stages))):
            if stage.name == "crc32c":
                found = _checked(found)
            elif number == 0:
                memory = np.empty(self.nbytes, np.uint8)
                decode_into(stage.name, found, memory)
                found = memory
            else:
                found = np.frombuffer(decode(stage.name, found, self.limits[number]), np.uint8)
        if len(found) != self.nbytes:
            raise ValueError(f"it decodes to {len(found):,} bytes instead of {self.nbytes:,}")
        stored: NDArray[Any] = found.view(self.dtype).reshape([self.shape[axis] for axis in self.order])
        return stored.transpose(np.argsort(self.order)).astype(self.dtype.newbyteorder("="), copy=False)

    def encode(self, chunk: NDArray[Any]) -> Any:
        """The bytes (as a buffer) of a chunk of this shape, of any strides, in native byte order."""
        stored = np.ascontiguousarray(chunk.transpose(self.order), self.dtype)
        found: Any = stored.reshape(-1).view(np.uint8)
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


def _encoded(stage: Stage, data: Any) -> Any:
    import imagecodecs

    options = stage.options
    if stage.name == "crc32c":
        return bytes(data) + checksum(data)
    if stage.name == "blosc":
        return imagecodecs.blosc_encode(
            data, options["clevel"], compressor=options["cname"], shuffle=options["shuffle"],
            typesize=options["typesize"], numthreads=1,
        )  # fmt: skip
    return getattr(imagecodecs, f"{stage.name}_encode")(data, options["level"])
