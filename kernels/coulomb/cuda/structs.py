"""The structures that kernels of coulomb.cu take by value, mirrored in ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.coulomb.cells import Cells
from kernels.coulomb.geometry import SCHEMES, SOFTENING_ANGSTROM, SPLIT_TERMS, Cell, Grid, Scheme

CONSTANT_ATOMS = 240  # in direct.cuh too


class PointsStruct(ctypes.Structure):
    """struct Points of direct.cuh."""

    _fields_ = (
        ("origin", ctypes.c_double * 3),
        ("step", ctypes.c_double * 3),
        ("first", ctypes.c_int * 3),
        ("shape", ctypes.c_int * 3),
        ("scale", ctypes.c_float),
        ("softening", ctypes.c_float),
        ("split", ctypes.c_float * SPLIT_TERMS),
        ("atoms", ctypes.c_longlong),
    )


class CellsStruct(ctypes.Structure):
    """struct Cells of cells.cuh."""

    _fields_ = (
        ("origin", ctypes.c_double * 3),
        ("matrix", ctypes.c_double * 9),
        ("inverse", ctypes.c_double * 9),
        ("edge", ctypes.c_double * 3),
        ("per_edge", ctypes.c_double * 3),
        ("low", ctypes.c_double * 3),
        ("high", ctypes.c_double * 3),
        ("unit", ctypes.c_double),
        ("atoms", ctypes.c_longlong),
        ("first", ctypes.c_int * 3),
        ("shape", ctypes.c_int * 3),
        ("images", ctypes.c_int),
        ("periodic", ctypes.c_int),
        ("scheme", ctypes.c_int),
    )


class AtomChunk(ctypes.Structure):
    """struct AtomChunk of direct.cuh."""

    _fields_ = (("atom", ctypes.c_float * (4 * CONSTANT_ATOMS)),)


def points_struct(grid: Grid, scheme: Scheme, atoms: int, unit: float) -> PointsStruct:
    """The grid, lengths in `unit` angstrom (the origin always in angstrom)."""
    points = PointsStruct(atoms=atoms)
    points.origin[:], points.step[:] = grid.origin, [h / unit for h in grid.spacing]
    points.first[:], points.shape[:] = grid.first, grid.shape
    points.scale = 1 / (scheme.dielectric * unit * (unit if scheme.distance_dependent else 1))
    points.softening = (SOFTENING_ANGSTROM / unit) * (SOFTENING_ANGSTROM / unit)
    points.split[:] = scheme.split or [0.0] * SPLIT_TERMS
    return points


def cells_struct(
    grid: Grid, scheme: Scheme, cell: Cell | None, atoms: int, low: Any, high: Any, multiples: Any, cells: Cells | None
) -> CellsStruct:
    """The box to select atoms from, in angstrom from the grid's origin, and the cells to sort them into, if any."""
    struct = CellsStruct(
        unit=scheme.cutoff_angstrom,
        atoms=atoms,
        images=len(multiples),
        periodic=cell is not None,
        scheme=SCHEMES.index(scheme.name),
    )
    struct.origin[:], struct.low[:], struct.high[:] = grid.origin, low, high
    if cell is not None:
        struct.matrix[:] = cell.matrix.ravel()
        struct.inverse[:] = cell.inverse.ravel()
    if cells is not None:
        struct.edge[:], struct.first[:], struct.shape[:] = cells.edge, cells.first, cells.shape
        struct.per_edge[:] = [1 / edge for edge in cells.edge]
    return struct


def in_cutoffs(struct: CellsStruct) -> CellsStruct:
    """The same cells, their edges in units of the cutoff."""
    scaled = CellsStruct.from_buffer_copy(struct)
    scaled.edge[:] = [edge / struct.unit for edge in struct.edge]
    scaled.per_edge[:] = [1 / edge for edge in scaled.edge]
    return scaled
