"""Tables beside a map: its mean over planes, as CSV and as a picture, and the potential at given points, as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats.charges.base import Array
from pipeline.formats.grid import map_format_for_output
from pipeline.formats.grid.base import GridHeader
from pipeline.formats.image.base import ImageHeader, ImageWriter, Region
from pipeline.formats.image.preview import write_pixels
from pipeline.formats.image.preview.figure import plot
from pipeline.storage.partial import Callback, behind_link, no_callback, partial_path
from pipeline.storage.positional import reading
from pipeline.storage.writable import writing

Axis = Literal["x", "y", "z"]

OWN_ANGSTROM = 1e-3  # an atom closer than this to a point is the point's own
MOST_POINTS = 100_000
_OF_NUMBERS = "0123456789+-."  # a field that begins like this is no name


def table_path(output: Path, what: str) -> Path:
    """Beside the output: map.dx.profile-z.csv, map.dx.at.csv."""
    return output.with_name(f"{output.name}.{what}.csv")


def read_points(path: Path) -> Array:
    """x, y, z in angstrom, (n, 3), from lines of three numbers with commas; a first line of names is skipped.

    Raises InputError, which names the line.
    """
    try:
        with reading(path):
            lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not text ({error.reason}); save it as UTF-8") from error
    found: list[list[float]] = []
    for number, fields in enumerate(csv.reader(lines), 1):
        if not fields:
            continue
        try:
            x, y, z = map(float, fields)
        except ValueError:
            if number == 1 and not any(field.strip()[:1] in _OF_NUMBERS for field in fields):
                continue  # names
            raise InputError(
                f"{path}, line {number}: give three numbers x,y,z in angstrom; got {','.join(fields)!r}"
            ) from None
        if not np.isfinite([x, y, z]).all():
            raise InputError(f"{path}, line {number}: a coordinate is not finite")
        found.append([x, y, z])
    if not 0 < len(found) <= MOST_POINTS:
        raise InputError(f"{path}: holds {len(found):,} points; give 1 to {MOST_POINTS:,}")
    return np.array(found)


def write_points(path: Path, points: Array, values: Array, units: str) -> None:
    """x, y, z and the potential, a line each."""
    _write(path, ["x_angstrom", "y_angstrom", "z_angstrom", f"potential [{units}]"], np.column_stack([points, values]))


def write_profile(output: Path, header: GridHeader, axis: Axis) -> None:
    """The mean of the sealed map over the planes across an axis, in float64, by position along it."""
    along = "xyz".index(axis)
    sealed = partial_path(behind_link(output))
    sums, reader = np.zeros(header.shape[along]), map_format_for_output(output).open(sealed, header)
    try:
        for x in range(header.shape[0]):
            region = Region((x, 0, 0), (x + 1, *header.shape[1:]))
            plane = np.empty(region.shape, reader.header.dtype)
            reader.read(region, plane)
            others = tuple(each for each in range(3) if each != along)
            found = plane.sum(axis=others, dtype=np.float64)
            if along == 0:
                sums[x] = found[0]
            else:
                sums += found
    finally:
        reader.close()
    means = sums * header.shape[along] / np.prod([float(n) for n in header.shape])
    places = header.origin[along] + np.arange(len(means)) * header.spacing[along]
    name = table_path(output, f"profile-{axis}")
    _write(name, [f"{axis}_angstrom", f"mean potential [{header.units}]"], np.column_stack([places, means]))
    write_pixels(
        name.with_suffix(".png"), plot(places, means, f"{axis} (angstrom)", f"mean potential ({header.units})")
    )


def _write(path: Path, names: list[str], rows: NDArray[np.float64]) -> None:
    partial = partial_path(path)
    with writing(path):
        with partial.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(names)
            lines.writerows([f"{value:.9g}" for value in row] for row in rows.tolist())
        partial.replace(path)


class WriterWithTables(ImageWriter):
    """A map's writer that writes tables once the map is sealed: no run that is killed leaves a map without them."""

    def __init__(self, writer: ImageWriter, write_tables: Callable[[], None]) -> None:
        self._writer = writer
        self._write_tables = write_tables
        self.path: Path = writer.path
        self.header: ImageHeader = writer.header

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        self._writer.write(region, samples)

    def flush(self) -> None:
        self._writer.flush()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        def sealed() -> None:
            self._write_tables()
            on_sealed()

        self._writer.publish(sealed)

    def keep(self) -> None:
        self._writer.keep()

    def discard(self) -> None:
        self._writer.discard()
