"""Every case on the CPU against the definition in float64; and laws that any potential map obeys."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from kernels.coulomb import SCHEMES, Cell, Grid, Scheme, cutoff, direct, potential
from kernels.coulomb.cases import CELLS, Case, cases, exact, in_slabs, made_atoms, useful_pairs

GRID = Grid(origin=(1.0, -2.0, 3.0), spacing=(0.5, 0.45, 0.55), shape=(23, 19, 29))
# For laws that do not depend on the number of tiles; the oracle's time is that of the points.
SMALL = replace(GRID, shape=(13, 11, 17))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_case(case: Case) -> None:
    case.check(case.apply(case.atoms()))


def scheme_of(name: str, **options: Any) -> Scheme:
    return Scheme(name=name, cutoff_angstrom=5.0, **options)


@pytest.mark.parametrize("spoil", [np.nan, np.inf, 1e-3])
def test_the_check_notices_one_wrong_value(spoil: float) -> None:
    case = Case(grid=replace(GRID, shape=(5, 7, 3)), scheme=Scheme())
    result = case.apply(case.atoms())
    result[3, 4, 1] += spoil
    with pytest.raises(AssertionError):
        case.check(result)


@pytest.mark.parametrize(("name", "cell"), [*product(SCHEMES[:-1], CELLS), ("direct", "free")])
@pytest.mark.parametrize("first", [(0, 0, 0), (3, 5, 9)])
def test_slabs_have_the_bits_of_the_whole(name: str, cell: str, first: tuple[int, int, int]) -> None:
    case = Case(grid=replace(GRID, first=first), scheme=scheme_of(name, exclude_radius_angstrom=0.4), cell=cell)
    atoms = case.atoms()
    whole = case.apply(atoms)
    for cuts in ((1, 2, 11), (7,), (8, 16)):
        np.testing.assert_array_equal(np.concatenate(in_slabs(case, cuts, atoms)), whole, strict=True)


@pytest.mark.parametrize("name", SCHEMES)
def test_any_part_has_the_bits_of_the_whole(name: str) -> None:
    atoms = made_atoms("water", 200, GRID)
    whole = potential(atoms, GRID, scheme_of(name))
    rng = np.random.default_rng(7)
    for _ in range(8):
        begin = [int(rng.integers(0, n)) for n in GRID.shape]
        shape = tuple(int(rng.integers(1, n - b + 1)) for n, b in zip(GRID.shape, begin, strict=True))
        part = replace(GRID, first=tuple(begin), shape=shape)
        window = tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))
        np.testing.assert_array_equal(potential(atoms, part, scheme_of(name)), whole[window], strict=True)


@pytest.mark.parametrize(("name", "cell"), [*product(SCHEMES[:-1], ["free", "triclinic"]), ("direct", "free")])
def test_the_bits_do_not_depend_on_the_number_of_workers(name: str, cell: str) -> None:
    case = Case(grid=GRID, scheme=scheme_of(name), cell=cell)
    alone = case.apply(case.atoms(), workers=1)
    for workers in (2, 3, 8):
        np.testing.assert_array_equal(case.apply(case.atoms(), workers=workers), alone, strict=True)


@pytest.mark.parametrize(("name", "cell"), [*product(SCHEMES[:-1], CELLS), ("direct", "free")])
def test_any_permutation_of_the_atoms(name: str, cell: str) -> None:
    case = Case(grid=SMALL, scheme=scheme_of(name), cell=cell, content="water")
    expected, atoms = case.exact(), case.atoms()
    for seed in range(3):
        case.check(case.apply(np.random.default_rng(seed).permutation(atoms)), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_potentials_of_two_sets_of_atoms_add_up(name: str) -> None:
    case = Case(grid=GRID, scheme=scheme_of(name), content="water")
    atoms = case.atoms()
    parts = [potential(part, GRID, case.scheme).astype(np.float64) for part in (atoms[:40], atoms[40:])]
    case.check((parts[0] + parts[1]).astype(np.float32), slack=2)


@pytest.mark.parametrize("name", SCHEMES[:-1])
@pytest.mark.parametrize("cell", ["box", "triclinic", "skewed"])
def test_atoms_may_be_moved_by_whole_cells(name: str, cell: str) -> None:
    case = Case(grid=SMALL, scheme=scheme_of(name), cell=cell, content="water")
    periodic = CELLS[cell]
    assert periodic is not None
    atoms = case.atoms()
    expected = case.exact()
    steps = np.random.default_rng(3).integers(-9, 10, (len(atoms), 3))
    atoms[:, :3] += steps @ periodic.matrix
    case.check(case.apply(atoms), expected)


def test_a_periodic_map_repeats_with_the_cell() -> None:
    cell = Cell(vectors=((10.0, 0.0, 0.0), (0.0, 12.0, 0.0), (0.0, 0.0, 11.0)))
    grid = Grid(origin=(0.0, 0.0, 0.0), spacing=(0.5, 0.5, 0.5), shape=(41, 25, 23))
    whole = cutoff(made_atoms("water", 90, grid), grid, scheme_of("shift"), cell=cell).astype(np.float64)
    scale = np.abs(whole).max()
    np.testing.assert_allclose(whole[20:40], whole[:20], rtol=0, atol=2e-6 * scale)
    np.testing.assert_allclose(whole[:, 24], whole[:, 0], rtol=0, atol=2e-6 * scale)
    np.testing.assert_allclose(whole[:, :, 22], whole[:, :, 0], rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize(
    ("name", "by_distance"), [each for each in product(SCHEMES, (False, True)) if each != ("split", True)]
)
def test_the_value_on_an_atom_is_the_documented_one(name: str, by_distance: bool) -> None:
    grid = Grid(origin=(0.0, 0.0, 0.0), spacing=(1.0, 1.0, 1.0), shape=(3, 3, 3))
    scheme = Scheme(name=name, distance_dependent=by_distance)
    value = potential(np.array([[1.0, 1.0, 1.0, -2.0]]), grid, scheme)[1, 1, 1]
    np.testing.assert_allclose(value, -2 * 1e4 ** (1 + by_distance), rtol=1e-4)


def test_the_dielectric_divides() -> None:
    atoms = made_atoms("random", 30, GRID)
    one, many = (direct(atoms, GRID, dielectric=eps).astype(np.float64) for eps in (1.0, 78.5))
    np.testing.assert_allclose(many * 78.5, one, rtol=2e-7)


def test_a_large_offset_costs_no_accuracy() -> None:
    """Coordinates of 10⁵ Å: float32 holds them to 0.008 Å, float64 minus the origin exactly enough."""
    for scheme in (scheme_of("shift"), scheme_of("direct")):
        atoms = made_atoms("water", 150, GRID)
        near = potential(atoms, GRID, scheme)
        offset = np.array([131072.0, -262144.0, 65536.0])
        moved = atoms + np.array([*offset, 0.0])
        moved_grid = replace(GRID, origin=tuple(GRID.origin + offset))
        np.testing.assert_allclose(potential(moved, moved_grid, scheme), near, rtol=1e-4, atol=1e-6)


def test_arrays_of_any_layout() -> None:
    atoms = made_atoms("random", 50, GRID)
    expected = cutoff(atoms, GRID)
    big_endian, columns = atoms.astype(">f8"), np.asfortranarray(atoms)
    spread = np.zeros((100, 8))
    spread[::2, ::2] = atoms
    frozen = atoms.copy()
    frozen.flags.writeable = False
    for other in (big_endian, columns, spread[::2, ::2], frozen):
        np.testing.assert_array_equal(cutoff(other, GRID), expected, strict=True)
    out = np.full(GRID.shape, np.nan, np.float32)
    assert cutoff(atoms, GRID, out=out) is out
    np.testing.assert_array_equal(out, expected, strict=True)


def test_useful_pairs_are_counted_exactly() -> None:
    atoms = made_atoms("water", 60, GRID)
    for cell in (None, CELLS["triclinic"]):
        scheme = replace(scheme_of("truncate"), distance_dependent=False)
        ones = np.column_stack([atoms[:, :3], np.where(atoms[:, 3] != 0, 1.0, 0.0)])
        expected = exact(ones, GRID, scheme, cell)
        assert 0 < useful_pairs(atoms, GRID, scheme, cell) < 60 * 8 * GRID.size
        assert (expected.values > 0).sum() <= useful_pairs(atoms, GRID, scheme, cell)
