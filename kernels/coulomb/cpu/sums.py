"""Sums over atoms for one block of rows of points, compiled by Numba: the CPU's direct sum and sum within a cutoff.

A row is the points of one (x, y) along z. An atom's squared distances along z are computed once, in float64 rounded to
float32, and shared by all rows of the block; each row adds its own squared distance in x and y.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from kernels.coulomb.cpu.terms import LANES, add_row
from kernels.runtime.compiled import compiled

BATCH = 64  # atoms of the direct sum added in float32 before the float64 total


class Block(NamedTuple):
    """Points x0 … x1 - 1, y0 … y1 - 1 and z0 … z1 - 1, counted in the whole grid."""

    x0: int
    x1: int
    y0: int
    y1: int
    z0: int
    z1: int


class Lattice(NamedTuple):
    """Grid and cells in units of the cutoff, from the grid's origin."""

    step_x: float  # between points
    step_y: float
    step_z: float
    edge_x: float  # of a cell
    edge_y: float
    edge_z: float
    first_x: int  # cell
    first_y: int
    first_z: int
    cells_x: int
    cells_y: int
    cells_z: int


@compiled
def _squares_along(squares: Any, count: int, first: int, step: float, z: float, softening: float) -> None:
    for k in range(count):
        distance = (first + k) * step - z
        squares[k] = np.float32(distance * distance + softening)


@compiled
def cutoff_block(
    kind: int,
    positions: Any,
    charges: Any,
    starts: Any,
    lattice: Lattice,
    softening: float,
    block: Block,
    sums: Any,
    squares: Any,
    out: Any,
    first: Any,
    scale: float,
    split: Any,
) -> None:
    """Sums a block. Every block visits the cells, and so each point its atoms, in ascending order.

    positions : [atoms, 3] float64, sorted by cell; charges: [atoms] float32; starts: first atom of each cell
    sums      : scratch for the block's rows, each of a multiple of eight points; squares: scratch for one row
    out       : the map, [x, y, z] float32; first: index in the whole grid of out[0, 0, 0]
    split     : the coefficients of the scheme "split", float32; zeros for others
    """
    pitch = (block.z1 - block.z0 + LANES - 1) // LANES * LANES
    rows_y = block.y1 - block.y0
    chords, across = np.empty((rows_y, 2), np.int64), np.empty(rows_y, np.float32)
    sums[: (block.x1 - block.x0) * rows_y * pitch] = 0
    low_x, high_x = block.x0 * lattice.step_x, (block.x1 - 1) * lattice.step_x
    low_y, high_y = block.y0 * lattice.step_y, (block.y1 - 1) * lattice.step_y
    for cx in range(lattice.cells_x):
        left = (lattice.first_x + cx) * lattice.edge_x
        gap_x = max(left - high_x, low_x - left - lattice.edge_x, 0.0)
        if gap_x > 1.0001:
            continue
        for cy in range(lattice.cells_y):
            left = (lattice.first_y + cy) * lattice.edge_y
            gap_y = max(left - high_y, low_y - left - lattice.edge_y, 0.0)
            if gap_x * gap_x + gap_y * gap_y > 1.0001:
                continue
            column = (cx * lattice.cells_y + cy) * lattice.cells_z
            for atom in range(starts[column], starts[column + lattice.cells_z]):
                _add_atom(
                    kind, positions[atom, 0], positions[atom, 1], positions[atom, 2], charges[atom],
                    lattice, softening, block, sums, squares, chords, across, pitch, split,
                )  # fmt: skip
    for x in range(block.x0, block.x1):
        for y in range(block.y0, block.y1):
            row = ((x - block.x0) * rows_y + y - block.y0) * pitch
            target = out[x - first[0], y - first[1], block.z0 - first[2] : block.z1 - first[2]]
            for k in range(len(target)):
                target[k] = sums[row + k] * np.float32(scale)


