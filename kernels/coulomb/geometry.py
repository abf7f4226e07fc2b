"""Grid, periodic cell and scheme of a potential map. Lengths in angstrom, charges in e."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.elementary import cosine

SCHEMES = ("shift", "taylor2", "truncate", "split", "direct")
SOFTENING_ANGSTROM = 1e-4
SPLIT_TERMS = 8  # in terms.cuh too
# Of 1/sqrt(1 - u) in powers of u.
INVERSE_ROOT_SERIES = (1.0, 1 / 2, 3 / 8, 5 / 16, 35 / 128, 63 / 256, 231 / 1024, 429 / 2048)
MAX_POINTS_AN_AXIS = 1 << 26
MAX_IMAGES = 1 << 20  # lattice vectors whose images can come near a grid


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A regular grid of points, or a part of one.

    origin  : position of the whole grid's point (0, 0, 0)
    spacing : distance between neighbouring points along x, y, z
    shape   : points along x, y, z
    first   : index in the whole grid of this part's first point: point [i, j, k] lies at
              origin + (first + (i, j, k)) * spacing, the same bits for a part as for the whole

    Raises ValueError.
    """

    origin: tuple[float, float, float]
    spacing: tuple[float, float, float]
    shape: tuple[int, int, int]
    first: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        origin = _three_reals("grid origin", self.origin)
        spacing = _three_reals("grid spacing", self.spacing)
        if min(spacing) <= 0:
            raise ValueError(f"grid spacing must be positive along each axis; got {self.spacing}")
        shape = _three_counts("grid shape", self.shape, least=1)
        first = _three_counts("grid first", self.first, least=0)
        if max(a + b for a, b in zip(shape, first, strict=True)) > MAX_POINTS_AN_AXIS:
            raise ValueError(f"grid shape {shape} from {first} on: at most {MAX_POINTS_AN_AXIS} points an axis")
        for name, value in (("origin", origin), ("spacing", spacing), ("shape", shape), ("first", first)):
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        """Number of points."""
        return math.prod(self.shape)

    def slab(self, begin: int, end: int) -> Grid:
        """The part with x indices begin … end - 1 of this grid."""
        if not 0 <= begin < end <= self.shape[0]:
            raise ValueError(f"slab {begin} … {end} lies outside the grid's {self.shape[0]} points along x")
        first, shape = self.first, self.shape
        return replace(self, first=(first[0] + begin, *first[1:]), shape=(end - begin, *shape[1:]))

    def axes(self) -> tuple[NDArray[np.float64], ...]:
        """Positions of the points along x, y and z, float64."""
        return tuple(
            np.asarray(o + (np.arange(n) + f) * h, np.float64)
            for o, h, n, f in zip(self.origin, self.spacing, self.shape, self.first, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A periodic cell: three edge vectors, the rows of `vectors`, of any length and angle.

    Raises ValueError if they span no volume.
    """

    vectors: tuple[tuple[float, float, float], ...]

    def __post_init__(self) -> None:
        try:
            vectors = tuple(tuple(float(x) for x in row) for row in self.vectors)
        except (TypeError, ValueError):
            raise ValueError(f"cell vectors must be three vectors of three numbers; got {self.vectors!r}") from None
        if len(vectors) != 3 or any(len(row) != 3 for row in vectors):
            raise ValueError(f"cell vectors must be three vectors of three numbers; got {self.vectors!r}")
        object.__setattr__(self, "vectors", vectors)
        matrix = self.matrix
        lengths = np.linalg.norm(matrix, axis=1)
        if not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) <= 1e-9 * float(np.prod(lengths)):
            raise ValueError(f"cell vectors {vectors} span no volume")

    @classmethod
    def from_lengths(
        cls, a: float, b: float, c: float, alpha: float = 90.0, beta: float = 90.0, gamma: float = 90.0
    ) -> Cell:
        """From edge lengths and the angles in degrees between b and c, a and c, a and b; by the crystallographic
        convention a lies along x and b in the x-y plane."""
        cosines = [float(cosine(angle / 360)) for angle in (alpha, beta, gamma)]
        sine = math.sqrt(max(1 - cosines[2] * cosines[2], 0.0))
        if sine == 0:
            raise ValueError(f"cell angles {alpha}, {beta}, {gamma} span no volume")
        y = (cosines[0] - cosines[1] * cosines[2]) / sine
        z = math.sqrt(max(1 - cosines[1] * cosines[1] - y * y, 0.0))
        return cls(vectors=((a, 0.0, 0.0), (b * cosines[2], b * sine, 0.0), (c * cosines[1], c * y, c * z)))

    @property
    def matrix(self) -> NDArray[np.float64]:
        return np.array(self.vectors, np.float64)

    @property
    def inverse(self) -> NDArray[np.float64]:
        """The matrix's inverse, by plain arithmetic: the same bits on every CPU, which LAPACK does not promise."""
        a, b, c = self.vectors
        columns = [_cross(b, c), _cross(c, a), _cross(a, b)]
        volume = a[0] * columns[0][0] + a[1] * columns[0][1] + a[2] * columns[0][2]
        return np.array([[column[i] / volume for column in columns] for i in range(3)])

    def vectors_of(self, multiples: NDArray[np.float64]) -> NDArray[np.float64]:
        """multiples @ matrix, by plain arithmetic."""
        return times(multiples, self.matrix)

    @property
    def widths(self) -> NDArray[np.float64]:
        """Distances between opposite faces."""
        return np.asarray(1 / np.linalg.norm(self.inverse, axis=0))


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The potential of a charge q at distance r, with rho = r / cutoff; the sum over atoms is divided by `dielectric`.

    name : "shift"     q/r (1 - rho²)², smooth at the cutoff
           "taylor2"   q (1/r - (1.875 - 1.25 rho² + 0.375 rho⁴) / cutoff)
           "truncate"  q/r
           "split"     q (1/r - P(1 - rho²) / cutoff), the near part of a full sum (kernels.ewald)
           "direct"    q/r, no cutoff
    cutoff_angstrom : atoms beyond it contribute nothing (not used by "direct")
    dielectric      : the relative permittivity, or its factor if `distance_dependent`
    distance_dependent : the permittivity is dielectric × r (r in angstrom): each term is divided by r once more
    exclude_radius_angstrom : points closer than this to any atom, charged or not, are set to zero; 0 disables it
    split : only for "split": the coefficients of the polynomial P, constant first, which is 1: the potential is then
            zero at the cutoff. By default the series of 1/sqrt, with which all derivatives up to the seventh are zero

    Raises ValueError.
    """

    name: str = "shift"
    cutoff_angstrom: float = 12.0
    dielectric: float = 1.0
    distance_dependent: bool = False
    exclude_radius_angstrom: float = 0.0
    split: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}; got {self.name!r}")
        for name, least in (("cutoff_angstrom", 1e-2), ("dielectric", 1e-3), ("exclude_radius_angstrom", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) < 1e30:
                raise ValueError(f"{name} must be a number of at least {least:g}; got {value!r}")
            object.__setattr__(self, name, float(value))
        if self.name == "split" and not self.split:
            object.__setattr__(self, "split", INVERSE_ROOT_SERIES)
        if self.split and (self.name != "split" or len(self.split) != SPLIT_TERMS):
            raise ValueError(f'scheme "split", and it alone, takes {SPLIT_TERMS} coefficients; got {self.split!r}')
        if self.split and (self.distance_dependent or self.split[0] != 1):
            raise ValueError('scheme "split" has the first coefficient 1 and no distance-dependent dielectric')


def check_cell(cell: Cell, scheme: Scheme) -> None:
    """ValueError unless the minimum image convention holds: no sphere may reach its own image."""
    reach = max(scheme.cutoff_angstrom, scheme.exclude_radius_angstrom)
    shortest = float(cell.widths.min())
    if reach > shortest / 2:
        what = "cutoff" if reach == scheme.cutoff_angstrom else "exclude radius"
        raise ValueError(
            f"{what} {reach:g} Å passes half the cell's shortest width ({shortest:.4g} Å between opposite faces): "
            f"choose at most {math.floor(shortest * 500) / 1000:g} Å"
        )


def reach_box(grid: Grid, reach: float, align: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Corners, relative to the grid's origin, of the box within `reach` of the grid's points. The points are first
    extended to whole tiles of `align` points, so that parts of one tile use the same atoms."""
    first, shape = np.array(grid.first), np.array(grid.shape)
    tile, spacing = np.array(align), np.array(grid.spacing)
    low = first // tile * tile
    high = -(-(first + shape) // tile) * tile - 1
    return low * spacing - reach, high * spacing + reach


def images(cell: Cell | None, low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.int32]:
    """Multiples (a, b, c) of the cell's vectors that can bring an atom of the home cell (fractions 0 … 1, from the
    grid's origin) into a box; ascending. One row of zeros without a cell.

    Raises ValueError if there are more than `MAX_IMAGES`.
    """
    if cell is None:
        return np.zeros((1, 3), np.int32)
    corners = times(np.array(list(itertools.product(*zip(low, high, strict=True)))), cell.inverse)
    first, last = np.floor(corners.min(0) - 1e-6), np.floor(corners.max(0) + 1e-6)
    if np.prod(last - first + 1) > MAX_IMAGES:
        raise ValueError(f"the grid reaches over {np.prod(last - first + 1):.3g} periodic cells: at most {MAX_IMAGES}")
    ranges = [np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]
    multiples = np.stack(np.meshgrid(*ranges, indexing="ij"), -1).reshape(-1, 3)
    # An image of the home cell: its eight corners, shifted. Drop those whose bounding box misses the reach box.
    units = cell.vectors_of(np.array(list(itertools.product((0.0, 1.0), repeat=3))))
    shifts = cell.vectors_of(multiples)
    near = (shifts + units.min(0) <= high + 1e-6).all(1) & (shifts + units.max(0) >= low - 1e-6).all(1)
    return np.ascontiguousarray(multiples[near], np.int32).reshape(-1, 3)


def times(vectors: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """vectors [n, 3] @ matrix [3, 3], each product and sum rounded separately: the same bits on every CPU."""
    x, y, z = vectors[:, :1], vectors[:, 1:2], vectors[:, 2:]
    return np.asarray(x * matrix[0] + y * matrix[1] + z * matrix[2])


def _cross(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def _three_reals(name: str, values: Any) -> tuple[float, float, float]:
    try:
        x, y, z = (float(value) for value in values)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be three numbers; got {values!r}") from None
    if not all(map(math.isfinite, (x, y, z))):
        raise ValueError(f"{name} must be finite; got {values!r}")
    return x, y, z


def _three_counts(name: str, values: Any, *, least: int) -> tuple[int, int, int]:
    try:
        x, y, z = (int(value) for value in values)
        whole = (x, y, z) == tuple(values) and not any(isinstance(value, bool) for value in values)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole or min(x, y, z) < least:
        raise ValueError(f"{name} must be three whole numbers, {least} or more; got {values!r}")
    return x, y, z
