"""Decodes packed blocks and encodes chunks by the libraries of the CPU codecs, as a GPU does by kernels."""

from __future__ import annotations

import functools
import struct

import imagecodecs
import numpy as np

from kernels.blocks import BITS, BYTES, FILL, NO_SHUFFLE
from pipeline.codecs.blosc import BloscLayout
from pipeline.engine.devices.device import CpuDevice


def place(decoded, blocks, origins, region, places):
    """As `kernels.blocks.cuda.place`, on NumPy arrays."""
    for block in blocks:
        count, first = int(block["bytes"]) // region.itemsize, int(block["first"]) // region.itemsize
        if block["source"] == FILL:
            samples = np.full(count, places.fill_value, region.dtype)
        else:
            stored = decoded[block["source"] : block["source"] + block["bytes"]]
            samples = unshuffled(stored, int(block["typesize"]), int(block["shuffle"])).view(region.dtype)
        found = np.stack(np.unravel_index(np.arange(first, first + count), places.chunk), -1) + origins[block["chunk"]]
        inside = np.all((found >= 0) & (found < region.shape), axis=1)
        region[tuple(found[inside].T)] = samples[inside]


def unshuffled(stored, typesize, shuffle):
    """A block's bytes in the order of its samples."""
    count = len(stored) // typesize
    if shuffle == NO_SHUFFLE or (shuffle == BITS and count % 8):
        return stored.copy()
    head, rest = stored[: count * typesize], stored[count * typesize :]
    if shuffle == BYTES:
        ordered = head.reshape(typesize, count).T
    else:
        bits = np.unpackbits(head, bitorder="little").reshape(typesize, 8, count)
        ordered = np.packbits(bits.transpose(2, 0, 1), axis=-1, bitorder="little")
    return np.concatenate([ordered.reshape(-1), rest])


_DECODE = {
    "lz4": functools.partial(imagecodecs.lz4_decode, header=False),
    "zlib": imagecodecs.zlib_decode,
    "zstd": imagecodecs.zstd_decode,
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
                stream = _DECODE[packed.codec](stream, out=size)
            except Exception:  # of any library
                return False
        if len(stream) != size:
            return False
        assert to + size <= len(decoded)
        decoded[to : to + size] = np.frombuffer(stream, np.uint8)
    blocks, origins = packed.blocks(memory), packed.origins(memory)
    if packed.differences is not None:
        for first, size in blocks[blocks["source"] >= 0][["source", "bytes"]].tolist():
            rows = decoded[first : first + size].view(out.dtype).reshape(-1, *packed.differences)
            rows[...] = np.cumsum(rows, axis=1, dtype=out.dtype)
    target = packed.view(out if packed.target is None else out[packed.target])
    assert blocks["bytes"].max() == packed.places.longest
    place(decoded, blocks, origins[:, origins.shape[1] - target.ndim :], target, packed.places)
    if packed.complete is not None:
        packed.complete(out)
    return True


_ENCODE = {
    "lz4": lambda data: imagecodecs.lz4_encode(data, header=False),
    "zstd": lambda data: imagecodecs.zstd_encode(data, 1),
}


def packed_chunk(samples, codec):
    """The Blosc chunk of an array, in blocks and streams as a GPU encodes them."""
    layout = BloscLayout(nbytes=samples.nbytes, typesize=samples.itemsize)
    raw = np.ascontiguousarray(samples).reshape(-1).view(np.uint8)
    blocks = [raw[at : at + layout.block_bytes] for at in range(0, len(raw), layout.block_bytes)]
    shuffled = np.concatenate([block.reshape(-1, samples.itemsize).T.reshape(-1) for block in blocks])
    assert len(blocks) == layout.blocks
    table, streams, at = [], b"", 16 + 4 * len(blocks)
    for first, size in layout.streams():
        if first % layout.block_bytes == 0:
            table.append(at + len(streams))
        stream = shuffled[first : first + size].tobytes()
        encoded = bytes(_ENCODE[codec](stream))
        stream = encoded if len(encoded) < size else stream
        streams += struct.pack("<i", len(stream)) + stream
    total, flags = at + len(streams), layout.flags(codec)
    if total >= len(raw) + 16:
        total, flags, table, streams = len(raw) + 16, flags | 2, [], raw.tobytes()
    header = struct.pack("<4B3I", 2, 1, flags, samples.itemsize, len(raw), layout.block_bytes, total)
    return np.frombuffer(header + struct.pack(f"<{len(table)}i", *table) + streams, np.uint8)


def pack(form, samples):
    """The encoded chunks of a region."""
    region = form.view(samples)
    found = []
    for origin in form.origins[:, form.origins.shape[1] - region.ndim :].tolist():
        chunk = np.zeros(form.chunk, region.dtype)
        part = region[tuple(slice(first, first + n) for first, n in zip(origin, form.chunk, strict=True))]
        chunk[tuple(map(slice, part.shape))] = part
        found.append(packed_chunk(chunk, form.codec))
    return found


class Unpacking(CpuDevice):
    """A CPU device that is handed packed blocks, and hands over encoded chunks. `chunks`, `encoded`: of the plan, those
    that it decoded and encoded."""

    decodes, encodes = True, frozenset({"lz4", "zstd"})

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.chunks, self.encoded = [], []

    def unpack(self, chunk, slot):
        out = np.empty(chunk.inputs[0].shape, chunk.inputs[0].dtype)
        if not unpack(slot.packed, slot.host_input, out):
            return False
        self.chunks.append(chunk.index)
        slot.inputs(chunk)[0][...] = out
        return True

    def finish(self, chunk, slot, record):
        super().finish(chunk, slot, record)
        slot.chunks = None
        if slot.form is not None:
            slot.chunks = pack(slot.form, slot.outputs(chunk)[0])
            self.encoded.append(chunk.index)
