"""Molecules outside the repository: under $MILLRACE_TEST_DATA, or in shared/data beside the checkout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.coulomb import Cell, Grid

_BESIDE = Path(__file__).parents[4] / "shared" / "data"
NAMES = ("1a63.pqr", "actin_dimer.pqr", "watbox_sl40.pqr", "adk_oplsaa.tpr")
SPACING = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Molecule:
    """Atoms [n, 4] float64 and, for the trajectory, its periodic cell."""

    atoms: Any
    cell: Cell | None = None

    def grid(self) -> Grid:
        """Points every 0.5 Å over the atoms."""
        low, high = self.atoms[:, :3].min(0), self.atoms[:, :3].max(0)
        shape = np.floor((high - low) / SPACING).astype(int) + 1
        return Grid(origin=tuple(low), spacing=SPACING, shape=tuple(int(n) for n in shape))


@cache
def molecule(name: str) -> Molecule:
    """The molecule of `coulomb/<name>`; skips the test if the file or its reader is absent."""
    path = Path(os.environ.get("MILLRACE_TEST_DATA", _BESIDE)) / "coulomb" / name
    if not path.is_file():
        pytest.skip(f"{name} is not under $MILLRACE_TEST_DATA or ../shared/data")
    if path.suffix == ".pqr":
        return Molecule(atoms=_pqr(path))
    mdanalysis = pytest.importorskip("MDAnalysis", reason="MDAnalysis reads TPR and XTC: pip install MDAnalysis")
    universe = mdanalysis.Universe(str(path), str(path.with_suffix(".xtc")), refresh_offsets=True)
    atoms = np.column_stack([universe.atoms.positions, universe.atoms.charges]).astype(np.float64)
    return Molecule(atoms=atoms, cell=Cell(vectors=tuple(map(tuple, universe.trajectory.ts.triclinic_dimensions))))


def _pqr(path: Path) -> Any:
    """The last five columns of an atom's line are x, y, z, charge, radius."""
    lines = [line.split() for line in path.read_text().splitlines() if line.startswith(("ATOM", "HETATM"))]
    return np.array([[float(word) for word in line[-5:-1]] for line in lines])
