"""The definition of a potential map at a few points, in float64, with which audits compare the map.

Plain NumPy: it shares no cells, tiles or lattice images with the kernels, and Numba takes longer to load than this
takes for one frame. `lazy_definition` is for many frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import SOFTENING_ANGSTROM, Cell, Scheme
from pipeline.formats.charges.base import Array

# Positions are float32 within a tile: a term's relative error grows towards the atom, and doubles here.
NEAR_ANGSTROM = 0.2
# Relative distance from a sharp cutoff or exclusion within which rounding decides on which side a pair lies.
DOUBTFUL = 2e-6
# Pairs of a point and an atom per step, so that steps are long compared with their overhead, which threads serialise;
# and pairs that justify another thread (0.1 s or more). Without a cutoff every pair goes through every operation, in
# arrays that fit the processor's cache; with one, few do.
_TOGETHER, _A_THREAD = 1 << 20, 1 << 27
_ALL_TOGETHER, _ALL_A_THREAD = 1 << 17, 1 << 24


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The definition at the audited points, one entry each.

    sizes    : sum of the terms' sizes |q|/r, to which the error is relative, larger near atoms
    doubtful : sum of the terms that rounding may include or exclude
    counted  : number of atoms in the sum
    """

    values: Array
    sizes: Array
    doubtful: Array
    counted: Array


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Pairs of a point and an atom's nearest image.

    squares : squared distances in Å², of any shape
    charges : of the atoms, in e; broadcasts to that shape
    add_up  : sums an array of that shape over the pairs of each point
    """

    squares: Array
    charges: Array
    add_up: Callable[[NDArray[Any]], NDArray[Any]]


def expectation(
    atoms: Array, points: Array, scheme: Scheme, cell: Cell | None, own_angstrom: float = 0.0
) -> Expectation:
    """The definition for one frame. atoms: (n, 4) x, y, z, q; points: (m, 3) in angstrom; atoms closer than
    `own_angstrom` to a point are left out of its sum."""
    all_count = scheme.name == "direct"
    together, a_thread = (_ALL_TOGETHER, _ALL_A_THREAD) if all_count else (_TOGETHER, _A_THREAD)
    step = max(1, together // max(1, len(points)))
    parts = (atoms[first : first + step] for first in range(0, len(atoms), step))
    threads = min(len(os.sched_getaffinity(0)), 1 + len(atoms) * len(points) // a_thread)
    found = np.zeros((6, len(points)))
    with ThreadPoolExecutor(threads, thread_name_prefix="audit") as pool:
        # Many frames are so small that starting a thread takes as long.
        for sums in (map if threads == 1 else pool.map)(
            lambda part: _sums(part, points, scheme, cell, own_angstrom), parts
        ):
            found += sums
    values, sizes, doubtful, counted, inside, at_edge = found
    doubtful = doubtful + np.where(at_edge > 0, np.abs(values), 0.0)
    values, sizes, doubtful = np.where(inside > 0, 0.0, [values, sizes, doubtful]) / scheme.dielectric
    return Expectation(values=values, sizes=sizes, doubtful=doubtful, counted=counted)


def _sums(atoms: Array, points: Array, scheme: Scheme, cell: Cell | None, own: float) -> Array:
    """(6, m): values, sizes, doubtful and counted of each point, without the dielectric and the exclusion; then the
    number of excluded spheres that contain the point, and of those whose edge it is on."""
    cutoff, radius = scheme.cutoff_angstrom, scheme.exclude_radius_angstrom
    if scheme.name == "direct":
        pairs, counts = _every_pair(atoms, points), None
    else:
        # A little beyond a sharp edge, for the pairs in doubt.
        pairs = _near_pairs(atoms, points, max(cutoff, radius) * (1 + DOUBTFUL), cell)
        counts = pairs.squares <= cutoff**2
    if own > 0:
        counts = (pairs.squares >= own**2) & (True if counts is None else counts)

    def add_up(terms: Array) -> NDArray[Any]:
        return pairs.add_up(terms if counts is None else np.where(counts, terms, 0.0))

    r = np.sqrt(pairs.squares + SOFTENING_ANGSTROM**2)
    inverse = 1 / r
    terms, sizes = pairs.charges * _term(scheme, r, inverse), np.abs(pairs.charges) * inverse
    if scheme.distance_dependent:
        terms, sizes = terms * inverse, sizes * inverse
    found = np.zeros((6, len(points)))
    found[0] = add_up(terms)
    found[1] = add_up(sizes * (1 + NEAR_ANGSTROM * inverse))
    found[3] = add_up(np.broadcast_to(1.0, r.shape))
    if scheme.name == "truncate":
        found[2] = pairs.add_up(np.where(np.abs(pairs.squares / cutoff**2 - 1) < DOUBTFUL, sizes, 0.0))
    if radius > 0:
        distances = np.sqrt(pairs.squares)
        found[4] = pairs.add_up(distances <= radius * (1 - DOUBTFUL))
        found[5] = pairs.add_up(np.abs(distances - radius) < radius * DOUBTFUL)
    return found


def _term(scheme: Scheme, r: Array, inverse: Array) -> Array:
    """A unit charge's potential at r, without the dielectric; inverse: 1/r."""
    cutoff = scheme.cutoff_angstrom
    if scheme.name == "shift":
        return np.asarray((1 - (r / cutoff) ** 2) ** 2 * inverse)
    if scheme.name == "taylor2":
        square = (r / cutoff) ** 2
        return np.asarray(inverse - (1.875 - 1.25 * square + 0.375 * square**2) / cutoff)
    return inverse


