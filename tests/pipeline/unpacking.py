"""Decodes packed blocks by the processor's libraries, as a GPU does by nvCOMP and kernels."""

from __future__ import annotations

import imagecodecs
import numpy as np

from kernels.blocks import place
from pipeline.engine.devices.device import CpuDevice

_DECODE = {
    "lz4": lambda data, size: imagecodecs.lz4_decode(data, out=size, header=False),
    "zstd": lambda data, size: imagecodecs.zstd_decode(data, out=size),
    "deflate": lambda data, size: imagecodecs.deflate_decode(data, out=size, raw=True),
}


def unpack(packed, memory, out):
    """Fill a chunk's array; False if a stream is damaged. `memory` is used up to `packed.nbytes`."""
    memory = memory[: packed.nbytes].copy()  # nothing beyond is uploaded
    decoded = np.full(packed.decoded_bytes, 0xA5, np.uint8)
    for number, (at, length, to, size) in enumerate(packed.streams(memory).T.tolist()):
        stream = memory[at : at + length].tobytes()
        assert len(stream) == length
        if number < packed.encoded:
            try:
                stream = _DECODE[packed.codec](stream, size)
            except Exception:  # of any library
                return False
        if len(stream) != size:
            return False
        assert to + size <= len(decoded)
        decoded[to : to + size] = np.frombuffer(stream, np.uint8)
    blocks, origins = packed.blocks(memory), packed.origins(memory)
    target = packed.view(out if packed.target is None else out[packed.target])
    assert blocks["bytes"].max() == packed.places.longest
    place(decoded, blocks, origins[:, origins.shape[1] - target.ndim :], target, packed.places)
    if packed.complete is not None:
        packed.complete(out)
    return True


class Unpacking(CpuDevice):
    """A CPU device that is handed packed blocks. `chunks`: those that it was."""

    decodes = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.chunks = []

    def process(self, job, chunk, slot, record):
        packed, slot.packed = slot.packed, None
        if packed is not None:
            out = np.empty(chunk.inputs[0].shape, chunk.inputs[0].dtype)
            if unpack(packed, slot.host_input, out):
                self.chunks.append(chunk.index)
                slot.inputs(chunk)[0][...] = out
            else:
                job.read(chunk, slot.inputs(chunk))
        super().process(job, chunk, slot, record)
