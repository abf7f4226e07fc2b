"""Quadtrees on CUDA: which kernels of quadtree.cu order the points and make the nodes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.classic.quadtree.cpu import NODE_DTYPES
from kernels.classic.sort.cuda import sorted_indices
from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream, pointer

OPTIONS = ("--fmad=false",)  # same codes as on the CPU

# Tuned on an H200 (sm_90); THREADS as in levels.cuh.
THREADS, BOUNDS_BLOCKS = 256, 1024

REALS = {"float32": "float", "float64": "double"}


class BoxStruct(ctypes.Structure):
    """struct Box of levels.cuh."""

    _fields_ = (("low", ctypes.c_double * 2), ("per_cell", ctypes.c_double * 2), ("depth", ctypes.c_int))


class NodesStruct(ctypes.Structure):
    """struct Nodes of levels.cuh."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in NODE_DTYPES)


@dataclass(kw_only=True)
class Task:
    """Points to build a tree over; a run sets the result."""

    points: Any  # CuPy [n, 2], n > 0, C-contiguous
    box: tuple[float, float, float, float]
    max_depth: int
    leaf_limit: int
    stream: Any
    order: Any = field(init=False)
    nodes: dict[str, Any] = field(init=False)

    @property
    def count(self) -> int:
        return len(self.points)

    def launch(self, entry: str, count: int, *args: Any) -> None:
        """Launches `count` threads, rounded up to whole blocks."""
        kernel("quadtree", entry).launch((blocks_of(count, THREADS),), (THREADS,), args, stream=self.stream)

    def make_room(self, nodes: int) -> NodesStruct:
        """Allocates nodes and sets the first to the root."""
        import cupy

        if nodes >= 1 << 31:
            raise ValueError(f"leaf_limit {self.leaf_limit} makes {nodes} nodes, more than 2^31 - 1: raise it")
        self.nodes = {name: cupy.empty(nodes, dtype) for name, dtype in NODE_DTYPES.items()}
        self.nodes["child"].fill(-1)
        for name, value in (("begin", 0), ("end", self.count), ("depth", 0), ("code", 0)):
            self.nodes[name][:1] = value
        return NodesStruct(**{name: pointer(array) for name, array in self.nodes.items()})


def build(
    points: Any, box: Any, max_depth: int, leaf_limit: int, *, stream: Any = None, variant: str | None = None
) -> dict[str, Any]:
    """Order, nodes and box of a CuPy array of points; see kernels.classic.quadtree.

    variant : a name in `VARIANTS`; default the fastest
    """
    import cupy

    with on_stream(points, stream) as current:
        points = cupy.ascontiguousarray(points, points.dtype.newbyteorder("="))
        box = _bounds(points, current) if box is None else box
        task = Task(points=points, box=box, max_depth=max_depth, leaf_limit=leaf_limit, stream=current)
        if len(points) == 0:
            task.order = cupy.empty(0, np.int32)
            task.make_room(1)
        else:
            VARIANTS[PRODUCTION if variant is None else variant].run(task)
    return {"order": task.order, "box": box, **task.nodes}


def _bounds(points: Any, stream: Any) -> tuple[float, float, float, float]:
    import cupy

    if len(points) == 0:
        return (0.0, 0.0, 0.0, 0.0)
    blocks = min(blocks_of(len(points), THREADS), BOUNDS_BLOCKS)
    found = cupy.empty((blocks, 4), points.dtype)
    args = (points, ctypes.c_longlong(len(points)), found)
    kernel("quadtree", f"find_bounds<{REALS[points.dtype.name]}>").launch((blocks,), (THREADS,), args, stream=stream)
    ends = found.get(stream=stream)
    low, high = ends[:, :2].min(axis=0), ends[:, 2:].max(axis=0)
    return float(low[0]), float(low[1]), float(high[0]), float(high[1])


def _codes(task: Task) -> Any:
    import cupy

    from kernels.classic.quadtree import cells_per_unit

    box = BoxStruct(depth=task.max_depth)
    box.low[:], box.per_cell[:] = task.box[:2], cells_per_unit(task.box, task.max_depth)
    codes = cupy.empty(task.count, np.uint32)
    real = REALS[task.points.dtype.name]
    task.launch(f"find_codes<{real}>", task.count, task.points, ctypes.c_longlong(task.count), box, codes)
    return codes


