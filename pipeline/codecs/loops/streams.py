"""Compiled loops over what a GPU is to decode: where the streams of Blosc chunks lie, and how much room Zstandard
frames need.

Sources: c-blosc 1.21, README_CHUNK_FORMAT.rst; RFC 8878.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled
from pipeline.codecs.blosc import HEADER_BYTES
from pipeline.codecs.loops.system import Memory, Table


@compiled
def _number(memory: Any, at: Any, nbytes: Any) -> Any:
    """The number in little-endian bytes, zeros beyond the memory."""
    found = np.int64(0)
    for place in range(min(nbytes, len(memory) - at)):
        found |= np.int64(memory[at + place]) << (8 * place)
    return found


@compiled
def blosc_streams(
    memory: Memory, chunks: Table, starts: Table, targets: Table, longest: int, streams: Table, blocks: Table
) -> tuple[int, int]:
    """Find the streams of blocks of Blosc chunks; returns how many are encoded and stored, (-1, -1) if one is damaged.

    chunks  : (chunks, 12): its number, decoded bytes, bytes of a block and of a sample, the shuffle, whether blocks are
              split, and where its table ends; where the chunk begins and ends in the memory, its first block, how many,
              and whether its table is in the memory: else they begin as `starts` says
    targets : of each chunk's first block, among the decoded bytes
    longest : decoded bytes of a stream
    streams : (4, streams): see `PackedBlocks.streams`; encoded ones from the front, stored ones from the back
    blocks  : (blocks, 4): becomes `kernels.blocks.BLOCK`
    """
    block, encoded, stored = 0, 0, 0
    for row in range(len(chunks)):
        chunk, nbytes, block_bytes, typesize, shuffle, is_split = chunks[row, :6]
        table_end, at, end, first, count, has_table = chunks[row, 6:]
        for number in range(first, first + count):
            begin, target = starts[block], targets[row] + (number - first) * block_bytes
            if has_table:
                begin = _number(memory, at + HEADER_BYTES + 4 * number, 4)
            size = min(block_bytes, nbytes - number * block_bytes)
            splits = typesize if is_split and size == block_bytes else 1
            decoded = size // splits
            if size % splits or decoded > longest or begin < table_end:
                return -1, -1
            blocks[block, 0], blocks[block, 1] = target, number * block_bytes
            blocks[block, 2], blocks[block, 3] = size | chunk << 32, typesize | shuffle << 32
            block += 1
            for split in range(splits):
                begin += 4
                if begin > end:
                    return -1, -1
                length = _number(memory, at + begin - 4, 4)
                if length == 0 or length > decoded or begin + length > end:
                    return -1, -1
                if length == decoded:
                    stored += 1
                    place = streams.shape[1] - stored
                else:
                    place = encoded
                    encoded += 1
                streams[0, place], streams[1, place] = at + begin, length
                streams[2, place], streams[3, place] = target + split * decoded, decoded
                begin += length
    return encoded, stored


@compiled
def zstd_room(memory: Memory, frames: Table) -> Table:
    """The blocks of Zstandard frames, bytes of literals that are encoded or repeated, and sequences, with one more for
    each block that may have them: as `scan_zstd` counts them in frames that it accepts.

    frames : (2, frames): where each begins, and its bytes
    """
    blocks = literals = sequences = np.int64(0)
    for frame in range(frames.shape[1]):
        at, end = frames[0, frame], frames[0, frame] + frames[1, frame]
        flags = _number(memory, at + 4, 1)
        form, is_single = flags >> 6, (flags >> 5) & 1
        at += 6 - is_single + ((1 << form) if form > 0 or is_single else 0)
        is_last = False
        while not is_last and at + 3 <= end:
            head = _number(memory, at, 3)
            is_last, kind, nbytes, at = head & 1 == 1, (head >> 1) & 3, head >> 3, at + 3
            blocks += 1
            if kind == 2 and at + nbytes <= end:
                head = _number(memory, at, 5)
                form, is_encoded = (head >> 2) & 3, head & 2 > 0
                if is_encoded:
                    size, bits = (3, 10) if form < 2 else (4, 14) if form == 2 else (5, 18)
                    count = (head >> 4) & ((1 << bits) - 1)
                    stored = (head >> (4 + bits)) & ((1 << bits) - 1)
                else:
                    size = 3 if form == 3 else 2 if form == 1 else 1
                    count = (head & ((1 << (8 * size)) - 1)) >> (3 if size == 1 else 4)
                    stored = np.int64(1) if head & 1 else count
                if head & 3:
                    literals += count
                at_sequences = at + size + stored
                count = _number(memory, at_sequences, 1)
                if count == 255:
                    count = 0x7F00 + _number(memory, at_sequences + 1, 2)
                elif count > 127:
                    count = (count - 128) << 8 | _number(memory, at_sequences + 1, 1)
                sequences += count + 1
            at += 1 if kind == 1 else nbytes
    return np.array([blocks, literals, sequences])
