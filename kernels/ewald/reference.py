"""Ewald's sum in float64 at a few points, and the plain sum: the definition with which maps are compared.

It shares neither splitting, window nor mesh with the kernels: error functions near, Fourier terms one by one far.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb.geometry import SOFTENING_ANGSTROM, Cell

Array = NDArray[np.float64]

# Terms of erfc and of the Gaussian below exp(-exponent²) are left out: 6e-13, and 2e-8 for audits.
EXACT, AUDIT = 5.3, 4.2
_COMPILED_ATOMS = 2000  # from so many on, the near part is compiled
_TOGETHER = 1 << 18  # pairs of a point and an atom
_ATOMS_TOGETHER = 1 << 13


def ewald(
    atoms: Array,
    points: Array,
    cell: Cell,
    *,
    smear_per_angstrom: float | None = None,
    vacuum: bool = False,
    own_angstrom: float = 0.0,
    exponent: float = EXACT,
) -> Array:
    """The potential of the atoms and all of their periodic images, with a uniform background that neutralises them.

    atoms  : [n, 4] x, y, z in angstrom and q; points: [m, 3]
    smear_per_angstrom : each charge is q (α/√π)³ exp(-α² r²) instead of a point
    vacuum : the crystal is a large sphere in vacuum rather than in a conductor; of the images, the ones at `atoms`
    own_angstrom : terms of atoms closer than this to a point, of the image there alone, are left out
    exponent : relative terms below exp(-exponent²) are left out

    The mean over the cell is zero (tin-foil). Returns [m] in e/Å.
    Source: de Leeuw, Perram and Smith, Proc. R. Soc. Lond. A 373 (1980).
    """
    volume = abs(float(np.linalg.det(cell.matrix)))
    reach = float(cell.widths.min()) / 2  # the nearest image alone
    split = exponent / reach if smear_per_angstrom is None else smear_per_angstrom
    found = _fourier(atoms, points, cell, split, volume, exponent)
    if smear_per_angstrom is None:
        found += _near(atoms, points, cell, split, reach) - atoms[:, 3].sum() * math.pi / (volume * split**2)
    if own_angstrom > 0:
        found -= _own(atoms, points, cell, smear_per_angstrom, own_angstrom)
    if vacuum:
        apart = points[:, None, :] - atoms[None, :, :3] if len(points) * len(atoms) < _TOGETHER else None
        if apart is not None:
            found -= 2 * math.pi / (3 * volume) * ((apart**2).sum(-1) @ atoms[:, 3])
        else:  # the same, expanded: neutral systems alone
            dipole, second = atoms[:, 3] @ atoms[:, :3], atoms[:, 3] @ (atoms[:, :3] ** 2).sum(1)
            found += 2 * math.pi / (3 * volume) * (2 * points @ dipole - second)
    return found


def plain(atoms: Array, points: Array, *, smear_per_angstrom: float | None = None, own_angstrom: float = 0.0) -> Array:
    """The potential of the atoms alone, without images: q/r, or that of Gaussian charges."""
    step, found = max(1, _TOGETHER // max(len(points), 1)), np.zeros(len(points))
    for first in range(0, len(atoms), step):
        part = atoms[first : first + step]
        r = _distances(points, part[:, :3])
        term = 1 / np.hypot(r, SOFTENING_ANGSTROM)
        if smear_per_angstrom is not None:
            term = _screened(r, smear_per_angstrom)
        found += np.where(r >= own_angstrom, term, 0) @ part[:, 3]
    return found


def _distances(points: Array, positions: Array) -> Array:
    x, y, z = (points[:, axis, None] - positions[:, axis] for axis in range(3))
    return np.asarray(np.sqrt(x * x + y * y + z * z))


def _screened(r: Array, split: float) -> Array:
    """erf(α r)/r."""
    from scipy.special import erf

    return np.asarray(np.where(r > 1e-8, erf(split * r) / np.maximum(r, 1e-8), 2 * split / math.sqrt(math.pi)))


def _near_term(r: Array, split: float) -> Array:
    """erfc(α r)/r, softened like 1/r."""
    from scipy.special import erfc

    soft = np.hypot(r, SOFTENING_ANGSTROM)
    return np.asarray(np.where(r > 0.5, erfc(split * r) / soft, 1 / soft - _screened(r, split)))


def _own(atoms: Array, points: Array, cell: Cell, smear: float | None, own: float) -> Array:
    """The terms of each point's own atoms."""
    found = np.zeros(len(points))
    step = max(1, _TOGETHER // max(len(points), 1))
    for first in range(0, len(atoms), step):
        part = atoms[first : first + step]
        r = _nearest(points, part[:, :3], cell)
        term = 1 / np.hypot(r, SOFTENING_ANGSTROM) if smear is None else _screened(r, smear)
        found += np.where(r < own, term, 0) @ part[:, 3]
    return found


def _nearest(points: Array, positions: Array, cell: Cell) -> Array:
    apart = (points[:, None, :] - positions[None]).reshape(-1, 3)
    apart -= np.rint(apart @ np.linalg.inv(cell.matrix)) @ cell.matrix
    return np.asarray(np.sqrt((apart**2).sum(1)).reshape(len(points), len(positions)))


def _near(atoms: Array, points: Array, cell: Cell, split: float, reach: float) -> Array:
    inverse, found = np.linalg.inv(cell.matrix), np.zeros(len(points))
    if len(atoms) >= _COMPILED_ATOMS:
        from kernels.ewald.cpu_near import near_sum

        near_sum(np.ascontiguousarray(atoms), np.ascontiguousarray(points), cell.matrix, inverse, split, reach, found)
        return found
    step = max(1, _TOGETHER // max(len(points), 1))
    for first in range(0, len(atoms), step):
        part = atoms[first : first + step]
        r = _nearest(points, part[:, :3], cell)
        found += np.where(r <= reach, _near_term(r, split), 0) @ part[:, 3]
    return found


def _fourier(atoms: Array, points: Array, cell: Cell, split: float, volume: float, exponent: float) -> Array:
    """The sum over wave vectors k ≠ 0 of 4π/V exp(-k²/4α²)/k² S(k) exp(ik·r), S the structure factor."""
    limit = 2 * split * exponent
    most = np.floor(limit * np.linalg.norm(cell.matrix, axis=1) / (2 * math.pi)).astype(int)
    inverse = np.linalg.inv(cell.matrix)
    # Half of the vectors, by the first index: the others are conjugates.
    first = np.arange(most[0] + 1)
    rest = [np.arange(-n, n + 1) for n in most[1:]]
    mesh: Any = np.stack(np.meshgrid(first, *rest, indexing="ij"), -1)
    square = ((2 * math.pi * mesh @ inverse.T) ** 2).sum(-1)
    weight = np.where(first > 0, 2.0, 1.0)[:, None, None] * 4 * math.pi / volume
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = weight * np.exp(-square / (4 * split**2)) / square
    factors[(square == 0) | (square > limit**2)] = 0

    def phases(positions: Array, sign: int) -> list[NDArray[np.complex128]]:
        fractions = positions @ inverse
        fractions = fractions - np.floor(fractions)
        return [
            np.exp(sign * 2j * math.pi * np.multiply.outer(n, fractions[:, axis]))
            for axis, n in enumerate((first, *rest))
        ]

    structure = np.zeros(square.shape, np.complex128)
    for begin in range(0, len(atoms), _ATOMS_TOGETHER):
        part = atoms[begin : begin + _ATOMS_TOGETHER]
        x, y, z = phases(part[:, :3], -1)
        for a, row in enumerate(x * part[:, 3]):
            structure[a] += (row * y) @ z.T
    structure *= factors
    x, y, z = phases(points, 1)
    found = np.zeros(len(points))
    for a, row in enumerate(x):
        found += ((row * y) * (structure[a] @ z)).sum(0).real
    return found
