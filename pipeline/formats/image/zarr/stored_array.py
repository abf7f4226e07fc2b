"""What an array's metadata say of its chunk files, for the codecs that are read and written here.

Sources: Zarr v2 and v3 specifications, the codecs bytes, transpose, blosc, gzip, zstd, crc32c and sharding_indexed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.codecs.chunk_codec import BLOSC, RAW, ChunkCodec, Stage

Place = tuple[int, ...]  # a chunk's, or a file's, position in its grid

_STORED_IN_V2 = ("blosc", "gzip", "lz4", "zlib", "zstd")
_STORED_IN_V3 = ("blosc", "crc32c", "gzip", "zstd")


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """An array in files that each hold one chunk, or a shard of several with an index of them.

    shape      : of the array
    codec      : of one chunk
    file_shape : the samples of one file: a chunk's, or whole chunks of a shard
    index      : encoding of a shard's index, (offset, bytes) of each chunk in uint64; None: no shards
    index_ends : whether the index ends the shard, or begins it
    fill_value : the value of missing chunks
    prefix     : of the files' names, before the numbers
    """

    shape: tuple[int, ...]
    codec: ChunkCodec
    file_shape: tuple[int, ...]
    index: ChunkCodec | None = None
    index_ends: bool = True
    fill_value: Any
    prefix: str = "c/"
    separator: str = "/"

    @cached_property
    def per_file(self) -> tuple[int, ...]:
        """Chunks in a file along each axis."""
        return tuple(whole // part for whole, part in zip(self.file_shape, self.codec.shape, strict=True))

    def file_of(self, place: Place) -> Place:
        """The file of a chunk."""
        if self.index is None:
            return place
        return tuple(number // count for number, count in zip(place, self.per_file, strict=True))

    def name(self, file: Place) -> str:
        """A file's path below the array's folder."""
        return self.prefix + self.separator.join(map(str, file))


def kind_of(array: StoredArray) -> int | None:
    """The kind of an array's chunks for `pipeline.codecs.loops.chunk_files`; None for other codecs."""
    codec = array.codec
    names = [stage.name for stage in codec.stages]
    if not codec.is_plain or names not in ([], ["blosc"]):
        return None
    return BLOSC if names else RAW


def stored_array(metadata: Mapping[str, Any], fill_value: Any) -> StoredArray | None:
    """Interpret an array's metadata, as `zarr.json` or `.zarray` holds them; None if another codec is used.

    fill_value : the array's; None: zero

    The metadata have been checked by the zarr library.
    """
    try:
        return _of_v3(metadata, fill_value) if metadata["zarr_format"] == 3 else _of_v2(metadata, fill_value)
    except (AttributeError, LookupError, TypeError, ValueError, _NotHereError):
        return None


class _NotHereError(Exception):
    """The array uses what only the zarr library reads."""


def _need(condition: bool) -> None:
    if not condition:
        raise _NotHereError


def _of_v2(metadata: Mapping[str, Any], fill_value: Any) -> StoredArray:
    compressor, separator = metadata.get("compressor"), metadata.get("dimension_separator") or "."
    _need(not metadata.get("filters") and separator in (".", "/"))
    shape = tuple(metadata["chunks"])
    axes = tuple(range(len(shape)))
    stages: tuple[Stage, ...] = ()
    if compressor is not None:
        _need(compressor["id"] in _STORED_IN_V2)
        stages = (Stage(compressor["id"], compressor),)
    codec = ChunkCodec(
        shape=shape,
        dtype=np.dtype(metadata["dtype"]),
        order=axes if metadata["order"] == "C" else axes[::-1],
        stages=stages,
    )
    return StoredArray(
        shape=tuple(metadata["shape"]),
        codec=codec,
        file_shape=shape,
        fill_value=fill_value or 0,
        prefix="",
        separator=separator,
    )


def _of_v3(metadata: Mapping[str, Any], fill_value: Any) -> StoredArray:
    grid, keys = metadata["chunk_grid"], metadata["chunk_key_encoding"]
    _need(grid["name"] == "regular" and keys["name"] in ("default", "v2") and not metadata.get("storage_transformers"))
    file_shape = tuple(grid["configuration"]["chunk_shape"])
    dtype, codecs = np.dtype(metadata["data_type"]), list(metadata["codecs"])
    is_v2 = keys["name"] == "v2"
    separator = keys.get("configuration", {}).get("separator", "." if is_v2 else "/")
    further: dict[str, Any] = {}
    shape = file_shape
    if codecs[0]["name"] == "sharding_indexed":
        _need(len(codecs) == 1)
        sharding = codecs[0]["configuration"]
        shape, codecs = tuple(sharding["chunk_shape"]), sharding["codecs"]
        further["index_ends"] = sharding.get("index_location", "end") == "end"
        counts = tuple(whole // part for whole, part in zip(file_shape, shape, strict=True))
        further["index"] = _codec((*counts, 2), np.dtype(np.uint64), sharding["index_codecs"])
        _need(all(stage.name == "crc32c" for stage in further["index"].stages))  # otherwise its length is unknown
    return StoredArray(
        shape=tuple(metadata["shape"]),
        codec=_codec(shape, dtype, codecs),
        file_shape=file_shape,
        fill_value=fill_value or 0,
        prefix="" if is_v2 else f"c{separator}",
        separator=separator,
        **further,
    )


def _codec(shape: tuple[int, ...], dtype: np.dtype[Any], codecs: Sequence[Mapping[str, Any]]) -> ChunkCodec:
    """An optional transposition, then `bytes`, then codecs from bytes to bytes."""
    order = tuple(range(len(shape)))
    rest = list(codecs)
    if rest[0]["name"] == "transpose":
        order = tuple(rest.pop(0)["configuration"]["order"])
    first = rest.pop(0)
    _need(first["name"] == "bytes" and all(codec["name"] in _STORED_IN_V3 for codec in rest))
    big = first.get("configuration", {}).get("endian") == "big"
    stages = tuple(Stage(codec["name"], codec.get("configuration", {})) for codec in rest)
    return ChunkCodec(shape=shape, dtype=dtype.newbyteorder(">" if big else "<"), order=order, stages=stages)
