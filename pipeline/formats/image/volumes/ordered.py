"""Samples whose axes follow one another in another order in the file than in the image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import Region
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.storage.positional import PositionalFile
from pipeline.storage.writable import WritableFile

ByteOrder = Literal["<", ">"]
BYTE_ORDERS: tuple[ByteOrder, ...] = ("<", ">")
Record = Any  # a structured array without axes; with its exact type, mypy takes seconds for arithmetic on its fields


@dataclass(frozen=True, kw_only=True)
class OrderedSamples(ContiguousSamples):
    """As its base, whose `shape` is that of the file. `order`: the image's axis that each of the file's is."""

    order: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def read(self, file: PositionalFile, region: Region, out: NDArray[Any]) -> None:
        if self.in_order:
            super().read(file, region, out)
            return
        stored = self._stored(region)
        samples = np.empty(stored.shape, out.dtype)
        super().read(file, stored, samples)
        out[...] = samples.transpose(np.argsort(self.order))

    def write(self, file: WritableFile, region: Region, samples: NDArray[Any]) -> None:
        if not self.in_order:
            region, samples = self._stored(region), np.ascontiguousarray(samples.transpose(self.order))
        super().write(file, region, samples)

    def _stored(self, region: Region) -> Region:
        return Region(*(tuple(ends[axis] for axis in self.order) for ends in (region.start, region.stop)))


def ordered(axes: str, shape: tuple[int, ...], stored: str, *, dtype: np.dtype[Any], offset: int) -> OrderedSamples:
    """The layout of an image with these axes and shape. `stored`: letters in the order of the file, slowest first."""
    order = tuple(axes.index(letter) for letter in stored if letter in axes)
    return OrderedSamples(shape=tuple(shape[axis] for axis in order), dtype=dtype, offset=offset, order=order)
