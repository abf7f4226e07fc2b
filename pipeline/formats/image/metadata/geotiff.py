"""GeoTIFF's tags, carried from a file to the next: where the raster lies, its coordinate system, and nodata.

Sources: OGC GeoTIFF 1.1 (19-008r4); GDAL's GTiff driver (GDAL_METADATA: names, colours and
units of bands; GDAL_NODATA).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PIXEL_SCALE, TIEPOINT, TRANSFORMATION = 33550, 33922, 34264
KEY_DIRECTORY, DOUBLE_PARAMS, ASCII_PARAMS, GDAL_METADATA, NODATA = 34735, 34736, 34737, 42112, 42113
TAGS = (PIXEL_SCALE, TIEPOINT, TRANSFORMATION, KEY_DIRECTORY, DOUBLE_PARAMS, ASCII_PARAMS, GDAL_METADATA, NODATA)
SHORT, ASCII, DOUBLE = 3, 2, 12
_KINDS = {KEY_DIRECTORY: SHORT, ASCII_PARAMS: ASCII, GDAL_METADATA: ASCII, NODATA: ASCII}
# Of the samples of the input, and of overviews.
_UNTRUE = re.compile(rb'\s*<Item name="(?:STATISTICS_|OVR_)[^>]*>[^<]*</Item>')
_CODES = {SHORT: "H", DOUBLE: "d"}


@dataclass(frozen=True)
class GeoTags:
    """The values of `TAGS` that a file has, little-endian, by tag."""

    values: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def is_placed(self) -> bool:
        """Whether the raster has a place or a coordinate system, and not only a nodata value."""
        return any(tag in self.values for tag in TAGS if tag not in (GDAL_METADATA, NODATA))

    @property
    def nodata(self) -> float | None:
        """The value that marks missing samples; None if the file states none, or no number."""
        try:
            text = self.values[NODATA].split(b"\0")[0].decode("ascii").strip()
            return float(text)
        except (KeyError, ValueError):
            return None

    def cropped(self, row: int, column: int) -> GeoTags:
        """The tags of the part that begins at this pixel: tie points and transformation move with it."""
        values = dict(self.values)
        if TIEPOINT in values:
            points = list(_doubles(values[TIEPOINT]))
            for n in range(0, len(points) - 5, 6):
                points[n] -= column
                points[n + 1] -= row
            values[TIEPOINT] = struct.pack(f"<{len(points)}d", *points)
        if len(values.get(TRANSFORMATION, b"")) == 128:
            matrix = list(_doubles(values[TRANSFORMATION]))
            for n in (3, 7, 11):
                matrix[n] += matrix[n - 3] * column + matrix[n - 2] * row
            values[TRANSFORMATION] = struct.pack("<16d", *matrix)
        return GeoTags(values)

    def fields(self) -> dict[int, tuple[int, int, bytes]]:
        """Field type, count and bytes by tag."""
        found = {}
        for tag, data in self.values.items():
            kind = _KINDS.get(tag, DOUBLE)
            found[tag] = kind, len(data) // struct.calcsize(_CODES.get(kind, "s")), data
        return found


def nodata_of(metadata: Mapping[str, Any], dtype: np.dtype[Any]) -> float | None:
    """The value that a header's metadata states for missing samples (GDAL_NODATA), if its samples can have it."""
    place = metadata.get("geo")
    value = place.nodata if isinstance(place, GeoTags) else None
    return value if value is not None and holds(dtype, value) else None


def holds(dtype: np.dtype[Any], value: float) -> bool:
    """Whether samples of a dtype can have a nodata value: floats any, booleans none."""
    if dtype.kind == "f":
        return True
    if dtype.kind == "b" or not math.isfinite(value) or value != int(value):
        return False
    limits = np.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def from_values(found: Mapping[int, tuple[int, bytes]], order: str) -> GeoTags:
    """The tags, from field type and bytes by tag in the file's byte order. Tags of another type are left out."""
    values = {}
    for tag, (kind, data) in found.items():
        if kind == _KINDS.get(tag, DOUBLE) and data:
            code = _CODES.get(kind)
            if code is not None and order != "<":
                count = len(data) // struct.calcsize(code)
                data = struct.pack(f"<{count}{code}", *struct.unpack(f">{count}{code}", data))
            values[tag] = _UNTRUE.sub(b"", data) if tag == GDAL_METADATA else data
    return GeoTags(values)


def _doubles(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 8}d", data[: len(data) // 8 * 8])
