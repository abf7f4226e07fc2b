"""Series as .npy: the bare array [time, z, y, x], without axes of one where there is no choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pipeline.formats.image.array_reader import ArrayReader, npy_array
from pipeline.formats.image.base import ImageReader, ImageWriter, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.npy import npy_head
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.series.base import SeriesFormat, SeriesHeader
from pipeline.storage.partial import Opening


class NpySeries(SeriesFormat):
    """[y, x] for one image, [z, y, x] for one time, else [time, z, y, x]; float32 or complex64."""

    name = "NPY"
    suffixes = (".npy",)

    def refusal(self, header: SeriesHeader, path: Path) -> str | None:
        return None

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return NpySeriesWriter(path, header, opening)

    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        array = npy_array(path)
        if array.ndim < 4:
            array = array[(None,) * (4 - array.ndim)]
        return ArrayReader(path, header.image, array)


class NpySeriesWriter(PositionalWriter):
    """The file's shape leaves out leading axes of one; the regions keep them."""

    def __init__(self, path: Path, header: SeriesHeader, opening: Opening) -> None:
        times, slices, *_ = header.shape
        stored = header.shape[1 if times == 1 else 0 :]
        stored = stored[1:] if times == 1 and slices == 1 else stored
        head = npy_head(replace(header.image, shape=stored))
        samples = ContiguousSamples(shape=header.shape, dtype=header.dtype, offset=len(head))
        super().__init__(path, header.image, opening, samples=samples, head=[head])

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        self._samples.write(self._file, region, samples)
