"""Test inputs for quadtrees and their expected results.

The oracle splits lists of points node by node, with Python integers and without sorting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.quadtree import Quadtree, build

Array = NDArray[Any]

CONTENTS = ("uniform", "clustered", "equal", "line", "grid", "corners", "pairs")
NODE_ARRAYS = {"begin": np.int32, "end": np.int32, "child": np.int32, "depth": np.int8, "code": np.uint32}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Points and the parameters of their tree."""

    count: int
    content: str = "uniform"
    dtype: str = "float32"
    max_depth: int = 16
    leaf_limit: int = 8
    box: tuple[float, float, float, float] | None = None

    @property
    def name(self) -> str:
        boxed = "boxed" if self.box else "bounds"
        return f"{self.content}-{self.count}-{self.dtype}-{self.max_depth}-{self.leaf_limit}-{boxed}"

    def points(self) -> Array:
        """The input [n, 2]; the same for every call."""
        return made_points(self.content, self.count).astype(self.dtype)

    def apply(self, points: Any, **options: Any) -> Quadtree:
        """The public function on an array of any supported library."""
        return build(points, max_depth=self.max_depth, leaf_limit=self.leaf_limit, box=self.box, **options)

    def exact(self) -> dict[str, Array]:
        return exact(self.points(), self.box, self.max_depth, self.leaf_limit)

    def check(self, tree: dict[str, Array], expected: dict[str, Array] | None = None) -> None:
        """AssertionError unless every array of the tree, on the host, is right."""
        for name, right in (expected or self.exact()).items():
            np.testing.assert_array_equal(tree[name], right, f"{self.name}: {name}", strict=True)

    def bytes(self) -> int:
        """Minimum traffic: the points read, their order written."""
        return self.count * (2 * np.dtype(self.dtype).itemsize + 4)

    def flops(self) -> int:
        return 0


def exact(points: Array, box: Any, max_depth: int, leaf_limit: int) -> dict[str, Array]:
    places = [(float(x), float(y)) for x, y in points]
    if box is None:
        xs, ys = [x for x, _ in places] or [0.0], [y for _, y in places] or [0.0]
        box = (min(xs), min(ys), max(xs), max(ys))
    cells = [tuple(_cell(p[axis], box[axis], box[axis + 2], max_depth) for axis in range(2)) for p in places]
    nodes: list[list[int]] = []  # begin, end, child, depth, code
    waiting = deque([(list(range(len(points))), 0, 0, 0)])
    made, order = 1, np.full(len(points), -1, np.int32)
    while waiting:
        members, begin, depth, code = waiting.popleft()
        splits = len(members) > leaf_limit and depth < max_depth
        nodes.append([begin, begin + len(members), made if splits else -1, depth, code])
        if not splits:
            order[begin : begin + len(members)] = _in_order(members, cells, max_depth - depth)
            continue
        made += 4
        for quadrant in range(4):
            inside = [m for m in members if _quadrant(cells[m], max_depth - depth - 1) == quadrant]
            waiting.append((inside, begin, depth + 1, 4 * code + quadrant))
            begin += len(inside)
    columns = zip(*nodes, strict=True)
    arrays = {name: np.array(c, dtype) for (name, dtype), c in zip(NODE_ARRAYS.items(), columns, strict=True)}
    return {"order": order, **arrays}


def _cell(place: float, low: float, high: float, depth: int) -> int:
    per_unit = 2.0**depth / (high - low) if high > low and math.isfinite(2.0**depth / (high - low)) else 0.0
    return min(max(math.floor((place - low) * per_unit), 0), (1 << depth) - 1)


def _quadrant(cell: tuple[int, ...], bit: int) -> int:
    return (cell[0] >> bit & 1) + 2 * (cell[1] >> bit & 1)


def _in_order(members: list[int], cells: list[tuple[int, ...]], levels: int) -> list[int]:
    """A leaf's points in the order of further splits down to the maximum depth."""
    for bit in range(levels):  # stable partitions, least significant quadrant first
        members = [m for quadrant in range(4) for m in members if _quadrant(cells[m], bit) == quadrant]
    return members


def made_points(content: str, count: int) -> Array:
    rng = np.random.default_rng([count, CONTENTS.index(content)])
    points = rng.uniform(-3, 5, (count, 2))
    if content == "clustered":
        points = rng.standard_normal((count, 2)) ** 3 * np.exp(rng.standard_normal((count, 1)))
    elif content == "equal":
        points[:] = (1.25, -7)
    elif content == "line":
        points[:, 1] = points[:, 0]
    elif content == "grid":  # on the edges of cells
        points = rng.integers(0, 65, (count, 2)) / 64
    elif content == "corners":
        points = rng.integers(0, 2, (count, 2)).astype(float)
    elif content == "pairs":  # close pairs far from each other: deep paths
        points = np.repeat(points[: (count + 1) // 2], 2, axis=0)[:count] + rng.uniform(0, 2e-4, (count, 2))
    return points


def cases() -> Iterator[Case]:
    """Every content; no point, one, a warp, blocks, primes; minimum and maximum depths and leaf sizes."""
    for content in CONTENTS:
        yield Case(count=1009, content=content)
        yield Case(count=1009, content=content, dtype="float64", max_depth=9, leaf_limit=1)
    for count in (0, 1, 2, 8, 9, 31, 32, 33, 255, 256, 257, 2048):
        yield Case(count=count, content="clustered", leaf_limit=8)
    for depth, limit in ((0, 1), (1, 1), (16, 1), (16, 5000), (3, 40), (15, 1000)):
        yield Case(count=1511, max_depth=depth, leaf_limit=limit)
    for box in ((-3.0, -3.0, 5.0, 5.0), (0.0, 0.0, 1.0, 1.0), (10.0, 10.0, 11.0, 11.0), (0.0, -9.0, 0.0, 9.0)):
        yield Case(count=701, box=box)
