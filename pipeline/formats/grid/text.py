"""Writing maps as text of fixed-width numbers: every value's offset is known, so regions come in any order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.deflate import gzipped_bands
from pipeline.errors import OutputError
from pipeline.formats.grid.base import GridFormat, GridHeader
from pipeline.formats.grid.fixed_decimals import NumberStyle, encode
from pipeline.formats.image.array_reader import ArrayReader, file_array
from pipeline.formats.image.base import ImageHeader, ImageReader, ImageWriter, PartialWriter, Region, require_fit
from pipeline.formats.image.contiguous import scratch_block
from pipeline.formats.image.spooled_writer import SpooledWriter
from pipeline.storage.partial import Opening, PartialFile, behind_link

# Values turned into text at a time, so that the text stays in the processor's cache; values of one compressed band.
_BLOCK_VALUES = 32 << 10
_BAND_VALUES = 256 << 10


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """A file of `head`, the values in C order, and `tail`; a line also ends after every `row_length` values."""

    head: bytes
    tail: bytes
    style: NumberStyle
    row_length: int
    values: int

    @property
    def nbytes(self) -> int:
        return self.place(self.values) + len(self.tail)

    def place(self, index: int) -> int:
        """The offset of a value's text."""
        return len(self.head) + index * self.style.width

    def encode(self, path: Path, header: ImageHeader, values: NDArray[np.float32], first: int) -> memoryview:
        """The text of `values`, the first of which is the map's value `first`; valid until this thread's next call.

        OutputError if one of them is not finite.
        """
        text = scratch_block(len(values) * self.style.width)
        infinite = encode(values, text, self.style, first=first, row_length=self.row_length)
        if infinite is not None:
            raise _has_no_text(path, np.unravel_index(first + infinite, header.shape), values[infinite])
        return text.data


class TextGrid(GridFormat):
    """A text format. Maps are read as float64. Numbers end the file, so the head may have any length."""

    @abstractmethod
    def layout(self, header: GridHeader) -> TextLayout: ...

    def file_bytes(self, header: GridHeader) -> int:
        return self.layout(header).nbytes

    def create(self, path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        writer = _GzipWriter if path.suffix.lower() == ".gz" else _PlainWriter
        return writer(path, header.image, opening, self.layout(header))

    def open(self, path: Path, header: GridHeader) -> ImageReader:
        layout = self.layout(header)
        texts = file_array(path, f"S{layout.style.width}", header.shape, offset=-1, after=len(layout.tail))
        return ArrayReader(path, replace(header.image, dtype=np.dtype(np.float64)), texts)


class _PlainWriter(PartialWriter):
    """Turns regions into text in the calling thread and writes them straight to their offset."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening, layout: TextLayout) -> None:
        self.path = path
        self.header = header
        self._layout = layout
        self._partial: PartialFile = PartialFile(behind_link(path), layout.nbytes, opening)
        if opening is Opening.NEW:
            try:
                self._partial.write_at(0, layout.head)
                self._partial.write_at(layout.place(layout.values), layout.tail)
            except BaseException:
                self._partial.discard()
                raise

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if samples.size:
            self._partial.write_runs(self._pieces(region, samples.reshape(-1)))

    def _pieces(self, region: Region, values: NDArray[Any]) -> Iterator[tuple[int, memoryview]]:
        """Offset and text of each piece, one at a time."""
        done = 0
        for first, length in _runs(self.header.shape, region):
            for start in range(0, length, _BLOCK_VALUES):
                stop = min(start + _BLOCK_VALUES, length)
                text = self._layout.encode(self.path, self.header, values[done + start : done + stop], first + start)
                yield self._layout.place(first + start), text
            done += length


class _GzipWriter(SpooledWriter):
    """Turns the values into text and compresses it, from first to last."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening, layout: TextLayout) -> None:
        super().__init__(path, header, opening)
        self._layout = layout

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        finite = np.isfinite(samples)
        if not finite.all():
            within = np.unravel_index(np.argmin(finite), samples.shape)
            raise _has_no_text(self.path, np.add(region.start, within), samples[within])
        super().write(region, samples)

    def _encoded(self) -> Iterator[bytes]:
        starts = range(0, self._layout.values, _BAND_VALUES)
        return gzipped_bands(self._text, [(first, min(first + _BAND_VALUES, self._layout.values)) for first in starts])

    def _text(self, first: int, stop: int) -> bytes:
        values = np.empty(stop - first, self.header.dtype)
        self._scratch.read_at(first * values.itemsize, values.view(np.uint8).data)
        text = bytes(self._layout.encode(self.path, self.header, values, first))
        before = self._layout.head if first == 0 else b""
        return before + text + (self._layout.tail if stop == self._layout.values else b"")


def _has_no_text(path: Path, point: Iterable[Any], value: Any) -> OutputError:
    place = ", ".join(str(int(index)) for index in point)
    return OutputError(
        f"{path}: the value at grid point ({place}) is {value}; text maps hold only finite numbers: "
        "choose .npy, .zarr or .mrc"
    )


def _runs(shape: tuple[int, ...], region: Region) -> Iterator[tuple[int, int]]:
    """The region's runs of values that are contiguous in the map: index of the first, and count; in order."""
    (x0, y0, z0), (x1, y1, z1) = region.start, region.stop
    _, ny, nz = shape
    if (y0, y1, z0, z1) == (0, ny, 0, nz):
        yield x0 * ny * nz, (x1 - x0) * ny * nz
        return
    for x in range(x0, x1):
        if (z0, z1) == (0, nz):
            yield (x * ny + y0) * nz, (y1 - y0) * nz
        else:
            for y in range(y0, y1):
                yield (x * ny + y) * nz + z0, z1 - z0
