"""Reading regions of a Zarr image, chunk by chunk: common codecs by our own threads, others by the zarr library."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.block_cache import BlockCache, Box
from pipeline.codecs.chunk_codec import RAW
from pipeline.codecs.packed import NotPackedError, PackedBlocks, Packing
from pipeline.codecs.parallel import for_each, items_at_once, split
from pipeline.codecs.zarr_codecs import LARGEST_BYTES, chunks_of, use_bounded_codecs
from pipeline.errors import InputError, MillraceError
from pipeline.formats.image.base import (
    DTYPES,
    OF_COMPLEX,
    ImageHeader,
    ImageReader,
    Part,
    Region,
    Schedule,
    blocks_along,
    require_fit,
)
from pipeline.formats.image.metadata.notes import Notes
from pipeline.formats.image.zarr.chunk_files import ChunkFiles, ChunkPart
from pipeline.formats.image.zarr.chunk_objects import ChunkObjects
from pipeline.formats.image.zarr.layout import Layout, find_array
from pipeline.formats.image.zarr.nodes import UnusualError, node
from pipeline.formats.image.zarr.packed_chunks import pack_chunks, packed_codec
from pipeline.formats.image.zarr.stored_array import Place, StoredArray, kind_of, stored_array
from pipeline.storage.objects import ObjectPath, failure
from pipeline.storage.positional import reading

MARKS = ("zarr.json", ".zarray", ".zgroup")
# numcodecs' codecs that execute what they read, or return Python objects.
_REFUSED_CODECS = ("pickle", "msgpack", "json", "vlen")
# Those whose encoded samples may be wider than the array's, up to the widest type.
_WIDENING_CODECS = {"astype", "base64", "delta", "fixedscaleoffset", "quantize"}
_WIDEST_BYTES = 16

# Of larger uncompressed chunks, the part that a region needs is read instead of the whole chunk.
_LARGEST_WHOLE_BYTES = 32 << 20
_Piece = tuple[Part, ...]  # of a region in a chunk, along each axis


class ZarrReader(ImageReader):
    """Decodes the chunks that a region touches; missing ones are read as the fill value."""

    any_strides = True

    def __init__(self, path: Path, level: int = 0) -> None:
        """`level`: of the pyramid. InputError if the metadata is damaged, offers no single image, or needs a codec that
        is not installed."""
        self.path = path
        self._array, self._layout = _open(path, level)
        dtype = np.dtype(self._array.dtype).newbyteorder("=")
        if dtype.name not in DTYPES:
            way_out = OF_COMPLEX if dtype.kind == "c" else f"{', '.join(DTYPES)} are: convert it"
            raise InputError(f"{path}: {dtype.name} samples are not supported; {way_out}")
        self._chunk: tuple[int, ...] = tuple(self._array.chunks)
        chunk_bytes = math.prod(self._chunk) * dtype.itemsize
        if min(self._chunk) < 1 or chunk_bytes > LARGEST_BYTES:
            raise InputError(f"{path}: chunks of {chunk_bytes:,} bytes, {self._chunk}; write it again in smaller ones")
        shape = self._layout.shape(self._array.shape)
        stored = stored_array(self._array.metadata.to_dict(), self._array.fill_value)
        is_compressed = stored is None or any(stage.name != "crc32c" for stage in stored.codec.stages)
        self.header = ImageHeader(
            shape=shape,
            axes=self._layout.axes,
            dtype=dtype,
            metadata=self._layout.metadata | ({"compression": "other"} if is_compressed else {}),
            calibration=self._layout.calibration,
            levels=self._layout.levels,
            notes=Notes(name=self._layout.name, left_out=self._layout.left_out),
        )
        self.block_shape = tuple(min(c, n) for c, n in zip(self._layout.shape(self._chunk), shape, strict=True))
        across = math.prod(
            -(-self._array.shape[n] // self._chunk[n]) for n, a in enumerate(self._layout.stored) if a in "XC"
        )
        widened = not _WIDENING_CODECS.isdisjoint(_codec_names(self._array.metadata.to_dict()))
        self._stored_bytes = math.prod(self._chunk) * (_WIDEST_BYTES if widened else dtype.itemsize)
        self._chunk_bytes = chunk_bytes
        self._cache = BlockCache(row_bytes=across * chunk_bytes, block_bytes=chunk_bytes)
        self._schedule: Schedule | None = None
        self._files = None if stored is None else _chunks(path / self._array.path, stored)
        self._waits = isinstance(path, ObjectPath)
        self._is_raw = stored is not None and stored.codec.is_raw
        self._in_parts = self._is_raw and chunk_bytes > _LARGEST_WHOLE_BYTES
        alone = self._files is None or self._files.waits or self._in_parts
        self._kind = None if alone or stored is None else kind_of(stored)

    def at_level(self, level: int) -> ImageReader:
        """Its header has the level's shape, and the whole image's calibration."""
        return ZarrReader(self.path, level)

    def read(self, region: Region, out: NDArray[Any]) -> None:
        require_fit(self.header, region, out, any_strides=True)
        if out.size == 0:
            return
        at = self._schedule.place(region) if self._schedule else ()
        with self._cache.reading(at):
            self._read(self._pieces(self._wanted(region)), self._in_stored_order(out), at)

    def _read(self, pieces: list[_Piece], target: NDArray[Any], at: Place) -> None:
        busy: list[_Piece] = []
        missing, here = split(self._left_together(pieces, target, at), self._lacks)

        def copy(piece: _Piece) -> None:
            if not self._copy(piece, target, at, wait=False):
                busy.append(piece)

        for piece in here:  # first: those on their last use then free their memory for others
            copy(piece)
        for_each(copy, missing, self._stored_bytes, waits=self._waits)
        for piece in busy:
            self._copy(piece, target, at, wait=True)

    @property
    def packs(self) -> bool:
        files = self._files
        return files is not None and not files.waits and packed_codec(files.array.codec) is not None

    def read_packed(self, region: Region, memory: NDArray[np.uint8]) -> PackedBlocks | None:
        files = self._files
        codec = packed_codec(files.array.codec) if files is not None and self.packs else None
        if files is None or codec is None or not all(region.shape):
            return None
        from pipeline.formats.image.zarr.together import stored_together

        wanted = self._wanted(region)
        packing = Packing(memory, codec, self._chunk, self.header.dtype.itemsize, files.array.fill_value)

        pieces = self._pieces(wanted)
        places = [tuple(number for number, _, _ in piece) for piece in pieces]
        within = np.array([[(part.start, part.stop) for _, _, part in piece] for piece in pieces])
        origins = np.array(places) * np.array(self._chunk) - np.array([start for start, _ in wanted])
        try:  # other readers are at work too; a pool would take longer to wake
            with stored_together(files, places) as stored:
                pack_chunks(packing, files.array.codec, stored, within, origins)
            return replace(packing.packed(), view=self._in_stored_order)
        except (NotPackedError, InputError, OSError, ValueError):  # the processor's way names the fault
            return None

    def _wanted(self, region: Region) -> list[tuple[int, int]]:
        """The region along the array's axes."""
        spans = dict(zip(self.header.axes, zip(region.start, region.stop, strict=True), strict=True))
        return [spans.get(letter, (0, 1)) for letter in self._layout.stored]

    def _pieces(self, wanted: list[tuple[int, int]]) -> list[_Piece]:
        return list(itertools.product(*map(blocks_along, wanted, self._chunk)))

    def expect(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        axes = [self._layout.stored.index(letter) for letter in self.header.axes]
        schedule = Schedule(spans, [self._chunk[axis] for axis in axes], self.header.shape)

        def in_order(chunk: Place) -> Place:
            return tuple(chunk[axis] for axis in axes)

        def part(chunk: Place, after: Place) -> Box:
            found = dict(zip(axes, schedule.part(in_order(chunk), after), strict=True))
            return tuple(found.get(axis, slice(0, 1)) for axis in range(len(chunk)))

        self._cache.expect(
            lambda chunk: schedule.uses(in_order(chunk)),
            lambda chunk, after: schedule.next_use(in_order(chunk), after),
            part,
        )
        self._schedule = schedule

    def hold_at_most(self, budget_bytes: int) -> int:
        return 0 if self._in_parts or self._kind == RAW else self._cache.hold_at_most(budget_bytes)

    def close(self) -> None:
        """Nothing is held open."""

    def _in_stored_order(self, out: Any) -> Any:
        """A view of `out`, of NumPy or CuPy, with the array's axes, in the array's order."""
        moved = out.transpose(np.argsort(self._layout.order))
        return moved[tuple(slice(None) if letter in self.header.axes else None for letter in self._layout.stored)]

    def _left_together(self, pieces: list[_Piece], target: NDArray[Any], at: Place) -> list[_Piece]:
        """Copy the chunks' parts of the region that can be read together; returns the others."""
        if self._files is None or self._kind is None:
            return pieces
        left: list[_Piece] = []
        # Memory for decoded chunks bounds a group.
        groups = 1 if self._kind == RAW else -(-len(pieces) // items_at_once(len(pieces), self._chunk_bytes))
        for number in range(groups):
            left += self._left_of_group(self._files, self._kind, pieces[number::groups], target, at)
        return left

    def _left_of_group(
        self, files: ChunkFiles, kind: int, pieces: Sequence[_Piece], target: NDArray[Any], at: Place
    ) -> list[_Piece]:
        from pipeline.formats.image.zarr.together import read_together

        parts = []
        for piece in pieces:
            place, into, within = zip(*piece, strict=True)
            parts.append(ChunkPart(place, into, within))

        def look(numbers: list[int], memories: list[tuple[int, bool]]) -> list[int]:
            chosen = [
                parts[number]._replace(memory=address, is_held=is_held)
                for number, (address, is_held) in zip(numbers, memories, strict=True)
            ]
            return read_together(files, kind, chosen, target)

        # The system keeps the files of uncompressed chunks, so that a part is read again sooner than copied.
        left = self._cache.use_together(
            [part.place for part in parts], self._chunk_bytes, look, lambda _, memory: self._samples(memory),
            keeps=kind != RAW, at=at,
        )  # fmt: skip
        return [pieces[number] for number in left]

    def _samples(self, memory: NDArray[Any]) -> NDArray[Any]:
        return memory.view(self.header.dtype).reshape(self._chunk)

    def _lacks(self, piece: _Piece) -> bool:
        """Whether the chunk has to be decoded."""
        return self._cache.lacks(tuple(number for number, _, _ in piece))

    def _copy(self, piece: _Piece, target: NDArray[Any], at: Place, *, wait: bool) -> bool:
        """Copy a chunk's part of the region; False if another thread is decoding the chunk and `wait` is False."""
        place, into, within = zip(*piece, strict=True)
        try:
            if self._is_raw and (self._in_parts or not self._cache.is_shared(place)):
                self._read_raw(place, within, target[into])
                return True

            def look(samples: NDArray[Any]) -> bool:
                target[into] = samples
                return True

            return self._cache.use(
                place, self._chunk_bytes, lambda memory: self._decode(place, memory), look, within, at=at, wait=wait
            ) is not None  # fmt: skip
        except Exception:
            with _translated(self.path, _undecoded(place)):
                raise

    def _read_raw(self, place: Place, within: tuple[slice, ...], out: NDArray[Any]) -> None:
        assert self._files is not None, "its codec is known"
        region = Region(tuple(span.start for span in within), tuple(span.stop for span in within))
        if not self._files.read_raw(place, region, out):
            out[...] = self._files.array.fill_value

    def _decode(self, place: Place, memory: NDArray[np.uint8]) -> NDArray[Any]:
        if self._files is not None:
            samples = self._samples(memory)
            if self._is_raw:
                self._read_raw(place, tuple(slice(0, size) for size in self._chunk), samples)
                return samples
            data = self._files.read(place)
            if data is None:
                samples[...] = self._files.array.fill_value
                return samples
            return self._files.array.codec.decode(data, memory)
        corner = [index * size for index, size in zip(place, self._chunk, strict=True)]
        box = tuple(
            slice(first, min(first + size, end))
            for first, size, end in zip(corner, self._chunk, self._array.shape, strict=True)
        )
        with chunks_of(self._stored_bytes):
            return np.asarray(self._array[box])


def _undecoded(place: Place) -> str:
    return f"chunk {'/'.join(map(str, place))} does not decode"


def _open(path: Path, level: int) -> tuple[Any, Layout]:
    """Open the image's array; only metadata is read."""
    mark = _mark(path)
    with suppress(UnusualError, ArithmeticError, LookupError, OSError, RecursionError, TypeError, ValueError):
        # The zarr library reports anything unexpected.
        return find_array(node(path), path, level)
    import zarr

    use_bounded_codecs()
    with _translated(path, f"its metadata ({mark}) cannot be used"), warnings.catch_warnings():
        # zarr warns of features that the specifications do not cover yet; those it cannot read are refused below.
        warnings.simplefilter("ignore")
        opened = zarr.open(store=_zarr_store(path), mode="r", zarr_format=3 if mark == "zarr.json" else 2)
        array, layout = find_array(opened, path, level)
        refused = [codec for codec in _codec_names(array.metadata.to_dict()) if codec.startswith(_REFUSED_CODECS)]
    if refused:
        raise InputError(f"{path}: its chunks are encoded as {refused[0]}, which is not safe to read; write it again")
    return array, layout


def _mark(path: Path) -> str:
    """The file of metadata that is there. InputError if there is none."""
    if isinstance(path, ObjectPath):
        names = {mark for mark in MARKS if (path / mark).exists()}
    else:
        if path.is_file():
            raise InputError(f"{path}: is a file, but a Zarr image is a folder; unpack it, or name a folder")
        with reading(path):
            names = {entry.name for entry in path.iterdir()}
    mark = next((mark for mark in MARKS if mark in names), None)
    if mark is None:
        raise InputError(f"{path}: a folder without Zarr metadata ({', '.join(MARKS)}); check the path")
    return mark


def _chunks(folder: Path, array: StoredArray) -> ChunkFiles:
    return ChunkObjects(folder, array) if isinstance(folder, ObjectPath) else ChunkFiles(folder, array)


def _zarr_store(path: Path) -> Any:
    """What the zarr library reads a hierarchy from."""
    if isinstance(path, ObjectPath):
        from zarr.storage import ObjectStore

        return ObjectStore(path.store_below, read_only=True)
    from pipeline.formats.image.zarr.lazy_store import RegularFiles

    return RegularFiles(path, read_only=True)


def _codec_names(metadata: Any) -> Iterator[str]:
    """The names of all codecs in an array's metadata, including those within shards."""
    if isinstance(metadata, dict):
        for key, value in metadata.items():
            if key in ("id", "name") and isinstance(value, str):
                yield value.removeprefix("numcodecs.")
            else:
                yield from _codec_names(value)
    elif isinstance(metadata, list | tuple):
        for value in metadata:
            yield from _codec_names(value)


@contextmanager
def _translated(path: Path, what: str) -> Iterator[None]:
    """Translate OSError as `reading` does, and all other errors of zarr and its codecs to InputError."""
    try:
        yield
    except MillraceError:
        raise
    except json.JSONDecodeError as exc:
        raise InputError(f"{path}: {what}: not JSON ({exc}); copy or export it again") from exc
    except Exception as exc:
        if isinstance(path, ObjectPath) and type(exc).__module__.startswith("obstore"):
            raise failure(path, InputError, exc) from exc
        if isinstance(exc, OSError) and exc.errno is not None:  # gzip's errors are OSErrors without a number
            with reading(path):
                raise
        # The errors of zarr, numcodecs and the codecs have no common ancestor; a damaged size may raise MemoryError.
        words = " ".join(f"{type(exc).__name__} {exc}".split())[:160]
        raise InputError(f"{path}: {what} ({words}); damaged, or a codec is missing: export it again") from exc


def open_level(path: Path) -> Any:
    """The one level of a group that Millrace wrote, as an array of the zarr library, with any axes."""
    import zarr

    if not any((path / mark).is_file() for mark in MARKS):
        raise InputError(f"{path}: no Zarr group is there; check the path")
    use_bounded_codecs()
    with _translated(path, "its metadata cannot be used"):
        return zarr.open_group(store=_zarr_store(path), mode="r")["0"]
