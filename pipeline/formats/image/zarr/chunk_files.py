"""The files of an array's chunks: found and read, and the buffers of which one is written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.block_cache import BlockCache
from pipeline.errors import InputError
from pipeline.formats.image.zarr.stored_array import Place, StoredArray
from pipeline.storage.confinement import open_beneath
from pipeline.storage.positional import PositionalFile, reading

# In a shard's index, both the offset and the length of a chunk that is not stored.
MISSING = np.iinfo(np.uint64).max
_INDEX_BYTES = 8 << 20

OpenFile = Callable[[str, int], int]


class ChunkFiles:
    """Where the chunks of an array are stored, and their encoded bytes. Safe in several threads."""

    def __init__(self, folder: Path, array: StoredArray, open_file: OpenFile = open_beneath) -> None:
        """`open_file`: makes a descriptor of the path of a file in the folder."""
        self.folder = folder
        self.array = array
        self._open_file = open_file
        entries = 0 if array.index is None else array.index.nbytes
        self._indices = BlockCache(row_bytes=0, block_bytes=entries)
        self._indices.hold_at_most(_INDEX_BYTES)

    def open(self, place: Place) -> tuple[PositionalFile, int, int] | None:
        """A chunk's file, open, its offset and bytes in it; None if the chunk is not stored.

        InputError if the file, or its index, is damaged.
        """
        name = self.array.name(self.array.file_of(place))
        file = open_regular(self.folder / name, self._open_file)
        if file is None:
            return None
        try:
            offset, nbytes = self._span(file, place)
            most = self.array.codec.limits[-1]
            if nbytes > most:
                raise ValueError(f"it has {nbytes:,} bytes, more than the {most:,} of a chunk of the declared size")
        except BaseException:
            file.close()
            raise
        if offset == MISSING:
            file.close()
            return None
        return file, offset, nbytes

    def read(self, place: Place) -> NDArray[np.uint8] | None:
        """A chunk's encoded bytes; None if it is not stored."""
        found = self.open(place)
        if found is None:
            return None
        file, offset, nbytes = found
        with closing(file):
            data = np.empty(nbytes, np.uint8)
            file.read_at(offset, data.data)
        return data

    def _span(self, file: PositionalFile, place: Place) -> tuple[int, int]:
        """Offset and bytes of a chunk; MISSING and 0 if it is not stored."""
        if self.array.index is None:
            return 0, file.size
        within = tuple(number % count for number, count in zip(place, self.array.per_file, strict=True))
        index = self._indices.take(self.array.file_of(place), lambda: self._index(file), wait=True)
        assert index is not None, "it is waited for"
        offset, nbytes = map(int, index[within])
        return (MISSING, 0) if offset == nbytes == MISSING else (offset, nbytes)

    def _index(self, file: PositionalFile) -> NDArray[np.uint64]:
        """A shard's index. ValueError if the shard is too short, or an entry lies outside it."""
        codec = self.array.index
        assert codec is not None
        size, nbytes = file.size, codec.limits[-1]
        if size < nbytes:
            raise ValueError(f"its shard has {size:,} bytes, too few for an index")
        data = np.empty(nbytes, np.uint8)
        file.read_at(size - nbytes if self.array.index_ends else 0, data.data)
        index: NDArray[np.uint64] = codec.decode(data)
        starts, lengths = index[..., 0], index[..., 1]
        stored = (starts != MISSING) | (lengths != MISSING)
        # Differences, since sums may pass the type's range.
        if np.any(stored & ((starts > size) | (lengths > np.uint64(size) - np.minimum(starts, np.uint64(size))))):
            raise ValueError("an entry of its shard's index lies outside the shard")
        return index


def open_regular(path: Path, open_file: OpenFile = open_beneath) -> PositionalFile | None:
    """Open a chunk's file, the one place where any is opened for reading; None if there is none.

    InputError for a folder, a special file or a broken link: none of them is a chunk that is not stored.
    """
    try:
        # O_NONBLOCK: opening a named pipe must not wait for its other end.
        descriptor = open_file(os.fspath(path), os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as exc:
        if path.is_symlink():  # as git-annex leaves them for contents that have not been fetched
            raise InputError(f"{path}: is a broken symbolic link; fetch the file it refers to") from exc
        return None
    except OSError:
        with reading(path):
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path}: is not a regular file where a chunk or metadata belongs; copy or export it again")
    return PositionalFile(path, descriptor)


def shard_of(array: StoredArray, chunks: Sequence[Any | None]) -> list[Any]:
    """The buffers of a file, one after another, from the encoded bytes of its chunks (None: not stored) in C order."""
    if array.index is None:
        return list(chunks)
    index = np.full((*array.per_file, 2), MISSING, np.uint64)
    entries = index.reshape(-1, 2)
    at = 0 if array.index_ends else array.index.limits[-1]
    for entry, chunk in zip(entries, chunks, strict=True):
        if chunk is not None:
            entry[:] = at, len(chunk)
            at += len(chunk)
    stored = [chunk for chunk in chunks if chunk is not None]
    encoded = array.index.encode(index)
    return [*stored, encoded] if array.index_ends else [encoded, *stored]
