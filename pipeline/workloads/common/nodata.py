"""Missing samples: those of an image's nodata value."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import ImageHeader, ImageReader, Region
from pipeline.formats.image.metadata.geotiff import nodata_of


def declared_nodata(header: ImageHeader) -> float | None:
    """The value that the file states for missing samples (GDAL_NODATA), if its samples can have it."""
    return nodata_of(header.metadata, header.dtype)


class MissingAsNan(ImageReader):
    """A float image whose nodata samples are read as NaN."""

    def __init__(self, reader: ImageReader, nodata: float) -> None:
        self._reader, self.path = reader, reader.path
        self.header, self.block_shape = reader.header, reader.block_shape
        self._nodata = self.header.dtype.type(nodata)

    def read(self, region: Region, out: NDArray[Any]) -> None:
        self._reader.read(region, out)
        out[out == self._nodata] = np.nan

    def expect(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._reader.expect(spans)

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._reader.hold_at_most(budget_bytes)

    def close(self) -> None:
        self._reader.close()


def mark_missing(samples: Any, nodata: float, stream: Any) -> None:
    """Store `nodata` where a NumPy or CuPy array has NaN, on its device."""
    xp = sys.modules[type(samples).__module__.partition(".")[0]]
    with stream or nullcontext():
        xp.copyto(samples, samples.dtype.type(nodata), where=xp.isnan(samples))
