"""Writing one Zarr array: whole files at once, parts of a file when they make it whole."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import operator
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import AXES
from pipeline.codecs.chunk_codec import BLOSC, RAW, Stage
from pipeline.codecs.packed import ChunkForm, origin_rows
from pipeline.codecs.parallel import for_each, split
from pipeline.errors import OutputError
from pipeline.formats.image.base import ImageHeader, Region, blocks_along
from pipeline.formats.image.zarr.chunk_files import ChunkFiles, ChunkPart, index_of, shard_of
from pipeline.formats.image.zarr.chunk_objects import ChunkBytes, ChunkObjects
from pipeline.formats.image.zarr.chunk_spool import ChunkSpool, SpooledChunk
from pipeline.formats.image.zarr.stored_array import Place, StoredArray, kind_of, stored_array
from pipeline.storage.partial import PartialFolder
from pipeline.storage.partial_objects import PartialObjects
from pipeline.storage.writable import writing

ROOT = "zarr.json"
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")

# Of chunks of which only parts have come, for each level.
_HELD_BYTES = 16 << 20
_LOCKS = 64

# Along one axis, by a chunk's number: where samples lie in the chunk and in the region, and whether they are all.
_Spans = dict[int, tuple[slice, slice, bool]]
Shapes = tuple[tuple[int, ...], tuple[int, ...] | None]  # of a chunk, and of a shard if there are any
_Older = ChunkFiles | ChunkBytes  # the chunks of a file that is changed
_Part = tuple[tuple[slice, ...], NDArray[Any]]  # of a chunk: its place and samples


class _Begun:
    """What has come of a file that no region holds whole.

    count : of its chunks
    parts : of chunks: copies of samples in memory, by their corners in the array
    kept  : whole chunks, encoded; None: stored in the file
    split : chunks of which the file may have some parts
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.parts: dict[Place, dict[tuple[Place, Place], NDArray[Any]]] = {}
        self.kept: dict[Place, SpooledChunk | None] = {}
        self.split: set[Place] = set()

    def is_complete(self, whole: Collection[Place]) -> bool:
        """Whether every chunk is kept or among these."""
        return len(self.kept.keys() | set(whole)) == self.count

    def read(self, chunk: Place, older: _Older | None) -> NDArray[np.uint8] | None:
        """A chunk's bytes as they are, valid until this thread's next call; None if there are none."""
        spooled = self.kept.get(chunk)
        return spooled.read() if spooled is not None else None if older is None else older.read(chunk)

    def free(self, chunks: Iterable[Place]) -> None:
        """Give up what spools have of these chunks."""
        for spooled in filter(None, map(self.kept.get, chunks)):
            spooled.spool.free.append(spooled.offset)


