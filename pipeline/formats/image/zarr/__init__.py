"""Zarr: version 3 and 2 in (arrays, groups of one array, OME-Zarr 0.4 and 0.5), OME-Zarr 0.5 out."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.block_cache import BlockCache
from pipeline.codecs.blosc import use_checked_blosc
from pipeline.errors import InputError, MillraceError
from pipeline.formats.image.base import ImageFormat, ImageHeader, ImageReader, ImageWriter, Region, require_fit
from pipeline.formats.image.zarr.image import chunk_shape, image_writer
from pipeline.formats.image.zarr.layout import Layout, find_array
from pipeline.storage.partial import Opening
from pipeline.storage.positional import reading

_AXES = ("YX", "YXC", "ZYX", "ZYXC")
_DTYPES = ("uint8", "uint16", "int16", "float32", "float64")
_MARKS = ("zarr.json", ".zarray", ".zgroup")
_LARGEST_CHUNK_BYTES = 1 << 30
# numcodecs' codecs that run what they read, or deliver Python objects.
_REFUSED_CODECS = ("pickle", "msgpack", "json", "vlen")


class Zarr(ImageFormat):
    """A folder of chunks, each a file. https://zarr-specs.readthedocs.io, https://ngff.openmicroscopy.org."""

    name = "Zarr"
    suffixes = (".zarr",)

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        return is_zarr(path)

    def open(self, path: Path) -> ImageReader:
        return ZarrReader(path)

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        if header.axes not in _AXES:
            return f"{path}: images are written along {', '.join(_AXES)}, not {header.axes}; check the input"
        if header.dtype.name not in _DTYPES:
            return f"{path}: images are written as {', '.join(_DTYPES)}, not {header.dtype.name}; convert the input"
        if min(header.shape) < 1:
            return f"{path}: an image of {' × '.join(map(str, header.shape))} has no samples; check the input"
        return None

    def block_shape(self, header: ImageHeader) -> tuple[int, ...]:
        return chunk_shape(header)

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return image_writer(path, header, opening)


def is_zarr(path: Path) -> bool:
    """Whether it is the folder of a Zarr array or group."""
    return any((path / mark).is_file() for mark in _MARKS)


