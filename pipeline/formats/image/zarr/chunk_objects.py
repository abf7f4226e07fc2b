"""The chunks of an array in an object store: whole objects, and ranges of shards."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import Region
from pipeline.formats.image.zarr.chunk_files import MISSING, ChunkFiles, shard_index
from pipeline.formats.image.zarr.stored_array import Place, StoredArray
from pipeline.storage.objects import ObjectPath


class ChunkObjects(ChunkFiles):
    """As `ChunkFiles`, by requests. Of a shard, the index is read first, by two requests, and then kept."""

    waits = True

    def __init__(self, folder: ObjectPath, array: StoredArray) -> None:
        super().__init__(folder, array)
        self._objects = folder

    def path(self, place: Place) -> ObjectPath:
        return self._objects / self.array.name(self.array.file_of(place))

    def read(self, place: Place) -> NDArray[np.uint8] | None:
        """A chunk's encoded bytes, read-only; None if it is not stored. Raises as `ObjectPath`, and ValueError."""
        most = self.array.codec.limits[-1]
        try:
            if self.array.index is None:
                return np.frombuffer(self.path(place).get(most)[0], np.uint8)
            span = self._in_shard(place)
            if span is None:
                return None
            if span[1] - span[0] > most:
                raise ValueError(f"it has {span[1] - span[0]:,} bytes, more than the {most:,} of a chunk")
            return self._range(place, span)
        except FileNotFoundError:
            return None

    def read_raw(self, place: Place, within: Region, out: NDArray[Any]) -> bool:
        codec = self.array.codec
        row = codec.nbytes // codec.shape[0]
        first, last = within.start[0] * row, within.stop[0] * row
        try:
            if self.array.index is None:
                data, meta = self.path(place).get(None, (first, last))
                stored = np.frombuffer(data, np.uint8), meta["size"]
            else:
                span = self._in_shard(place)
                if span is None:
                    return False
                stored = self._range(place, (span[0] + first, min(span[0] + last, span[1]))), span[1] - span[0]
        except FileNotFoundError:
            return False
        if stored[1] != codec.nbytes or len(stored[0]) != last - first:
            raise ValueError(f"it has {stored[1]:,} bytes instead of {codec.nbytes:,}")
        rows = stored[0].view(codec.dtype).reshape(within.shape[0], *codec.shape[1:])
        out[...] = rows[(slice(None), *within.slices[1:])]
        return True

    def _range(self, place: Place, span: tuple[int, int]) -> NDArray[np.uint8]:
        return np.frombuffer(self.path(place).get(None, span)[0], np.uint8)

    def _in_shard(self, place: Place) -> tuple[int, int] | None:
        """The first byte of a chunk and the one after its last; None if it is not stored."""
        within = tuple(number % count for number, count in zip(place, self.array.per_file, strict=True))
        found = self._indices.use(
            self.array.file_of(place), 0, lambda _: self._read_index(place), lambda index: index[within].tolist(),
            wait=True,
        )  # fmt: skip
        assert found is not None, "it is waited for"
        offset, nbytes = found
        return None if offset == nbytes == MISSING else (offset, offset + nbytes)

    def _read_index(self, place: Place) -> NDArray[np.uint64]:
        codec = self.array.index
        assert codec is not None
        nbytes = codec.limits[-1]
        try:
            size = int(self.path(place).head()["size"])
        except FileNotFoundError:
            return np.full((*self.array.per_file, 2), MISSING, np.uint64)
        if size < nbytes:
            raise ValueError(f"its shard has {size:,} bytes, too few for an index")
        at = size - nbytes if self.array.index_ends else 0
        return shard_index(codec, self._range(place, (at, at + nbytes)), size)


class ChunkBytes:
    """The chunks of one object that has been read as a whole."""

    def __init__(self, array: StoredArray, data: bytes) -> None:
        self._array, self._data = array, np.frombuffer(data, np.uint8)

    def read(self, place: Place) -> NDArray[np.uint8] | None:
        """A chunk's encoded bytes; None if it is not stored. ValueError if the index is damaged."""
        codec, data = self._array.index, self._data
        if codec is None:
            return data
        nbytes = codec.limits[-1]
        index = shard_index(codec, data[-nbytes:] if self._array.index_ends else data[:nbytes], len(data))
        within = tuple(number % count for number, count in zip(place, self._array.per_file, strict=True))
        offset, length = index[within].tolist()
        return None if offset == length == MISSING else data[offset : offset + length]
