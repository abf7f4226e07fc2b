"""The electrostatic potential of all charges on a regular grid, in a periodic cell (Ewald's sum) or without one.

    V(p) = 1 / dielectric × sum over atoms, and in a cell over all of their images, of q / r

Units, atoms, result and softening are those of `kernels.coulomb`. 1/r is split (`splitting`) into a near part, which
the kernels of `kernels.coulomb` add up within a cutoff of a few angstrom, and a smooth far part: charges are spread to
a mesh, transformed, multiplied by the influence function, transformed back, and read at the grid's points through the
same window.

Periodic : the mean of V over the cell is zero. The total charge is neutralised by a uniform background. Outside is a
           conductor ("tinfoil"); or a vacuum, around a large sphere of cells as the atoms are placed, which adds
           -2π/(3 volume) Σ q |p - r|² and takes neutral charges.
Free     : no images.
Smeared  : with `smear_per_angstrom` α each charge is q (α/√π)³ exp(-α² r²); there is no near part.
Precision: the relative L2 error beyond 1 Å of any atom is at most `accuracy` (1e-4 … 1e-6) in systems like water.
Bits     : charges are added on the mesh in 64-bit integers, so neither the order of atoms and frames nor the number of
           threads matters. A part of a grid has the same bits as that part of the whole, on the same kind of device.

Sources: Hockney and Eastwood, "Computer Simulation Using Particles" (1988); Liang, Jiang, Barnett and Greengard, "ESP"
(arXiv 2505.09727); Kaiser-Bessel windows: Barnett, Magland and af Klinteberg (SIAM J. Sci. Comput. 41, 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import numpy as np

from kernels.coulomb import Cell, Grid, Scheme, exclude
from kernels.coulomb import potential as cut_off
from kernels.coulomb.geometry import check_cell
from kernels.ewald.mesh import MAX_MESH_POINTS, Mesh, smooth
from kernels.ewald.splitting import LEVELS, Level, level_of, splitting_of

__all__ = [
    "DEFAULT_CUTOFF_ANGSTROM",
    "DEFAULT_FREE_CUTOFF_ANGSTROM",
    "LEVELS",
    "Boundary",
    "FarField",
    "Mesh",
    "Method",
    "box_of",
    "dipole",
    "mesh_of",
    "near",
    "potential",
    "refuse_charged",
]

Boundary = Literal["tinfoil", "vacuum"]

# A smaller one moves work from the near part to the mesh. One H100, water at 0.5 Å: 772,824 atoms in a cell take 6.2,
# 5.6, 6.2 and 6.7 ms at 3.5, 4, 4.5 and 5 Å; 96,603 without a cell, on a doubled mesh, about 1.6 ms from 4.5 to 6 Å.
DEFAULT_CUTOFF_ANGSTROM, DEFAULT_FREE_CUTOFF_ANGSTROM = 4.0, 5.0
NEUTRAL = 1e-6  # of the charges' magnitudes
# A Gaussian's spectrum at the edge of the mesh's band, by which its spacing is chosen, relative to the accuracy.
_SMEARED_TAIL = 0.1


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the full potential is computed.

    accuracy : relative L2 error beyond 1 Å of any atom, 1e-6 or more
    cutoff_angstrom : of the near part; the mesh's spacing is a fifth to a seventh of it
    boundary : of a periodic system
    dielectric : the relative permittivity
    exclude_radius_angstrom : points closer than this to any atom are set to zero; 0 disables it
    smear_per_angstrom : the charges are Gaussians; None: points
    free : there is no cell

    Raises ValueError.
    """

    accuracy: float = LEVELS[0].accuracy
    cutoff_angstrom: float = DEFAULT_CUTOFF_ANGSTROM
    boundary: Boundary = "tinfoil"
    dielectric: float = 1.0
    exclude_radius_angstrom: float = 0.0
    smear_per_angstrom: float | None = None
    free: bool = False

    def __post_init__(self) -> None:
        if self.boundary not in ("tinfoil", "vacuum"):
            raise ValueError(f"boundary must be tinfoil or vacuum; got {self.boundary!r}")
        smear = self.smear_per_angstrom
        if smear is not None and not 1e-3 <= smear <= 1e3:
            raise ValueError(f"smear_per_angstrom must be a number from 0.001 to 1000; got {smear!r}")
        _ = self.level, self.scheme

    @property
    def level(self) -> Level:
        return level_of(self.accuracy, free=self.free)

    @property
    def scheme(self) -> Scheme:
        """The scheme of the near part, without exclusion."""
        terms = splitting_of(self.level).terms
        return Scheme(name="split", cutoff_angstrom=self.cutoff_angstrom, dielectric=self.dielectric, split=terms)

    @property
    def spacing_angstrom(self) -> float:
        """The largest spacing of the mesh."""
        if self.smear_per_angstrom is None:
            return self.level.spacing * self.cutoff_angstrom
        band = 2 * self.smear_per_angstrom * math.sqrt(-math.log(_SMEARED_TAIL * self.level.accuracy))
        return math.pi / band


