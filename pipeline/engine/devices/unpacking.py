"""Decodes the packed blocks of a chunk on a GPU: kernels decode their streams and place their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import AXES, BLOCK
from kernels.blocks.cuda import Streams, add_rows, copy_streams, decode_lz4, decode_zlib, decode_zstd, place
from pipeline.codecs.packed import PackedBlocks

_WORD = 8
NO_FAULT = 0x7F7F7F7F


class Unpacking:
    """One chunk's blocks on their way; made before they are uploaded, on the stream that is current then."""

    def __init__(self, packed: PackedBlocks, memory: NDArray[np.uint8], device: Any) -> None:
        """`memory`: with the packed blocks; `device`: the device memory that they are uploaded to."""
        import cupy

        self._packed, self._device = packed, device
        self._decoded = cupy.empty(max(packed.decoded_bytes, 1), cupy.uint8)
        self._scratch = cupy.empty(packed.room.nbytes if packed.room.frames else 0, cupy.uint8)
        streams = packed.streams(memory)
        streams[0] += np.uint64(device.ptr)
        streams[2] += np.uint64(self._decoded.data.ptr)

    def launch(self, out: Any, stream: Any) -> Any:
        """Enqueue the decoding into `out`, the chunk's array; returns an int32 on the device: `NO_FAULT`, or which
        stream is damaged."""
        import cupy

        packed, count = self._packed, self._packed.encoded
        fault = cupy.empty((), cupy.int32)
        cupy.cuda.runtime.memsetAsync(fault.data.ptr, NO_FAULT & 0xFF, fault.nbytes, stream.ptr)
        if packed.codec == "zstd":
            decode_zstd(self._streams(0), packed.room, self._scratch, fault, stream)
        else:
            decode = decode_zlib if packed.codec == "zlib" else decode_lz4
            decode(self._streams(0), count, fault, stream)
        copy_streams(self._streams(count), packed.counts[0] - count, packed.longest_stored, stream)
        target = packed.view(out if packed.target is None else out[packed.target])
        blocks = self._bytes(packed.tables[1], BLOCK.itemsize * packed.counts[1])
        origins = self._bytes(packed.tables[2], 4 * AXES * packed.counts[2])
        if packed.differences is not None:
            add_rows(self._decoded, blocks, target.itemsize, packed.differences, packed.places.longest, stream)
        place(self._decoded, blocks, origins, target, packed.places, stream=stream)
        if packed.complete is not None:
            packed.complete(out)
        return fault

    def _streams(self, first: int) -> Streams:
        start = self._device.ptr + self._packed.tables[0]
        row = _WORD * self._packed.counts[0]
        return Streams(*(start + row * number + _WORD * first for number in range(4)))

    def _bytes(self, first: int, nbytes: int) -> Any:
        import cupy

        return cupy.ndarray((nbytes,), cupy.uint8, memptr=self._device + first)
