"""Outputs read back through arrays: memory-mapped, decompressed, or of the zarr library."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pipeline.codecs.bounded import TooLarge, decode
from pipeline.errors import InputError, MillraceError, counted
from pipeline.formats.image.base import ImageHeader, ImageReader, Region
from pipeline.storage.confinement import by_descriptor, open_beneath
from pipeline.storage.positional import PositionalFile, reading

# Of the beginning of a file whose array ends it.
_LONGEST_HEAD_BYTES = 1 << 20


class ArrayReader(ImageReader):
    """Regions of anything that is sliced like an array."""

    def __init__(self, path: Path, header: ImageHeader, array: Any) -> None:
        """InputError if the array has another shape or dtype; an array of text is read as the header's dtype."""
        fits = array.dtype == header.dtype or array.dtype.kind == "S"
        if tuple(array.shape) != header.shape or not fits:
            raise InputError(
                f"{path}: holds an array of {tuple(array.shape)} {array.dtype}, not {header.shape} {header.dtype}; "
                "make it again"
            )
        self.path = path
        self.header = header
        self._array = array

    def read(self, region: Region, out: NDArray[Any]) -> None:
        try:
            out[...] = self._array[region.slices]
        except MillraceError:
            raise
        except Exception as exc:  # zarr and its codecs have errors of their own, without a common ancestor
            raise InputError(
                f"{self.path}: {region.start} to {region.stop} cannot be read ({type(exc).__name__}: {exc}); make it "
                "again"
            ) from exc

    def close(self) -> None:
        self._array = None


def file_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...], *, offset: int = 0, after: int = 0) -> Any:
    """An array in C order from byte `offset` of a file, memory-mapped; of a .gz in memory.

    offset : from the file's start; if negative, the array and `after` are at the end of the file
    after  : bytes that follow the array

    InputError if the file is not exactly as long as it must be.
    """
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    is_compressed = path.name.lower().endswith(".gz")
    content = _decompressed(path, max(offset, 0) + nbytes + after + _LONGEST_HEAD_BYTES) if is_compressed else b""
    size = len(content) if is_compressed else _size(path)
    offset = max(size - nbytes - after, 0) if offset < 0 else offset
    if size != offset + nbytes + after:
        raise InputError(
            f"{path}: holds {counted(size, 'byte')}, not {offset + nbytes + after:,}: truncated, or of another job; "
            "make it again"
        )
    if is_compressed:
        return np.frombuffer(content, dtype, math.prod(shape), offset).reshape(shape)
    with reading(path), by_descriptor(path) as here:
        return np.memmap(here, dtype, "r", offset, shape)


def _size(path: Path) -> int:
    file = PositionalFile(path)
    try:
        return file.size
    finally:
        file.close()


def _decompressed(path: Path, limit: int) -> bytes:
    try:
        with reading(path), open(path, "rb", opener=open_beneath) as file:
            content = file.read()
        return bytes(decode("gzip", content, limit))
    except TooLarge as exc:
        raise InputError(f"{path}: {exc}; it is of another job: make it again") from exc
    except (ValueError, zlib.error) as exc:
        raise InputError(f"{path}: does not decompress ({exc}); make it again") from exc
