"""Missing samples: those of an image's nodata value."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ParameterError
from pipeline.formats.image.base import ImageHeader, ImageReader, Region
from pipeline.formats.image.metadata.geotiff import NODATA, GeoTags, holds, nodata_of
from pipeline.workloads.common.samples import module_of


def nodata_in_force(given: float | None, header: ImageHeader, path: Path) -> float | None:
    """The nodata value that is given, or else that the image states, as its samples hold it. ParameterError if they
    cannot."""
    if given is not None and not holds(header.dtype, given):
        raise ParameterError(f"--nodata {given:g}: {path} is {header.dtype.name}, which cannot have it")
    nodata = nodata_of(header.metadata, header.dtype) if given is None else given
    return nodata if nodata is None or header.dtype.kind != "f" else float(header.dtype.type(nodata))


def missing_as_nan(samples: Any, nodata: float) -> Any:
    """A copy of a NumPy or CuPy array of floats with NaN for samples of the nodata value."""
    return module_of(samples).where(samples == samples.dtype.type(nodata), samples.dtype.type(np.nan), samples)


def missing_is_nan(header: ImageHeader) -> ImageHeader:
    """The header of an image whose missing samples are NaN instead of the nodata value that it states."""
    place = header.metadata.get("geo")
    if not isinstance(place, GeoTags) or place.nodata is None:
        return header
    return replace(header, metadata={**header.metadata, "geo": GeoTags({**place.values, NODATA: b"nan\0"})})


class MissingAsNan(ImageReader):
    """An image whose nodata samples are read as NaN: integers as float64."""

    def __init__(self, reader: ImageReader, nodata: float) -> None:
        self._reader, self.path = reader, reader.path
        self._stored, self.block_shape = reader.header.dtype, reader.block_shape
        dtype = self._stored if self._stored.kind == "f" else np.dtype(np.float64)
        self.header = replace(reader.header, dtype=dtype)
        self._nodata = self._stored.type(nodata)

    def read(self, region: Region, out: NDArray[Any]) -> None:
        samples = out if out.dtype == self._stored else np.empty(region.shape, self._stored)
        self._reader.read(region, samples)
        missing = samples == self._nodata
        if samples is not out:
            out[...] = samples
        out[missing] = np.nan

    def expect(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._reader.expect(spans)

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._reader.hold_at_most(budget_bytes)

    def close(self) -> None:
        self._reader.close()


def mark_missing(samples: Any, nodata: float, stream: Any) -> None:
    """Store `nodata` where a NumPy or CuPy array has NaN, on its device."""
    xp = module_of(samples)
    with stream or nullcontext():
        xp.copyto(samples, samples.dtype.type(nodata), where=xp.isnan(samples))
