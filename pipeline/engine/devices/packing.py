"""Encodes the chunks of an output on a GPU: kernels shuffle them, encode LZ4 or Zstandard and write Blosc chunks."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from kernels.blocks import BLOCK, BYTES, NO_SHUFFLE, Places
from kernels.blocks.cuda import ZSTD_SCRATCH_BYTES, Packed, Packing, Streams, cut, encode_lz4, encode_zstd, pack_chunks
from pipeline.codecs.blosc import BloscLayout
from pipeline.codecs.packed import ChunkForm

_ALIGNMENT_BYTES = 256
# Zstandard's scratch memory is for this many streams, about as many as a GPU holds. Odd, so that a warp's next stream
# has another byte of the samples: the high bytes take longer.
_STREAMS_AT_ONCE = 1055
# A plan has a few shapes of regions.
_MOST_ORIGINS = 64


def table_bytes(chunks: int) -> int:
    """Bytes before the packed chunks: int64 sizes of each, and of all or -1."""
    return -(-8 * (chunks + 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _Memory:
    """Device memory and tables for at most `chunks` chunks of one form."""

    def __init__(self, layout: BloscLayout, chunks: int) -> None:
        import cupy

        self.layout, self.chunks = layout, chunks
        self.stride = -(-layout.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        streams = layout.streams()
        self.per_chunk, longest = len(streams), max(size for _, size in streams)
        count = self.per_chunk * chunks
        self.room = -(-longest // 16) * 16
        self.shuffled = cupy.empty(self.stride * chunks, cupy.uint8)
        self.encoded = cupy.empty(self.room * count, cupy.uint8)
        self.statuses, self.offsets = cupy.zeros(count, cupy.int32), cupy.empty(count, cupy.uint64)
        self.starts = cupy.empty(chunks, cupy.int64)
        firsts = np.arange(chunks, dtype=np.uint64)[:, np.newaxis] * np.uint64(self.stride)
        offsets, sizes = np.array(streams, np.uint64).T
        table = np.zeros((4, count), np.uint64)
        table[0] = (firsts + offsets).reshape(-1) + np.uint64(self.shuffled.data.ptr)
        table[1] = np.tile(sizes, chunks)
        table[2] = np.arange(count, dtype=np.uint64) * np.uint64(self.room) + np.uint64(self.encoded.data.ptr)
        self.table = cupy.asarray(table)
        blocks = np.zeros((chunks, layout.blocks), BLOCK)
        blocks["first"] = np.arange(layout.blocks) * layout.block_bytes
        blocks["source"] = blocks["first"] + firsts.astype(np.int64)
        blocks["bytes"] = np.minimum(layout.block_bytes, layout.nbytes - blocks["first"])
        blocks["chunk"] = np.arange(chunks)[:, np.newaxis]
        blocks["typesize"], blocks["shuffle"] = layout.typesize, BYTES if layout.typesize > 1 else NO_SHUFFLE
        self.blocks = cupy.asarray(blocks.reshape(-1).view(np.uint8))

    @cached_property
    def scratch(self) -> Any:
        """For Zstandard."""
        import cupy

        at_once = min(len(self.statuses), _STREAMS_AT_ONCE)
        return cupy.empty(at_once * ZSTD_SCRATCH_BYTES, cupy.uint8)


class Packer:
    """Encodes one region after another, all on one stream; its memory is kept for the next."""

    def __init__(self) -> None:
        self._memories: dict[BloscLayout, _Memory] = {}
        self._origins: dict[bytes, Any] = {}

    def nbytes(self, form: ChunkForm, itemsize: int) -> int:
        """About the memory that a region takes while it is encoded."""
        scratch = _STREAMS_AT_ONCE * ZSTD_SCRATCH_BYTES if form.codec == "zstd" else 0
        return scratch + 2 * len(form.origins) * int(np.prod(form.chunk)) * itemsize

    def launch(self, form: ChunkForm, samples: Any, out: Any, nbytes: int, stream: Any) -> None:
        """Enqueue the encoding of a region's samples into `out`, device memory of `nbytes`: the table, then chunks."""
        region, count = form.view(samples), len(form.origins)
        layout = BloscLayout(nbytes=int(np.prod(form.chunk)) * region.itemsize, typesize=region.itemsize)
        memory = self._memory(layout, count)
        origins = self._origins_of(form)
        places = Places(chunk=form.chunk, fill_value=0, longest=layout.block_bytes)
        cut(region, memory.blocks[: count * layout.blocks * BLOCK.itemsize], origins, memory.shuffled, places,
            stream=stream)  # fmt: skip
        streams = Streams(*(row.data.ptr for row in memory.table))
        if form.codec == "zstd":
            encode_zstd(streams, count * memory.per_chunk, memory.scratch, stream)
        else:
            encode_lz4(streams, count * memory.per_chunk, stream)
        first = table_bytes(count)
        packing = Packing(
            nbytes=layout.nbytes, capacity=max(nbytes - first, 0), room=memory.room, chunks=count,
            streams=memory.per_chunk, blocks=layout.blocks, block_bytes=layout.block_bytes, splits=layout.splits,
            typesize=layout.typesize,
            flags=layout.flags(form.codec),
        )  # fmt: skip
        packed = Packed(
            shuffled=memory.shuffled.data.ptr, encoded=memory.encoded.data.ptr, encoded_bytes=streams.target_bytes,
            statuses=memory.statuses.data.ptr, offsets=memory.offsets.data.ptr, starts=memory.starts.data.ptr,
            sizes=out.ptr, out=out.ptr + first, stride=memory.stride,
        )  # fmt: skip
        pack_chunks(region, origins, places, packing, packed, stream=stream)

    def _memory(self, layout: BloscLayout, chunks: int) -> _Memory:
        memory = self._memories.get(layout)
        if memory is None or memory.chunks < chunks:
            self._memories.clear()
            memory = self._memories[layout] = _Memory(layout, chunks)
        return memory

    def _origins_of(self, form: ChunkForm) -> Any:
        import cupy

        key = form.origins.tobytes()
        if key not in self._origins:
            if len(self._origins) == _MOST_ORIGINS:
                self._origins.clear()
            self._origins[key] = cupy.asarray(form.origins)
        return self._origins[key]
