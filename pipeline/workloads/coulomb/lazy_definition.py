"""The definition of a potential map at a few points of many frames: `definition`, compiled by Numba.

It releases the GIL, so that its threads run in parallel with each other and with those that load frames to a GPU.
Import it lazily: loading LLVM or Numba takes longer than NumPy takes for one frame.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kernels.coulomb import SCHEMES, SOFTENING_ANGSTROM, Cell, Scheme
from kernels.runtime.compiled import compiled
from pipeline.formats.charges.base import Array
from pipeline.workloads.coulomb.definition import DOUBTFUL, NEAR_ANGSTROM, Expectation

# Pairs of a point and an atom that justify another thread: 0.05 s.
_A_THREAD = 1 << 24


def expectation(atoms: Array, points: Array, scheme: Scheme, cell: Cell | None) -> Expectation:
    """As `definition.expectation`."""
    cutoff = math.inf if scheme.name == "direct" else scheme.cutoff_angstrom
    matrix = np.zeros((3, 3)) if cell is None else cell.matrix
    inverse = np.zeros((3, 3)) if cell is None else np.linalg.inv(cell.matrix)
    found, places = np.empty((4, len(points))), np.ascontiguousarray(points, np.float64)
    atoms = np.ascontiguousarray(atoms)

    def add_up(first: int) -> None:
        part = np.empty((4, len(places[first::threads])))
        _add_up(
            atoms, np.ascontiguousarray(places[first::threads]), SCHEMES.index(scheme.name), cutoff,
            scheme.distance_dependent, scheme.exclude_radius_angstrom, matrix, inverse, part,
        )  # fmt: skip
        found[:, first::threads] = part

    threads = min(len(os.sched_getaffinity(0)), 1 + len(atoms) * len(points) // _A_THREAD)
    with ThreadPoolExecutor(threads, thread_name_prefix="audit") as pool:
        list(pool.map(add_up, range(threads)))
    values, sizes, doubtful = found[:3] / scheme.dielectric
    return Expectation(values=values, sizes=sizes, doubtful=doubtful, counted=found[3])


@compiled
def _add_up(
    atoms: Any, points: Any, kind: int, cutoff: float, by_distance: bool, radius: float,
    matrix: Any, inverse: Any, found: Any,
) -> None:  # fmt: skip
    """found: (4, m) values, sizes, doubtful and counted of each point, before division by the dielectric."""
    for point in range(len(points)):
        value, size, doubtful, counted, nearest = 0.0, 0.0, 0.0, 0.0, np.inf
        for atom in range(len(atoms)):
            square = _square_distance(points[point], atoms[atom], matrix, inverse)
            nearest = min(nearest, square)
            # A little beyond a sharp edge, for the pairs in doubt.
            if square > cutoff * cutoff * (1 + DOUBTFUL):
                continue
            charge = atoms[atom, 3]
            r = math.sqrt(square + SOFTENING_ANGSTROM * SOFTENING_ANGSTROM)
            term, largest = _term(kind, r, cutoff), 1 / r
            if by_distance:
                term, largest = term / r, largest / r
            if square <= cutoff * cutoff:
                value += charge * term
                size += abs(charge) * largest * (1 + NEAR_ANGSTROM / r)
                counted += 1
            if kind == 2 and abs(square / (cutoff * cutoff) - 1) < DOUBTFUL:
                doubtful += abs(charge) * largest
        distance = math.sqrt(nearest)
        if radius > 0 and abs(distance - radius) < DOUBTFUL * radius:
            doubtful += abs(value)
        elif distance < radius:
            value, size, doubtful = 0.0, 0.0, 0.0
        found[0, point], found[1, point], found[2, point], found[3, point] = value, size, doubtful, counted


@compiled
def _term(kind: int, r: float, cutoff: float) -> float:
    """A unit charge's potential; kind: index of the scheme in SCHEMES."""
    rho = r / cutoff
    if kind == 0:
        return (1 - rho * rho) ** 2 / r
    if kind == 1:
        return 1 / r - (1.875 - 1.25 * rho**2 + 0.375 * rho**4) / cutoff
    return 1 / r


@compiled
def _square_distance(point: Any, atom: Any, matrix: Any, inverse: Any) -> Any:
    """To the image at the nearest fractions, the only one that can lie within half the cell's shortest width.

    A matrix of zeros means no cell.
    """
    apart = (point[0] - atom[0], point[1] - atom[1], point[2] - atom[2])
    if matrix[0, 0] == 0 and matrix[0, 1] == 0 and matrix[0, 2] == 0:
        return apart[0] * apart[0] + apart[1] * apart[1] + apart[2] * apart[2]
    square = 0.0
    steps = (
        np.rint(apart[0] * inverse[0, 0] + apart[1] * inverse[1, 0] + apart[2] * inverse[2, 0]),
        np.rint(apart[0] * inverse[0, 1] + apart[1] * inverse[1, 1] + apart[2] * inverse[2, 1]),
        np.rint(apart[0] * inverse[0, 2] + apart[1] * inverse[1, 2] + apart[2] * inverse[2, 2]),
    )
    for axis in range(3):
        moved = apart[axis] - (steps[0] * matrix[0, axis] + steps[1] * matrix[1, axis] + steps[2] * matrix[2, axis])
        square += moved * moved
    return square
