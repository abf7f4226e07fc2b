"""The interface of map formats: one float32 value at each point of a regular grid in space."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ParameterError
from pipeline.formats.grid.fixed_decimals import NumberStyle
from pipeline.formats.image.base import ImageHeader, ImageReader, ImageWriter
from pipeline.storage.partial import Opening

Vector = tuple[float, float, float]

AXES = "XYZ"  # x changes slowest, z fastest
DTYPE = np.dtype(np.float32)
_LONGEST_AXIS = (1 << 31) - 1  # the limit of the formats' headers and their readers
_UNITS_OF_SIZE = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True, kw_only=True, eq=False)
class GridHeader:
    """A grid in space: point (i, j, k) lies at origin + i·vectors[0] + j·vectors[1] + k·vectors[2].

    shape   : points along x, y and z
    origin  : position of point (0, 0, 0), in angstrom
    vectors : the steps from one point to the next along each axis, as rows, in angstrom
    units   : of the values, as text for the file: "kT/e at 298.15 K"
    title   : one line of text
    atoms   : (n, 4) float64, x, y, z in angstrom and charge, for formats that store them (cube)
    """

    shape: tuple[int, int, int]
    origin: Vector
    vectors: tuple[Vector, Vector, Vector]
    units: str
    title: str = ""
    atoms: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"a grid of {self.shape} points; it has three axes of at least one point")
        if not np.isfinite([self.origin, *self.vectors]).all():
            raise ValueError("a grid whose origin or steps are not finite")
        lengths = np.linalg.norm(self.vectors, axis=1)
        if not abs(np.linalg.det(np.array(self.vectors))) > 1e-9 * np.prod(lengths):
            raise ValueError(f"a grid whose steps {self.vectors} span no volume")

    @classmethod
    def orthogonal(
        cls, shape: tuple[int, int, int], origin: Vector, spacing: float | Vector, *, units: str, title: str = ""
    ) -> Self:
        """Axes along x, y and z; `spacing` in angstrom, for all axes or for each."""
        x, y, z = (spacing,) * 3 if isinstance(spacing, int | float) else spacing
        vectors = ((x, 0.0, 0.0), (0.0, y, 0.0), (0.0, 0.0, z))
        return cls(shape=shape, origin=origin, vectors=vectors, units=units, title=title)

    @classmethod
    def covering(
        cls,
        lowest: Vector,
        highest: Vector,
        spacing: float | Vector,
        *,
        units: str,
        title: str = "",
        limit_bytes: int | None = None,
    ) -> Self:
        """The grid over a box, its points at whole multiples of the spacing, so that maps of parts fit each other.

        ParameterError if the spacing is not finite and positive, or the grid would take more than `limit_bytes`; it
        states the bytes needed and a spacing that fits, and comes before anything of that size is allocated.
        """
        steps = np.broadcast_to(np.asarray(spacing, np.float64), 3)
        if not (np.isfinite(steps).all() and (steps > 0).all()):
            raise ParameterError(f"--spacing {_numbers(steps)}: must be finite and above 0, in angstrom")
        if not np.isfinite([lowest, highest]).all():
            raise ParameterError("the box of the grid is not finite: check the coordinates")
        # Tolerate whole numbers of steps that rounding has increased a little.
        first = np.floor(np.asarray(lowest) / steps + 1e-9)
        last = np.ceil(np.asarray(highest) / steps - 1e-9)
        counts = [int(high) - int(low) + 1 for low, high in zip(first, np.maximum(first, last), strict=True)]
        nbytes = math.prod(counts) * DTYPE.itemsize
        if max(counts) > _LONGEST_AXIS or (limit_bytes is not None and nbytes > limit_bytes):
            enough = ""
            if limit_bytes is not None and nbytes > limit_bytes:
                factor = (nbytes / limit_bytes) ** (1 / 3) * 1.01
                enough = (
                    f", more than the {readable(limit_bytes)} allowed; a spacing of {_numbers(steps * factor)} fits"
                )
            raise ParameterError(
                f"--spacing {_numbers(steps)}: makes a grid of {' × '.join(f'{n:,}' for n in counts)} points, which "
                f"takes {readable(nbytes)}{enough}; choose a larger spacing or a smaller box"
            )
        origin = first * steps
        shape = (counts[0], counts[1], counts[2])
        start, widths = _vector(origin), _vector(steps)
        return cls.orthogonal(shape, start, widths, units=units, title=title)

    @property
    def image(self) -> ImageHeader:
        """The header for image writers: axes X, Y, Z and float32."""
        return ImageHeader(shape=self.shape, axes=AXES, dtype=DTYPE)

    @property
    def points(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values as float32."""
        return self.points * DTYPE.itemsize

    @property
    def is_orthogonal(self) -> bool:
        """Whether the axes run along x, y and z, in the positive direction."""
        steps = np.array(self.vectors)
        return bool((steps == np.diag(np.diag(steps))).all() and (np.diag(steps) > 0).all())

    @property
    def spacing(self) -> Vector:
        """The length of the step along each axis, in angstrom."""
        return _vector(np.linalg.norm(self.vectors, axis=1))

    def line(self, longest: int) -> str:
        """Title and units as one line of printable ASCII without double quotes."""
        text = f"{self.title} ({self.units})" if self.title else f"Potential ({self.units})"
        plain = text.replace("Å", "A").encode("ascii", "replace").decode("ascii").replace('"', "'")
        printable = "".join(letter if letter.isprintable() else " " for letter in plain)
        return printable[:longest]


class GridFormat(ABC):
    """One map format. Instances carry no state; the registry in `pipeline.formats.grid` holds one of each."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    # Whether files hold the header's atoms; other formats ignore them.
    shows_atoms: ClassVar[bool] = False
    # How text formats round; None: files hold every bit.
    style: ClassVar[NumberStyle | None] = None

    def refusal(self, header: GridHeader, path: Path) -> str | None:
        """Why this format cannot hold such a map at this path, and which can; None if it can."""
        return None

    def block_shape(self, header: GridHeader) -> tuple[int, int, int] | None:
        """The blocks in which `create` stores such a map; whole blocks are written fastest. None: no preference.

        Slabs along x are the best choice: they are contiguous in all of these formats.
        """
        return None

    def file_bytes(self, header: GridHeader) -> int:
        """Bytes of the finished file; for compressed formats about the most it can have."""
        return header.nbytes

    @abstractmethod
    def create(self, path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        """Start a new file beside `path`, or resume or join one of the same header. Call `refusal` first.

        The writer takes float32 regions of x, y and z in any order, from several threads and, if joined, several
        processes. OutputError if the folder is not writable, StorageError if the disk has no room.
        """

    @abstractmethod
    def open(self, path: Path, header: GridHeader) -> ImageReader:
        """Read a map of that shape again: regions [x, y, z], float32, or float64 from text. InputError if damaged.

        Only the shape of `header` counts: title, units and atoms of the file may be others.
        """


def readable(nbytes: int) -> str:
    """1,234,567 bytes (1.18 MiB)."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS_OF_SIZE) - 1:
        size, unit = size / 1024, unit + 1
    return f"{nbytes:,} bytes" + (f" ({size:.4g} {_UNITS_OF_SIZE[unit]})" if unit else "")


def _numbers(values: Any) -> str:
    shown = [f"{value:.4g}" for value in values]
    return shown[0] if len(set(shown)) == 1 else ",".join(shown)


def _vector(values: Any) -> Vector:
    x, y, z = (float(value) for value in values)
    return x, y, z
