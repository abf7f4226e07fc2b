"""Ewald's sum in float64: Madelung constants, other splittings, sums over spheres, and what each option means."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kernels.coulomb import Cell
from kernels.ewald.reference import ewald, plain
from tests.kernels.ewald.crystals import CRYSTALS, SKEWED, random_atoms


@pytest.mark.parametrize("name", CRYSTALS)
@pytest.mark.parametrize("side", [4.0, 30.0])
def test_madelung_constants(name: str, side: float) -> None:
    """Of the shortest distance; from Crandall and Buhler, J. Phys. A 20 (1987), and tables."""
    atoms, distance, constant = CRYSTALS[name]
    atoms = atoms * [side, side, side, 1]
    at = ewald(atoms, atoms[:, :3], Cell.from_lengths(side, side, side), own_angstrom=1e-3)
    np.testing.assert_allclose(at * atoms[:, 3] * distance * side, -constant, rtol=1e-8)


def test_the_splitting_does_not_matter() -> None:
    """Ten atoms and copies of them in a cell eight times as large are split at other distances."""
    atoms, points = random_atoms(10, SKEWED), random_atoms(7, SKEWED, seed=1)[:, :3]
    shifts = np.array(list(itertools.product((0, 1), repeat=3))) @ SKEWED.matrix
    copies = np.concatenate([atoms + np.append(shift, 0) for shift in shifts])
    doubled = Cell(vectors=tuple(tuple(2 * x for x in row) for row in SKEWED.vectors))
    found = ewald(atoms, points, SKEWED)
    np.testing.assert_allclose(ewald(copies, points, doubled), found, atol=1e-10 * np.abs(found).max())


def test_a_large_sphere_of_cells_in_a_vacuum() -> None:
    """Its plain sum converges to the definition, the sphere's error like one over its radius."""
    side = 3.0
    atoms = np.array([[0.2, 0.3, 0.1, 1.0], [1.4, 0.7, 2.2, -1.0], [2.5, 2.0, 1.0, 0.5], [0.9, 2.6, 1.7, -0.5]])
    point = np.array([[1.1, 1.9, 0.4]])
    errors = []
    for radius in (8, 16):
        count = np.arange(-radius, radius + 1)
        cells = np.stack(np.meshgrid(count, count, count, indexing="ij"), -1).reshape(-1, 3)
        cells = cells[(cells**2).sum(1) <= radius**2]
        images = np.concatenate([atoms + np.append(side * cell, 0) for cell in cells])
        errors.append(
            plain(images, point)[0] - ewald(atoms, point, Cell.from_lengths(side, side, side), vacuum=True)[0]
        )
    assert abs(errors[1]) < 2e-3
    assert abs(errors[1]) < 0.8 * abs(errors[0])


def test_a_background_makes_the_mean_zero() -> None:
    """Of a charged cell; by the midpoints of Gaussian charges, which any mesh integrates."""
    atoms = np.array([[1.0, 2.0, 0.5, 1.5]])
    cell = Cell.from_lengths(9.0, 8.0, 10.0, 80, 95, 105)
    parts = np.stack(np.meshgrid(*[np.arange(10) / 10] * 3, indexing="ij"), -1).reshape(-1, 3)
    smeared = ewald(atoms, parts @ cell.matrix, cell, smear_per_angstrom=0.4)
    assert abs(smeared.mean()) < 1e-9 * np.abs(smeared).max()
    # A point charge's field differs only by π/α² q over the volume, far from the charge.
    far = atoms[:, :3] + np.array([0.5, 0.5, 0.5]) @ cell.matrix
    apart = ewald(atoms, far, cell) - ewald(atoms, far, cell, smear_per_angstrom=2.0)
    np.testing.assert_allclose(apart, -1.5 * math.pi / 4 / abs(np.linalg.det(cell.matrix)), rtol=1e-6)


def test_own_terms_are_left_out() -> None:
    atoms = random_atoms(6, SKEWED)
    for smear in (None, 0.6):
        without = [
            ewald(np.delete(atoms, i, 0), atoms[i : i + 1, :3], SKEWED, smear_per_angstrom=smear)[0] for i in range(6)
        ]
        alone = ewald(atoms[:1] * [1, 1, 1, 0] + [0, 0, 0, 1], atoms[:1, :3], SKEWED, smear_per_angstrom=smear,
                      own_angstrom=1e-3)  # fmt: skip
        found = ewald(atoms, atoms[:, :3], SKEWED, smear_per_angstrom=smear, own_angstrom=1e-3)
        np.testing.assert_allclose(found, without + alone[0] * atoms[:, 3], atol=1e-8)
    np.testing.assert_allclose(
        plain(atoms, atoms[:1, :3], own_angstrom=1e-3), plain(atoms[1:], atoms[:1, :3]), rtol=1e-12
    )
