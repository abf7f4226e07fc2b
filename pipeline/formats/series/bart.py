"""Series as BART has them: a pair of files (`pipeline.formats.cfl`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats.cfl import COMPLEX, Cfl, alike
from pipeline.formats.image.array_reader import ArrayReader
from pipeline.formats.image.base import ImageReader, ImageWriter, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.series.base import SeriesFormat, SeriesHeader
from pipeline.storage.partial import Opening, PartialFile, Sealed, not_told


class BartSeries(SeriesFormat):
    """Images as BART has them: x, y, z, time in dimension 10, slices in 13; always complex."""

    name = "BART"
    suffixes = (".cfl",)

    def refusal(self, header: SeriesHeader, path: Path) -> str | None:
        return None

    def also_written(self, path: Path) -> tuple[Path, ...]:
        return (alike(path, ".hdr"),)

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return BartSeriesWriter(path, header, opening)

    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        """Always complex."""
        times, slices, rows, columns = header.shape
        pair = Cfl(path)
        if pair.dims != _dims(header):
            raise InputError(f"{path}: its .hdr is of another series: {' '.join(map(str, pair.dims))}; make it again")
        array = pair.array.reshape(header.shape)
        if not header.is_volume:
            array = pair.array.reshape(slices, times, rows, columns).swapaxes(0, 1)
        return ArrayReader(path, replace(header.image, dtype=COMPLEX), array)


class BartSeriesWriter(PositionalWriter):
    """The .cfl grows beside its name; the .hdr is made when it is published."""

    def __init__(self, path: Path, header: SeriesHeader, opening: Opening) -> None:
        times, slices, rows, columns = header.shape
        self._slices_last = not header.is_volume
        stored = (slices, times, rows, columns) if self._slices_last else header.shape
        samples = ContiguousSamples(shape=stored, dtype=np.dtype("<c8"), offset=0)
        self._text = f"# Dimensions\n{' '.join(map(str, _dims(header)))}\n".encode()
        super().__init__(path, header.image, opening, samples=samples, head=[])

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if not self._slices_last:
            self._samples.write(self._file, region, samples.astype(COMPLEX, copy=False))
            return
        turned = Region(_turned(region.start), _turned(region.stop))
        self._samples.write(self._file, turned, np.ascontiguousarray(samples.swapaxes(0, 1), COMPLEX))

    def publish(self, sealed: Sealed = not_told) -> None:
        header = PartialFile(alike(self.path, ".hdr"), len(self._text))

        def publish_header() -> None:  # first: whoever finds the samples under their name finds it too
            sealed()
            header.publish()

        try:
            header.write_at(0, self._text)
            super().publish(publish_header)
        finally:
            header.discard()


def _dims(header: SeriesHeader) -> tuple[int, ...]:
    times, slices, rows, columns = header.shape
    planes, apart = (slices, 1) if header.is_volume else (1, slices)
    return columns, rows, planes, *[1] * 7, times, 1, 1, apart, 1, 1


def _turned(place: tuple[int, ...]) -> tuple[int, ...]:
    return (place[1], place[0], *place[2:])
