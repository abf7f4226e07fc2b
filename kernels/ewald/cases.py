"""Test inputs of full maps and the expected results, for the tests and benchmarks of every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import Cell, Grid
from kernels.coulomb.cases import BOX, SKEWED, TRICLINIC, water_box
from kernels.ewald import Method, potential
from kernels.ewald.reference import ewald, plain

Array = NDArray[Any]

CELLS = {"free": None, "box": BOX, "triclinic": TRICLINIC, "skewed": SKEWED}
GRID = Grid(origin=(-3.7, 1.3, 0.9), spacing=(0.9, 0.95, 0.87), shape=(13, 11, 17), first=(2, 0, 5))
_COUNT, _PLACES = 200, 150


@dataclass(frozen=True, kw_only=True)
class Case:
    """One map of water-like atoms."""

    method: Method
    cell: str
    grid: Grid = GRID
    charge: float = 0.0  # added to the first atom

    def atoms(self) -> Array:
        """[n, 4] float64; neutral but for `charge`."""
        atoms = water_box(12.0, _COUNT, seed=2).astype(np.float64)
        atoms[:, 3] -= atoms[:, 3].mean()
        atoms[0, 3] += self.charge
        return atoms

    def apply(self, atoms: Any, **options: Any) -> Any:
        return potential(atoms, self.grid, self.method, cell=CELLS[self.cell], **options)

    def check(self, result: Array) -> None:
        """AssertionError unless the map, on the host, is as accurate as promised: see `error`."""
        error = self.error(result)
        assert error <= self.method.accuracy, f"{self}: relative L2 error {error:.2e}"

    def error(self, result: Array) -> float:
        """The relative L2 error at some points beyond 1 Å of any atom; NaN if a value is not a number."""
        atoms, cell, smear = self.atoms(), CELLS[self.cell], self.method.smear_per_angstrom
        places = np.random.default_rng(0).integers(0, self.grid.shape, (4 * _PLACES, 3))
        points = np.column_stack([axis[index] for axis, index in zip(self.grid.axes(), places.T, strict=True)])
        far = nearest(atoms, points, cell) > 1
        places, points = places[far][:_PLACES], points[far][:_PLACES]
        if cell is None:
            right = plain(atoms, points, smear_per_angstrom=smear)
        else:
            right = ewald(atoms, points, cell, smear_per_angstrom=smear, vacuum=self.method.boundary == "vacuum")
        right /= self.method.dielectric
        return float(np.linalg.norm(result[tuple(places.T)] - right) / np.linalg.norm(right))


def nearest(atoms: Array, points: Array, cell: Cell | None) -> Array:
    """Distance of each point to the nearest atom, or image at the nearest fractions."""
    apart = points[:, None, :] - atoms[None, :, :3]
    if cell is not None:
        apart -= np.rint(apart @ np.linalg.inv(cell.matrix)) @ cell.matrix
    return np.asarray(np.sqrt((apart**2).sum(-1)).min(1))


def cases() -> list[Case]:
    """Every accuracy, cell, boundary and kind of charge."""
    found = [Case(method=Method(accuracy=each), cell=cell) for each in (1e-4, 1e-5, 1e-6) for cell in CELLS]
    found += [Case(method=Method(smear_per_angstrom=0.4, dielectric=3.0), cell=cell) for cell in CELLS]
    found += [Case(method=Method(boundary="vacuum"), cell="box"), Case(method=Method(boundary="vacuum"), cell="skewed")]
    found += [Case(method=Method(accuracy=1e-5, cutoff_angstrom=3.0), cell=cell, charge=2.0) for cell in CELLS]
    return found
