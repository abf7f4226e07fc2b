"""Test inputs of potential maps and the expected results, for the tests and benchmarks of every device.

The oracle is the definition in float64: every atom against every point, each periodic image explicitly. It shares
neither cells, tiles nor minimum images with the code under test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import SOFTENING_ANGSTROM, Cell, Grid, Scheme, potential

Array = NDArray[Any]

CONTENTS = ("random", "water", "on points", "coincident", "neutral", "extreme", "far", "outside")
RELATIVE_L2 = 2e-6  # the contract's bound, over the points beyond 1 Å of any atom
CANCELLATION = 20  # if charges cancel further than this, the bound is relative to the uncancelled sum divided by this
# Bound on each value's error relative to the sum of its terms' sizes; larger near an atom, since positions relative to
# the tile are float32 numbers of some 10 Å.
RELATIVE_ERROR, NEAR_ANGSTROM = 3e-6, 0.2
AT_CUTOFF = 2e-6  # of the cutoff's square: rounding decides whether a pair this near to it counts
# Pairs that the oracle computes together: their intermediates fit the processor's cache.
_PAIRS_AT_ONCE = 1 << 14

FREE = None
BOX = Cell(vectors=((13.1, 0.0, 0.0), (0.0, 11.7, 0.0), (0.0, 0.0, 12.3)))
TRICLINIC = Cell.from_lengths(17.0, 17.0, 17.0, 60.0, 60.0, 90.0)
SKEWED = Cell(vectors=((12.0, 1.5, -2.0), (-4.0, 13.0, 1.0), (3.0, -3.5, 14.0)))
CELLS = {"free": FREE, "box": BOX, "triclinic": TRICLINIC, "skewed": SKEWED}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The oracle's map, and the bounds for judging another; arrays [x, y, z] float64."""

    values: Array
    sizes: Array  # sums of the terms' magnitudes, weighted up near an atom
    doubtful: Array  # sums of the magnitudes of terms right at the cutoff
    nearest: Array  # distance to the nearest atom, angstrom


@dataclass(frozen=True, kw_only=True)
class Case:
    """One map of generated atoms."""

    grid: Grid
    scheme: Scheme
    count: int = 150
    content: str = "random"
    cell: str = "free"
    dtype: str = "float64"

    @property
    def name(self) -> str:
        scheme, shape = self.scheme, "x".join(map(str, self.grid.shape))
        parts = [scheme.name, f"{scheme.cutoff_angstrom:g}", shape, self.cell, self.content, self.dtype]
        parts += ["by-distance"] * scheme.distance_dependent
        parts += [f"excluded{scheme.exclude_radius_angstrom:g}"] * (scheme.exclude_radius_angstrom > 0)
        return "-".join(parts).replace(" ", "-")

    def atoms(self) -> Array:
        """The input [n, 4]; the same for every call."""
        return made_atoms(self.content, self.count, self.grid).astype(self.dtype)

    def apply(self, atoms: Any, **options: Any) -> Any:
        """The public function on `atoms`, an array of any supported library."""
        return potential(atoms, self.grid, self.scheme, cell=CELLS[self.cell], **options)

    def exact(self) -> Expected:
        return exact(self.atoms(), self.grid, self.scheme, CELLS[self.cell])

    def check(self, result: Array, expected: Expected | None = None, *, slack: float = 1) -> None:
        """AssertionError unless every value of the map, copied to the host, is right; `slack` widens the bounds."""
        check(result, expected or self.exact(), self.scheme, self.name, slack=slack)

    def pairs(self) -> int:
        """Pairs of a point and a charged atom within the cutoff: the least work."""
        return useful_pairs(self.atoms(), self.grid, self.scheme, CELLS[self.cell])

    def bytes(self) -> int:
        """Least traffic: atoms read once, map written once."""
        return self.count * 4 * np.dtype(self.dtype).itemsize + 4 * self.grid.size

    def flops(self) -> int:
        """Operations of the definition: 8 for r², then 3 (1/r, times charge, add) and the scheme's."""
        return self.pairs() * (11 + {"shift": 4, "taylor2": 6}.get(self.scheme.name, 0))