@compiled
def _add_atom(
    kind: int, x: float, y: float, z: float, charge: np.float32,
    lattice: Lattice, softening: float, block: Block, sums: Any, squares: Any, chords: Any, across: Any, pitch: int,
    split: Any,
) -> None:  # fmt: skip
    """Adds one atom's terms to all rows that its sphere reaches (the cylinder test), each over its own chord."""
    reach = 1.00001  # slightly more than the cutoff; the terms are exact zeros beyond it
    z_first = max(math.ceil((z - reach) / lattice.step_z) - block.z0, 0) // LANES * LANES
    z_last = min(math.floor((z + reach) / lattice.step_z) - block.z0, pitch - 1)
    x_first = max(math.ceil((x - reach) / lattice.step_x), block.x0)
    x_last = min(math.floor((x + reach) / lattice.step_x), block.x1 - 1)
    y_first = max(math.ceil((y - reach) / lattice.step_y), block.y0)
    y_last = min(math.floor((y + reach) / lattice.step_y), block.y1 - 1)
    if z_first > z_last or x_first > x_last or y_first > y_last:
        return
    count = (z_last - z_first) // LANES * LANES + LANES
    _squares_along(squares, count, block.z0 + z_first, lattice.step_z, z, softening)
    centre, per_step = z / lattice.step_z - (block.z0 + z_first), 1 / lattice.step_z
    rows = y_last + 1 - y_first
    for i in range(x_first, x_last + 1):
        dx = i * lattice.step_x - x
        # All chords first, so that the loops below know their lengths in advance.
        for j in range(rows):
            dy = (y_first + j) * lattice.step_y - y
            square = dx * dx + dy * dy
            half_chord = math.sqrt(max(reach * reach - square, 0.0)) * per_step
            begin = max(int(centre - half_chord), 0) & -LANES
            end = min((int(centre + half_chord) & -LANES) + LANES, count)
            chords[j, 0] = begin
            chords[j, 1] = end - begin if square <= reach * reach else 0
            across[j] = np.float32(square)
        row = ((i - block.x0) * (block.y1 - block.y0) + y_first - block.y0) * pitch + z_first
        for j in range(rows):
            begin = chords[j, 0]
            add_row(kind, sums, row + j * pitch + begin, squares, begin, chords[j, 1], across[j], charge, split)


@compiled
def direct_block(
    kind: int,
    positions: Any,
    charges: Any,
    lattice: Lattice,
    softening: float,
    block: Block,
    sums: Any,
    totals: Any,
    squares: Any,
    out: Any,
    first: Any,
    scale: float,
    split: Any,
) -> None:
    """Sums a block over all atoms, in input order; totals: float64 scratch, as long as `sums`."""
    pitch = (block.z1 - block.z0 + LANES - 1) // LANES * LANES
    rows_y = block.y1 - block.y0
    points = (block.x1 - block.x0) * rows_y * pitch
    totals[:points] = 0
    for batch in range(0, len(charges), BATCH):
        sums[:points] = 0
        for atom in range(batch, min(batch + BATCH, len(charges))):
            _squares_along(squares, pitch, block.z0, lattice.step_z, positions[atom, 2], softening)
            for i in range(block.x0, block.x1):
                dx = i * lattice.step_x - positions[atom, 0]
                for j in range(block.y0, block.y1):
                    dy = j * lattice.step_y - positions[atom, 1]
                    row = ((i - block.x0) * rows_y + j - block.y0) * pitch
                    add_row(kind, sums, row, squares, 0, pitch, np.float32(dx * dx + dy * dy), charges[atom], split)
        for point in range(points):
            totals[point] += sums[point]
    for x in range(block.x0, block.x1):
        for y in range(block.y0, block.y1):
            row = ((x - block.x0) * rows_y + y - block.y0) * pitch
            target = out[x - first[0], y - first[1], block.z0 - first[2] : block.z1 - first[2]]
            for k in range(len(target)):
                target[k] = totals[row + k] * scale


@compiled
def exclude(positions: Any, radius: float, origin_steps: Any, first: Any, out: Any, x_begin: int, x_end: int) -> None:
    """Zeroes the points of planes x_begin … x_end - 1 closer than `radius` to an atom; angstrom, float64 throughout.

    origin_steps: spacing along x, y, z; first: index in the whole grid of out[0, 0, 0]
    """
    square = radius * radius
    for atom in range(len(positions)):
        x, y, z = positions[atom, 0], positions[atom, 1], positions[atom, 2]
        i0 = max(math.floor((x - radius) / origin_steps[0]) - first[0], x_begin)
        i1 = min(math.ceil((x + radius) / origin_steps[0]) - first[0] + 1, x_end)
        j0 = max(math.floor((y - radius) / origin_steps[1]) - first[1], 0)
        j1 = min(math.ceil((y + radius) / origin_steps[1]) - first[1] + 1, out.shape[1])
        k0 = max(math.floor((z - radius) / origin_steps[2]) - first[2], 0)
        k1 = min(math.ceil((z + radius) / origin_steps[2]) - first[2] + 1, out.shape[2])
        for i in range(i0, i1):
            dx = (first[0] + i) * origin_steps[0] - x
            for j in range(j0, j1):
                dy = (first[1] + j) * origin_steps[1] - y
                for k in range(k0, k1):
                    dz = (first[2] + k) * origin_steps[2] - z
                    if dx * dx + dy * dy + dz * dz < square:
                        out[i, j, k] = 0
