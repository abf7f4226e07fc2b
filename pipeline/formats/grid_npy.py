"""Maps as .npy: one float32 array."""

from __future__ import annotations

from pathlib import Path

from pipeline.formats.base import ImageWriter
from pipeline.formats.grid_map import GridFormat, GridHeader
from pipeline.formats.npy import Npy
from pipeline.formats.partial import Opening


class NpyMap(GridFormat):
    """The bare array [x, y, z]: an .npy file has no room for origin, steps and units, which the receipt keeps."""

    name = "NPY"
    suffixes = (".npy",)

    def refusal(self, header: GridHeader, path: Path) -> str | None:
        return None

    def file_bytes(self, header: GridHeader) -> int:
        return header.nbytes

    def create(self, path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return Npy().create(path, header.image, opening)
