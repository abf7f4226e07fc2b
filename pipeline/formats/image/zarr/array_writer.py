"""Writing one Zarr array: whole files at once, parts of a file when they make it whole."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import AXES
from pipeline.codecs.chunk_codec import BLOSC, RAW, Stage
from pipeline.codecs.packed import ChunkForm, origin_rows
from pipeline.codecs.parallel import for_each
from pipeline.errors import OutputError
from pipeline.formats.image.base import ImageHeader, Region, blocks_along
from pipeline.formats.image.zarr.chunk_files import ChunkFiles, index_of, shard_of
from pipeline.formats.image.zarr.chunk_objects import ChunkBytes, ChunkObjects
from pipeline.formats.image.zarr.stored_array import Place, StoredArray, kind_of, stored_array
from pipeline.storage.partial import PartialFolder
from pipeline.storage.partial_objects import PartialObjects
from pipeline.storage.writable import writing

ROOT = "zarr.json"
_SHUFFLES = ("noshuffle", "shuffle", "bitshuffle")

# Of files of which only parts have come, for each level.
_HELD_BYTES = 16 << 20

# Along one axis, by a chunk's number: where samples lie in the chunk and in the region, and whether they are all.
_Spans = dict[int, tuple[slice, slice, bool]]
Shapes = tuple[tuple[int, ...], tuple[int, ...] | None]  # of a chunk, and of a shard if there are any


class Older(Protocol):
    """The chunks of a file that is changed."""

    def read(self, place: Place) -> NDArray[np.uint8] | None: ...


class ArrayWriter:
    """One array of the group.

    Several threads encode and store regions of whole files at once. Parts of a file are held until they make it whole.
    Beyond `_HELD_BYTES`, and at a flush, the file is read, changed and written back, by one region of one process at a
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
        self._sharing = threading.Lock()
        # By file: copies of its parts by their corners in the array. All of them together are not on disk.
        self._held: dict[Place, dict[tuple[Place, Place], NDArray[Any]]] = {}
        self._split: set[Place] = set()  # files of which some parts were stored alone

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
        with writing(self.path, samples.nbytes), self._partial.in_use():
            whole: list[Place] = []
            parts: list[Place] = []
            for file in _under(start, stop, self._array.file_shape):
                (whole if self._covers(start, stop, file) else parts).append(file)
            self._store(start, stop, stored, whole, are_whole=True)
            if parts:
                with self._sharing:
                    self._take_parts(start, stop, stored, parts)

    def write_held(self) -> None:
        """Store the parts that are held, each alone."""
        with self._sharing:
            if self._held:
                with writing(self.path), self._partial.in_use():
                    for file in list(self._held):
                        self._store_held(file)

    def _take_parts(self, start: Place, stop: Place, stored: NDArray[Any], files: Sequence[Place]) -> None:
        """Hold what a region has of these files; store those that are whole now, and parts for which there is no room.
        The lock is held: what is no longer held is stored when the next flush begins."""
        complete, alone = [], []
        most = max(_HELD_BYTES // (math.prod(self._array.file_shape) * self.header.dtype.itemsize), 1)
        for file in files:
            first, last = self._box(file)
            begin, end = tuple(map(max, start, first)), tuple(map(min, stop, last))
            overlaps = any(
                key != (begin, end) and all(a < d and c < b for a, b, c, d in zip(begin, end, *key, strict=True))
                for key in self._held.get(file, ())
            )
            if overlaps:  # the job was cut anew
                self._store_held(file)
            if file in self._split or (file not in self._held and len(self._held) >= most):
                alone.append(file)
                continue
            held = self._held.setdefault(file, {})
            held[begin, end] = stored[_within(begin, end, start)].copy()
            if sum(part.size for part in held.values()) == math.prod(b - a for a, b in zip(first, last, strict=True)):
                complete.append(file)

        def store_whole(file: Place) -> None:
            first, last = self._box(file)
            samples = np.empty([b - a for a, b in zip(first, last, strict=True)], stored.dtype)
            for (begin, end), part in self._held[file].items():
                samples[_within(begin, end, first)] = part
            self._store(first, last, samples, [file], are_whole=True)
            del self._held[file]

        file_bytes = math.prod(self._array.file_shape) * stored.itemsize
        for_each(store_whole, complete, file_bytes, waits=isinstance(self._partial, PartialObjects))
        self._split.update(alone)
        self._store(start, stop, stored, alone, are_whole=False)

    def _store_held(self, file: Place) -> None:
        for (begin, end), part in self._held[file].items():
            self._store(begin, end, part, [file], are_whole=False)
        del self._held[file]
        self._split.add(file)

    def _store(
        self, start: Place, stop: Place, stored: NDArray[Any], files: Sequence[Place], *, are_whole: bool
    ) -> None:
        """Store what a region of the array has of these files: all, or a part of each, under the lock."""
        if not files:
            return
        spans = [
            _spans(first, last, size, length)
            for first, last, size, length in zip(start, stop, self._array.codec.shape, self._array.shape, strict=True)
        ]

        def store(file: Place, older: Older | None = None) -> None:
            name, is_shard = f"{self._name}/{self._array.name(file)}", self._array.index is not None
            if self._kind == RAW and is_shard and older is None and isinstance(self._partial, PartialFolder):
                self._partial.put(name, partial(self._write_raw, file, spans, stored))
            else:
                self._partial.put(name, shard_of(self._array, self._encoded(file, spans, stored, older)))

        file_bytes = math.prod(self._array.file_shape) * self.header.dtype.itemsize
        if are_whole:
            if self._kind is not None and self._array.index is None and isinstance(self._partial, PartialFolder):
                from pipeline.formats.image.zarr.together import ChunkPart, write_together

                cuts = [zip(*map(dict.__getitem__, spans, file), strict=True) for file in files]
                parts = [ChunkPart(file, within, into) for file, (into, within, _) in zip(files, cuts, strict=True)]
                left = write_together(self._partial, self._name, self._array, self._kind, parts, stored)
                files = [files[number] for number in left]
            for_each(store, files, file_bytes, waits=isinstance(self._partial, PartialObjects))
        elif isinstance(self._partial, PartialObjects):
            for_each(partial(self._change_object, spans, stored), files, file_bytes, waits=True)
        else:
            with self._alone(self._partial) as older:
                for_each(lambda file: store(file, older), files, file_bytes)

    def chunk_form(self, region: Region) -> ChunkForm | None:
        """How a device may encode a region; None unless it consists of whole files of Blosc chunks."""
        start, stop = self._in_order(region.start), self._in_order(region.stop)
        codec, stages = self._array.codec, self._array.codec.stages
        if [stage.name for stage in stages] != ["blosc"] or stages[0].options["cname"] not in ("lz4", "zstd"):
            return None
        if not all(map(operator.lt, start, stop)) or len(codec.shape) > AXES or codec.dtype.itemsize > 8:
            return None
        if not all(self._covers(start, stop, file) for file in _under(start, stop, self._array.file_shape)):
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
        """Store the encoded chunks of a region of whole files."""
        start, stop = self._in_order(region.start), self._in_order(region.stop)
        chunks = dict(zip(_under(start, stop, self._array.codec.shape), encoded, strict=True))

        def store(file: Place) -> None:
            stored = [chunks.get(chunk) for chunk in self._chunks_of(file)]
            self._partial.put(f"{self._name}/{self._array.name(file)}", shard_of(self._array, stored))

        with writing(self.path, sum(map(len, encoded))), self._partial.in_use():
            files = list(_under(start, stop, self._array.file_shape))
            if self._array.index is None and isinstance(self._partial, PartialFolder):
                from pipeline.formats.image.zarr.together import write_encoded

                left = write_encoded(self._partial, self._name, self._array, chunks)
                files = [files[number] for number in left]
            for_each(store, files, waits=isinstance(self._partial, PartialObjects))

    def _chunks_of(self, file: Place) -> list[Place]:
        """The chunks of a file in C order."""
        first = [number * count for number, count in zip(file, self._array.per_file, strict=True)]
        return [tuple(map(sum, zip(first, within, strict=True))) for within in np.ndindex(*self._array.per_file)]

    def _change_object(self, spans: Sequence[_Spans], stored: NDArray[Any], file: Place) -> None:
        """Write an object that the region covers in part, with the older one's other samples."""
        assert isinstance(self._partial, PartialObjects)
        self._partial.change(
            f"{self._name}/{self._array.name(file)}",
            lambda data: shard_of(
                self._array, self._encoded(file, spans, stored, None if data is None else ChunkBytes(self._array, data))
            ),
        )

    def read(self, region: Region) -> NDArray[Any]:
        """Samples of a region that is written."""
        self.write_held()
        start, stop = self._in_order(region.start), self._in_order(region.stop)
        samples = np.empty(region.shape, self.header.dtype)
        stored = samples.transpose(self._order)
        codec, is_remote = self._array.codec, isinstance(self._partial, PartialObjects)
        if isinstance(self._partial, PartialObjects):
            files: Older = ChunkObjects(self._partial.final / self._name, self._array)
        else:
            files = ChunkFiles(Path(self._name), self._array, self._partial.open_file)
        spans = list(map(_spans, start, stop, codec.shape, self._array.shape))

        def copy(chunk: Place) -> None:
            into, within, _ = zip(*(axis[number] for axis, number in zip(spans, chunk, strict=True)), strict=True)
            data = files.read(chunk)
            stored[within] = self._array.fill_value if data is None else codec.decode(data)[into]

        with writing(self.path):
            for_each(copy, list(_under(start, stop, codec.shape)), codec.nbytes, waits=is_remote)
        return samples

    def _in_order(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[axis] for axis in self._order)

    def _covers(self, start: Place, stop: Place, file: Place) -> bool:
        """Whether a region of the array holds all of a file's samples."""
        return all(a <= c and d <= b for a, b, c, d in zip(start, stop, *self._box(file), strict=True))

    def _box(self, file: Place) -> tuple[Place, Place]:
        """The corners of a file's samples in the array."""
        first = tuple(number * size for number, size in zip(file, self._array.file_shape, strict=True))
        ends = zip(first, self._array.file_shape, self._array.shape, strict=True)
        return first, tuple(min(begin + size, length) for begin, size, length in ends)

    def _encoded(
        self, file: Place, spans: Sequence[_Spans], stored: NDArray[Any], older: Older | None
    ) -> list[NDArray[np.uint8] | None]:
        """The encoded chunks of a file in C order; `older`: the file is changed, not replaced. None: not stored."""
        array, chunks = self._array, self._chunks_of(file)
        if array.index is None:
            return [self._encoded_chunk(file, spans, stored, older)]
        found: dict[Place, NDArray[np.uint8] | None] = {}
        if self._kind == BLOSC:
            from pipeline.formats.image.zarr.together import ChunkPart, encode_together

            cuts = [(chunk, _cut(spans, chunk)) for chunk in chunks]
            parts = [ChunkPart(chunk, cut[1], cut[0]) for chunk, cut in cuts if cut and (cut[2] or older is None)]
            found.update(encode_together(array, parts, stored))

        def encode(chunk: Place) -> None:
            data = self._encoded_chunk(chunk, spans, stored, older)
            found[chunk] = None if data is None else data.copy()  # the thread encodes others

        for_each(encode, [chunk for chunk in chunks if chunk not in found], array.codec.nbytes)
        return [found[chunk] for chunk in chunks]

    def _write_raw(self, file: Place, spans: Sequence[_Spans], stored: NDArray[Any], descriptor: int) -> list[Any]:
        """Write a shard's uncompressed chunks to its file; returns what follows them."""
        from pipeline.formats.image.zarr.together import ChunkPart, write_in_row

        cuts = [(chunk, _cut(spans, chunk)) for chunk in self._chunks_of(file)]
        parts = [ChunkPart(chunk, cut[1], cut[0]) for chunk, cut in cuts if cut]
        if not write_in_row(self._array, parts, stored, descriptor):
            return shard_of(self._array, self._encoded(file, spans, stored, None))
        os.lseek(descriptor, 0, os.SEEK_END)
        return [index_of(self._array, [self._array.codec.nbytes if cut else None for _, cut in cuts])]

    def _encoded_chunk(
        self, chunk: Place, spans: Sequence[_Spans], stored: NDArray[Any], older: Older | None
    ) -> NDArray[np.uint8] | None:
        """A chunk's bytes: of the samples given, and around them of the older ones, or the fill value.

        They are valid until this thread's next call.
        """
        codec = self._array.codec
        cut = _cut(spans, chunk)
        if cut is None:
            return None if older is None else older.read(chunk)
        into, within, is_whole = cut
        samples = stored[within]
        if samples.shape != codec.shape:
            data = None if older is None or is_whole else older.read(chunk)
            whole = np.zeros(codec.shape, stored.dtype) if data is None else codec.decode(data)
            whole[into] = samples
            samples = whole
        return codec.encode(samples)

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


def _cut(spans: Sequence[_Spans], chunk: Place) -> tuple[tuple[slice, ...], tuple[slice, ...], bool] | None:
    """Where samples lie in a chunk and in the region, and whether they are all that it has; None: there are none."""
    parts = [axis.get(number) for axis, number in zip(spans, chunk, strict=True)]
    if None in parts:
        return None
    into, within, are_whole = zip(*parts, strict=True)
    return into, within, all(are_whole)


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
