"""The near part of Ewald's sum in float64, compiled by Numba: for many pairs, since Numba takes long to load."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.coulomb.geometry import SOFTENING_ANGSTROM
from kernels.runtime.compiled import compiled


@compiled
def near_sum(atoms: Any, points: Any, matrix: Any, inverse: Any, split: float, reach: float, found: Any) -> None:
    """found[m] += sum over atoms, at the image with the nearest fractions, of q erfc(α r)/r within `reach`, which is at
    most half of the cell's narrowest width. Softened like 1/r."""
    for point in range(len(points)):
        total = 0.0
        for atom in range(len(atoms)):
            x, y, z = (points[point, 0] - atoms[atom, 0], points[point, 1] - atoms[atom, 1],
                       points[point, 2] - atoms[atom, 2])  # fmt: skip
            a = np.rint(x * inverse[0, 0] + y * inverse[1, 0] + z * inverse[2, 0])
            b = np.rint(x * inverse[0, 1] + y * inverse[1, 1] + z * inverse[2, 1])
            c = np.rint(x * inverse[0, 2] + y * inverse[1, 2] + z * inverse[2, 2])
            x -= a * matrix[0, 0] + b * matrix[1, 0] + c * matrix[2, 0]
            y -= a * matrix[0, 1] + b * matrix[1, 1] + c * matrix[2, 1]
            z -= a * matrix[0, 2] + b * matrix[1, 2] + c * matrix[2, 2]
            square = x * x + y * y + z * z
            if square > reach * reach:
                continue
            r = math.sqrt(square)
            soft = math.sqrt(square + SOFTENING_ANGSTROM * SOFTENING_ANGSTROM)
            if r > 0.5:
                term = math.erfc(split * r) / soft
            elif r > 1e-8:
                term = 1 / soft - math.erf(split * r) / r
            else:
                term = 1 / soft - 2 * split / math.sqrt(math.pi)
            total += atoms[atom, 3] * term
        found[point] += total
