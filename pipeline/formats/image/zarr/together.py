"""The chunk files of a region, read or written together by the loops of `pipeline.codecs.loops.chunk_files`.

Imported only when chunks are read or written: the loops need LLVM or Numba, which take long to load.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.chunk_codec import BLOSC, ENCODED, RAW, ChunkCodec
from pipeline.codecs.loops import chunk_files as loops
from pipeline.codecs.loops.system import DONE, LEFT, NO_LINKS
from pipeline.codecs.loops.threads import in_threads
from pipeline.codecs.packed import NotPackedError
from pipeline.codecs.parallel import threads_for
from pipeline.codecs.scratch import scratch
from pipeline.errors import MillraceError
from pipeline.formats.image.zarr.chunk_files import ChunkFiles, ChunkPart
from pipeline.formats.image.zarr.packed_chunks import HEAD_BYTES, StoredTogether
from pipeline.formats.image.zarr.stored_array import Place, StoredArray
from pipeline.storage.confinement import is_confined, open_beneath
from pipeline.storage.partial import PartialFolder

Numbers = NDArray[np.int64]


class _Table:
    """The rows of some chunks, and the bytes of names."""

    def __init__(self, codec: ChunkCodec, count: int, axes: int) -> None:
        self.codec, self.names = codec, bytearray()
        self.rows = np.zeros((count, loops.EXTENTS + axes), np.int64)
        self.ends = np.full(count, LEFT, np.int8)
        self.strides, self.shape = np.zeros((2, axes), np.int64), np.zeros(axes, np.int64)

    @classmethod
    def of_parts(cls, codec: ChunkCodec, parts: Sequence[ChunkPart], target: NDArray[Any]) -> Self:
        itemsize = codec.dtype.itemsize
        chunk_strides = [math.prod(codec.shape[axis + 1 :]) * itemsize for axis in range(len(codec.shape))]
        # Along axes of chunks of one sample, every part has one.
        axes = [axis for axis, size in enumerate(codec.shape) if size > 1] or [len(codec.shape) - 1]
        table = cls(codec, len(parts), len(axes))
        table.strides[:] = [[each[axis] for axis in axes] for each in (target.strides, chunk_strides)]
        table.shape[:] = [codec.shape[axis] for axis in axes]
        into = np.array([[span.start for span in part.into] for part in parts], np.int64)
        within = np.array([[span.start for span in part.within] for part in parts], np.int64)
        extents = np.array([[span.stop - span.start for span in part.within] for part in parts], np.int64)
        table.rows[:, loops.PART] = target.ctypes.data + into @ np.array(target.strides, np.int64)
        table.rows[:, loops.INSIDE] = within @ np.array(chunk_strides, np.int64)
        table.rows[:, loops.EXTENTS :] = extents[:, axes]
        return table

    def add_name(self, name: str) -> int:
        """Its offset among the names."""
        at = len(self.names)
        self.names += os.fsencode(name) + b"\0"
        return at

    def add_files(self, files: ChunkFiles, places: Sequence[Place]) -> None:
        """Where chunks to read are stored; a fault of a shard's index is left to the other way."""
        array, wanted = files.array, np.flatnonzero(self.rows[:, loops.HELD] == 0).tolist()
        self.rows[:, loops.LENGTH] = loops.WHOLE
        if array.index is None:
            for number in wanted:
                self.rows[number, loops.NAME] = self.add_name(array.name(places[number]))
            return
        within = np.array(places, np.int64) % np.array(array.per_file, np.int64)
        for file, rows in _by_file(array, places, wanted).items():
            self.rows[rows, loops.NAME] = self.add_name(array.name(file))
            try:
                with files.opened(places[rows[0]]) as descriptor:
                    found = loops.NONE if descriptor is None else files.spans(descriptor, places[rows[0]], within[rows])
                    self.rows[rows, loops.OFFSET : loops.LENGTH + 1] = found
            except (MillraceError, OSError, ValueError):
                self.rows[rows, loops.LENGTH] = loops.FAULT

    def run(self, loop: Any, *given: Any, is_coded: bool, threads: int | None = None) -> list[int]:
        """Call a loop; returns the rows that are left."""
        room = self.codec.nbytes, self.codec.limits[-1] if is_coded else 0, 0
        in_threads(
            loop, self.rows, self.ends, np.frombuffer(self.names, np.uint8), *given,
            threads=threads or threads_for(len(self.rows), room[0]), room=room, copies=not is_coded,
        )  # fmt: skip
        return np.flatnonzero(self.ends != DONE).tolist()