def _every_pair(atoms: Array, points: Array) -> _Pairs:
    x, y, z = (points[:, axis, None] - np.ascontiguousarray(atoms[:, axis]) for axis in range(3))
    return _Pairs(squares=x * x + y * y + z * z, charges=atoms[:, 3], add_up=lambda terms: terms.sum(axis=1))


def _near_pairs(atoms: Array, points: Array, reach: float, cell: Cell | None) -> _Pairs:
    """The pairs within reach, and some more. `reach`: at most half the cell's shortest width."""
    which, chosen = _candidates(atoms, points, reach, cell)
    x, y, z = (points[:, axis][which] - atoms[:, axis][chosen] for axis in range(3))
    if cell is not None:
        # Only the image at the nearest fractions can lie within half the cell's shortest width.
        steps = np.rint(_times(np.array([x, y, z]), np.linalg.inv(cell.matrix)))
        x, y, z = np.array([x, y, z]) - _times(steps, cell.matrix)
    return _Pairs(
        squares=x * x + y * y + z * z,
        charges=atoms[:, 3][chosen],
        add_up=lambda terms: np.asarray(np.bincount(which, terms, len(points))),
    )


def _candidates(
    atoms: Array, points: Array, reach: float, cell: Cell | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of points and atoms: the pairs whose atom is in a box around the point; each pair once at most."""
    placed, places, limits = atoms[:, :3].T, points.T, np.full(3, reach)
    if cell is not None:  # fractions along its vectors, and a box as oblique as the cell
        inverse = np.linalg.inv(cell.matrix)
        placed, places = _times(placed, inverse), _times(places, inverse)
        placed, places = placed - np.floor(placed), places - np.floor(places)
        limits = reach * np.linalg.norm(inverse, axis=0)
    limits = limits * (1 + DOUBTFUL)
    order = np.argsort(placed[0])
    along = placed[0][order]
    if cell is not None:  # atoms near one face have neighbours at the other
        along, order = np.concatenate([along - 1, along, along + 1]), np.tile(order, 3)
    first = np.searchsorted(along, places[0] - limits[0])
    last = np.minimum(np.searchsorted(along, places[0] + limits[0], side="right"), first + len(atoms))
    which = np.repeat(np.arange(len(points)), last - first)
    chosen = order[np.arange(len(which)) + np.repeat(last - np.cumsum(last - first), last - first)]
    for axis in (1, 2):
        apart = placed[axis][chosen] - places[axis][which]
        if cell is not None:
            apart -= np.rint(apart)
        near = np.flatnonzero(np.abs(apart) <= limits[axis])
        which, chosen = which[near], chosen[near]
    return which, chosen


def _times(vectors: Array, matrix: NDArray[Any]) -> Array:
    """(3, n): vectors (3, n), each as a row, times the matrix; without BLAS, which would start its own threads."""
    x, y, z = vectors
    return np.array([x * a + y * b + z * c for a, b, c in matrix.T])
