"""Real molecules on the CPU: full against direct, and Ewald's sum in the trajectory's own oblique cell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels.coulomb import Grid, direct
from kernels.ewald import Method, potential
from kernels.ewald.cases import nearest
from kernels.ewald.reference import ewald
from tests.kernels.coulomb.real_inputs import NAMES, molecule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MDAnalysis's own


def _coarse(grid: Grid) -> tuple[Grid, np.ndarray]:
    """Some points over the whole molecule, and their positions [n, 3]."""
    steps = tuple(h * (n - 1) / k for h, n, k in zip(grid.spacing, grid.shape, (2, 4, 6), strict=True))
    found = replace(grid, spacing=steps, shape=(3, 5, 7))
    return found, np.stack(np.meshgrid(*found.axes(), indexing="ij"), -1).reshape(-1, 3)


@pytest.mark.parametrize("method", [Method(cutoff_angstrom=5.0), Method(accuracy=1e-5, cutoff_angstrom=6.0)])
@pytest.mark.parametrize("name", NAMES)
def test_full_is_direct(name: str, method: Method) -> None:
    atoms = molecule(name).atoms
    grid, points = _coarse(molecule(name).grid())
    far = nearest(atoms, points, None) > 1
    right = direct(atoms, grid).astype(np.float64).ravel()[far]
    found = potential(atoms, grid, method).ravel()[far]
    assert np.linalg.norm(found - right) < method.accuracy * np.linalg.norm(right)


def test_the_trajectory_in_its_cell() -> None:
    found = molecule("adk_oplsaa.tpr")
    assert found.cell is not None
    grid, points = _coarse(found.grid())
    far = nearest(found.atoms, points, found.cell) > 1
    right = ewald(found.atoms, points[far], found.cell)
    error = potential(found.atoms, grid, cell=found.cell).ravel()[far] - right
    assert np.linalg.norm(error) < 1e-4 * np.linalg.norm(right)
