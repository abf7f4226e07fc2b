"""Electrostatic potential of point charges on a regular grid, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    V(p) = 1 / dielectric × sum over atoms of q f(r),    f chosen by `Scheme`, r the distance from the atom to point p

Units    : positions and lengths in angstrom, charges in units of e; the result in e/Å (times 14.39964 for volts).
Atoms    : array [n, 4] of x, y, z, q, float32 or float64, n >= 0.
Result   : float32 array [x, y, z], C-contiguous: z runs fastest, as OpenDX files want it.
Softening: distances are softened, r → sqrt(r² + (1e-4 Å)²), so values stay finite: at an atom's position its term is
           q f(1e-4 Å), about 10⁴ q. Beyond 1 Å from an atom this changes its term by less than 1e-8.
Exclusion: points closer than `exclude_radius_angstrom` to any atom, charged or not, are zero.
Periodic : with a `Cell` the sum runs over all atoms and their images within the cutoff: at most one image of each,
           since the cutoff is limited to half the cell's shortest width. Atoms may lie outside the cell.
Precision: coordinates are taken relative to the grid in float64 before they become float32; sums are float32.
           Beyond 1 Å of any atom the relative L2 error is below 2e-6.
           "truncate" is discontinuous at the cutoff: rounding decides pairs within a relative 1e-6 of it.

A part of a grid (`Grid.slab`) has the same bits as that part of the whole grid, on the same kind of device. Atoms are
sorted into cells, and points into tiles, that are counted from the whole grid's origin. One thread sums a point's
atoms, without atomic additions, in an order that depends only on the cells, the tile and the order of the input. A part
uses every atom of each cell that its tiles reach (`Reach` selects them). On the CPU the bits depend neither on the
number of workers nor on the CPU model.

Sources: Stone et al., "Accelerating molecular modeling applications with graphics processors", J. Comput. Chem. 28
(2007); Rodrigues et al., "GPU acceleration of cutoff pair potentials for molecular modeling applications" (2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.coulomb.geometry import SCHEMES, SOFTENING_ANGSTROM, Cell, Grid, Scheme, check_cell
from kernels.coulomb.neighbours import Reach, reaching
from kernels.runtime.arrays import check_array, check_out, check_workers

__all__ = [
    "DTYPES",
    "SCHEMES",
    "SOFTENING_ANGSTROM",
    "Cell",
    "Grid",
    "Reach",
    "Scheme",
    "cutoff",
    "direct",
    "exclude",
    "potential",
    "reaching",
]

DTYPES = ("float32", "float64")
MAX_ATOMS = (1 << 31) - 1


def direct(
    atoms: Any,
    grid: Grid,
    *,
    dielectric: float = 1.0,
    distance_dependent: bool = False,
    exclude_radius_angstrom: float = 0.0,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """The potential of all atoms at all points: `potential` with the scheme "direct"."""
    scheme = Scheme(
        name="direct",
        dielectric=dielectric,
        distance_dependent=distance_dependent,
        exclude_radius_angstrom=exclude_radius_angstrom,
    )
    return potential(atoms, grid, scheme, out=out, workers=workers, stream=stream)


def cutoff(
    atoms: Any,
    grid: Grid,
    scheme: Scheme | None = None,
    *,
    cell: Cell | None = None,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """The potential of the atoms within a cutoff: `potential` with a scheme that has one (default `Scheme()`)."""
    scheme = Scheme() if scheme is None else scheme
    if isinstance(scheme, Scheme) and scheme.name == "direct":
        raise ValueError('scheme "direct" has no cutoff: call direct, or choose shift, taylor2 or truncate')
    return potential(atoms, grid, scheme, cell=cell, out=out, workers=workers, stream=stream)


def potential(
    atoms: Any,
    grid: Grid,
    scheme: Scheme,
    *,
    cell: Cell | None = None,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """The potential map of `atoms` on `grid`.

    atoms   : NumPy or CuPy array [n, 4] of x, y, z in angstrom and q in e, float32 or float64, any strides. NumPy
              arrays are checked for non-finite values; CuPy arrays are not, since that would wait for the device.
    scheme  : the potential of one atom
    cell    : periodic cell, or None. Not with the scheme "direct", whose sum over images is infinite.
    out     : array for the result, NumPy or CuPy like the atoms: float32, of the grid's shape, C-contiguous, sharing no
              memory with the atoms
    workers : CPU threads; default one per core
    stream  : CUDA stream to launch on; default CuPy's current one. The call does not wait for the device, except with a
              cell, when it reads back the number of images once.

    Returns the map: float32 [x, y, z], NumPy or CuPy like the atoms.
    Raises ValueError or TypeError with one line that names the parameter.
    """
    _check_types(grid, scheme, cell)
    _check_atoms(atoms)
    if cell is not None:
        if scheme.name == "direct":
            raise ValueError('scheme "direct" cannot be periodic: choose shift, taylor2 or truncate, or leave out cell')
        check_cell(cell, scheme)
    check_out(out, grid.shape, np.float32, apart_from={"atoms": atoms})
    check_workers(workers)
    if isinstance(atoms, np.ndarray):
        from kernels.coulomb import cpu

        return cpu.potential(atoms, grid, scheme, cell, out, workers=workers)
    from kernels.coulomb import cuda

    return cuda.potential(atoms, grid, scheme, cell, out, stream=stream)


def exclude(
    atoms: Any,
    grid: Grid,
    radius_angstrom: float,
    *,
    cell: Cell | None = None,
    out: Any,
    workers: int | None = None,
    stream: Any = None,
) -> None:
    """Set the points of `out` that are closer than a radius to any atom, charged or not, to zero, in place.

    The arrays are those of `potential`. A cell's narrowest width is at least twice the radius.
    """
    _check_atoms(atoms)
    if isinstance(atoms, np.ndarray):
        from kernels.coulomb import cpu

        cpu.exclude_near(atoms, grid, radius_angstrom, cell, out, workers=workers)
    else:
        from kernels.coulomb import cuda

        cuda.exclude_near(atoms, grid, radius_angstrom, cell, out, stream=stream)


def _check_types(grid: Any, scheme: Any, cell: Any) -> None:
    if not isinstance(grid, Grid):
        raise TypeError(f"grid must be a Grid; got {type(grid).__name__}")
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme must be a Scheme; got {type(scheme).__name__}")
    if cell is not None and not isinstance(cell, Cell):
        raise TypeError(f"cell must be a Cell or None; got {type(cell).__name__}")


def _check_atoms(atoms: Any) -> None:
    check_array("atoms", atoms)
    if np.dtype(atoms.dtype).newbyteorder("=").name not in DTYPES:
        raise TypeError(f"atoms has dtype {atoms.dtype}; supported are {', '.join(DTYPES)}")
    if atoms.ndim != 2 or atoms.shape[1] != 4 or atoms.shape[0] > MAX_ATOMS:
        raise ValueError(f"atoms must be an array [n, 4] of x, y, z, q, n at most {MAX_ATOMS}; got shape {atoms.shape}")
    if isinstance(atoms, np.ndarray) and not np.isfinite(atoms).all():
        row, column = np.argwhere(~np.isfinite(atoms))[0]
        raise ValueError(f"atoms: {'xyzq'[column]} of atom {row} is {atoms[row, column]}")
