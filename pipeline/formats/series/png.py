"""A series as one PNG: every slice and time side by side, in 8-bit shades of a window of values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats.image.base import ImageHeader, ImageReader, ImageWriter, Region
from pipeline.formats.image.png import LONGEST_SIDE, png_pieces
from pipeline.formats.image.spooled_writer import SpooledWriter
from pipeline.formats.series.base import SeriesFormat, SeriesHeader
from pipeline.storage.partial import Opening

BRIGHTEST = 99.7  # percent of the pixels that an automatic window resolves
_BINS = 1 << 14


class PngSeries(SeriesFormat):
    """Times below one another and slices beside one another; of one time or slice, rows of about equal length."""

    name = "PNG"
    suffixes = (".png",)
    windowed = True

    def refusal(self, header: SeriesHeader, path: Path) -> str | None:
        if header.dtype.kind == "c":
            return f"{path}: a PNG holds magnitudes; choose .nii for complex values"
        if max(_mosaic(header)) > LONGEST_SIDE:
            return f"{path}: so many images make a PNG of more than {LONGEST_SIDE:,} pixels along a side; choose .nii"
        return None

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return PngSeriesWriter(path, header, opening)

    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        raise InputError(f"{path}: a PNG holds shades, not values, which nothing can be compared with; choose .nii")


def _across(header: SeriesHeader) -> int:
    """Images in a row."""
    times, slices, *_ = header.shape
    return slices if min(times, slices) > 1 else math.ceil(math.sqrt(times * slices))


def _mosaic(header: SeriesHeader) -> tuple[int, int]:
    """Its pixels, rows and columns."""
    times, slices, rows, columns = header.shape
    across = _across(header)
    return -(-times * slices // across) * rows, across * columns


class PngSeriesWriter(SpooledWriter):
    """Draws the mosaic once all images are present."""

    def __init__(self, path: Path, header: SeriesHeader, opening: Opening) -> None:
        super().__init__(path, header.image, opening)
        self._series = header

    def _encoded(self) -> Iterator[bytes]:
        self._low, high = self._series.window or (0.0, self._brightest())
        self._range = (high - self._low) or 1.0
        mosaic = ImageHeader(shape=_mosaic(self._series), axes="YX", dtype=np.dtype(np.uint8))
        yield from png_pieces(mosaic, self._rows)

    def _rows(self, first: int, stop: int) -> NDArray[np.uint8]:
        times, slices, rows, columns = self.header.shape
        across = _across(self._series)
        found = np.zeros((stop - first, across * columns), np.uint8)
        for line in range(first // rows, -(-stop // rows)):
            begin, end = max(first - line * rows, 0), min(stop - line * rows, rows)
            for place in range(min(across, times * slices - line * across)):
                values = self._frame(line * across + place, begin, end).astype(np.float64)
                shades = np.rint(np.clip((values - self._low) / self._range, 0, 1) * 255)
                at = line * rows + begin - first
                found[at : at + end - begin, place * columns : (place + 1) * columns] = shades
        return found

    def _frame(self, number: int, begin: int, end: int) -> NDArray[Any]:
        """Some rows of an image."""
        time, place = divmod(number, self.header.shape[1])
        region = Region((time, place, begin, 0), (time + 1, place + 1, end, self.header.shape[3]))
        values = np.empty(region.shape, np.float32)
        self._samples.read(self._scratch, region, values)
        return values.reshape(region.shape[2:])

    def _brightest(self) -> float:
        """The value that `BRIGHTEST` percent of the pixels do not exceed, to a part in 16,384 of the largest."""
        times, slices, rows, _ = self.header.shape
        largest = max(float(self._frame(number, 0, rows).max()) for number in range(times * slices))
        if not largest > 0:
            return 1.0
        counts = np.zeros(_BINS, np.int64)
        for number in range(times * slices):
            counts += np.histogram(self._frame(number, 0, rows), bins=_BINS, range=(0.0, largest))[0]
        reached = np.searchsorted(np.cumsum(counts), counts.sum() * BRIGHTEST / 100)
        return float((reached + 1) / _BINS * largest)
