"""Every error is one line that names the parameter."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

from kernels.coulomb import Cell, Grid, Scheme, cutoff, direct, potential

ATOMS = np.array([[0.0, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, -1.0]])
GRID = Grid(origin=(0.0, 0.0, 0.0), spacing=(0.5, 0.5, 0.5), shape=(5, 6, 7))
MAP = np.zeros((5, 6, 7), np.float32)
BOX = Cell(vectors=((30.0, 0.0, 0.0), (0.0, 20.0, 0.0), (0.0, 0.0, 40.0)))


def _grid(**changed: Any) -> Grid:
    return Grid(**{"origin": (0, 0, 0), "spacing": (1, 1, 1), "shape": (2, 3, 4), **changed})


def _spoilt(row: int, column: int, value: float) -> Any:
    atoms = ATOMS.copy()
    atoms[row, column] = value
    return atoms


REFUSALS = {
    "list": (TypeError, "atoms must be a NumPy or CuPy array; got list", lambda: direct([[1, 2, 3, 4]], GRID)),
    "integers": (TypeError, "atoms has dtype int64; supported are float32", lambda: direct(ATOMS.astype(int), GRID)),
    "columns": (ValueError, r"atoms must be an array \[n, 4\].*got shape \(2, 3\)", lambda: direct(ATOMS[:, :3], GRID)),
    "flat": (ValueError, r"atoms must be an array .*got shape \(8,\)", lambda: direct(ATOMS.ravel(), GRID)),
    "nan": (ValueError, "atoms: y of atom 1 is nan", lambda: cutoff(_spoilt(1, 1, math.nan), GRID)),
    "inf": (ValueError, "atoms: q of atom 0 is inf", lambda: cutoff(_spoilt(0, 3, math.inf), GRID)),
    "grid": (TypeError, "grid must be a Grid; got tuple", lambda: direct(ATOMS, (1, 2, 3))),
    "scheme type": (TypeError, "scheme must be a Scheme; got str", lambda: cutoff(ATOMS, GRID, "shift")),
    "cell type": (TypeError, "cell must be a Cell or None; got float", lambda: cutoff(ATOMS, GRID, cell=3.0)),
    "scheme": (
        ValueError,
        "scheme must be one of shift, taylor2, truncate, split, direct; got 'pme'",
        lambda: Scheme(name="pme"),
    ),
    "cutoff 0": (
        ValueError,
        "cutoff_angstrom must be a number of at least 0.01; got 0",
        lambda: Scheme(cutoff_angstrom=0),
    ),
    "cutoff nan": (ValueError, "cutoff_angstrom must be", lambda: Scheme(cutoff_angstrom=math.nan)),
    "dielectric": (ValueError, "dielectric must be a number", lambda: Scheme(dielectric=0)),
    "exclusion": (ValueError, "exclude_radius_angstrom must be", lambda: Scheme(exclude_radius_angstrom=-1)),
    "direct in cutoff": (
        ValueError,
        'scheme "direct" has no cutoff',
        lambda: cutoff(ATOMS, GRID, Scheme(name="direct")),
    ),
    "periodic direct": (
        ValueError,
        'scheme "direct" cannot be periodic',
        lambda: potential(ATOMS, GRID, Scheme(name="direct"), cell=BOX),
    ),
    "cutoff too long": (
        ValueError,
        r"cutoff 12 Å passes half the cell's shortest width \(20 Å between opposite faces\): choose at most 10 Å",
        lambda: cutoff(ATOMS, GRID, cell=BOX),
    ),
    "exclusion too long": (
        ValueError,
        "exclude radius 11 Å passes half",
        lambda: cutoff(ATOMS, GRID, Scheme(cutoff_angstrom=9, exclude_radius_angstrom=11), cell=BOX),
    ),
    "triclinic width": (  # edges of 17 Å, yet faces only 13.9 and 12.0 Å apart
        ValueError,
        r"shortest width \(12.02 Å",
        lambda: cutoff(ATOMS, GRID, Scheme(cutoff_angstrom=7), cell=Cell.from_lengths(17, 17, 17, 60, 60, 90)),
    ),
    "flat cell": (ValueError, "span no volume", lambda: Cell(vectors=((1, 0, 0), (2, 0, 0), (0, 0, 1)))),
    "angles": (ValueError, "span no volume", lambda: Cell.from_lengths(1, 1, 1, 90, 90, 0)),
    "cell shape": (ValueError, "cell vectors must be three vectors", lambda: Cell(vectors=((1, 0), (0, 1)))),
    "spacing": (ValueError, "grid spacing must be positive", lambda: _grid(spacing=(1, 0, 1))),
    "spacing count": (ValueError, "grid spacing must be three numbers", lambda: _grid(spacing=0.5)),
    "origin": (ValueError, "grid origin must be finite", lambda: _grid(origin=(0, math.nan, 0))),
    "shape 0": (ValueError, "grid shape must be three whole numbers, 1 or more", lambda: _grid(shape=(2, 0, 3))),
    "shape 1.5": (ValueError, "grid shape must be three whole numbers", lambda: _grid(shape=(2, 1.5, 3))),
    "first": (ValueError, "grid first must be three whole numbers, 0 or more", lambda: _grid(first=(0, 0, -1))),
    "too many": (ValueError, "at most 67108864 points an axis", lambda: _grid(shape=(1, 1, 1 << 27))),
    "slab": (ValueError, "slab 3 … 6 lies outside the grid's 5 points along x", lambda: GRID.slab(3, 6)),
    "images": (
        ValueError,
        "periodic cells: at most",
        lambda: cutoff(
            ATOMS,
            _grid(spacing=(1e3,) * 3, shape=(99, 99, 99)),
            Scheme(cutoff_angstrom=2),
            cell=Cell.from_lengths(5, 5, 5),
        ),
    ),
    "out": (
        ValueError,
        r"out must be a C-contiguous ndarray of shape \(5, 6, 7\) and dtype float32",
        lambda: direct(ATOMS, GRID, out=np.zeros((5, 6, 7))),
    ),
    "out is atoms": (ValueError, "out shares memory with atoms", lambda: direct(_atoms_in(MAP), GRID, out=MAP)),
    "out protected": (ValueError, "out is read-only", lambda: direct(ATOMS, GRID, out=_protected())),
    "workers": (ValueError, "workers must be a whole number of threads", lambda: direct(ATOMS, GRID, workers=0)),
}


def _atoms_in(memory: Any) -> Any:
    """Two atoms that share an array's memory."""
    return memory.ravel()[:8].reshape(2, 4)


def _protected() -> Any:
    out = np.zeros(GRID.shape, np.float32)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(("kind", "message", "call"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(kind: Any, message: str, call: Any) -> None:
    with pytest.raises(kind, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_widths_of_the_rhombic_cell() -> None:
    np.testing.assert_allclose(Cell.from_lengths(80, 80, 80, 60, 60, 90).widths, 80 * np.sqrt([2 / 3, 2 / 3, 1 / 2]))


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(0)
    grid = Grid(origin=(0, 0, 0), spacing=(0.5, 0.5, 0.5), shape=(31, 33, 35))
    sets = [np.column_stack([rng.uniform(0, 16, (200, 3)), rng.uniform(-1, 1, 200)]) for _ in range(4)]
    expected = [cutoff(atoms, grid, workers=1) for atoms in sets]
    failed = []

    def call(atoms: Any, right: Any) -> None:
        for workers in (1, 2, 3):
            if not np.array_equal(cutoff(atoms, grid, workers=workers), right):
                failed.append(workers)

    callers = [threading.Thread(target=call, args=pair) for pair in zip(sets, expected, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failed