def made_atoms(content: str, count: int, grid: Grid) -> Array:
    """Atoms in and around a grid, float64 [count, 4]."""
    rng = np.random.default_rng(count + sum(grid.shape))
    low = np.array(grid.origin) + np.array(grid.first) * grid.spacing
    extent = (np.array(grid.shape) - 1) * grid.spacing
    atoms = np.empty((count, 4))
    atoms[:, :3] = low + rng.uniform(-3, extent + 3, (count, 3))
    atoms[:, 3] = rng.uniform(-1, 1, count)
    if content == "water":
        atoms[:, 3] = np.resize([-0.834, 0.417, 0.417, 0.0], count)
    elif content == "on points":
        atoms[:, :3] = low + rng.integers(0, grid.shape, (count, 3)) * np.array(grid.spacing)
    elif content == "coincident":
        atoms[:, :3] = atoms[0, :3]
    elif content == "neutral":
        atoms[:, 3] = 0
    elif content == "extreme":
        atoms[:, 3] = np.resize([1e6, -1e-6, 3.0, 0.0], count)
    elif content == "far":
        atoms[:, :3] += 1e6
    elif content == "outside":
        atoms[:, :3] += np.where(rng.random((count, 3)) < 0.5, 0, 41.0) * rng.integers(-3, 4, (count, 3))
    return atoms


def image_vectors(cell: Cell | None, atoms: Array, grid: Grid, reach: float) -> Array:
    """Vectors [n, 3] by which images of these atoms may come within reach of a grid."""
    if cell is None:
        return np.zeros((1, 3))
    axes = grid.axes()
    low = np.array([axis[0] for axis in axes]) - reach - atoms[:, :3].max(0)
    high = np.array([axis[-1] for axis in axes]) + reach - atoms[:, :3].min(0)
    corners = np.array(list(itertools.product(*zip(low, high, strict=True)))) @ np.linalg.inv(cell.matrix)
    ranges = [np.arange(np.floor(a) - 1, np.ceil(b) + 2) for a, b in zip(corners.min(0), corners.max(0), strict=True)]
    vectors = np.stack(np.meshgrid(*ranges, indexing="ij"), -1).reshape(-1, 3) @ cell.matrix
    return np.asarray(vectors[((vectors >= low) & (vectors <= high)).all(1)])