def mesh_of(method: Method, cell: Cell | None, low: Any = None, high: Any = None) -> Mesh:
    """The mesh of a cell; or, without one, of the box that holds all atoms and points, from `low` to `high`.

    Raises ValueError if it has too many points, or the cutoff passes half the cell's width.
    """
    if cell is not None:
        if method.smear_per_angstrom is None:
            check_cell(cell, method.scheme)
        lengths, origin = np.linalg.norm(cell.matrix, axis=1), (0.0, 0.0, 0.0)
    else:
        # Room for the window on each side, and for the Green's function to turn where it is mirrored.
        margin = method.level.taps * method.spacing_angstrom
        low, high = np.asarray(low) - margin, np.asarray(high) + margin
        lengths, origin = 2 * (high - low), tuple(low.tolist())
    shape = [smooth(min(length / method.spacing_angstrom, 1e12)) for length in lengths.tolist()]
    if math.prod(shape) > MAX_MESH_POINTS:
        raise ValueError(
            f"the mesh would have {' × '.join(map(str, shape))} points: raise the cutoff ({method.cutoff_angstrom:g} Å)"
            " or lower the accuracy"
        )
    if cell is None:
        x, y, z = (n * method.spacing_angstrom for n in shape)
        cell = Cell(vectors=((x, 0.0, 0.0), (0.0, y, 0.0), (0.0, 0.0, z)))
        free = True
    else:
        free = False
    return Mesh(
        origin=origin, cell=cell, shape=(shape[0], shape[1], shape[2]), level=method.level, free=free,
        cutoff_angstrom=method.cutoff_angstrom, smear_per_angstrom=method.smear_per_angstrom,
        factor=1 / method.dielectric,
    )  # fmt: skip


class FarField:
    """The far part on one mesh, for atoms whose charges' magnitudes add up to at most `total` (over all frames)."""

    def __init__(self, mesh: Mesh, total: float, *, vacuum: bool = False) -> None:
        self.mesh = mesh
        self.vacuum = vacuum
        # Sums of 64-bit integers cannot overflow: the window is at most one.
        self.scale = 2.0 ** (61 - math.ceil(math.log2(max(total, 1e-30))))
        self._bodies: dict[Any, Any] = {}

    def _body(self, like: Any, stream: Any) -> Any:
        """The body for an array's device, with its influence function, computed on the stream."""
        on_cpu = isinstance(like, np.ndarray)
        key = "cpu" if on_cpu else int(like.device.id)
        if key not in self._bodies:
            device = import_module(f"kernels.ewald.{'cpu' if on_cpu else 'cuda'}")
            self._bodies[key] = device.Body(self.mesh, self.scale, like, stream)
        return self._bodies[key]

    def spread(self, atoms: Any, charges: Any = None, *, workers: int | None = None, stream: Any = None) -> Any:
        """Add the atoms [n, 4], NumPy or CuPy, to a mesh of charges: int64, new if `charges` is None."""
        return self._body(atoms, stream).spread(atoms, charges, workers, stream)

    def solve(self, charges: Any, *, workers: int | None = None, stream: Any = None) -> Any:
        """The potential of a mesh of charges, as `add` takes it: float32."""
        return self._body(charges, stream).solve(charges, workers, stream)

    def add(
        self, solved: Any, grid: Grid, out: Any, dipole: Any = None, *, workers: int | None = None, stream: Any = None
    ) -> None:
        """Add the potential at a grid's points to `out`, float32 [x, y, z].

        dipole : with a vacuum outside, what `dipole` returned for the same atoms
        """
        ramp = np.zeros(4)
        if self.vacuum:
            *vector, second = np.asarray(dipole, np.float64).tolist()
            ramp = np.array([-second, *(2 * d for d in vector)])
            ramp *= 2 * math.pi * self.mesh.factor / (3 * self.mesh.volume)
        self._body(solved, stream).add(solved, grid, out, ramp, workers, stream)


