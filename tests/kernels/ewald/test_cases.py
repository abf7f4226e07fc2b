"""Full maps on the CPU against the plain definition, and the laws that they obey."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.coulomb import Cell, Grid
from kernels.ewald import FarField, Method, box_of, mesh_of, potential
from kernels.ewald.cases import CELLS, Case, cases, nearest
from kernels.ewald.splitting import FREE_LEVELS, LEVELS, level_of, splitting_of
from tests.kernels.ewald.crystals import CRYSTALS


@pytest.mark.parametrize("case", cases(), ids=str)
def test_maps_are_as_accurate_as_promised(case: Case) -> None:
    case.check(case.apply(case.atoms(), workers=2))


@pytest.mark.parametrize("name", CRYSTALS)
@pytest.mark.parametrize("accuracy", [1e-4, 1e-6])
def test_madelung_constants(name: str, accuracy: float) -> None:
    """The map at an ion's place is the potential of the others, and 10⁴ times its charge by softening."""
    side = 5.64
    atoms, distance, constant = CRYSTALS[name]
    atoms = atoms * [side, side, side, 1]
    spacing = (side / 4,) * 3
    without = np.concatenate([atoms[1:], [[*atoms[0, :3], 0.0]]])
    grid = Grid(origin=(0, 0, 0), spacing=spacing, shape=(1, 1, 1))
    cell = Cell.from_lengths(side, side, side)
    at = potential(without, grid, Method(accuracy=accuracy, cutoff_angstrom=2.7), cell=cell)[0, 0, 0]
    # The ion's own images are left out too, and its background: those of a simple cubic lattice of unit charges.
    images = -2.837297479480619 / side
    assert abs((at + images) * distance * side * atoms[0, 3] + constant) < accuracy * constant


@pytest.mark.parametrize("name", CELLS)
def test_slabs_and_threads_have_the_bits_of_the_whole(name: str) -> None:
    case = Case(method=Method(exclude_radius_angstrom=0.7), cell=name)
    atoms = case.atoms()
    whole = case.apply(atoms, workers=1)
    np.testing.assert_array_equal(case.apply(atoms, workers=2), whole, strict=True)
    parts = [
        potential(atoms, case.grid.slab(a, b), case.method, cell=CELLS[name], workers=1)
        for a, b in ((0, 5), (5, 13))
        if CELLS[name] is not None  # without a cell, the mesh spans the part
    ]
    if parts:
        np.testing.assert_array_equal(np.concatenate(parts), whole, strict=True)
    points = np.stack(np.meshgrid(*case.grid.axes(), indexing="ij"), -1).reshape(-1, 3)
    np.testing.assert_array_equal(whole.ravel() == 0, nearest(atoms, points, CELLS[name]) < 0.7)


def test_meshes_of_charges_add_up_in_any_order() -> None:
    atoms, cell = Case(method=Method(), cell="skewed").atoms(), CELLS["skewed"]
    field = FarField(mesh_of(Method(), cell), float(np.abs(atoms[:, 3]).sum()))
    whole = field.spread(atoms, workers=1)
    mixed = field.spread(atoms[100:][::-1], workers=2)
    np.testing.assert_array_equal(field.spread(atoms[:100], mixed, workers=2), whole, strict=True)
    # The window's sum over the mesh is nearly its integral; neutral charges cancel.
    assert abs(whole.sum() / field.scale) < 1e-3


def test_the_potential_is_linear_and_moves_with_the_atoms() -> None:
    case = Case(method=Method(accuracy=1e-5), cell="triclinic")
    atoms, grid = case.atoms(), case.grid
    one, other = atoms.copy(), atoms.copy()
    one[::2, 3], other[1::2, 3] = 0, 0
    found = case.apply(atoms).astype(np.float64)
    scale = np.abs(np.median(found))
    np.testing.assert_allclose(case.apply(one) + case.apply(other), found, rtol=1e-5, atol=1e-3 * scale)
    shift = np.array([3.3, -41.7, 12.9])
    moved = replace(case, grid=replace(grid, origin=tuple(np.array(grid.origin) + shift)))
    apart = moved.apply(atoms + np.append(shift, 0)) - found
    assert np.linalg.norm(apart) < 1e-4 * np.linalg.norm(found)


def test_the_accuracy_chosen_is_the_cheapest_that_suffices() -> None:
    assert [level_of(accuracy).accuracy for accuracy in (1e-2, 1e-4, 5e-5, 1e-5, 1e-6)] == [
        1e-4,
        1e-4,
        1e-5,
        1e-5,
        1e-6,
    ]


@pytest.mark.parametrize("level", [*LEVELS, FREE_LEVELS[0]], ids=lambda level: f"{level.accuracy:g}-{level.taps}")
def test_the_two_parts_of_the_splitting_add_up(level: Any) -> None:
    """Near and far part to 1/r, and the far part's spectrum to its values in space."""
    splitting = splitting_of(level)
    r = np.linspace(0.05, 1.5, 30)
    near = np.where(r < 1, 1 / r - np.polynomial.polynomial.polyval(1 - r**2, splitting.terms), 0)
    np.testing.assert_allclose(near + splitting.far(r**2), 1 / r, rtol=1e-12)
    # L(r) = 2/π ∫ φ̂(k) sin(kr)/(kr) dk
    k = np.linspace(0, 60, 3001)
    integrand = splitting.spectrum(k) * np.sinc(np.multiply.outer(r, k) / np.pi)
    integrand[:, [0, -1]] /= 2
    np.testing.assert_allclose(2 / np.pi * integrand.sum(1) * k[1], splitting.far(r**2), rtol=1e-4)
    assert abs(splitting.spectrum(np.array([0.0]))[0] - 1) < 1e-12


def test_no_atoms_and_neutral_atoms() -> None:
    grid = Grid(origin=(0, 0, 0), spacing=(1, 1, 1), shape=(3, 4, 5))
    for atoms in (np.empty((0, 4)), np.array([[1.0, 2, 3, 0]])):
        for cell in CELLS.values():
            assert not potential(atoms, grid, cell=cell).any()


GRID = Grid(origin=(0, 0, 0), spacing=(1, 1, 1), shape=(2, 2, 2))
ONE = np.array([[1.0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "accuracy": ("finer than float32 maps can be: choose 1e-06", lambda: Method(accuracy=1e-7)),
        "boundary": ("tinfoil or vacuum; got 'air'", lambda: Method(boundary="air")),  # type: ignore[arg-type]
        "smear": ("from 0.001 to 1000; got -1", lambda: Method(smear_per_angstrom=-1)),
        "cutoff": ("passes half the cell's shortest width", lambda: mesh_of(Method(cutoff_angstrom=7), CELLS["box"])),
        "charged": (
            "needs neutral charges, and these add up to 1 e",
            lambda: potential(ONE, GRID, Method(boundary="vacuum"), cell=CELLS["box"]),
        ),
        "mesh": (
            "the mesh would have .* points: raise the cutoff",
            lambda: mesh_of(Method(), None, np.zeros(3), np.full(3, 1e5)),
        ),
    }.values(),
)
def test_refusals(message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_the_box_holds_points_and_atoms() -> None:
    low, high = box_of(np.array([[5.0, -1, 1, 0]]), GRID)
    assert (low.tolist(), high.tolist()) == ([0, -1, 0], [5, 1, 1])