def exact(atoms: Array, grid: Grid, scheme: Scheme, cell: Cell | None = None) -> Expected:
    """The definition, in float64."""
    direct = scheme.name == "direct"
    cutoff = np.inf if direct else scheme.cutoff_angstrom
    axes, atoms = grid.axes(), atoms.astype(np.float64)
    values, sizes, doubtful = (np.zeros(grid.shape) for _ in range(3))
    nearest = np.full(grid.shape, np.inf)
    reach = max(0 if direct else cutoff, scheme.exclude_radius_angstrom, 1.0) * (1 + AT_CUTOFF)
    placed, together = _images(atoms, grid, cell, np.inf if direct else reach), -(-_PAIRS_AT_ONCE // grid.size)
    for first in range(0, len(placed), together):
        # Atoms along the first of four axes, points along the others.
        *position, charge = placed[first : first + together].T[..., None, None, None]
        x, y, z = ((axis - at[:, 0, 0]) ** 2 for axis, at in zip(axes, position, strict=True))
        square = x[:, :, None, None] + y[:, None, :, None] + z[:, None, None, :]
        np.minimum(nearest, np.sqrt(square.min(0)), out=nearest)
        distance = np.sqrt(square + SOFTENING_ANGSTROM**2)
        size = abs(charge) / distance ** (1 + scheme.distance_dependent) * (1 + NEAR_ANGSTROM / distance)
        inside = square <= cutoff**2
        values += np.where(inside, charge * _term(scheme, distance), 0).sum(0)
        sizes += np.where(inside, size, 0).sum(0)
        if scheme.name == "truncate":
            doubtful += np.where(abs(square / cutoff**2 - 1) < AT_CUTOFF, size, 0).sum(0)
    values, sizes, doubtful = (array / scheme.dielectric for array in (values, sizes, doubtful))
    excluded = nearest < scheme.exclude_radius_angstrom
    for array in (values, sizes, doubtful):
        array[excluded] = 0
    return Expected(values=values, sizes=sizes, doubtful=doubtful, nearest=nearest)


def _images(atoms: Array, grid: Grid, cell: Cell | None, reach: float) -> Array:
    """Atoms and their images within reach of a grid's box, [n, 4]."""
    if not len(atoms):
        return atoms
    axes, images = grid.axes(), [atoms[:0]]
    low, high = (np.array([axis[end] for axis in axes]) for end in (0, -1))
    for shift in image_vectors(cell, atoms, grid, reach):
        moved = atoms + np.array([*shift, 0.0])
        images.append(moved[((moved[:, :3] >= low - reach) & (moved[:, :3] <= high + reach)).all(1)])
    return np.concatenate(images)


def _term(scheme: Scheme, distance: Array) -> Array:
    rho = distance / scheme.cutoff_angstrom
    if scheme.name == "shift":
        term = (1 - rho**2) ** 2 / distance
    elif scheme.name == "taylor2":
        term = 1 / distance - (1.875 - 1.25 * rho**2 + 0.375 * (rho**2) ** 2) / scheme.cutoff_angstrom
    elif scheme.name == "split":
        term = 1 / distance - np.polynomial.polynomial.polyval(1 - rho**2, scheme.split) / scheme.cutoff_angstrom
    else:
        term = 1 / distance
    return np.asarray(term / distance if scheme.distance_dependent else term)


def check(result: Array, expected: Expected, scheme: Scheme, name: str = "", *, slack: float = 1) -> None:
    """AssertionError unless each value is within its own bound, and the values beyond 1 Å within the contract's."""
    assert result.shape == expected.values.shape, f"{name}: shape {result.shape}, expected {expected.values.shape}"
    assert result.dtype == np.float32, f"{name}: dtype {result.dtype}"
    assert np.isfinite(result).all(), f"{name}: {np.argwhere(~np.isfinite(result))[0]} is not finite"
    error = np.abs(result - expected.values)
    allowed = slack * RELATIVE_ERROR * expected.sizes + (1 + slack * RELATIVE_ERROR) * expected.doubtful
    worst = np.unravel_index(int(np.argmax(error - allowed)), error.shape)
    story = f"{name}: at {tuple(map(int, worst))} got {result[worst]}, expected {expected.values[worst]}"
    assert error[worst] <= allowed[worst], f"{story} ± {allowed[worst]}"
    excluded = expected.nearest < scheme.exclude_radius_angstrom
    assert not result[excluded].any(), f"{name}: excluded points are not zero"
    relative = relative_l2(result, expected)
    assert relative <= slack * RELATIVE_L2, f"{name}: relative L2 error {relative:.2e} beyond 1 Å"


def relative_l2(result: Array, expected: Expected) -> float:
    """Over the points beyond 1 Å of any atom, except those with a pair right at the cutoff."""
    judged = (expected.nearest > 1) & (expected.doubtful == 0)
    size = max(
        float(np.linalg.norm(field[judged])) / by
        for field, by in ((expected.values, 1), (expected.sizes, CANCELLATION))
    )
    wrong = float(np.linalg.norm(result[judged] - expected.values[judged]))
    return wrong / size if size else wrong


def useful_pairs(atoms: Array, grid: Grid, scheme: Scheme, cell: Cell | None = None) -> int:
    """Pairs of a point and a charged atom (or image) within the cutoff."""
    charged = atoms[atoms[:, 3] != 0].astype(np.float64)
    if scheme.name == "direct" or not len(charged):
        return len(charged) * grid.size
    square, axes, total = scheme.cutoff_angstrom**2, grid.axes(), 0
    for *position, _charge in _images(charged, grid, cell, scheme.cutoff_angstrom):
        x, y, z = ((axis - at) ** 2 for axis, at in zip(axes, position, strict=True))
        x, y, z = x[x <= square], y[y <= square], np.sort(z[z <= square])
        total += int(np.searchsorted(z, square - (x[:, None] + y[None, :]).ravel(), side="right").sum())
    return total


def _grid(shape: tuple[int, int, int], spacing: float = 0.5, **other: Any) -> Grid:
    made: dict[str, Any] = {"origin": (-3.7, 11.3, 0.9), "spacing": (spacing, spacing * 1.1, spacing * 0.93), **other}
    return Grid(shape=shape, **made)


def cases() -> Iterator[Case]:
    """Every scheme, cell and content; prime shapes; single points and lines; grids that begin anywhere in a tile;
    spacing from far below to far above the cutoff. Small: a few milliseconds each, apart from the oracle's time."""
    schemes = ("shift", "taylor2", "truncate", "split", "direct")
    for name, by_distance, cell in itertools.product(schemes, (False, True), CELLS):
        if (name == "direct" and cell != "free") or (name == "split" and by_distance):
            continue
        scheme = Scheme(name=name, cutoff_angstrom=5.1, dielectric=2.5, distance_dependent=by_distance)
        yield Case(grid=_grid((19, 23, 17)), scheme=scheme, cell=cell, content="water")
        yield Case(grid=_grid((13, 7, 29), first=(5, 3, 11)), scheme=scheme, cell=cell, dtype="float32")
    for name, content in itertools.product(schemes, CONTENTS[2:]):
        scheme = Scheme(name=name, cutoff_angstrom=4.3)
        yield Case(grid=_grid((11, 13, 17)), scheme=scheme, content=content)
        if name != "direct" and content not in ("extreme", "far"):
            yield Case(grid=_grid((11, 13, 17)), scheme=scheme, content=content, cell="box", count=40)
    for name, shape in itertools.product(
        ("shift", "direct"), ((1, 1, 1), (1, 1, 37), (37, 1, 1), (1, 37, 2), (2, 3, 1))
    ):
        yield Case(grid=_grid(shape, first=(2, 0, 7)), scheme=Scheme(name=name, cutoff_angstrom=6.0))
    for spacing, cutoff in ((0.07, 2.0), (3.0, 2.0), (9.0, 4.0), (1.0, 31.0), (0.5, 0.05)):
        scheme = Scheme(cutoff_angstrom=cutoff)
        yield Case(grid=_grid((11, 9, 13), spacing), scheme=scheme)
    for name, cell, radius in itertools.product(("shift", "direct"), ("free", "triclinic"), (0.3, 1.5)):
        if name == "direct" and cell != "free":
            continue
        scheme = Scheme(name=name, cutoff_angstrom=5.0, exclude_radius_angstrom=radius)
        yield Case(grid=_grid((17, 13, 19), first=(1, 2, 3)), scheme=scheme, cell=cell, content="water", count=60)
    yield Case(grid=_grid((5, 7, 3)), scheme=Scheme(), count=0)
    yield Case(grid=_grid((31, 29, 37), first=(40, 0, 1)), scheme=Scheme(cutoff_angstrom=8.0), count=700)


def water_box(side_angstrom: float, count: int, *, seed: int = 0) -> Array:
    """Atoms with about water's density and charges, at random positions in a cube: float32 [count, 4]."""
    rng = np.random.default_rng(seed)
    atoms = np.empty((count, 4), np.float32)
    atoms[:, :3] = rng.uniform(0, side_angstrom, (count, 3))
    atoms[:, 3] = np.resize(np.array([-0.834, 0.417, 0.417], np.float32), count)
    return atoms


def in_slabs(case: Case, cuts: tuple[int, ...], atoms: Any) -> list[Any]:
    """The case's map, computed slab by slab; `cuts` are the x indices between them."""
    ends = (0, *cuts, case.grid.shape[0])
    parts = [replace(case, grid=case.grid.slab(a, b)) for a, b in itertools.pairwise(ends)]
    return [part.apply(atoms) for part in parts]
