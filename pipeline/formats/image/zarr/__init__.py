"""Zarr: version 3 and 2 in (arrays, groups of one array, OME-Zarr 0.4 and 0.5), OME-Zarr 0.5 out.

Images are stored with channels before the spatial axes, in chunks of 2 MiB; those of more than 8 GiB in shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.codecs.zarr_codecs import LARGEST_BYTES
from pipeline.errors import ParameterError, counted
from pipeline.formats.image.base import (
    DTYPES,
    ImageFormat,
    ImageHeader,
    ImageReader,
    ImageWriter,
    Storage,
    along_axes,
)
from pipeline.formats.image.metadata import ome_zarr
from pipeline.formats.image.pyramid import LABELS, Reduction, at_level, chosen_levels
from pipeline.formats.image.zarr.layout import COLOURS_MARK
from pipeline.formats.image.zarr.reader import MARKS, ZarrReader
from pipeline.formats.image.zarr.writer import COMPRESSIONS, DEFAULT_COMPRESSION, ZarrWriter, ome_metadata
from pipeline.storage.partial import Opening

# Objects of metadata, by their places below an image that this or other writers make.
METADATA_NAMES = (*MARKS, ".zattrs", "0/zarr.json", "0/.zarray")

_STORED_ORDER = "TCZYX"
# Chunks of few rows, so that the bands of rows in which wide images are processed contain whole chunks. 2 MiB each;
# chunks of narrow images have more rows, so that files do not get too small.
_CHUNK_ROWS = 256
_CHUNK_BYTES = 2 << 20
_SMALLEST_BYTES = 64 << 10
# Of larger images several chunks share a file, since file systems and tape archives suffer from millions of files. The
# shards are no larger than a good chunk of a job, which had better write whole ones.
SHARDED_BYTES = 8 << 30
_SHARD_BYTES = 16 << 20
# More files, each below a disk's block, are a number of parts taken for a number of pixels: they take hours.
_MOST_TINY_FILES = 100_000
_TINY_BYTES = 4096
_MOST_CHUNKS = 1 << 20  # in a shard


class Zarr(ImageFormat):
    """A folder of chunks, each a file. https://zarr-specs.readthedocs.io, https://ngff.openmicroscopy.org."""

    name = "Zarr"
    suffixes = (".zarr",)

    def __init__(self, storage: Storage = Storage()) -> None:  # noqa: B008 - it is frozen
        self._storage = storage

    def storing(self, storage: Storage) -> Zarr:
        if storage.compression not in (None, *COMPRESSIONS):
            raise ParameterError(f"--compression {storage.compression}: Zarr takes {', '.join(COMPRESSIONS)}")
        return Zarr(storage)

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        return not first_bytes and is_zarr(path)

    def open(self, path: Path) -> ImageReader:
        return ZarrReader(path)

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        if {"C", "S"} <= set(header.axes):
            return f"{path}: OME-Zarr has one axis for channels and colours, not {header.axes}; choose .tif"
        if header.dtype.name not in DTYPES:
            return f"{path}: images are written as {', '.join(DTYPES)}, not {header.dtype.name}; convert the input"
        if min(header.shape) < 1:
            return f"{path}: an image of {' × '.join(map(str, header.shape))} has no samples; check the input"
        return None

    def keeps(self, header: ImageHeader, path: Path) -> set[str]:
        return {*header.calibration.facts(header.axes), "display", "label properties", "name"}

    def block_shape(self, header: ImageHeader) -> tuple[int, ...]:
        chunk, shard = self._shapes(header)
        return shard or chunk

    def part_shape(self, header: ImageHeader) -> tuple[int, ...]:
        return self._shapes(header)[0]

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        """Sizes, positions and units as in the input."""
        # OME-Zarr has no samples of a pixel: colours are channels there, with a mark for our reader.
        letters = header.axes.replace("S", "C")
        stored = "".join(letter for letter in _STORED_ORDER if letter in letters)
        levels = self.levels(header, path)
        attributes: dict[str, Any] = {"ome": _metadata(path, header, stored, levels)}
        if "S" in header.axes:
            attributes[COLOURS_MARK] = True
        chunk, shard = self._shapes(header)
        return ZarrWriter(
            path,
            header,
            opening,
            stored=stored,
            order=tuple(letters.index(letter) for letter in stored),
            chunk=chunk,
            shard=shard,
            compression=self._storage.compression or DEFAULT_COMPRESSION,
            attributes=attributes,
            further=[self._shapes_at(header, level) for level in range(1, levels)],
        )

    def levels(self, header: ImageHeader, path: Path) -> int:
        return chosen_levels(self._storage.levels, header)

    def _shapes_at(self, header: ImageHeader, level: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The chunk's and the shard's extent at a level. Its shards cover what those of level 0 do, so that these
        together fill them, as far as whole chunks do."""
        shard = self._shapes(header)[1]
        chunk = self._shapes(at_level(header, level))[0]
        if shard is None:
            return chunk, None
        halved = (n >> level if letter in "YX" else n for n, letter in zip(shard, header.axes, strict=True))
        return chunk, tuple(max(-(-n // part), 1) * part for n, part in zip(halved, chunk, strict=True))

    def _shapes(self, header: ImageHeader) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The chunk's and the shard's extent along the image's axes. ParameterError if they do not fit together."""
        chunks, shards = self._storage.chunks, self._storage.shards
        chunk = _chunk_shape(header) if chunks is None else along_axes(chunks, header, "--chunks")
        shard = () if shards is None else along_axes(shards, header, "--shards")
        if chunks is None and shards is not None:  # as many of the usual chunks as fit, cut to a divisor
            chunk = tuple(
                part if whole >= length else math.gcd(whole, part)
                for whole, length, part in zip(shard, header.shape, chunk, strict=True)
            )
        chunk_bytes = math.prod(chunk) * header.dtype.itemsize
        if chunk_bytes > LARGEST_BYTES:
            raise ParameterError(
                f"--chunks: {chunk_bytes:,} bytes in a chunk, and at most {LARGEST_BYTES:,} can be read"
            )
        if shards is None:
            if chunks is not None:
                _require_files(header, chunk, "--chunks")
            is_large = chunks is None and header.nbytes > SHARDED_BYTES
            return chunk, _shard_shape(header, chunk) if is_large else None
        shard = tuple(  # the index of one has an entry for each of its chunks, even beyond the image
            whole if whole < length else -(-length // part) * part
            for whole, length, part in zip(shard, header.shape, chunk, strict=True)
        )
        count = math.prod(-(-whole // part) for whole, part in zip(shard, chunk, strict=True))
        if count > _MOST_CHUNKS:
            raise ParameterError(
                f"--chunks {_numbers(chunk)}: makes {count:,} chunks in each shard of {_numbers(shard)}, and at most "
                f"{_MOST_CHUNKS:,} are indexed; give larger chunks or smaller shards"
            )
        if any(whole % part for whole, part in zip(shard, chunk, strict=True)):
            raise ParameterError(
                f"--shards {_numbers(shard)}: must be whole multiples of the chunks, {_numbers(chunk)}"
            )
        _require_files(header, shard, "--shards")
        return chunk, shard


def _require_files(header: ImageHeader, part: tuple[int, ...], option: str) -> None:
    """ParameterError if the image would have very many files of `part` samples, each of very few bytes."""
    count = math.prod(-(-length // n) for length, n in zip(header.shape, part, strict=True))
    file_bytes = math.prod(part) * header.dtype.itemsize
    if count > _MOST_TINY_FILES and file_bytes < _TINY_BYTES:
        raise ParameterError(
            f"{option} {_numbers(part)} makes {count:,} files of {counted(file_bytes, 'byte')}: these are pixels of a "
            f"file, not a number of files; give more, such as {option} 256"
        )


def _numbers(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def is_zarr(path: Path) -> bool:
    """Whether `path` is the folder of a Zarr array or group."""
    return any((path / mark).is_file() for mark in MARKS)


def _chunk_shape(header: ImageHeader) -> tuple[int, ...]:
    """The shape of a chunk, in the image's axes."""
    sizes = dict(zip(header.axes, header.shape, strict=True))
    columns = min(_CHUNK_BYTES // (_CHUNK_ROWS * header.dtype.itemsize), sizes["X"])
    rows = max(_CHUNK_ROWS, _SMALLEST_BYTES // (columns * header.dtype.itemsize))
    chunk = {"Y": min(rows, sizes["Y"]), "X": columns}
    return tuple(chunk.get(letter, 1) for letter in header.axes)


def _shard_shape(header: ImageHeader, chunk: tuple[int, ...]) -> tuple[int, ...]:
    """Neighbouring chunks, along X first, since jobs cut wide images into bands of rows."""
    shard, room = list(chunk), _SHARD_BYTES // (math.prod(chunk) * header.dtype.itemsize)
    for axis in reversed(range(len(chunk))):
        if header.axes[axis] in "ZYX":
            count = max(min(room, -(-header.shape[axis] // chunk[axis])), 1)
            shard[axis], room = count * chunk[axis], room // count
    return tuple(shard)


def _metadata(path: Path, header: ImageHeader, stored: str, levels: int) -> dict[str, Any]:
    known = header.calibration
    placed = [ome_zarr.transformations(known, stored, level) for level in range(levels)]
    method = Reduction.of(header).method if levels > 1 else None
    title = header.notes.name or path.stem
    described = ome_metadata(title, ome_zarr.axes(known, stored), *placed, method=method)
    if isinstance(header.metadata.get(LABELS), Mapping):
        described |= {LABELS: header.metadata[LABELS]}
    omero = header.metadata.get("omero") or ome_zarr.omero(known.channels, header.notes.display, header.dtype)
    return described if omero is None else described | {"omero": omero}
