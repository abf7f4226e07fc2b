"""The interface of series formats: slices or a volume, at one time or several."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import ImageHeader, ImageReader, ImageWriter
from pipeline.storage.partial import Opening

AXES = "TZYX"  # time changes slowest, x fastest
DTYPES = (np.dtype(np.float32), np.dtype(np.complex64))


@dataclass(frozen=True, kw_only=True, eq=False)
class SeriesHeader:
    """The description of a series to write.

    shape     : times, slices (or the volume's z), y and x
    dtype     : float32 or complex64
    is_volume : z is an axis of one volume, not a number of slices
    voxel_mm  : along x, y and z; for slices, z is their distance
    affine    : (4, 4), from indices (x, y, z, 1) to mm along NIfTI's axes right, anterior, superior; None: unknown
    title     : one line of text
    window    : the values shown as black and white, for formats that are `windowed`; None: automatic
    """

    shape: tuple[int, int, int, int]
    dtype: np.dtype[Any]
    is_volume: bool
    voxel_mm: tuple[float, float, float] | None = None
    affine: NDArray[np.float64] | None = None
    title: str = ""
    window: tuple[float, float] | None = None

    @property
    def image(self) -> ImageHeader:
        """The header for image writers."""
        return ImageHeader(shape=self.shape, axes=AXES, dtype=self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SeriesFormat(ABC):
    """One format for series. Instances carry no state."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    windowed: ClassVar[bool] = False  # it states the values of black and white

    def refusal(self, header: SeriesHeader, path: Path) -> str | None:
        """Why this format cannot hold such a series, and which can; None if it can."""
        return None

    def also_written(self, path: Path) -> tuple[Path, ...]:
        """Further files written with the one named."""
        return ()

    @abstractmethod
    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        """Start a new file beside `path`, or resume or join one of the same header.

        The writer takes regions [time, z, y, x] in any order, from several threads and, if joined, several processes.
        """

    @abstractmethod
    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        """Read a series of that header again: regions [time, z, y, x]. InputError if it is damaged."""
