"""Neighbour search: the atoms that a part of a grid needs on any device, those in the cells around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb.cells import cells_around
from kernels.coulomb.geometry import Cell, Grid, Scheme, images, times
from kernels.coulomb.tuning import CUBES, SLICES

# Whole tiles and blocks of every kernel; and more than rounding can move an atom.
_ALIGNED = (8, 8, 16)
_MARGIN_ANGSTROM = 1e-2
# Edge of the boxes that atoms are sorted into: some twenty atoms of water each, and hardly more boxes than atoms.
_EDGE_ANGSTROM = 6.0
_NUMBER_BITS = 31  # of an atom's index; the box's index takes the bits above


class Reach:
    """Atoms sorted into boxes once, so that finding those near a part of a grid does not visit all of them.

    positions : [n, 3 or more] of x, y and z first, in angstrom
    """

    def __init__(self, positions: NDArray[Any], scheme: Scheme, cell: Cell | None = None) -> None:
        self._scheme = scheme
        self._cell = cell
        self._count = len(positions)
        if scheme.name == "direct" or self._count == 0:
            return
        placed = np.asarray(positions[:, :3], np.float64)
        if cell is not None:
            placed = placed - cell.vectors_of(np.floor(times(placed, cell.inverse)))
        columns = np.array(placed.T, order="C")  # contiguous columns are several times as fast
        self._low, high = columns.min(axis=1), columns.max(axis=1)
        sides = high - self._low
        self._edge = max(_EDGE_ANGSTROM, float((sides + _EDGE_ANGSTROM).prod() / self._count) ** (1 / 3))
        self._shape = (sides / self._edge).astype(np.int64) + 1
        columns -= self._low[:, None]
        columns /= self._edge
        place = np.minimum(columns.astype(np.int64), self._shape[:, None] - 1)
        number = np.ravel_multi_index(tuple(place), tuple(self._shape))
        self._starts = np.zeros(int(self._shape.prod()) + 1, np.int64)
        np.cumsum(np.bincount(number, minlength=len(self._starts) - 1), out=self._starts[1:])
        # By box, then by index, packed into one integer: ten times as fast as a stable argsort.
        order = number << _NUMBER_BITS | np.arange(self._count)
        order.sort()
        self._order = order & ((1 << _NUMBER_BITS) - 1)

    def count(self, grid: Grid) -> int:
        """The number of atoms that `atoms` returns."""
        if self._cell is None and self._scheme.name != "direct" and self._count:
            return int(sum((last - first).sum() for first, last in self._runs(grid)))
        return len(self.atoms(grid))

    def atoms(self, grid: Grid) -> NDArray[np.int64]:
        """Indices, ascending, of the atoms that this part of a grid needs, and some around them: a map of these alone
        has the same bits as a map of all. With the scheme "direct" these are all atoms."""
        if self._scheme.name == "direct" or self._count == 0:
            return np.arange(self._count)
        needed = np.zeros(self._count, bool)
        for firsts, lasts in self._runs(grid):
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                needed[self._order[first:last]] = True
        return np.flatnonzero(needed)

    def _runs(self, grid: Grid) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """For each image, the first and end indices of its sorted atoms, a pair for each row of boxes along z."""
        low, high = self._box(grid)
        shifts = np.zeros((1, 3))
        if self._cell is not None:
            shifts = self._cell.vectors_of(images(self._cell, low, high).astype(np.float64))
        for shift in shifts:
            first = np.floor((low - shift - self._low) / self._edge).clip(0, self._shape).astype(np.int64)
            last = np.floor((high - shift - self._low) / self._edge).clip(-1, self._shape - 1).astype(np.int64)
            if (first > last).any():
                continue
            x, y = np.ogrid[first[0] : last[0] + 1, first[1] : last[1] + 1]
            row = ((x * self._shape[1] + y) * self._shape[2]).ravel()
            yield self._starts[row + first[2]], self._starts[row + last[2] + 1]

    def _box(self, grid: Grid) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Corners of the box that holds every atom a part of a grid can need."""
        boxes = [cells_around(grid, self._scheme, None, _ALIGNED, cut).box() for cut in (CUBES, SLICES)]
        low, high = np.minimum(boxes[0][0], boxes[1][0]), np.maximum(boxes[0][1], boxes[1][1])
        # Atoms that exclude points need be neither charged nor within the cutoff.
        first, shape, spacing = np.array(grid.first), np.array(grid.shape), np.array(grid.spacing)
        radius = self._scheme.exclude_radius_angstrom
        low = np.minimum(low, first * spacing - radius) - _MARGIN_ANGSTROM
        high = np.maximum(high, (first + shape - 1) * spacing + radius) + _MARGIN_ANGSTROM
        return low + np.array(grid.origin), high + np.array(grid.origin)


def reaching(positions: NDArray[Any], grid: Grid, scheme: Scheme, cell: Cell | None = None) -> NDArray[np.int64]:
    """`Reach.atoms`, for one part of a grid."""
    return Reach(positions, scheme, cell).atoms(grid)
