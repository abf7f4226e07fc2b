"""Maps as Zarr (.zarr): an OME-Zarr 0.5 group whose one level, '0', is the array [x, y, z] in chunks of float32.

Origin, steps and units stand in the group's attribute `grid` in any case; the transformations of OME-Zarr, which know
scale and translation alone, besides where the steps run along x, y and z.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from pipeline.formats.base import ImageWriter
from pipeline.formats.grid_map import AXES, GridFormat, GridHeader
from pipeline.formats.partial import Opening, PartialFolder
from pipeline.formats.writable import writing
from pipeline.formats.zarr_writer import ZarrWriter, _is_an_earlier_result

# 1 MiB, thin along x: slabs of a few planes shall hold whole chunks.
_CHUNK = (8, 128, 256)


class ZarrMap(GridFormat):
    """Any three steps that span a volume."""

    name = "Zarr"
    suffixes = (".zarr",)

    def refusal(self, header: GridHeader, path: Path) -> str | None:
        return None

    def block_shape(self, header: GridHeader) -> tuple[int, int, int]:
        x, y, z = (min(block, count) for block, count in zip(_CHUNK, header.shape, strict=True))
        return x, y, z

    def file_bytes(self, header: GridHeader) -> int:
        return header.nbytes

    def create(self, path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return ZarrMapWriter(path, header, opening, self.block_shape(header))


class ZarrMapWriter(ZarrWriter):
    """As an image is written, but with the axes in the order x, y, z, and what a map has to say in the metadata."""

    def __init__(self, path: Path, header: GridHeader, opening: Opening, chunk: tuple[int, int, int]) -> None:
        self.path = path
        self.header = header.image
        self._grid = header
        self._stored = AXES
        self._order = (0, 1, 2)
        self._chunk = chunk
        self._sharing = threading.Lock()
        self._folder = PartialFolder(path, _is_an_earlier_result, opening)
        try:
            with writing(path):
                self._array = self._create_array(chunk) if opening is Opening.NEW else self._existing_array()
        except BaseException:
            self._folder.keep() if opening is Opening.RESUME else self._folder.discard()
            raise

    def _create_array(self, chunk: tuple[int, ...]) -> Any:
        array = super()._create_array(chunk)
        import zarr

        group = zarr.open_group(store=str(self._folder.path), mode="r+")
        group.attrs["grid"] = {
            "origin_angstrom": list(self._grid.origin),
            "vectors_angstrom": [list(vector) for vector in self._grid.vectors],
            "units": self._grid.units,
            "title": self._grid.title,
        }
        return array

    def _ome_metadata(self) -> dict[str, Any]:
        """https://ngff.openmicroscopy.org/0.5"""
        axes = [{"name": letter.lower(), "type": "space", "unit": "angstrom"} for letter in AXES]
        scale = list(self._grid.spacing) if self._grid.is_orthogonal else [1.0] * 3
        steps: list[dict[str, Any]] = [{"type": "scale", "scale": scale}]
        if self._grid.is_orthogonal:
            steps.append({"type": "translation", "translation": list(self._grid.origin)})
        image = {
            "name": self.path.stem,
            "axes": axes,
            "datasets": [{"path": "0", "coordinateTransformations": steps}],
        }
        return {"version": "0.5", "multiscales": [image]}
