"""The content of a gzip file by position, in bounded memory and without a file beside it.

The first read of a place inflates everything before it once, and keeps the decompressor's state (about 40 KiB) at the
start of each block, from which a block that is no longer held is inflated again (the idea of zlib's example zran.c).

Source: RFC 1952. A file may have several members.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.block_cache import BlockCache
from pipeline.errors import InputError
from pipeline.storage.positional import PositionalFile

MAGIC = b"\x1f\x8b"
_GZIP = 16 + zlib.MAX_WBITS
_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 1024
_STATE_BYTES = 44 << 10
_PIECE_BYTES = 128 << 10
_LARGEST_EXPANSION = 1032


def start_of(file: PositionalFile, nbytes: int) -> bytes:
    """Up to `nbytes` from the start of a file's content, whether or not it is compressed."""
    head = file.head(min(nbytes, _PIECE_BYTES))
    if not head.startswith(MAGIC):
        return head if len(head) < _PIECE_BYTES else file.head(nbytes)
    found, place, stream = bytearray(), 0, zlib.decompressobj(_GZIP)
    try:
        while len(found) < nbytes and not stream.eof and (data := file.head(_PIECE_BYTES, place)):
            found += stream.decompress(data, nbytes - len(found))
            place += len(data) - len(stream.unconsumed_tail)
    except zlib.error as exc:
        raise InputError(f"{file.path}: corrupt: does not decompress ({exc}); copy it again") from exc
    return bytes(found)


def content_of(file: PositionalFile, nbytes: int) -> PositionalFile:
    """The file itself, or what a compressed one of `nbytes` holds; closing it closes the file."""
    return InflatedFile(file, nbytes) if file.head(len(MAGIC)) == MAGIC else file


@dataclass(frozen=True)
class _State:
    """The decompressor at the start of a block, and the file's next byte."""

    stream: Any
    place: int


class InflatedFile(PositionalFile):
    """The first `size` bytes of a gzip file's content, with the methods of an open file."""

    def __init__(self, file: PositionalFile, size: int) -> None:
        """Raises InputError if the file is too short for that many bytes."""
        self.path = file.path
        self._file, self._size = file, size
        if size > _LARGEST_EXPANSION * file.size:
            raise InputError(
                f"{self.path}: truncated: its header promises {size:,} bytes, which {file.size:,} compressed ones "
                "cannot hold; copy or export it again"
            )
        self._block_bytes = max(_BLOCK_BYTES, -(-size // _MOST_BLOCKS))
        self._states = [_State(zlib.decompressobj(_GZIP), 0)]
        self._cache = BlockCache(row_bytes=size, block_bytes=self._block_bytes)

    @property
    def size(self) -> int:
        return self._size

    def hold_at_most(self, budget_bytes: int) -> int:
        """Bound the inflated bytes kept between calls; returns the bound in force, with the decompressor's states."""
        states = -(-self._size // self._block_bytes) * _STATE_BYTES
        return min(self._cache.hold_at_most(max(budget_bytes - states, 0)), self._size) + states

    def read_runs(self, runs: Iterable[tuple[int, memoryview]]) -> None:
        for offset, into in runs:
            done = 0
            while done < len(into):
                number, start = divmod(offset + done, self._block_bytes)
                done += self._copy(number, start, into[done:])

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        """The file closes itself."""

    def _copy(self, number: int, start: int, into: memoryview) -> int:
        """Copy what the block has from `start`; returns the number of bytes."""

        def look(block: NDArray[np.uint8]) -> int:
            part = block[start : start + len(into)]
            into[: len(part)] = part.data
            return len(part)

        while len(self._states) <= number:  # in order, so that each block is inflated once
            self._use(len(self._states) - 1, len)
        copied = self._use(number, look)
        if not copied:
            raise ValueError(f"{self.path}: read past its {self._size} bytes")
        return copied

    def _use(self, number: int, look: Any) -> int:
        found = self._cache.use(
            (number,), self._block_bytes, lambda memory: self._inflate(number, memory), look, wait=True
        )
        assert found is not None, "it was waited for"
        return int(found)

    def _inflate(self, number: int, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        state = self._states[number]
        block = memory[: self._size - number * self._block_bytes]
        try:
            after = self._fill(state, block.data, is_last=(number + 1) * self._block_bytes >= self._size)
        except zlib.error as exc:
            raise InputError(f"{self.path}: corrupt: does not decompress ({exc}); copy or export it again") from exc
        if number + 1 == len(self._states):  # no other thread inflates this block
            self._states.append(after)
        return block

    def _fill(self, state: _State, into: memoryview, *, is_last: bool) -> _State:
        """Fill a block; the last one with what follows, up to the checksum."""
        stream, place, done = state.stream.copy(), state.place, 0
        while done < len(into):
            stream, place, data = self._further(stream, place, len(into) - done)
            into[done : done + len(data)] = data
            done += len(data)
        more = b""
        while is_last and not stream.eof and not more:
            stream, place, more = self._further(stream, place, 1)
        return _State(stream, place)

    def _further(self, stream: Any, place: int, at_most: int) -> tuple[Any, int, bytes]:
        packed = self._file.head(_PIECE_BYTES, place)
        if stream.eof:  # the next member
            stream = zlib.decompressobj(_GZIP)
        data = stream.decompress(packed, at_most)
        if not packed and not data:
            raise InputError(f"{self.path}: truncated: its content ends early; copy or export it again")
        return stream, place + len(packed) - len(stream.unconsumed_tail) - len(stream.unused_data), data
