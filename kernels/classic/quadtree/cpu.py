"""Quadtrees of NumPy arrays: codes, one stable sort, then the nodes level by level."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.quadtree import cells_per_unit

Array = NDArray[Any]
NODE_DTYPES = {"begin": np.int32, "end": np.int32, "child": np.int32, "depth": np.int8, "code": np.uint32}


def build(points: Array, box: Any, max_depth: int, leaf_limit: int) -> dict[str, Any]:
    """Order, nodes and box; see kernels.classic.quadtree."""
    if box is None:
        ends = (*points.min(axis=0), *points.max(axis=0)) if len(points) else (0, 0, 0, 0)
        box = tuple(float(value) for value in ends)
    found = codes(points, box, max_depth)
    order = np.argsort(found, kind="stable")
    nodes = _nodes(found[order], max_depth, leaf_limit)
    return {"order": order.astype(np.int32), "box": box, **nodes}


def codes(points: Array, box: tuple[float, float, float, float], depth: int) -> Array:
    """The code of each point's cell at a depth, uint32."""
    found = np.zeros(len(points), np.uint32)
    for axis, per_unit in enumerate(cells_per_unit(box, depth)):
        place = (points[:, axis].astype(np.float64) - box[axis]) * per_unit
        cell = np.clip(place, 0, (1 << depth) - 1).astype(np.uint32)
        for bit in range(depth):
            found |= (cell >> np.uint32(bit) & np.uint32(1)) << np.uint32(2 * bit + axis)
    return found


def _nodes(ordered: Array, max_depth: int, leaf_limit: int) -> dict[str, Array]:
    begin, end, code = np.zeros(1, np.int64), np.full(1, len(ordered)), np.zeros(1, np.int64)
    levels, first = [], 0
    for depth in range(max_depth + 1):
        splits = (end - begin > leaf_limit) if depth < max_depth else np.zeros(len(begin), bool)
        child = np.full(len(begin), -1, np.int64)
        child[splits] = first + len(begin) + 4 * np.arange(np.count_nonzero(splits))
        levels.append((begin, end, child, np.full(len(begin), depth), code))
        if not splits.any():
            break
        first += len(begin)
        parents = code[splits]
        code = (4 * parents[:, None] + np.arange(4)).ravel()
        begin = np.searchsorted(ordered, code << 2 * (max_depth - depth - 1))
        end = np.searchsorted(ordered, (code + 1) << 2 * (max_depth - depth - 1))
    parts = zip(NODE_DTYPES.items(), zip(*levels, strict=True), strict=True)
    return {name: np.concatenate(part).astype(dtype) for (name, dtype), part in parts}