class ArrayWriter:
    """One array of the group.

    Several threads encode and store regions at once. Encoded chunks of a local shard wait in a spool, and parts of a
    chunk in memory, until they make a file whole, which is then written, its chunks in C order. What cannot wait, and
    at a flush everything, is stored in files that are read, changed and written back, by one thread of one process at a
    time: correct in any order, but slower.
    """

    def __init__(
        self, path: Path, header: ImageHeader, output: PartialFolder | PartialObjects, *, name: str,
        order: tuple[int, ...], shapes: Shapes, stages: tuple[Stage, ...], names: str,
    ) -> None:  # fmt: skip
        """`header`: of this level; `name`: of the array in the group; `stages`: after `bytes`; `names`: of its axes."""
        self.path, self.header, self._partial, self._name, self._order = path, header, output, name, order
        chunk, shard = self._in_order(shapes[0]), None if shapes[1] is None else self._in_order(shapes[1])
        self._metadata = _array_metadata(self._in_order(header.shape), header.dtype, chunk, shard, stages, names)
        self._array = _for_writing(self._metadata, stages, header.dtype)
        self._kind = kind_of(self._array)
        self._begun: dict[Place, _Begun] = {}  # each is used under its file's lock
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._held: set[Place] = set()  # chunks of which parts are in memory
        self._spools_chunks = self._array.index is not None and isinstance(output, PartialFolder)
        self._spools: dict[int, ChunkSpool] = {}  # by thread: a file takes the writes of one at a time

    def create(self) -> None:
        self._partial.put(metadata_of(self._name), [json.dumps(self._metadata, indent=2).encode()])

    def join(self) -> None:
        """OutputError if the partial output holds another array."""
        found = None
        with suppress(ValueError, FileNotFoundError):
            found = json.loads(self._partial.read(metadata_of(self._name)))
        if found != self._metadata:
            raise OutputError(f"{self._partial.path}: holds another array: run again without --resume")

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        """Store the samples of a region that is not empty."""
        start, stop = self._in_order(region.start), self._in_order(region.stop)
        stored = samples.transpose(self._order)
        spans = list(map(_spans, start, stop, self._array.codec.shape, self._array.shape))
        with writing(self.path, samples.nbytes), self._partial.in_use():
            files = _under(start, stop, self._array.file_shape)
            whole, parts = split(files, lambda file: self._covers(start, stop, file))
            self._store(spans, stored, whole)
            if parts:
                chunks = itertools.chain.from_iterable(self._touched(file, start, stop) for file in parts)
                ours = _parts(spans, chunks, are_whole=True) if self._spools_chunks else []
                self._take_parts(start, stop, stored, parts, self._spooled(ours, stored) if ours else {})

    def write_held(self) -> None:
        """Store what has come of files that are not whole."""
        self._spools.clear()  # those in use live on
        for file in list(self._begun):
            with writing(self.path), self._partial.in_use(), self._locks[hash(file) % _LOCKS]:
                begun = self._begun.get(file)
                if begun is not None and (begun.parts or any(begun.kept.values())):
                    self._store_begun(file, begun)

    def _take_parts(
        self, start: Place, stop: Place, stored: NDArray[Any] | None, files: Sequence[Place],
        spooled: Mapping[Place, SpooledChunk],
    ) -> None:  # fmt: skip
        """Keep what a region has of these files: whole chunks, `spooled`, and parts of others, unless `stored` is None;
        store what is whole now or cannot wait."""
        codec = self._array.codec

        def take(file: Place) -> None:
            corners = zip(*self._box(file, self._array.file_shape), codec.shape, strict=True)
            count = math.prod(-(-(b - a) // size) for a, b, size in corners)

            def keep(chunk: Place) -> None:
                self._keep(begun, chunk, self._spool().add(self._of_parts(chunk, begun, None)))

            with self._locks[hash(file) % _LOCKS]:
                begun, is_due = self._begun.setdefault(file, _Begun(count)), False
                for chunk in self._touched(file, start, stop):
                    if chunk in spooled:
                        self._keep(begun, chunk, spooled[chunk])
                    elif stored is not None and not self._holds(begun, chunk, start, stop, stored):
                        is_due = True
                whole = [chunk for chunk in begun.parts if self._is_whole(begun, chunk)]
                if is_due or begun.is_complete(whole):
                    self._store_begun(file, begun)
                elif self._spools_chunks:
                    for_each(keep, whole, codec.nbytes)

        file_bytes = math.prod(self._array.file_shape) * codec.dtype.itemsize
        for_each(take, files, file_bytes, waits=isinstance(self._partial, PartialObjects))

    def _spooled(self, parts: Sequence[ChunkPart], stored: NDArray[Any]) -> dict[Place, SpooledChunk]:
        """Encode chunks of which a region has all samples."""
        from pipeline.formats.image.zarr.together import encode

        spool = self._spool()
        places = [spool.take() for _ in parts]
        lengths = encode(self._array, self._kind, parts, stored, spool.descriptor, places)
        found = {part.place: SpooledChunk(spool, *span) for part, *span in zip(parts, places, lengths, strict=True)}

        def encode_alone(part: ChunkPart) -> None:
            spool.free.append(found[part.place].offset)
            found[part.place] = self._spool().add(self._encode([(part.within, stored[part.into])]))

        for_each(encode_alone, [part for part in parts if not found[part.place].nbytes], self._array.codec.nbytes)
        return found

    def _spool(self) -> ChunkSpool:
        """The spool of this thread."""
        spool = self._spools.get(threading.get_ident())  # a flush may clear them meanwhile
        if spool is None:
            assert isinstance(self._partial, PartialFolder), "objects do not spool"
            spool = ChunkSpool(self._partial.scratch(), self._array.codec.limits[-1])
            self._spools[threading.get_ident()] = spool
        return spool

    # The file's lock is held

    def _keep(self, begun: _Begun, chunk: Place, spooled: SpooledChunk) -> None:
        begun.free([chunk])
        begun.kept[chunk] = spooled
        begun.parts.pop(chunk, None)
        self._held.discard(chunk)

    def _holds(self, begun: _Begun, chunk: Place, start: Place, stop: Place, stored: NDArray[Any]) -> bool:
        """Add a region's part of a chunk; returns whether it may wait for others."""
        first, last = self._box(chunk, self._array.codec.shape)
        begin, end = tuple(map(max, start, first)), tuple(map(min, stop, last))
        held = begun.parts.setdefault(chunk, {})
        overlaps = any(
            key != (begin, end) and all(a < d and c < b for a, b, c, d in zip(begin, end, *key, strict=True))
            for key in held
        )  # the job was cut anew
        has_room = chunk in self._held or len(self._held) < max(_HELD_BYTES // self._array.codec.nbytes, 1)
        if chunk in begun.kept or overlaps or not has_room:
            begun.split.add(chunk)
        held[begin, end] = stored[_within(begin, end, start)].copy()
        self._held.add(chunk)
        return chunk not in begun.split

    def _is_whole(self, begun: _Begun, chunk: Place) -> bool:
        """Whether its parts are all that it has."""
        samples = sum(part.size for part in begun.parts[chunk].values())
        corners = zip(*self._box(chunk, self._array.codec.shape), strict=True)
        return chunk not in begun.split and samples == math.prod(b - a for a, b in corners)

    def _store_begun(self, file: Place, begun: _Begun) -> None:
        """Store what has come of a file."""
        name, chunks = f"{self._name}/{self._array.name(file)}", list(begun.parts)
        whole = [chunk for chunk in chunks if self._is_whole(begun, chunk)]
        is_complete = begun.is_complete(whole)

        def content(older: _Older | None) -> Iterator[NDArray[np.uint8]]:
            """Its buffers, each valid until the next."""
            made: dict[Place, NDArray[np.uint8]] = {}

            def encode(chunk: Place) -> None:
                made[chunk] = self._of_parts(chunk, begun, older).copy()  # the thread encodes others

            for_each(encode, chunks, self._array.codec.nbytes)
            sizes: list[int | None] = []
            for chunk in self._chunks_of(file):
                data = made[chunk] if chunk in made else begun.read(chunk, older)
                sizes.append(None if data is None else len(data))
                if data is not None:
                    yield data
            if self._array.index is not None:
                yield index_of(self._array, sizes)

        def copied(older: _Older | None) -> list[NDArray[np.uint8]]:
            return [each.copy() for each in content(older)]

        is_new = is_complete and None not in begun.kept.values()
        if isinstance(self._partial, PartialObjects) and is_new:
            self._partial.put(name, copied(None))
        elif isinstance(self._partial, PartialObjects):
            self._partial.change(name, lambda data: copied(None if data is None else ChunkBytes(self._array, data)))
        else:
            with nullcontext() if is_new else self._alone(self._partial) as files:
                self._partial.put(name, content(files))
        begun.free(begun.kept)
        begun.kept = dict.fromkeys([*begun.kept, *whole])
        begun.split.update(set(chunks).difference(whole))
        begun.parts.clear()
        self._held.difference_update(chunks)
        if is_complete:
            del self._begun[file]

    def _of_parts(self, chunk: Place, begun: _Begun, older: _Older | None) -> NDArray[np.uint8]:
        """The bytes of a chunk: of its parts, over what it has besides; valid until this thread's next call."""
        data = None if self._is_whole(begun, chunk) else begun.read(chunk, older)
        first, _ = self._box(chunk, self._array.codec.shape)
        parts = [(_within(*corners, first), part) for corners, part in begun.parts[chunk].items()]
        return self._encode(parts, data)

    def _encode(self, parts: Iterable[_Part], data: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """The bytes of a chunk: of parts over the samples in `data`, or zeros."""
        codec = self._array.codec
        samples = np.zeros(codec.shape, self.header.dtype) if data is None else codec.decode(data)
        for place, part in parts:
            samples[place] = part
        return codec.encode(samples)

    def _store(self, spans: Sequence[_Spans], stored: NDArray[Any], files: Sequence[Place]) -> None:
        """Store files of which a region has all samples."""

        def store(file: Place) -> None:
            writes = self._spools_chunks and self._kind == RAW
            content: Any = partial(self._write_raw if writes else self._encoded, file, spans, stored)
            self._partial.put(f"{self._name}/{self._array.name(file)}", content if writes else content())

        if files and self._kind is not None and self._array.index is None and isinstance(self._partial, PartialFolder):
            from pipeline.formats.image.zarr.together import write_together

            left = write_together(self._partial, self._name, self._array, self._kind, _parts(spans, files), stored)
            files = [files[number] for number in left]
        file_bytes = math.prod(self._array.file_shape) * self.header.dtype.itemsize
        for_each(store, files, file_bytes, waits=isinstance(self._partial, PartialObjects))

    def chunk_form(self, region: Region) -> ChunkForm | None:
        """How a device may encode a region; None unless it consists of whole Blosc chunks."""
        start, stop = self._in_order(region.start), self._in_order(region.stop)
        codec, stages = self._array.codec, self._array.codec.stages
        if [stage.name for stage in stages] != ["blosc"] or stages[0].options["cname"] not in ("lz4", "zstd"):
            return None
        if not all(map(operator.lt, start, stop)) or len(codec.shape) > AXES or codec.dtype.itemsize > 8:
            return None
        shape = codec.shape if self._spools_chunks else self._array.file_shape
        if not all(self._covers(start, stop, part, shape) for part in _under(start, stop, shape)):
            return None
        origins = [
            tuple(n * size - first for n, size, first in zip(place, codec.shape, start, strict=True))
            for place in _under(start, stop, codec.shape)
        ]
        return ChunkForm(
            codec=stages[0].options["cname"], chunk=codec.shape, origins=origin_rows(origins, len(codec.shape)),
            view=lambda samples: samples.transpose(self._order),
        )  # fmt: skip

    def write_packed(self, region: Region, encoded: Sequence[NDArray[np.uint8]]) -> None:
        """Store the encoded chunks of a region of whole chunks."""
        start, stop = self._in_order(region.start), self._in_order(region.stop)
        chunks = dict(zip(_under(start, stop, self._array.codec.shape), encoded, strict=True))

        def store(file: Place) -> None:
            stored = [chunks.get(chunk) for chunk in self._chunks_of(file)]
            self._partial.put(f"{self._name}/{self._array.name(file)}", shard_of(self._array, stored))

        with writing(self.path, sum(map(len, encoded))), self._partial.in_use():
            files = _under(start, stop, self._array.file_shape)
            whole, parts = split(files, lambda file: self._covers(start, stop, file))
            if self._array.index is None and isinstance(self._partial, PartialFolder):
                from pipeline.formats.image.zarr.together import write_encoded

                left = write_encoded(self._partial, self._name, self._array, chunks)
                whole = [whole[number] for number in left]
            for_each(store, whole, waits=isinstance(self._partial, PartialObjects))
            spooled = {
                chunk: self._spool().add(chunks[chunk]) for file in parts for chunk in self._touched(file, start, stop)
            }
            self._take_parts(start, stop, None, parts, spooled)

    def _chunks_of(self, file: Place) -> list[Place]:
        """The chunks of a file in C order."""
        first = [number * count for number, count in zip(file, self._array.per_file, strict=True)]
        return [tuple(map(sum, zip(first, within, strict=True))) for within in np.ndindex(*self._array.per_file)]

    def _touched(self, file: Place, start: Place, stop: Place) -> Iterator[Place]:
        """The chunks of a file that a region touches."""
        first, last = self._box(file, self._array.file_shape)
        return _under(tuple(map(max, start, first)), tuple(map(min, stop, last)), self._array.codec.shape)

    def read(self, region: Region) -> NDArray[Any]:
        """Samples of a region that is written."""
        self.write_held()
        start, stop = self._in_order(region.start), self._in_order(region.stop)
        samples = np.empty(region.shape, self.header.dtype)
        stored = samples.transpose(self._order)
        codec, is_remote = self._array.codec, isinstance(self._partial, PartialObjects)
        if isinstance(self._partial, PartialObjects):
            files: ChunkFiles = ChunkObjects(self._partial.final / self._name, self._array)
        else:
            files = ChunkFiles(Path(self._name), self._array, self._partial.open_file)

        def copy(part: ChunkPart) -> None:
            data = files.read(part.place)
            stored[part.into] = self._array.fill_value if data is None else codec.decode(data)[part.within]

        with writing(self.path):
            spans = list(map(_spans, start, stop, codec.shape, self._array.shape))
            for_each(copy, _parts(spans, _under(start, stop, codec.shape)), codec.nbytes, waits=is_remote)
        return samples

    def _in_order(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[axis] for axis in self._order)

    def _covers(self, start: Place, stop: Place, file: Place, shape: Place | None = None) -> bool:
        """Whether a region of the array holds all samples of a file, or of a part of that shape."""
        corners = zip(start, stop, *self._box(file, shape or self._array.file_shape), strict=True)
        return all(a <= c and d <= b for a, b, c, d in corners)

    def _box(self, place: Place, shape: Place) -> tuple[Place, Place]:
        """The corners in the array of the samples of a file or chunk of that shape."""
        first = tuple(map(operator.mul, place, shape))
        ends = zip(first, shape, self._array.shape, strict=True)
        return first, tuple(min(begin + size, length) for begin, size, length in ends)

    def _encoded(self, file: Place, spans: Sequence[_Spans], stored: NDArray[Any]) -> list[Any]:
        """The buffers of a file, its chunks in C order."""
        parts, found = _parts(spans, self._chunks_of(file)), dict[Place, NDArray[np.uint8]]()
        if self._kind == BLOSC and self._array.index is not None:
            from pipeline.formats.image.zarr.together import encode

            room = np.empty((len(parts), self._array.codec.limits[-1]), np.uint8)
            lengths = encode(
                self._array, BLOSC, parts, stored, None, room.ctypes.data + np.arange(len(parts)) * room.shape[1]
            )
            found = {part.place: row[:n] for part, row, n in zip(parts, room, lengths, strict=True) if n}

        def encode_alone(part: ChunkPart) -> None:
            found[part.place] = self._encode([(part.within, stored[part.into])]).copy()  # the thread encodes others

        for_each(encode_alone, [part for part in parts if part.place not in found], self._array.codec.nbytes)
        return shard_of(self._array, [found.get(chunk) for chunk in self._chunks_of(file)])

    def _write_raw(self, file: Place, spans: Sequence[_Spans], stored: NDArray[Any], descriptor: int) -> list[Any]:
        """Write a shard's uncompressed chunks to its file; returns what follows them."""
        from pipeline.formats.image.zarr.together import encode

        chunks, nbytes = self._chunks_of(file), self._array.codec.nbytes
        parts = _parts(spans, chunks)
        if not all(encode(self._array, RAW, parts, stored, descriptor, range(0, len(parts) * nbytes, nbytes))):
            return self._encoded(file, spans, stored)
        os.lseek(descriptor, 0, os.SEEK_END)
        there = {part.place for part in parts}
        return [index_of(self._array, [nbytes if chunk in there else None for chunk in chunks])]

    @contextmanager
    def _alone(self, folder: PartialFolder) -> Iterator[ChunkFiles]:
        """Exclude joined processes from changing parts of files, besides the lock; yields the files as they are."""
        with os.fdopen(folder.open_file(metadata_of(self._name))) as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            yield ChunkFiles(Path(self._name), self._array, folder.open_file)


def metadata_of(array: str) -> str:
    return f"{array}/{ROOT}"


def _within(begin: Place, end: Place, origin: Place) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for a, b, c in zip(begin, end, origin, strict=True))


def _spans(start: int, stop: int, size: int, length: int) -> _Spans:
    """What a region covers along one axis, by the chunk's number."""
    return {
        number: (into, within, into.start == 0 and into.stop == min(size, length - number * size))
        for number, within, into in blocks_along((start, stop), size)
    }


def _parts(spans: Sequence[_Spans], chunks: Iterable[Place], *, are_whole: bool = False) -> list[ChunkPart]:
    """The parts of chunks that a region has; `are_whole`: those alone that are all of their chunk."""
    found = []
    for chunk in chunks:
        cuts = [axis.get(number) for axis, number in zip(spans, chunk, strict=True)]
        if None not in cuts:
            within, into, covered = zip(*cuts, strict=True)
            if all(covered) or not are_whole:
                found.append(ChunkPart(chunk, into, within))
    return found


def _under(start: Place, stop: Place, block: tuple[int, ...]) -> Iterator[Place]:
    """The blocks that a region touches, by their numbers."""
    return itertools.product(*(range(a // size, -(-b // size)) for a, b, size in zip(start, stop, block, strict=True)))


def _array_metadata(
    shape: Place, dtype: np.dtype[Any], chunk: Place, shard: Place | None, stages: Sequence[Stage], names: str
) -> dict[str, Any]:
    """The content of the array's `zarr.json`."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs: list[dict[str, Any]] = [little if dtype.itemsize > 1 else {"name": "bytes"}]
    codecs += [{"name": stage.name, "configuration": _configuration(stage, dtype)} for stage in stages]
    if shard is not None:
        index = [little, {"name": "crc32c"}]
        sharding = {"chunk_shape": list(chunk), "codecs": codecs, "index_codecs": index, "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    zero = {"c": [0.0, 0.0], "f": 0.0, "b": False}.get(dtype.kind, 0)
    return {
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard or chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": codecs,
        "attributes": {},
        "dimension_names": list(names),
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _configuration(stage: Stage, dtype: np.dtype[Any]) -> dict[str, Any]:
    if stage.name != "blosc":
        return dict(stage.options)
    shuffle = _SHUFFLES[stage.options["shuffle"]]
    return {"blocksize": 0, **stage.options, "typesize": dtype.itemsize, "shuffle": shuffle}


def _for_writing(metadata: Mapping[str, Any], stages: Sequence[Stage], dtype: np.dtype[Any]) -> StoredArray:
    """The array of our own metadata, with encoders that know their options."""
    array = stored_array(metadata, 0)
    assert array is not None, "every codec written here is also read here"
    options = {"typesize": dtype.itemsize}
    encoders = tuple(Stage(stage.name, {**stage.options, **options}) for stage in stages)
    return replace(array, codec=replace(array.codec, stages=encoders))
