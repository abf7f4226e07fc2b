"""The definition of a full map (schemes "ewald" and "full") at a few points of one frame, in float64."""

from __future__ import annotations

import math

import numpy as np

from kernels.coulomb import Cell, Scheme
from kernels.ewald import Method
from kernels.ewald.reference import AUDIT, ewald, plain
from pipeline.formats.charges.base import Array
from pipeline.workloads.coulomb.definition import Expectation, expectation

# Rounding steps of float32, of a near term (as for sums within a cutoff), and of the far field's largest value.
STEPS = 26
_STEP = float(np.finfo(np.float32).eps)


def full_expectation(
    atoms: Array, points: Array, method: Method, cell: Cell | None, own_angstrom: float = 0.0
) -> Expectation:
    """atoms: (n, 4) x, y, z, q; points: (m, 3) in angstrom; atoms closer than `own_angstrom` to a point are left out.

    A value may be off by a few times `accuracy` times its size: that is the RMS potential of uncorrelated charges,
    √(Σ q² rc / V), to which the error of splitting is proportional, and the rounding of float32, counted in accuracies.
    """
    smear, radius = method.smear_per_angstrom, method.exclude_radius_angstrom
    if cell is None:
        values = plain(atoms, points, smear_per_angstrom=smear, own_angstrom=own_angstrom)
    else:
        values = ewald(
            atoms, points, cell, smear_per_angstrom=smear, vacuum=method.boundary == "vacuum", exponent=AUDIT,
            own_angstrom=own_angstrom,
        )  # fmt: skip
    reach = method.cutoff_angstrom if smear is None else 1 / smear
    # Every atom as a unit charge: sums of 1/r, and zeros where points are excluded.
    units = np.column_stack([atoms[:, :3], np.ones(len(atoms))])
    within = method.cutoff_angstrom if cell is None else min(method.cutoff_angstrom, float(cell.widths.min()) / 2)
    scheme = Scheme(name="truncate", cutoff_angstrom=max(within, radius), exclude_radius_angstrom=radius)
    near = expectation(units, points, scheme, cell)
    excluded = (near.counted > 0) & (near.sizes == 0)
    at_edge = (near.doubtful > 0.5 * near.sizes) & (radius > 0)
    if cell is None:
        sides = atoms[:, :3].max(0) - atoms[:, :3].min(0) + reach
        volume = float(sides.prod())
    else:
        volume = abs(float(np.linalg.det(cell.matrix)))
    charges = atoms[:, 3]
    field = math.sqrt(float((charges**2).sum()) * reach / volume)
    largest = float(np.abs(charges).max(initial=0)) * near.sizes + np.abs(values)
    sizes = (field + largest * STEPS * _STEP / method.accuracy) / method.dielectric
    values = values / method.dielectric
    return Expectation(
        values=np.where(excluded, 0.0, values),
        sizes=np.where(excluded, 0.0, sizes),
        doubtful=np.where(at_edge, np.abs(values), 0.0),
        counted=near.counted,
    )
