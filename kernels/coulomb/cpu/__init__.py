"""Potential maps of NumPy arrays: our own threads compute blocks of rows of the grid with Numba-compiled code.

Each point is summed in one block, in an order that depends only on the atoms and the whole grid.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import tuning
from kernels.coulomb.cells import Cells, cells_around
from kernels.coulomb.cpu.sums import Block, Lattice, cutoff_block, direct_block, exclude
from kernels.coulomb.cpu.terms import LANES
from kernels.coulomb.geometry import (
    SCHEMES,
    SOFTENING_ANGSTROM,
    SPLIT_TERMS,
    Cell,
    Grid,
    Scheme,
    images,
    reach_box,
    times,
)
from kernels.runtime.threads import for_each

Array = NDArray[Any]

POINT = (1, 1, 1)


def potential(
    atoms: Array, grid: Grid, scheme: Scheme, cell: Cell | None, out: Array | None, *, workers: int | None = None
) -> Array:
    """The map, [x, y, z] float32; see kernels.coulomb. The bits do not depend on the number of workers."""
    if out is None:
        out = np.empty(grid.shape, np.float32)
    workers = workers or len(os.sched_getaffinity(0))
    if scheme.name == "direct":
        _direct(atoms, grid, scheme, out, workers)
    else:
        _cutoff(atoms, grid, scheme, cell, out, workers)
    if scheme.exclude_radius_angstrom > 0:
        _exclude(atoms, grid, scheme.exclude_radius_angstrom, cell, out, workers)
    return out


def exclude_near(
    atoms: Array, grid: Grid, radius: float, cell: Cell | None, out: Array, *, workers: int | None = None
) -> None:
    """See kernels.coulomb.exclude."""
    _exclude(atoms, grid, radius, cell, out, workers or len(os.sched_getaffinity(0)))


def _kind(scheme: Scheme) -> int:
    return SCHEMES.index(scheme.name) + len(SCHEMES) * scheme.distance_dependent


def _split(scheme: Scheme) -> Array:
    return np.array(scheme.split or [0.0] * SPLIT_TERMS, np.float32)


def _scale(scheme: Scheme, unit: float) -> float:
    """The factor from sums of charge / length, in lengths of `unit` angstrom, to e/Å."""
    return 1 / (scheme.dielectric * unit * (unit if scheme.distance_dependent else 1))


def from_origin(atoms: Array, grid: Grid) -> Array:
    """Positions relative to the grid's origin, float64."""
    return np.ascontiguousarray(atoms[:, :3].astype(np.float64) - np.array(grid.origin))


def image_positions(positions: Array, cell: Cell | None, multiples: Array, low: Array, high: Array) -> Any:
    """Positions of the atoms' images inside a box: (positions, atom indices, image indices)."""
    if cell is not None:
        positions = positions - cell.vectors_of(np.floor(times(positions, cell.inverse)))
    found = []
    for index, multiple in enumerate(multiples):
        moved = positions if cell is None else positions + cell.vectors_of(multiple[None].astype(np.float64))
        atom = np.flatnonzero(((moved >= low) & (moved <= high)).all(1))
        found.append((moved[atom], atom, np.full(len(atom), index)))
    if not found:
        return np.empty((0, 3)), np.empty(0, np.int64), np.empty(0, np.int64)
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


def sorted_atoms(
    atoms: Array, grid: Grid, scheme: Scheme, cell: Cell | None, cells: Cells
) -> tuple[Array, Array, Array]:
    """Charged atoms and images sorted by cell, then by input order.

    Returns positions from the grid's origin in angstrom [n, 3] float64, charges [n] float32, first atom of each cell.
    """
    charged = atoms[atoms[:, 3] != 0]
    low, high = cells.box()
    positions, atom, image = image_positions(from_origin(charged, grid), cell, cells.images, low, high)
    place = np.floor(positions / np.array(cells.edge)).astype(np.int64) - np.array(cells.first)
    inside = ((place >= 0) & (place < np.array(cells.shape))).all(1)
    positions, atom, image, place = positions[inside], atom[inside], image[inside], place[inside]
    number = np.ravel_multi_index(tuple(place.T), cells.shape)
    order = np.lexsort((image, atom, number))
    starts = np.zeros(cells.size + 1, np.int64)
    np.cumsum(np.bincount(number, minlength=cells.size), out=starts[1:])
    return positions[order], charged[atom[order], 3].astype(np.float32), starts


