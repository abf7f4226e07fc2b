"""Neighbour search: the selected atoms alone give the same bits, and they are few."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kernels.coulomb import SCHEMES, Grid, Scheme, potential, reaching
from kernels.coulomb.cases import CELLS, made_atoms, water_box

GRID = Grid(origin=(1.0, -2.0, 3.0), spacing=(0.5, 0.45, 0.55), shape=(53, 29, 31))
KINDS = [*product(SCHEMES[:-1], CELLS), ("direct", "free")]


@pytest.mark.parametrize(("name", "cell"), KINDS)
@pytest.mark.parametrize("exclude", [0.0, 6.5])
def test_the_other_atoms_change_no_bit(name: str, cell: str, exclude: float) -> None:
    if cell != "free" and exclude:
        exclude = 4.0  # within half the cell
    scheme = Scheme(name=name, cutoff_angstrom=5.0, exclude_radius_angstrom=exclude)
    atoms = made_atoms("outside" if cell != "free" else "water", 600, GRID)
    for first, shape in (((0, 0, 0), (3, 29, 31)), ((21, 5, 9), (1, 7, 11)), ((50, 0, 0), (3, 29, 31))):
        part = replace(GRID, first=first, shape=shape)
        chosen = reaching(atoms, part, scheme, CELLS[cell])
        assert (np.diff(chosen) > 0).all()
        found = potential(np.ascontiguousarray(atoms[chosen]), part, scheme, cell=CELLS[cell], workers=1)
        np.testing.assert_array_equal(found, potential(atoms, part, scheme, cell=CELLS[cell], workers=1), strict=True)


def test_they_are_about_those_within_the_cutoff() -> None:
    atoms = water_box(100, 20_000)
    part = replace(GRID, origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), first=(96, 0, 0), shape=(8, 201, 201))
    within = np.abs(atoms[:, 0] - 49.75) < 1.75 + 12
    chosen = reaching(atoms, part, Scheme())
    assert set(np.flatnonzero(within)) <= set(chosen)
    assert len(chosen) < 1.5 * np.count_nonzero(within)
    assert len(reaching(atoms, part, Scheme(name="direct"))) == len(atoms)
    assert len(reaching(atoms + 500, part, Scheme())) == 0
