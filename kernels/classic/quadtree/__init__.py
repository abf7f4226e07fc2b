"""A quadtree over points of the plane, on NumPy arrays (CPU) and CuPy arrays (CUDA).

A node is a cell of the box and the points in it. A node splits into four if it has more points than a leaf may have and
lies above the maximum depth; a leaf at the maximum depth may have any number.
Cells  : at depth d the box is divided into 2^d × 2^d cells. The cell of x at the maximum depth is the integer part of
         (x − low) × (2^depth / (high − low)) in float64; at a smaller depth, the cell that contains it. Points on the
         upper edge of the box, or outside it, belong to the nearest cell.
Codes  : a cell's quadrants from the root down, 2 bits each, y over x: 0 low x and y, 1 high x, 2 high y, 3 both.
Order  : a permutation of the points, stably sorted by their codes at the maximum depth. A node's points are
         order[begin:end].
Nodes  : level by level, within a level by code; the root is node 0. A node's four children are consecutive, by
         quadrant, including those without points.

All results are exact and identical on CPU and CUDA.

Sources: Morton, "A computer oriented geodetic data base" (1966); Karras, "Maximizing parallelism in the construction of
BVHs, octrees, and k-d trees" (2012).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array

__all__ = ["DTYPES", "MAX_DEPTH", "Quadtree", "build", "cells_per_unit"]

DTYPES = ("float32", "float64")
MAX_DEPTH = 16
MAX_POINTS = (1 << 29) - 1  # so that four children a point have numbers of 31 bits


@dataclass(frozen=True, kw_only=True)
class Quadtree:
    """Arrays of the points' library; m nodes over n points."""

    box: tuple[float, float, float, float]  # low x, low y, high x, high y
    order: Any  # int32 [n]
    begin: Any  # int32 [m]: a node's first point in the order
    end: Any  # int32 [m]: one past its last point
    child: Any  # int32 [m]: its first child; −1: a leaf
    depth: Any  # int8 [m]
    code: Any  # uint32 [m]: 2 × depth bits


def build(
    points: Any,
    *,
    max_depth: int = 16,
    leaf_limit: int = 32,
    box: tuple[float, float, float, float] | None = None,
    stream: Any = None,
) -> Quadtree:
    """The quadtree of points.

    points     : NumPy or CuPy array [n, 2] of x, y, float32 or float64, any strides. NumPy arrays are checked for
                 values that are not finite; CuPy arrays are not: with a given box, such points are put at its edge.
    max_depth  : from 0 to 16
    leaf_limit : the maximum number of points of a leaf above the maximum depth, 1 or more
    box        : low x, low y, high x, high y; default the bounding box of the points
    stream     : CUDA: the stream to launch on; default CuPy's current one. The call waits for the device to read the
                 number of nodes and, unless it is given, the box.

    Returns the tree. Raises ValueError or TypeError; the message names the parameter.
    """
    _check_points(points)
    for name, value, low, high in (
        ("max_depth", max_depth, 0, MAX_DEPTH),
        ("leaf_limit", leaf_limit, 1, MAX_POINTS),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be a whole number from {low} to {high}; got {value!r}")
    if box is not None:
        box = _checked_box(box)
    if isinstance(points, np.ndarray):
        from kernels.classic.quadtree import cpu

        return Quadtree(**cpu.build(points, box, max_depth, leaf_limit))
    from kernels.classic.quadtree import cuda

    return Quadtree(**cuda.build(points, box, max_depth, leaf_limit, stream=stream))


def cells_per_unit(box: tuple[float, float, float, float], depth: int) -> tuple[float, float]:
    """Cells of a depth per unit of length, along x and y; 0 along an axis where the box has no width."""
    widths = box[2] - box[0], box[3] - box[1]
    x, y = (2.0**depth / width if width > 0 and math.isfinite(2.0**depth / width) else 0.0 for width in widths)
    return x, y


def _check_points(points: Any) -> None:
    check_array("points", points)
    if np.dtype(points.dtype).newbyteorder("=").name not in DTYPES:
        raise TypeError(f"points has dtype {points.dtype}; supported are {', '.join(DTYPES)}")
    if points.ndim != 2 or points.shape[1] != 2 or points.shape[0] > MAX_POINTS:
        raise ValueError(f"points must be an array [n, 2], n at most {MAX_POINTS}; got shape {points.shape}")
    if isinstance(points, np.ndarray) and not np.isfinite(points).all():
        point, axis = np.argwhere(~np.isfinite(points))[0]
        raise ValueError(f"points: {'xy'[axis]} of point {point} is {points[point, axis]}")


def _checked_box(box: Any) -> tuple[float, float, float, float]:
    try:
        x0, y0, x1, y1 = (float(value) for value in box)
    except (TypeError, ValueError):
        raise TypeError(f"box must be four numbers, low x, low y, high x, high y; got {box!r}") from None
    if not (all(map(math.isfinite, (x0, y0, x1, y1, x1 - x0, y1 - y0))) and x0 <= x1 and y0 <= y1):
        raise ValueError(f"box must be low x, low y, high x, high y, finite and in order; got {box!r}")
    return x0, y0, x1, y1
