"""OpenMM's Coulomb energies against our potentials at atoms: its reference platform computes in float64.

Its energy is a quadratic form of the charges. Moving charge from one atom to another, both ways by the same amount,
changes it by the difference of the potentials at the two, without any error of a finite step.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import openmm
import pytest

from kernels.coulomb import Cell
from tests.kernels.ewald.crystals import SKEWED, random_atoms
from tests.pipeline.workloads.coulomb.coulomb_jobs import make_map, write_npz

KILOJOULES = 4.184  # a kilocalorie
OBLIQUE = Cell(vectors=((12.0, 0.0, 0.0), (-4.0, 13.0, 0.0), (3.0, -3.5, 14.0)))  # as OpenMM takes vectors
BOX = Cell.from_lengths(12.0, 13.0, 14.0)
ATOMS, MOVED_E = 24, 0.5


class Energies:
    """Of charges at fixed places, in kJ/mol."""

    def __init__(self, atoms: Any, cell: Cell | None) -> None:
        system, self._force = openmm.System(), openmm.NonbondedForce()
        for q in atoms[:, 3]:
            system.addParticle(1.0)
            self._force.addParticle(q, 0.1, 0.0)
        if cell is None:
            self._force.setNonbondedMethod(openmm.NonbondedForce.NoCutoff)
        else:
            system.setDefaultPeriodicBoxVectors(*(openmm.Vec3(*(0.1 * x for x in row)) for row in cell.vectors))
            self._force.setNonbondedMethod(openmm.NonbondedForce.PME)
            self._force.setCutoffDistance(0.59)
            self._force.setPMEParameters(9.0, 80, 80, 80)  # of the error function, 1/nm; 0.16 Å
        system.addForce(self._force)
        platform = openmm.Platform.getPlatformByName("Reference")
        self._context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
        self._context.setPositions(0.1 * atoms[:, :3])

    def of(self, charges: Any) -> float:
        for number, q in enumerate(charges):
            self._force.setParticleParameters(number, q, 0.1, 0.0)
        self._force.updateParametersInContext(self._context)
        found = self._context.getState(getEnergy=True).getPotentialEnergy()
        return float(found.value_in_unit(openmm.unit.kilojoule_per_mole))


@pytest.mark.parametrize(
    ("scheme", "cell"),
    [("ewald", BOX), ("ewald", OBLIQUE), ("full", None), ("direct", None)],
    ids=["box", "oblique", "full", "direct"],
)
def test_potentials_at_atoms_are_the_derivatives_of_energies(tmp_path: Path, scheme: str, cell: Cell | None) -> None:
    atoms = random_atoms(ATOMS, cell or SKEWED)
    atoms[:, 3] -= atoms[:, 3].mean()
    write_npz(tmp_path / "a.npz", atoms, None if cell is None else cell.matrix)
    np.savetxt(tmp_path / "points.csv", atoms[:, :3], fmt="%.17g", delimiter=",")
    make_map(
        tmp_path, "a.npz", scheme=scheme, at=tmp_path / "points.csv", units="kcal/mol/e",
        origin="0,0,0", shape="5,5,5", spacing="2",
    )  # fmt: skip
    lines = list(csv.reader((tmp_path / "out.npy.at.csv").read_text().splitlines()))[1:]
    potentials = KILOJOULES * np.array(lines, float)[:, 3]
    energies = Energies(atoms, cell)
    scale = np.abs(potentials).max()
    assert abs(energies.of(atoms[:, 3]) - potentials @ atoms[:, 3] / 2) < 1e-5 * scale
    for number in range(1, ATOMS):
        moved = np.zeros(ATOMS)
        moved[0], moved[number] = -MOVED_E, MOVED_E
        difference = energies.of(atoms[:, 3] + moved) - energies.of(atoms[:, 3] - moved)
        expected = potentials[number] - potentials[0]
        assert abs(difference / (2 * MOVED_E) - expected) < 1e-5 * scale
