"""Encoded chunks of shards that are not whole yet, in a file that has no name."""

from __future__ import annotations

import os
import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.scratch import scratch


class ChunkSpool:
    """Slots of the longest chunk's bytes. One thread takes them for its chunks; any may read, and free them for others.

    The file is closed, and so removed, once neither the spool nor a chunk in it is in use.
    """

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        """`descriptor`: of an empty file, which the spool closes."""
        self.descriptor, self.free = descriptor, list[int]()  # offsets
        self._slot_bytes, self._slots = slot_bytes, 0
        weakref.finalize(self, os.close, descriptor)

    def take(self) -> int:
        """A place for a chunk."""
        if self.free:
            return self.free.pop()
        self._slots += 1
        return (self._slots - 1) * self._slot_bytes

    def add(self, data: NDArray[np.uint8]) -> SpooledChunk:
        offset, done = self.take(), 0
        while done < len(data):
            done += os.pwrite(self.descriptor, data.data[done:], offset + done)
        return SpooledChunk(self, offset, done)


class SpooledChunk(NamedTuple):
    spool: ChunkSpool
    offset: int
    nbytes: int

    def read(self) -> NDArray[np.uint8]:
        """Its bytes, valid until this thread's next call."""
        data, done = scratch("encoded", self.nbytes), 0
        while done < self.nbytes:
            done += os.preadv(self.spool.descriptor, [data.data[done:]], self.offset + done)
        return data
