"""Atoms at the cutoff: the cells that blocks skip, and the chords that rows get, leave out none of them."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from kernels.coulomb import Grid, Scheme, potential
from kernels.coulomb.tuning import CUBES

CUTOFF = 5.0
NEAR = 1e-4  # of the cutoff: how near to it the atoms are
PAST = 2e-3  # of the cutoff: how far they are inside their cell, whose other atoms would be too far away
DIRECTIONS = [each for each in product((-1, 0, 1), repeat=3) if any(each)]


def lattice(direction: int, offset: float, cut: int) -> tuple[int, float]:
    """Number and spacing of a plane of points, from which an atom at `offset` lies `PAST` behind a wall of cells."""
    edge = CUTOFF / cut
    wall = 10 * edge if direction > 0 else 3 * edge
    place = wall - direction * (offset - PAST * CUTOFF)
    first = math.ceil(place / 0.31)
    return first, place / first


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 11, 13)])
def test_atoms_just_within_the_cutoff_count_and_those_just_beyond_do_not(
    direction: tuple[int, int, int], shape: tuple[int, int, int]
) -> None:
    """Of the corner of a grid that is nearest to them, along axes and diagonals."""
    length = math.sqrt(sum(each * each for each in direction))
    planes = [
        lattice(each, CUTOFF * (1 - NEAR) / length, cut) if each else (11, 0.3)
        for each, cut in zip(direction, CUBES, strict=True)
    ]
    corner, spacing = np.array([first for first, _ in planes]), np.array([step for _, step in planes])
    first = np.where(np.array(direction) > 0, corner - np.array(shape) + 1, corner)
    grid = Grid(origin=(0.0, 0.0, 0.0), spacing=tuple(spacing), shape=shape, first=tuple(int(n) for n in first))
    points = np.stack(np.meshgrid(*((np.arange(n) + f) for n, f in zip(shape, first, strict=True)), indexing="ij"), -1)
    for share, charge in ((1 - NEAR, 1.5), (1 + NEAR, 0.0)):
        atom = corner * spacing + np.array(direction) * CUTOFF * share / length
        atoms = np.array([[*atom, 1.5]])
        found = potential(atoms, grid, Scheme(name="truncate", cutoff_angstrom=CUTOFF))
        distance = np.sqrt(((points * spacing - atom) ** 2).sum(-1))
        expected = np.where(distance < CUTOFF, 1.5 / distance, 0.0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert found[tuple(corner - first)] == pytest.approx(charge / (CUTOFF * share), rel=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_points_just_within_the_excluded_radius_are_zero(direction: tuple[int, int, int]) -> None:
    length = math.sqrt(sum(each * each for each in direction))
    grid = Grid(origin=(0.0, 0.0, 0.0), spacing=(0.4, 0.5, 0.6), shape=(7, 8, 9), first=(20, 21, 22))
    centre = np.array([23, 24, 26]) * np.array(grid.spacing)
    scheme = Scheme(name="truncate", cutoff_angstrom=CUTOFF, exclude_radius_angstrom=1.0)
    for radius, zero in ((1 - NEAR, True), (1 + NEAR, False)):
        atoms = np.array([[*(centre + np.array(direction) * radius / length), 1.0]])
        assert (potential(atoms, grid, scheme)[3, 3, 4] == 0) == zero


@pytest.mark.parametrize("name", ["direct", "truncate"])
def test_long_rows_of_a_grid_within_a_larger_one(name: str) -> None:
    """Several blocks follow each other along z, none of which begins at the grid's own origin."""
    rng = np.random.default_rng(5)
    grid = Grid(origin=(0.0, 0.0, 0.0), spacing=(0.4, 0.5, 0.3), shape=(3, 5, 307), first=(7, 11, 101))
    planes = [(np.arange(n) + f) * s for n, f, s in zip(grid.shape, grid.first, grid.spacing, strict=True)]
    points = np.stack(np.meshgrid(*planes, indexing="ij"), -1)
    low, high = points.min((0, 1, 2)) - 2.0, points.max((0, 1, 2)) + 2.0
    atoms = np.column_stack([rng.uniform(low, high, (60, 3)), rng.normal(size=60)])
    expected = np.zeros(grid.shape)
    for *place, charge in atoms:
        distance = np.sqrt(((points - place) ** 2).sum(-1))
        expected += np.where((distance < CUTOFF) | (name == "direct"), charge / distance, 0.0)
    scheme = Scheme(name="direct") if name == "direct" else Scheme(name=name, cutoff_angstrom=CUTOFF)
    found = potential(atoms, grid, scheme)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
