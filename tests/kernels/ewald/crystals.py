"""Crystals with known potentials, and random atoms in a cell."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import Cell

Array = NDArray[np.float64]

SKEWED = Cell(vectors=((12.0, 1.5, -2.0), (-4.0, 13.0, 1.0), (3.0, -3.5, 14.0)))

_CORNERS = np.array(list(itertools.product((0.0, 0.5), repeat=3)))
_FACES = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])

# Atoms in a cubic cell of side 1, the shortest distance in it, and the Madelung constant for that distance.
CRYSTALS: dict[str, tuple[Array, float, float]] = {
    "NaCl": (np.column_stack([_CORNERS, 1 - 4 * _CORNERS.sum(1) % 4]), 0.5, 1.7475645946331822),
    "CsCl": (np.array([[0, 0, 0, 1.0], [0.5, 0.5, 0.5, -1.0]]), math.sqrt(3) / 2, 1.7626747730709884),
    "zincblende": (
        np.concatenate([np.column_stack([_FACES + shift, np.full(4, q)]) for shift, q in ((0, 1.0), (0.25, -1.0))]),
        math.sqrt(3) / 4,
        1.6380550533887876,
    ),
}


def random_atoms(count: int, cell: Cell, *, seed: int = 0) -> Array:
    """Neutral: charges in pairs."""
    rng = np.random.default_rng(seed)
    charges = rng.uniform(0.2, 1, count)
    return np.column_stack([rng.random((count, 3)) @ cell.matrix, charges - charges.mean()])