def _lattice(grid: Grid, unit: float, cells: Cells | None = None) -> Lattice:
    x, y, z = (h / unit for h in grid.spacing)
    if cells is None:
        return Lattice(x, y, z, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0)
    edge_x, edge_y, edge_z = (edge / unit for edge in cells.edge)
    return Lattice(x, y, z, edge_x, edge_y, edge_z, *cells.first, *cells.shape)


def _cutoff(atoms: Array, grid: Grid, scheme: Scheme, cell: Cell | None, out: Array, workers: int) -> None:
    cells = cells_around(grid, scheme, cell, POINT)
    positions, charges, starts = sorted_atoms(atoms, grid, scheme, cell, cells)
    unit = scheme.cutoff_angstrom
    positions = positions / unit
    lattice, soft = _lattice(grid, unit, cells), SOFTENING_ANGSTROM / unit
    kind, scale, split = _kind(scheme), _scale(scheme, unit), _split(scheme)

    def compute(block: Block) -> None:
        points, pitch = _points(block)
        sums, squares = np.empty(points, np.float32), np.empty(pitch, np.float32)
        cutoff_block(
            kind, positions, charges, starts, lattice, soft * soft, block, sums, squares, out, grid.first, scale, split
        )

    for_each(compute, _blocks(grid, tuning.CUTOFF_BLOCK_ROWS, grid.shape[2], workers), workers)


def _direct(atoms: Array, grid: Grid, scheme: Scheme, out: Array, workers: int) -> None:
    positions, charges = from_origin(atoms, grid), atoms[:, 3].astype(np.float32)
    lattice, soft = _lattice(grid, 1.0), SOFTENING_ANGSTROM
    kind, scale, split = _kind(scheme), _scale(scheme, 1.0), _split(scheme)

    def compute(block: Block) -> None:
        points, pitch = _points(block)
        sums, totals, squares = np.empty(points, np.float32), np.empty(points), np.empty(pitch, np.float32)
        direct_block(
            kind, positions, charges, lattice, soft * soft, block, sums, totals, squares, out, grid.first, scale, split
        )

    most_points = tuning.MOST_BLOCK_PAIRS / max(len(atoms), 1)
    for_each(
        compute, _blocks(grid, tuning.DIRECT_BLOCK_ROWS, tuning.DIRECT_BLOCK_POINTS, workers, most_points), workers
    )


def _exclude(atoms: Array, grid: Grid, radius: float, cell: Cell | None, out: Array, workers: int) -> None:
    low, high = reach_box(grid, radius, POINT)
    multiples = images(cell, low, high)
    positions, _, _ = image_positions(from_origin(atoms, grid), cell, multiples, low, high)
    steps, first = np.array(grid.spacing), np.array(grid.first)
    planes = [(i, min(i + 16, grid.shape[0])) for i in range(0, grid.shape[0], 16)]
    for_each(lambda part: exclude(positions, radius, steps, first, out, *part), planes, workers)


def _points(block: Block) -> tuple[int, int]:
    """Sums that a block needs, and how many of them make a row."""
    pitch = -(-(block.z1 - block.z0) // LANES) * LANES
    return (block.x1 - block.x0) * (block.y1 - block.y0) * pitch, pitch


def _blocks(grid: Grid, rows: tuple[int, int], points: int, workers: int, most_points: float = math.inf) -> list[Block]:
    """Blocks that cover the grid once, made smaller if they would be too few for the workers or too long to cancel."""
    wide, deep = rows
    while wide * deep > 1 and (
        wide * deep * points > most_points
        or (workers > 1 and _count(grid, wide, deep, points) < tuning.MIN_BLOCKS_A_WORKER * workers)
    ):
        wide, deep = (wide, deep // 2) if deep >= wide else (wide // 2, deep)
    (x, y, z), (nx, ny, nz) = grid.first, grid.shape
    return [
        Block(x + i, x + min(i + wide, nx), y + j, y + min(j + deep, ny), z + k, z + min(k + points, nz))
        for i, j, k in itertools.product(range(0, nx, wide), range(0, ny, deep), range(0, nz, points))
    ]


def _count(grid: Grid, wide: int, deep: int, points: int) -> int:
    nx, ny, nz = grid.shape
    return -(-nx // wide) * -(-ny // deep) * -(-nz // points)
