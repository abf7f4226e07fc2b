"""Potential maps as MRC2014 and CCP4 maps (.mrc, .map, .ccp4): mode 2, float32, little-endian.

z changes fastest in the file: columns run along z, rows along y, sections along x (MAPC 3, MAPR 2, MAPS 1), so that a
slab along x is contiguous. How the header states the map's start: see `formats.image.volumes.mrc`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.grid.base import GridFormat, GridHeader
from pipeline.formats.image.array_reader import ArrayReader, file_array
from pipeline.formats.image.base import ImageReader, ImageWriter
from pipeline.formats.image.volumes.mrc import HEADER, MrcWriter, blank, put_labels, whole_starts
from pipeline.storage.partial import Opening

_NEEDING_STARTS = (".map", ".ccp4")
_COLUMNS_ROWS_SECTIONS = (3, 2, 1)  # z, y, x
_LABEL_CHARACTERS = 80


class Mrc(GridFormat):
    """Steps along x, y and z, or of a cell whose first step runs along x and second lies in the xy plane."""

    name = "MRC"
    suffixes = (".mrc", ".map", ".ccp4")

    def refusal(self, header: GridHeader, path: Path) -> str | None:
        (ax, ay, az), (_, by, bz), (_, _, cz) = header.vectors
        if (ay, az, bz) != (0, 0, 0) or min(ax, by, cz) <= 0:
            return f"{path}: MRC needs a first step along x and a second in the xy plane; choose .dx, .cube or .zarr"
        if path.suffix.lower() in _NEEDING_STARTS and _starts(header) is None:
            return (
                f"{path}: {path.suffix} needs a start of whole steps from 0, within ten times the map's size, "
                f"not {header.origin}; choose .mrc"
            )
        return None

    def file_bytes(self, header: GridHeader) -> int:
        return HEADER.itemsize + header.nbytes

    def create(self, path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return MrcWriter(path, header.image, opening, _head(header), "XYZ")

    def open(self, path: Path, header: GridHeader) -> ImageReader:
        return ArrayReader(path, header.image, file_array(path, "<f4", header.shape, offset=HEADER.itemsize))


def _head(header: GridHeader) -> bytes:
    cell, starts, record = np.array(header.vectors) * np.array(header.shape)[:, None], _starts(header), blank()
    record["n"], record["m"], record["axes"] = header.shape[::-1], header.shape, _COLUMNS_ROWS_SECTIONS
    record["cell"], record["angles"] = np.linalg.norm(cell, axis=1), _angles(cell)
    if starts is None:
        record["origin"] = header.origin
    else:
        record["start"] = starts[::-1]
    put_labels(record, [header.line(_LABEL_CHARACTERS).encode(), b"Columns along z, rows along y, sections along x"])
    return bytes(record.tobytes())


def _angles(cell: NDArray[np.float64]) -> tuple[float, ...]:
    """alpha, beta and gamma in degrees, exactly 90 where two vectors are at right angles."""
    unit = cell / np.linalg.norm(cell, axis=1)[:, None]
    cosines = (float(unit[one] @ unit[other]) for one, other in ((1, 2), (0, 2), (0, 1)))
    return tuple(90.0 if cosine == 0 else float(np.degrees(np.arccos(cosine))) for cosine in cosines)


def _starts(header: GridHeader) -> NDArray[np.int64] | None:
    """The origin in whole steps along x, y and z; None if it is not one."""
    return whole_starts(np.linalg.solve(np.array(header.vectors).T, np.array(header.origin)), header.shape)
