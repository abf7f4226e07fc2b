"""Series as BART's pair of files (.cfl, .hdr; see `pipeline.formats.cfl`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats.cfl import COMPLEX, DIMENSIONS, SLICE, TIME, Cfl, with_suffix_in_case
from pipeline.formats.image.array_reader import ArrayReader
from pipeline.formats.image.base import ImageReader, ImageWriter, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.series.base import SeriesFormat, SeriesHeader
from pipeline.storage.partial import Callback, Opening, PartialFile, no_callback


class BartSeries(SeriesFormat):
    """Dimensions x, y, z (of a volume), time (10) and slices (13); always complex64."""

    name = "BART"
    suffixes = (".cfl",)

    def also_written(self, path: Path) -> tuple[Path, ...]:
        return (with_suffix_in_case(path, ".hdr"),)

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
    """Writes the samples to the partial .cfl; `publish` makes the .hdr."""

    def __init__(self, path: Path, header: SeriesHeader, opening: Opening) -> None:
        times, slices, rows, columns = header.shape
        self._slices_slowest = not header.is_volume
        stored = (slices, times, rows, columns) if self._slices_slowest else header.shape
        samples = ContiguousSamples(shape=stored, dtype=COMPLEX, offset=0)
        self._text = f"# Dimensions\n{' '.join(map(str, _dims(header)))}\n".encode()
        super().__init__(path, header.image, opening, samples=samples, head=[])

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if self._slices_slowest:
            region = Region(_slices_first(region.start), _slices_first(region.stop))
            samples = samples.swapaxes(0, 1)
        self._samples.write(self._partial, region, np.ascontiguousarray(samples, COMPLEX))

    def publish(self, on_sealed: Callback = no_callback) -> None:
        header = PartialFile(with_suffix_in_case(self.path, ".hdr"), len(self._text))

        def publish_header() -> None:  # before the .cfl, which is never found without its header
            on_sealed()
            header.publish()

        try:
            header.write_at(0, self._text)
            super().publish(publish_header)
        finally:
            header.discard()


def _dims(header: SeriesHeader) -> tuple[int, ...]:
    times, slices, rows, columns = header.shape
    dims = [columns, rows, *[1] * (DIMENSIONS - 2)]
    dims[TIME], dims[2 if header.is_volume else SLICE] = times, slices
    return tuple(dims)


def _slices_first(place: tuple[int, ...]) -> tuple[int, ...]:
    return (place[1], place[0], *place[2:])
