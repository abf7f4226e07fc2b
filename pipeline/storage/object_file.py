"""An object read by position, like a file: by ranges, with small reads served from larger blocks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, StorageError, counted
from pipeline.storage.objects import ObjectPath
from pipeline.storage.positional import PositionalFile, reading

# Headers and directories are read in many small pieces, and each request takes tens of milliseconds.
_BLOCK_BYTES = 256 << 10
_BLOCKS_KEPT = 64
_REQUESTS = 16  # for blocks at a time; two threads never ask for the same block


def opened_to_read(path: Path) -> PositionalFile:
    """The open file or object. InputError if it cannot be read."""
    return ObjectFile(path) if isinstance(path, ObjectPath) else PositionalFile(path)


class ObjectFile(PositionalFile):
    """An object, with the methods of an open file."""

    def __init__(self, path: ObjectPath) -> None:
        """InputError if there is no such object, or it may not be read; StorageError if the server does not answer."""
        self.path: ObjectPath = path
        with reading(path):
            found = path.head()
        self._size = int(found["size"])
        self._blocks: OrderedDict[int, Any] = OrderedDict()
        self._blocks_lock = threading.Lock()
        self._requests = [threading.Lock() for _ in range(_REQUESTS)]

    @property
    def name(self) -> Path:
        raise TypeError(f"{self.path}: an object has no name in the file system")

    @property
    def size(self) -> int:
        return self._size

    def in_use(self) -> AbstractContextManager[int]:
        return nullcontext(-1)

    def close(self) -> None:
        """Nothing is held open."""

    def read_runs(self, runs: Iterable[tuple[int, memoryview]]) -> None:
        wanted = [(offset, into) for offset, into in runs if len(into)]
        for offset, into in wanted:
            if offset + len(into) > self._size:
                short = offset + len(into) - self._size
                raise InputError(
                    f"{self.path}: truncated: the object ends at byte {self._size:,}, {counted(short, 'byte')} short; "
                    "copy or export it again"
                )
        first = min((offset for offset, _ in wanted), default=0)
        if max((offset + len(into) for offset, into in wanted), default=0) - first <= _BLOCK_BYTES:
            for offset, into in wanted:
                into[:] = self._small(offset, len(into))
            return
        with reading(self.path):
            found = self.path.get_ranges([offset for offset, _ in wanted], [len(into) for _, into in wanted])
        for (_, into), data in zip(wanted, found, strict=True):
            into[:] = self._whole(data, len(into))

    def read_some(self, offset: int, into: memoryview) -> int:
        nbytes = max(min(len(into), self._size - offset), 0)
        if nbytes:
            self.read_runs([(offset, into[:nbytes])])
        return nbytes

    def head(self, nbytes: int, offset: int = 0) -> bytes:
        data = bytearray(max(min(nbytes, self._size - offset), 0))
        self.read_some(offset, memoryview(data))
        return bytes(data)

    def __del__(self) -> None:
        """Nothing to close."""

    def _small(self, offset: int, nbytes: int) -> bytes:
        first, last = offset // _BLOCK_BYTES, (offset + nbytes - 1) // _BLOCK_BYTES
        data = b"".join(self._block(number) for number in range(first, last + 1))
        start = offset - first * _BLOCK_BYTES
        return data[start : start + nbytes]

    def _block(self, number: int) -> bytes:
        with self._requests[number % _REQUESTS]:
            with self._blocks_lock:
                found = self._blocks.get(number)
                if found is not None:
                    self._blocks.move_to_end(number)
                    return bytes(found)
            start = number * _BLOCK_BYTES
            nbytes = min(_BLOCK_BYTES, self._size - start)
            with reading(self.path):
                data = bytes(self._whole(self.path.get_ranges([start], [nbytes])[0], nbytes))
            with self._blocks_lock:
                self._blocks[number] = data
                while len(self._blocks) > _BLOCKS_KEPT:
                    self._blocks.popitem(last=False)
            return data

    def _whole(self, data: Any, nbytes: int) -> memoryview:
        if len(data) != nbytes:
            raise StorageError(f"{self.path}: the server sent {len(data):,} of {nbytes:,} bytes; run again")
        return memoryview(data)
