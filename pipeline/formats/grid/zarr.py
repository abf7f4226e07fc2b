"""Maps as Zarr (.zarr): an OME-Zarr 0.5 group whose one level, '0', is the array [x, y, z] in chunks of float32.

The group's attribute `grid` always states origin, steps and units; if the steps run along x, y and z, so do the
transformations of OME-Zarr, which support only scale and translation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.formats.grid.base import AXES, GridFormat, GridHeader
from pipeline.formats.image.array_reader import ArrayReader
from pipeline.formats.image.base import ImageReader, ImageWriter
from pipeline.formats.image.zarr.reader import open_level
from pipeline.formats.image.zarr.writer import ZarrWriter, ome_metadata
from pipeline.storage.partial import Opening

# 1 MiB, thin along x, so that slabs of a few planes contain whole chunks.
_CHUNK = (8, 128, 256)


class ZarrMap(GridFormat):
    """Any three steps that span a volume."""

    name = "Zarr"
    suffixes = (".zarr",)

    def block_shape(self, header: GridHeader) -> tuple[int, int, int]:
        x, y, z = (min(block, count) for block, count in zip(_CHUNK, header.shape, strict=True))
        return x, y, z

    def create(self, path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        chunk = self.block_shape(header)
        attributes = {"ome": _metadata(path, header), "grid": _attribute(header)}
        return ZarrWriter(path, header.image, opening, stored=AXES, chunk=chunk, attributes=attributes)

    def open(self, path: Path, header: GridHeader) -> ImageReader:
        return ArrayReader(path, header.image, open_level(path))


def _metadata(path: Path, header: GridHeader) -> dict[str, Any]:
    axes = [{"name": letter.lower(), "type": "space", "unit": "angstrom"} for letter in AXES]
    scale = list(header.spacing) if header.is_orthogonal else [1.0] * 3
    steps: list[dict[str, Any]] = [{"type": "scale", "scale": scale}]
    if header.is_orthogonal:
        steps.append({"type": "translation", "translation": list(header.origin)})
    return ome_metadata(path.stem, axes, steps)


def _attribute(header: GridHeader) -> dict[str, Any]:
    return {
        "origin_angstrom": list(header.origin),
        "vectors_angstrom": [list(vector) for vector in header.vectors],
        "units": header.units,
        "title": header.title,
    }
