"""Series as Zarr (.zarr): an OME-Zarr 0.5 group whose one level, '0', is the array [t, z, y, x], an image a chunk.

The affine to millimetres stands in the group's attribute `series`, since OME-Zarr knows scale and translation alone.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from pipeline.formats.base import ImageWriter
from pipeline.formats.image_series import AXES, SeriesFormat, SeriesHeader
from pipeline.formats.partial import Opening, PartialFolder
from pipeline.formats.writable import writing
from pipeline.formats.zarr_writer import ZarrWriter, _is_an_earlier_result

_CHUNK_BYTES = 4 << 20


class ZarrSeries(SeriesFormat):
    """float32 or complex64."""

    name = "Zarr"
    suffixes = (".zarr",)

    def refusal(self, header: SeriesHeader, path: Path) -> str | None:
        return None

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return ZarrSeriesWriter(path, header, opening)


class ZarrSeriesWriter(ZarrWriter):
    """As an image is written, with time in front."""

    def __init__(self, path: Path, header: SeriesHeader, opening: Opening) -> None:
        self.path = path
        self.header = header.image
        self._series = header
        self._stored = AXES
        self._order = (0, 1, 2, 3)
        self._chunk = _chunk(header)
        self._sharing = threading.Lock()
        self._folder = PartialFolder(path, _is_an_earlier_result, opening)
        try:
            with writing(path):
                self._array = self._create_array(self._chunk) if opening is Opening.NEW else self._existing_array()
        except BaseException:
            self._folder.keep() if opening is Opening.RESUME else self._folder.discard()
            raise

    def _create_array(self, chunk: tuple[int, ...]) -> Any:
        array = super()._create_array(chunk)
        import zarr

        affine = self._series.affine
        group = zarr.open_group(store=str(self._folder.path), mode="r+")
        group.attrs["series"] = {
            "affine_mm": None if affine is None else affine.tolist(),
            "title": self._series.title,
        }
        return array

    def _ome_metadata(self) -> dict[str, Any]:
        """https://ngff.openmicroscopy.org/0.5"""
        known = self._series.voxel_mm is not None
        space = {"type": "space"} | ({"unit": "millimeter"} if known else {})
        axes: list[dict[str, str]] = [{"name": "t", "type": "time"}, *({"name": name} | space for name in "zyx")]
        x, y, z = self._series.voxel_mm or (1.0, 1.0, 1.0)
        scale = [{"type": "scale", "scale": [1.0, z, y, x]}]
        image = {
            "name": self.path.stem,
            "axes": axes,
            "datasets": [{"path": "0", "coordinateTransformations": scale}],
        }
        return {"version": "0.5", "multiscales": [image]}


def _chunk(header: SeriesHeader) -> tuple[int, int, int, int]:
    """One image, or of a volume as many planes as make a good chunk: regions are whole ones."""
    _, slices, rows, columns = header.shape
    planes = _CHUNK_BYTES // max(rows * columns * header.dtype.itemsize, 1) if header.is_volume else 1
    return 1, min(max(planes, 1), slices), rows, columns