def _run_levels(task: Task) -> None:
    """One level at a time: moves points into quadrants, then makes nodes; the host reads how many split."""
    import cupy

    count = task.count
    points, limit = ctypes.c_longlong(count), ctypes.c_int(task.leaf_limit)
    placed, moved = (cupy.empty((count, 4), np.int32) for _ in range(2))
    task.launch("place_points", count, _codes(task), points, placed)
    flags = cupy.empty((4, count), np.int32)
    struct = task.make_room(1)
    first, level = 0, 1  # the first node of the level, and its number of nodes
    for depth in range(task.max_depth):
        shift = ctypes.c_int(2 * (task.max_depth - depth - 1))
        task.launch("flag_quadrants", count, placed, points, shift, flags)
        for row in flags:
            cupy.cumsum(row, out=row)
        if level:
            splits = cupy.empty(level, np.int32)
            task.launch("flag_splits", level, struct, ctypes.c_longlong(first), ctypes.c_longlong(level), limit, splits)
            cupy.cumsum(splits, out=splits)
            children = 4 * int(splits[-1:].get(stream=task.stream)[0])
            before = task.nodes
            struct = task.make_room(first + level + children)
            for name, array in before.items():
                task.nodes[name][: array.size] = array
            nodes = ctypes.c_longlong(first), ctypes.c_longlong(level)
            args = (struct, *nodes, limit, splits, ctypes.c_int(depth), flags, points)
            task.launch("split_nodes", level, *args)
            first, level = first + level, children
        task.launch("move_points", count, placed, points, shift, flags, moved)
        placed, moved = moved, placed
    task.order = cupy.empty(count, np.int32)
    task.launch("take_order", count, placed, points, task.order)


def _run_morton(task: Task) -> None:
    """One sort, then all nodes at once; the host reads their number."""
    import cupy

    count, depth, limit = ctypes.c_longlong(task.count), ctypes.c_int(task.max_depth), ctypes.c_int(task.leaf_limit)
    codes, indices = sorted_indices(_codes(task), stream=task.stream)
    task.order = indices.view(np.int32)
    if task.max_depth == 0:
        task.make_room(1)
        return
    upto = cupy.empty((task.max_depth, blocks_of(task.count, THREADS)), np.int64)
    task.launch("count_splits", task.count, codes, count, depth, limit, upto)
    cupy.cumsum(upto.ravel(), out=upto.ravel())
    splits = int(upto.ravel()[-1:].get(stream=task.stream)[0])
    struct = task.make_room(1 + 4 * splits)
    task.launch("make_nodes", task.count, codes, count, depth, limit, upto, struct)


_CODES = tuple(f"{name}<{real}>" for name in ("find_bounds", "find_codes") for real in REALS.values())

# Naive to fast; the last is the one in production.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "levels": Variant(
            summary="level by level: flags, sums, and every point moved at every level",
            entries=(
                *_CODES,
                "place_points",
                "flag_quadrants",
                "move_points",
                "flag_splits",
                "split_nodes",
                "take_order",
            ),
            run=_run_levels,
        ),
        "morton": Variant(
            summary="one radix sort of the cells' codes, then the nodes of all levels at once",
            entries=(*_CODES, "count_splits", "make_nodes"),
            run=_run_morton,
        ),
    }
)
PRODUCTION = "morton"


def ladders() -> tuple[Ladder, ...]:
    """Evenly spread and clustered points."""
    return (
        _ladder("2²⁴ points, evenly spread", lambda rng, shape: rng.random(shape, np.float32)),
        _ladder("2²⁴ points, clustered", lambda rng, shape: rng.standard_normal(shape, np.float32) ** 3),
    )


def _ladder(name: str, made: Callable[[Any, tuple[int, int]], Any]) -> Ladder:
    count = 1 << 24

    @cache
    def points() -> Any:
        import cupy

        return made(cupy.random.default_rng(1), (count, 2))

    def prepare(variant: str) -> Callable[[], Any]:
        return lambda: build(points(), None, 16, 32, variant=variant)

    return Ladder(
        name=name,
        variants=tuple(VARIANTS),
        bytes=count * (2 * 8 + 4),  # read for the bounds and for the codes
        flops=0,
        limit="copy",
        prepare=prepare,
        libraries=dict,
    )
