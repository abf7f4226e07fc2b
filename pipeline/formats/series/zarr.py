"""Series as Zarr (.zarr): an OME-Zarr 0.5 group whose one level, '0', is the array [t, z, y, x], one image per chunk.

The group's attribute `series` states the affine to millimetres, since OME-Zarr supports only scale and translation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.formats.image.array_reader import ArrayReader
from pipeline.formats.image.base import ImageReader, ImageWriter
from pipeline.formats.image.zarr.reader import open_level
from pipeline.formats.image.zarr.writer import ZarrWriter, ome_metadata
from pipeline.formats.series.base import AXES, SeriesFormat, SeriesHeader
from pipeline.storage.partial import Opening

_CHUNK_BYTES = 4 << 20


class ZarrSeries(SeriesFormat):
    """float32 or complex64."""

    name = "Zarr"
    suffixes = (".zarr",)

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        attributes = {"ome": _metadata(path, header), "series": _attribute(header)}
        return ZarrWriter(path, header.image, opening, stored=AXES, chunk=_chunk(header), attributes=attributes)

    def open(self, path: Path, header: SeriesHeader) -> ImageReader:
        return ArrayReader(path, header.image, open_level(path))


def _metadata(path: Path, header: SeriesHeader) -> dict[str, Any]:
    space = {"type": "space"} | ({"unit": "millimeter"} if header.voxel_mm is not None else {})
    axes = [{"name": "t", "type": "time"}, *({"name": name} | space for name in "zyx")]
    x, y, z = header.voxel_mm or (1.0, 1.0, 1.0)
    return ome_metadata(path.stem, axes, [{"type": "scale", "scale": [1.0, z, y, x]}])


def _attribute(header: SeriesHeader) -> dict[str, Any]:
    return {"affine_mm": None if header.affine is None else header.affine.tolist(), "title": header.title}


def _chunk(header: SeriesHeader) -> tuple[int, int, int, int]:
    """One image, or as many planes of a volume as fit into a chunk, so that regions are whole chunks."""
    _, slices, rows, columns = header.shape
    planes = _CHUNK_BYTES // max(rows * columns * header.dtype.itemsize, 1) if header.is_volume else 1
    return 1, min(max(planes, 1), slices), rows, columns