def read_together(files: ChunkFiles, kind: int, parts: Sequence[ChunkPart], target: NDArray[Any]) -> list[int]:
    """Read and decode chunks, and copy their parts to `target`, the region's array with the file's axes.

    Returns those that are left: read each alone, to read it another way, or to name its fault.
    """
    array = files.array
    if not parts or (kind == BLOSC and not all(loops.blosc_functions())):
        return list(range(len(parts)))
    table, decoder = _Table.of_parts(array.codec, parts, target), loops.blosc_functions()[0] if kind == BLOSC else 0
    for row, part in zip(table.rows, parts, strict=True):
        row[loops.MEMORY], row[loops.HELD] = part.memory, part.is_held
    table.add_files(files, [part.place for part in parts])
    try:
        with _opened(files.folder) as (folder, resolve):
            return table.run(
                loops.read_chunks, folder, resolve, kind, decoder, table.strides, table.shape,
                np.full(1, array.fill_value, array.codec.dtype).view(np.uint8), is_coded=kind == BLOSC,
            )  # fmt: skip
    except OSError:
        return list(range(len(parts)))


@contextmanager
def stored_together(files: ChunkFiles, places: Sequence[Place]) -> Iterator[StoredTogether]:
    """Several chunks' encoded bytes. What lies beyond the first `HEAD_BYTES` of a file has been read when the context
    is left.

    NotPackedError if a file cannot be read: the processor's way names the fault.
    """
    array, heads = files.array, scratch("encoded", len(places) * HEAD_BYTES).reshape(-1, HEAD_BYTES)
    names, name_at, rows_of = bytearray(), list[int](), _by_file(array, places, range(len(places)))
    for file in rows_of:
        name_at.append(len(names))
        names += os.fsencode(array.name(file)) + b"\0"
    found, spans = np.full((len(rows_of), 2), loops.NONE, np.int64), []
    chunks_at = np.zeros((len(places), 3), np.int64)  # a descriptor, offset and bytes of each

    def read(chunks: Numbers, firsts: Numbers, addresses: Numbers, sizes: Numbers) -> None:
        spans.append(np.stack([chunks_at[chunks, 0], chunks_at[chunks, 1] + firsts, addresses, sizes], 1))

    try:
        with _opened(files.folder) as (folder, resolve):
            # Of shards nothing yet.
            begins, at = heads if array.index is None else heads[:, :0], np.array(name_at, np.int64)
            loops.open_files(found, begins, np.frombuffer(names, np.uint8), at, folder, resolve)
        within = np.array(places, np.int64) % np.array(array.per_file, np.int64)
        # Not file by file: NumPy gives up the interpreter's lock at each.
        chunks_at[np.concatenate([*rows_of.values()]), ::2] = np.repeat(found, [*map(len, rows_of.values())], axis=0)
        chunks_at[chunks_at[:, 0] < 0, 2] = -1
        if array.index is not None:
            for descriptor, rows in zip(found[:, 0].tolist(), rows_of.values(), strict=True):
                if descriptor >= 0:
                    chunks_at[rows, 1:] = files.spans(descriptor, places[rows[0]], within[rows])
        if np.any(found[:, 0] == loops.FAULT) or np.any(chunks_at[:, 2] > array.codec.limits[-1]):
            raise NotPackedError("a file that does not open, or a chunk that is too long")
        if array.index is not None:
            there = np.flatnonzero(chunks_at[:, 2] > 0)
            sizes = np.minimum(chunks_at[there, 2], HEAD_BYTES)
            read(there, np.zeros_like(there), heads.ctypes.data + there * HEAD_BYTES, sizes)
            if not loops.read_spans(spans.pop()):
                raise NotPackedError("a file that was cut short")
        yield StoredTogether(chunks_at[:, 2], heads, read)
        if spans and not loops.read_shared(np.concatenate(spans)):
            raise NotPackedError("a file that was cut short")
    except OSError as error:
        raise NotPackedError("the folder does not open") from error
    finally:
        loops.close_files(found)


