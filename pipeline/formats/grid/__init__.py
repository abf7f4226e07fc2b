"""The registry of map formats, which the output's suffix selects."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import OutputError
from pipeline.formats import unsupported_output
from pipeline.formats.grid.base import GridFormat, GridHeader
from pipeline.formats.grid.cube import Cube
from pipeline.formats.grid.mrc import Mrc
from pipeline.formats.grid.opendx import OpenDx
from pipeline.formats.grid.zarr import ZarrMap
from pipeline.formats.image.array_reader import ArrayReader
from pipeline.formats.image.base import ImageReader, ImageWriter
from pipeline.formats.image.npy import Npy
from pipeline.formats.numpy_files import mapped_array
from pipeline.storage.partial import Opening


class NpyMap(GridFormat):
    """The array [x, y, z] alone: .npy cannot hold origin, steps and units, which the receipt states."""

    name = "NPY"
    suffixes = (".npy",)

    def create(self, path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return Npy().create(path, header.image, opening)

    def open(self, path: Path, header: GridHeader) -> ImageReader:
        return ArrayReader(path, header.image, mapped_array(path))


GRID_FORMATS: tuple[GridFormat, ...] = (OpenDx(), Mrc(), Cube(), ZarrMap(), NpyMap())


def map_format_for_output(path: Path) -> GridFormat:
    """The format that the suffix selects. OutputError if there is none."""
    name = path.name.lower()
    for form in GRID_FORMATS:
        if name.endswith(form.suffixes):
            return form
    raise unsupported_output(path, "map format", [suffix for form in GRID_FORMATS for suffix in form.suffixes])


def create_map(path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
    """Start writing a map beside `path`, or resume or join one: see `Opening`.

    The writer takes regions [x, y, z] of float32 in any order, from several threads at once.
    OutputError if the format cannot hold the map or the folder is not writable; StorageError, with the bytes needed and
    free, if the disk has no room.
    """
    form = map_format_for_output(path)
    refusal = form.refusal(header, path)
    if refusal is not None:
        raise OutputError(refusal)
    return form.create(path, header, opening)


def open_map(path: Path, header: GridHeader) -> ImageReader:
    """Read a map of that shape again: regions [x, y, z], float32, or float64 from text. InputError if it is damaged."""
    return map_format_for_output(path).open(path, header)
