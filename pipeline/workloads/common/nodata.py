"""Missing samples: those of an image's nodata value."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import ImageReader, Region
from pipeline.workloads.common.samples import module_of


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
