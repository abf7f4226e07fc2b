"""The files of an array's chunks: found and read, and the buffers of which one is written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.block_cache import BlockCache
from pipeline.codecs.chunk_codec import ChunkCodec
from pipeline.codecs.scratch import scratch
from pipeline.errors import InputError
from pipeline.formats.image.base import Region
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.zarr.stored_array import Place, StoredArray
from pipeline.storage.confinement import open_beneath
from pipeline.storage.positional import PositionalFile, read_fully, reading

# In a shard's index, both the offset and the length of a chunk that is not stored.
MISSING = np.iinfo(np.uint64).max
_INDEX_BYTES = 8 << 20

OpenFile = Callable[[str, int], int]


class ChunkPart(NamedTuple):
    """The part of a chunk that lies in a region.

    into, within : where in the region's array, and in the chunk
    memory       : address of the decoded chunk, which is kept; 0: it is not
    is_held      : whether it is there already
    """

    place: Place
    into: tuple[slice, ...]
    within: tuple[slice, ...]
    memory: int = 0
    is_held: bool = False


class ChunkFiles:
    """Where the chunks of an array are stored, and their encoded bytes. Safe in several threads.

    waits : whether reading mostly waits for a server
    """

    waits = False

    def __init__(self, folder: Path, array: StoredArray, open_file: OpenFile = open_beneath) -> None:
        """`open_file`: makes a descriptor of the path of a file in the folder."""
        self.folder = folder
        self.array = array
        self._open_file = open_file
        self._start = f"{folder}/"
        entries = 0 if array.index is None else array.index.nbytes
        self._indices = BlockCache(row_bytes=0, block_bytes=entries)
        self._indices.hold_at_most(_INDEX_BYTES)

    def read(self, place: Place) -> NDArray[np.uint8] | None:
        """A chunk's encoded bytes, valid until this thread's next call; None if it is not stored.

        InputError, or ValueError, if the file or its index is damaged.
        """
        with self.opened(place) as descriptor:
            if descriptor is None or (span := self._span(descriptor, place))[0] == MISSING:
                return None
            data = scratch("encoded", span[1])
            self._fill(descriptor, place, span[0], data)
            return data

    def read_raw(self, place: Place, within: Region, out: NDArray[Any]) -> bool:
        """Fill `out` (any strides) with samples of an uncompressed chunk; False if it is not stored. Raises as `read`.

        within : the part of the chunk
        """
        codec = self.array.codec
        with self.opened(place) as descriptor:
            if descriptor is None or (span := self._span(descriptor, place))[0] == MISSING:
                return False
            if span[1] != codec.nbytes:
                raise ValueError(f"it has {span[1]:,} bytes instead of {codec.nbytes:,}")
            samples = out
            if not out.flags.c_contiguous:
                samples = scratch("samples", out.size * out.itemsize).view(out.dtype).reshape(out.shape)
            with closing(PositionalFile(self.path(place), os.dup(descriptor))) as file:
                ContiguousSamples(shape=codec.shape, dtype=codec.dtype, offset=span[0]).read(file, within, samples)
            if samples is not out:
                out[...] = samples
            return True

    def spans(self, descriptor: int, place: Place, within: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offset and bytes of chunks of one open shard; -1 if not stored. Raises as `read`.

        place  : of one of them; within: (chunks, axes): their numbers in the shard
        """
        size, chosen = self._size(descriptor, place), tuple(within.T)
        found: NDArray[np.int64] = self._look_up(descriptor, place, size, lambda index: index[chosen].astype(np.int64))
        return found

    def path(self, place: Place) -> Path:
        """The file of a chunk."""
        return Path(self._start + self.array.name(self.array.file_of(place)))

    @contextmanager
    def opened(self, place: Place) -> Iterator[int | None]:
        """A descriptor of a chunk's file; None if there is none. InputError as `open_regular`."""
        name, descriptor = self._start + self.array.name(self.array.file_of(place)), None
        try:
            # O_NONBLOCK: opening a named pipe must not wait for its other end.
            descriptor = self._open_file(name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as exc:
            refuse_unless_missing(Path(name), exc)
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _fill(self, descriptor: int, place: Place, offset: int, data: NDArray[np.uint8]) -> None:
        if os.preadv(descriptor, [data.data], offset) < len(data):  # interrupted, or too short
            read_fully(descriptor, self.path(place), offset, data.data)

    def _span(self, descriptor: int, place: Place) -> tuple[int, int]:
        """Offset and bytes of a chunk; MISSING and 0 if it is not stored. ValueError if there are too many bytes."""
        offset, nbytes = 0, self._size(descriptor, place)
        if self.array.index is not None:
            within = tuple(number % count for number, count in zip(place, self.array.per_file, strict=True))
            offset, nbytes = self._look_up(descriptor, place, nbytes, lambda index: index[within].tolist())
            if offset == nbytes == MISSING:
                return MISSING, 0
        most = self.array.codec.limits[-1]
        if nbytes > most:
            raise ValueError(f"it has {nbytes:,} bytes, more than the {most:,} of a chunk of the declared size")
        return offset, nbytes

    def _size(self, descriptor: int, place: Place) -> int:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise not_regular(self.path(place))
        return status.st_size

    def _look_up(self, descriptor: int, place: Place, size: int, look: Callable[[NDArray[np.uint64]], Any]) -> Any:
        """What `look` returns for the index of a chunk's shard, of so many bytes."""
        file = self.array.file_of(place)
        return self._indices.use(file, 0, lambda _: self._index(descriptor, place, size), look, wait=True)

    def _index(self, descriptor: int, place: Place, size: int) -> NDArray[np.uint64]:
        """A shard's index. ValueError if the shard is too short, or an entry lies outside it."""
        codec = self.array.index
        assert codec is not None
        nbytes = codec.limits[-1]
        if size < nbytes:
            raise ValueError(f"its shard has {size:,} bytes, too few for an index")
        data = np.empty(nbytes, np.uint8)
        self._fill(descriptor, place, size - nbytes if self.array.index_ends else 0, data)
        return shard_index(codec, data, size)


def shard_index(codec: ChunkCodec, data: NDArray[np.uint8], size: int) -> NDArray[np.uint64]:
    """The decoded index of a shard of `size` bytes. ValueError if an entry lies outside it."""
    index: NDArray[np.uint64] = codec.decode(data)
    starts, lengths = index[..., 0], index[..., 1]
    stored = (starts != MISSING) | (lengths != MISSING)
    # Differences, since sums may pass the type's range.
    if np.any(stored & ((starts > size) | (lengths > np.uint64(size) - np.minimum(starts, np.uint64(size))))):
        raise ValueError("an entry of its shard's index lies outside the shard")
    return index


def open_regular(path: Path, open_file: OpenFile = open_beneath) -> PositionalFile | None:
    """Open a file of metadata; None if there is none.

    InputError for a folder, a special file or a broken link: none of them is a file that is not stored.
    """
    try:
        descriptor = open_file(os.fspath(path), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as exc:
        refuse_unless_missing(path, exc)
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular(path)
    return PositionalFile(path, descriptor)


def refuse_unless_missing(path: Path, exc: OSError) -> None:
    """Returns if the file that did not open is not there; else raises InputError or StorageError."""
    if isinstance(exc, FileNotFoundError):
        if path.is_symlink():  # as git-annex leaves them for contents that have not been fetched
            raise InputError(f"{path}: is a broken symbolic link; fetch the file it refers to") from exc
        return
    with reading(path):
        raise exc


def not_regular(path: Path) -> InputError:
    return InputError(f"{path}: is not a regular file where a chunk or metadata belongs; copy or export it again")


def shard_of(array: StoredArray, chunks: Sequence[Any | None]) -> list[Any]:
    """The buffers of a file, one after another, from the encoded bytes of its chunks (None: not stored) in C order."""
    if array.index is None:
        return list(chunks)
    stored = [chunk for chunk in chunks if chunk is not None]
    index = index_of(array, [None if chunk is None else len(chunk) for chunk in chunks])
    return [*stored, index] if array.index_ends else [index, *stored]


def index_of(array: StoredArray, sizes: Sequence[int | None]) -> NDArray[np.uint8]:
    """The encoded index of a shard of chunks of so many bytes, as `shard_of` makes it."""
    assert array.index is not None
    index = np.full((*array.per_file, 2), MISSING, np.uint64)
    at = 0 if array.index_ends else array.index.limits[-1]
    for entry, size in zip(index.reshape(-1, 2), sizes, strict=True):
        if size is not None:
            entry[:] = at, size
            at += size
    return array.index.encode(index)
