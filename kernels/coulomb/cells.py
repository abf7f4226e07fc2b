"""The cells that atoms are sorted into: boxes of fixed edges, counted from the whole grid's origin.

An atom's cell, and its rank among the sorted atoms, are therefore the same for the whole grid and for any part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from kernels.coulomb.geometry import Cell, Grid, Scheme, images, reach_box
from kernels.coulomb.tuning import CUBES, POINTS_A_CUTOFF


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The cells around a grid, and the periodic images of the atoms that can lie in them."""

    edge: tuple[float, float, float]  # angstrom
    first: tuple[int, int, int]
    shape: tuple[int, int, int]
    images: np.ndarray  # [n, 3] int32: multiples of the periodic cell's vectors

    def box(self) -> tuple[np.ndarray, np.ndarray]:
        """Corners of the box of all cells, in angstrom from the grid's origin, with a margin of 1e-6 of an edge."""
        first, edge = np.array(self.first), np.array(self.edge)
        return (first - 1e-6) * edge, (first + np.array(self.shape) + 1e-6) * edge

    @property
    def size(self) -> int:
        return int(np.prod([float(n) for n in self.shape]))


@lru_cache(maxsize=64)  # frames of a trajectory often share their cell
def cells_around(
    grid: Grid, scheme: Scheme, cell: Cell | None, tile: tuple[int, int, int], cut: tuple[int, int, int] = CUBES
) -> Cells:
    """The cells within the cutoff of a grid whose points are computed in tiles; `cut`: cells per cutoff."""
    reach = scheme.cutoff_angstrom
    edge = np.maximum(reach, POINTS_A_CUTOFF * np.array(grid.spacing)) / np.array(cut)
    low, high = reach_box(grid, reach, tile)
    first = np.floor(low / edge - 1e-3).astype(np.int64)
    last = np.floor(high / edge + 1e-3).astype(np.int64)
    cells = Cells(
        edge=(float(edge[0]), float(edge[1]), float(edge[2])),
        first=(int(first[0]), int(first[1]), int(first[2])),
        shape=(int(last[0] - first[0] + 1), int(last[1] - first[1] + 1), int(last[2] - first[2] + 1)),
        images=np.zeros((1, 3), np.int32),
    )
    return cells if cell is None else replace(cells, images=images(cell, *cells.box()))
