"""Full maps on CUDA: the same cases as on the CPU, and the same bits for any part and order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.coulomb import Cell
from kernels.coulomb.cases import water_box
from kernels.ewald import FarField, Method, mesh_of
from kernels.ewald.cases import CELLS, Case, cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.mark.sanitize("ewald")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_maps_are_as_accurate_as_promised(cupy: Any, case: Case) -> None:
    atoms = case.atoms()
    result = case.apply(cupy.asarray(atoms)).get()
    case.check(result)
    on_cpu = case.apply(atoms)
    assert np.linalg.norm(result - on_cpu) < 3e-6 * np.linalg.norm(on_cpu)
    single = case.apply(cupy.asarray(atoms.astype(np.float32))).get()
    assert np.linalg.norm(single - on_cpu) < 1e-4 * np.linalg.norm(on_cpu)


@pytest.mark.parametrize("name", CELLS)
def test_parts_and_orders_have_the_same_bits(cupy: Any, name: str) -> None:
    case = Case(method=Method(), cell=name)
    atoms, grid = case.atoms(), case.grid
    low, high = np.full(3, -20.0), np.full(3, 40.0)
    field = FarField(mesh_of(case.method, CELLS[name], low, high), float(np.abs(atoms[:, 3]).sum()))
    charges = field.spread(cupy.asarray(atoms))
    mixed = field.spread(cupy.asarray(atoms[100:][::-1]))
    field.spread(cupy.asarray(atoms[:100]), mixed)
    assert (charges == mixed).all()
    solved = field.solve(charges)
    assert (field.solve(mixed) == solved).all()
    parts = []
    for begin, end in ((0, grid.shape[0]), (0, 5), (5, grid.shape[0])):
        part = grid.slab(begin, end)
        parts.append(cupy.zeros(part.shape, cupy.float32))
        field.add(solved, part, parts[-1])
    assert (cupy.concatenate(parts[1:]) == parts[0]).all()


def test_sorted_atoms_have_the_bits_of_unsorted_ones(cupy: Any) -> None:
    """A mesh and a number of atoms large enough to be sorted; their halves are not."""
    side, count = 140.0, 150_001
    atoms, cell = cupy.asarray(water_box(side, count)), Cell.from_lengths(side, side, side, 80, 95, 100)
    field = FarField(mesh_of(Method(), cell), float(count))
    whole = field.spread(atoms)
    halves = field.spread(atoms[: count // 2])
    field.spread(atoms[count // 2 :], halves)
    assert (whole == halves).all()
