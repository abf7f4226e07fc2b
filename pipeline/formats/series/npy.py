"""Series as .npy: the array [time, z, y, x] without its leading axes of length 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.formats.image.array_reader import ArrayReader
from pipeline.formats.image.base import ImageReader, ImageWriter
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.npy import npy_head
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.numpy_files import mapped_array
from pipeline.formats.series.base import SeriesFormat, SeriesHeader
from pipeline.storage.partial import Opening


class NpySeries(SeriesFormat):
    """[y, x] for one image, [z, y, x] for one time, else [time, z, y, x]; float32 or complex64."""

    name = "NPY"
    suffixes = (".npy",)

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        times, slices, *_ = header.shape
        omitted = 0 if times > 1 else 1 if slices > 1 else 2
        head = npy_head(replace(header.image, shape=header.shape[omitted:]))
        samples = ContiguousSamples(shape=header.shape, dtype=header.dtype, offset=len(head))
        return PositionalWriter(path, header.image, opening, samples=samples, head=[head])

    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        array = mapped_array(path)
        if array.ndim < 4:
            array = array[(None,) * (4 - array.ndim)]
        return ArrayReader(path, header.image, array)