class ZarrReader(ImageReader):
    """Decodes, through the zarr library, the chunks that a region touches; missing ones read as the fill value."""

    def __init__(self, path: Path) -> None:
        """InputError where the metadata is damaged, offers no single image, or needs a codec that is not here."""
        self.path = path
        self._array, self._layout = _open(path)
        dtype = np.dtype(self._array.dtype).newbyteorder("=")
        if dtype.name not in _DTYPES:
            raise InputError(f"{path}: {dtype.name} samples are not supported; {', '.join(_DTYPES)} are: convert it")
        self._chunk: tuple[int, ...] = tuple(self._array.chunks)
        chunk_bytes = math.prod(self._chunk) * dtype.itemsize
        if min(self._chunk) < 1 or chunk_bytes > _LARGEST_CHUNK_BYTES:
            raise InputError(f"{path}: chunks of {chunk_bytes:,} bytes, {self._chunk}; write it again in smaller ones")
        shape = self._layout.shape(self._array.shape)
        self.header = ImageHeader(shape=shape, axes=self._layout.axes, dtype=dtype, metadata=self._layout.metadata)
        self.block_shape = tuple(min(c, n) for c, n in zip(self._layout.shape(self._chunk), shape, strict=True))
        across = math.prod(
            -(-self._array.shape[n] // self._chunk[n]) for n, a in enumerate(self._layout.stored) if a in "XC"
        )
        self._cache = BlockCache(row_bytes=across * chunk_bytes, block_bytes=chunk_bytes)

    def read(self, region: Region, out: NDArray[Any]) -> None:
        require_fit(self.header, region, out)
        if out.size == 0:
            return
        spans = dict(zip(self.header.axes, zip(region.start, region.stop, strict=True), strict=True))
        wanted = [spans.get(letter, (0, 1)) for letter in self._layout.stored]
        grid = [range(start // c, -(-stop // c)) for (start, stop), c in zip(wanted, self._chunk, strict=True)]
        target = self._in_stored_order(out)
        busy = [place for place in itertools.product(*grid) if not self._copy(place, wanted, target, wait=False)]
        for place in busy:
            self._copy(place, wanted, target, wait=True)

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._cache.hold_at_most(budget_bytes)

    def close(self) -> None:
        """Nothing is held open."""

    def _in_stored_order(self, out: NDArray[Any]) -> NDArray[Any]:
        """A view of `out` with the array's axes, in the array's order."""
        moved = out.transpose(np.argsort(self._layout.order))
        absent = tuple(n for n, letter in enumerate(self._layout.stored) if letter not in self.header.axes)
        return np.expand_dims(moved, absent)

    def _copy(self, place: tuple[int, ...], wanted: list[tuple[int, int]], target: NDArray[Any], *, wait: bool) -> bool:
        """Copy what a chunk has of the region; False where another thread is decoding it and `wait` is False."""
        chunk = self._cache.take(place, lambda: self._decode(place), wait=wait)
        if chunk is None:
            return False
        into, within = [], []
        for (start, stop), index, size in zip(wanted, place, self._chunk, strict=True):
            first, last = max(start, index * size), min(stop, (index + 1) * size)
            into.append(slice(first - start, last - start))
            within.append(slice(first - index * size, last - index * size))
        target[tuple(into)] = chunk[tuple(within)]
        return True

    def _decode(self, place: tuple[int, ...]) -> NDArray[Any]:
        corner = [index * size for index, size in zip(place, self._chunk, strict=True)]
        box = tuple(
            slice(first, min(first + size, end))
            for first, size, end in zip(corner, self._chunk, self._array.shape, strict=True)
        )
        with _translated(self.path, f"chunk {'/'.join(map(str, place))} does not decode"):
            return np.asarray(self._array[box])


def _open(path: Path) -> tuple[Any, Layout]:
    """The image's array, opened; nothing but metadata is read."""
    if path.is_file():
        raise InputError(f"{path}: is a file, and a Zarr image is a folder; unpack it, or name a folder")
    with reading(path):
        names = {entry.name for entry in path.iterdir()}
    mark = next((mark for mark in _MARKS if mark in names), None)
    if mark is None:
        raise InputError(f"{path}: a folder without Zarr metadata ({', '.join(_MARKS)}); check the path")
    import zarr

    from pipeline.formats.image.zarr.lazy_store import RegularFiles

    use_checked_blosc()
    with _translated(path, f"its metadata ({mark}) cannot be used"), warnings.catch_warnings():
        # zarr warns of what the specifications do not cover yet; what cannot be read is refused below.
        warnings.simplefilter("ignore")
        store = RegularFiles(path, read_only=True)
        node = zarr.open(store=store, mode="r", zarr_format=3 if mark == "zarr.json" else 2)
        array, layout = find_array(node, path)
        refused = [codec for codec in _codec_names(array.metadata.to_dict()) if codec.startswith(_REFUSED_CODECS)]
    if refused:
        raise InputError(f"{path}: its chunks are coded as {refused[0]}, which is not safe to read; write it again")
    return array, layout


def open_level(path: Path) -> Any:
    """The one level of a group that Millrace wrote, as an array of the zarr library, whatever its axes."""
    import zarr

    from pipeline.formats.image.zarr.lazy_store import RegularFiles

    if not is_zarr(path):
        raise InputError(f"{path}: no Zarr group is there; check the path")
    use_checked_blosc()
    with _translated(path, "its metadata cannot be used"):
        return zarr.open_group(store=RegularFiles(path, read_only=True), mode="r")["0"]


def _codec_names(metadata: Any) -> Iterator[str]:
    """The names of every codec in an array's metadata, shards' own included."""
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
    """Errors of the operating system as ever; whatever else zarr and its codecs raise becomes an InputError."""
    try:
        yield
    except MillraceError:
        raise
    except json.JSONDecodeError as exc:
        raise InputError(f"{path}: {what}: not JSON ({exc}); copy or export it again") from exc
    except Exception as exc:
        if isinstance(exc, OSError) and exc.errno is not None:  # gzip's errors are OSErrors without a number
            with reading(path):
                raise
        # zarr, numcodecs and each codec have errors of their own, without a common ancestor; a size in a damaged chunk
        # may end as MemoryError.
        words = " ".join(f"{type(exc).__name__} {exc}".split())[:160]
        raise InputError(f"{path}: {what} ({words}); damaged, or a codec is missing: export it again") from exc