def dipole(atoms: Any) -> np.ndarray:
    """Σ q x, Σ q y, Σ q z and Σ q r² of NumPy or CuPy atoms: a NumPy array, float64."""
    positions, charges = atoms[:, :3].astype(np.float64), atoms[:, 3].astype(np.float64)
    sums = [(charges * positions[:, axis]).sum() for axis in range(3)]
    return np.array([float(each) for each in (*sums, (charges * (positions**2).sum(1)).sum())])


def near(
    atoms: Any, grid: Grid, method: Method, cell: Cell | None, out: Any, *, workers: int | None = None,
    stream: Any = None,
) -> None:  # fmt: skip
    """Write the near part to `out`: zeros for smeared charges."""
    if method.smear_per_angstrom is not None:
        out[...] = 0
    else:
        cut_off(atoms, grid, method.scheme, cell=cell, out=out, workers=workers, stream=stream)


def potential(
    atoms: Any, grid: Grid, method: Method | None = None, *, cell: Cell | None = None, out: Any = None,
    workers: int | None = None, stream: Any = None,
) -> Any:  # fmt: skip
    """The map of the full potential.

    atoms : NumPy or CuPy array [n, 4] of x, y, z in angstrom and q in e, float32 or float64
    cell  : periodic cell; None: no images
    out, workers, stream : as `kernels.coulomb.potential` takes them; CuPy atoms are copied to the host once

    Returns the map: float32 [x, y, z], NumPy or CuPy like the atoms.
    Raises ValueError or TypeError with one line that names the parameter.
    """
    method = replace(method or Method(), free=cell is None)
    out = cut_off(atoms, grid, method.scheme, cell=cell, out=out, workers=workers, stream=stream)
    if len(atoms) == 0:
        return out
    if method.smear_per_angstrom is not None:
        out[...] = 0
    host = atoms if isinstance(atoms, np.ndarray) else atoms.get(stream=stream)
    low, high = box_of(host, grid)
    vacuum = cell is not None and method.boundary == "vacuum"
    if vacuum:
        refuse_charged(host[:, 3])
    field = FarField(mesh_of(method, cell, low, high), float(np.abs(host[:, 3]).sum()), vacuum=vacuum)
    solved = field.solve(field.spread(atoms, workers=workers, stream=stream), workers=workers, stream=stream)
    field.add(solved, grid, out, dipole(host) if vacuum else None, workers=workers, stream=stream)
    if method.exclude_radius_angstrom > 0:
        exclude(atoms, grid, method.exclude_radius_angstrom, cell=cell, out=out, workers=workers, stream=stream)
    return out


def box_of(atoms: np.ndarray, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the box of a grid's points and the atoms."""
    axes = grid.axes()
    ends = np.array([[axis[0], axis[-1]] for axis in axes])
    return np.minimum(ends[:, 0], atoms[:, :3].min(0)), np.maximum(ends[:, 1], atoms[:, :3].max(0))


def refuse_charged(charges: np.ndarray) -> None:
    """ValueError unless the charges are neutral."""
    total, size = float(charges.sum()), float(np.abs(charges).sum())
    if abs(total) > NEUTRAL * size:
        raise ValueError(f"boundary vacuum needs neutral charges, and these add up to {total:.6g} e: choose tinfoil")