def _by_file(array: StoredArray, places: Sequence[Place], numbers: Iterable[int]) -> dict[Place, list[int]]:
    """The numbers of chunks in `places`, by their file."""
    found = defaultdict[Place, list[int]](list)
    for number in numbers:
        found[array.file_of(places[number])].append(number)
    return found


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[int, int]]:
    """A descriptor to open files below a folder by, and how to resolve their names; raises OSError."""
    descriptor = open_beneath(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield descriptor, NO_LINKS if is_confined(folder) else 0
    finally:
        os.close(descriptor)


def write_together(
    folder: PartialFolder, name: str, array: StoredArray, kind: int, parts: Sequence[ChunkPart], source: NDArray[Any]
) -> list[int]:
    """Encode and store files of one chunk each, in the folder `name`, of the parts of `source`: all that they have.

    Returns those that are left: store each alone.
    """
    if not parts or (kind == BLOSC and not all(loops.blosc_functions())):
        return list(range(len(parts)))
    table = _Table.of_parts(array.codec, parts, source)
    return _written(table, folder, name, array, kind, [part.place for part in parts])


def encode(
    array: StoredArray, kind: int | None, parts: Sequence[ChunkPart], source: NDArray[Any], descriptor: int | None,
    places: Any,
) -> list[int]:  # fmt: skip
    """Encode chunks of the parts of `source`, all that they have, to these places of an open file, or addresses.

    Returns the bytes of each; 0 for those that are left: encode each alone.
    """
    if not parts or kind is None or (kind == BLOSC and not all(loops.blosc_functions())):
        return [0] * len(parts)
    table = _Table.of_parts(array.codec, parts, source)
    table.rows[:, loops.MEMORY if descriptor is None else loops.OFFSET] = places
    given = loops.NONE if descriptor is None else descriptor, loops.NONE, ""
    # A file takes uncompressed chunks one after another.
    table.rows[_run_writing(table, array, kind, given, threads=1 if kind == RAW else None), loops.LENGTH] = 0
    lengths: list[int] = table.rows[:, loops.LENGTH].tolist()
    return lengths


def write_encoded(
    folder: PartialFolder, name: str, array: StoredArray, chunks: Mapping[Place, NDArray[np.uint8]]
) -> list[int]:
    """As `write_together`, of encoded chunks."""
    table = _Table(array.codec, len(chunks), 1)
    for row, chunk in zip(table.rows, chunks.values(), strict=True):
        row[loops.PART], row[loops.LENGTH] = chunk.ctypes.data, len(chunk)
    return _written(table, folder, name, array, ENCODED, list(chunks))


def _written(
    table: _Table, folder: PartialFolder, name: str, array: StoredArray, kind: int, places: Sequence[Place]
) -> list[int]:
    parents: dict[str, int] = {}
    for row, place in zip(table.rows, places, strict=True):
        parent, _, last = f"{name}/{array.name(place)}".rpartition("/")
        if parent not in parents:
            parents[parent] = table.add_name(parent)
        row[loops.PARENT], row[loops.NAME] = parents[parent], table.add_name(last)
    with folder.open_folders(parents) as (opened, begun, unfinished):
        return _run_writing(table, array, kind, (opened, begun, f"{unfinished}-{threading.get_ident()}-"))


def _run_writing(
    table: _Table, array: StoredArray, kind: int, folders: tuple[int, int, str], threads: int | None = None
) -> list[int]:
    """`folders`: see `loops.write_chunks`; the last is how names begin."""
    options: Mapping[str, Any] = {"clevel": 0, "shuffle": 0, "cname": ""}
    encoder = 0
    if kind == BLOSC:
        options, encoder = array.codec.stages[0].options, loops.blosc_functions()[1]
    levels = np.array([options["clevel"], options["shuffle"], options.get("blocksize", 0)], np.int64)
    temporary, codec = (
        np.frombuffer(bytearray(os.fsencode(f"{name}\0")), np.uint8) for name in (folders[2], options["cname"])
    )
    return table.run(
        loops.write_chunks, *folders[:2], temporary[:-1], kind, encoder, levels, codec, table.strides, table.shape,
        array.codec.dtype.itemsize, is_coded=kind == BLOSC, threads=threads,
    )  # fmt: skip
