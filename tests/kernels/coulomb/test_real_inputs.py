"""Real molecules on the CPU, against float64: a dense part of each map, and a coarse map of the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels.coulomb import Grid, Scheme, potential
from kernels.coulomb.cases import check, exact
from tests.kernels.coulomb.real_inputs import NAMES, molecule

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MDAnalysis's own

DENSE = (9, 7, 11)


def _middle(grid: Grid, shape: tuple[int, int, int]) -> Grid:
    first = tuple((whole - part) // 2 for whole, part in zip(grid.shape, shape, strict=True))
    return replace(grid, first=first, shape=shape)


@pytest.mark.parametrize("scheme", ["shift", "taylor2", "truncate"])
@pytest.mark.parametrize("name", NAMES)
def test_within_a_cutoff(name: str, scheme: str) -> None:
    found = molecule(name)
    part = _middle(found.grid(), DENSE)
    for cell in {None, found.cell}:
        result = potential(found.atoms, part, Scheme(name=scheme), cell=cell)
        check(result, exact(found.atoms, part, Scheme(name=scheme), cell), Scheme(name=scheme), f"{name} {cell}")


@pytest.mark.parametrize("name", NAMES)
def test_direct(name: str) -> None:
    found = molecule(name)
    part = _middle(found.grid(), (5, 7, 11))
    check(potential(found.atoms, part, Scheme(name="direct")), exact(found.atoms, part, Scheme(name="direct")),
          Scheme(name="direct"), name)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_coarse_map_of_the_whole(name: str) -> None:
    found = molecule(name)
    fine = found.grid()
    coarse = 8 if len(found.atoms) < 10_000 else 24  # fine points; the oracle takes its time
    shape = tuple(int(np.ceil(n / coarse)) for n in fine.shape)
    grid = Grid(origin=fine.origin, spacing=tuple(coarse * h for h in fine.spacing), shape=shape)
    scheme = Scheme(exclude_radius_angstrom=1.0)
    check(
        potential(found.atoms, grid, scheme, cell=found.cell),
        exact(found.atoms, grid, scheme, found.cell),
        scheme,
        name,
    )
