"""Planning a gridding transform on CUDA: records of the trajectory's points, their order, and the work lists."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.nufft.gridding.spreading import Spreading, deapodisation, grid_shape, kernel_for, lanes_for
from kernels.nufft.tuning import MEAN_PARTS, REGION_PART, SPREAD_PART
from kernels.runtime.launch import blocks_of, kernel, shared_bytes_a_block

THREADS = 256
TILE, TILES_A_BLOCK, PATCH = 4, 8, (2, 4)  # cells; tiles; neighbouring tiles along x and z
OWNED = {
    (2, False): (4, 4),
    (3, False): (1, 4),
    (2, True): (4, 8),
    (3, True): (8, 8),
}  # x, z by axes, one coil
COEFFICIENTS = 12
REGION = {
    (2, False): (8, 1, 8),
    (3, False): (4, 8, 8),
    (3, True): (4, 8, 16),
}  # cells, by axes, one coil
REGION_WARPS, BATCH = 8, 8
MAX_CELLS = 1 << 33  # of a grid; the index of a column of bins then fits 32 bits
REALS = {"float32": "float", "float64": "double"}


class GriddingStruct(ctypes.Structure):
    """struct Gridding of gridding.cuh."""

    _fields_ = [
        ("points", ctypes.c_longlong),
        ("size", ctypes.c_int * 3),
        ("image", ctypes.c_int * 3),
        ("bins", ctypes.c_int * 2),
        ("width", ctypes.c_int),
        ("coils", ctypes.c_int),
        ("lanes", ctypes.c_int),
        ("items", ctypes.c_int),
        ("part", ctypes.c_int),
        ("per_half", ctypes.c_float),
        ("coefficient", ctypes.c_float * COEFFICIENTS),
    ]


def launch(
    entry: str,
    grid: tuple[int, ...],
    threads: int,
    *args: Any,
    stream: Any,
    shared_bytes: int = 0,
    dependent_launch: bool = False,
) -> None:
    if all(grid):
        found = kernel("nufft", entry)
        found.launch(
            grid, (threads,), args, shared_bytes=shared_bytes, stream=stream, dependent_launch=dependent_launch
        )


def rows_grid(along: int, rows: int) -> tuple[tuple[int, int, int], int]:
    """Blocks and threads of a kernel with one or several blocks per row of values, for any number of rows."""
    threads = min(THREADS, blocks_of(along, 32) * 32)
    at_once = min(rows, 1 << 15)
    return (blocks_of(along, threads), at_once, blocks_of(rows, at_once) if rows else 0), threads


def three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """Sizes along x, y, z as kernels take them; a 2-D image has no y."""
    return (sizes[0], 1, sizes[1]) if len(sizes) == 2 else (sizes[0], sizes[1], sizes[2])


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Work items of the adjoint's warps: a tile each, or a part of a tile with many times the mean's candidates."""

    items: Any  # int32 [count, 4]
    count: int
    heavy: Any  # int32 [split tiles, 4]
    split: int
    slots: int  # of partial sums
    part: int  # candidates


@dataclass(frozen=True, kw_only=True)
class Regions:
    """Work items of the forward transform's blocks."""

    items: Any  # int32 [count, 2]
    count: int


class SortedTrajectory:
    """A trajectory sorted for a grid, and the work lists of the kernels that run on it."""

    def __init__(self, trajectory: Any, shape: tuple[int, ...], eps: float, spreading: Spreading | None = None) -> None:
        import cupy

        self.shape, self.axes = shape, len(shape)
        self.spreading = spreading or kernel_for(eps, self.axes)
        self.grid = grid_shape(shape, self.spreading.oversampling)
        self.points = len(trajectory)
        self.device = trajectory.device
        self._fft_plans: dict[tuple[int, int], Any] = {}
        self._lists: dict[tuple[str, bool], Any] = {}
        self._lock = threading.Lock()
        if math.prod(self.grid) >= MAX_CELLS:
            raise ValueError(f"shape {shape} is too large for gridding on CUDA: its grid would have sizes {self.grid}")
        with self.device:
            stream = cupy.cuda.get_current_stream()
            pairs = zip(three(shape), three(self.grid), strict=True)
            self.scales = [
                cupy.asarray(deapodisation(n, g, self.spreading) if g > 1 else np.ones(1), cupy.float32)
                for n, g in pairs
            ]
            if self.points:
                self._sort(cupy.ascontiguousarray(trajectory), stream)
            # For later calls on other streams.
            stream.synchronize()

    def struct(self, coils: int = 1, lanes: int = 1, items: int = 0, part: int = 1) -> GriddingStruct:
        size, image = three(self.grid), three(self.shape)
        return GriddingStruct(
            points=self.points,
            size=size,
            image=image,
            bins=(blocks_of(size[1], TILE), size[2] // TILE),
            width=self.spreading.width,
            coils=coils,
            lanes=lanes,
            items=items,
            part=part,
            per_half=2 / self.spreading.width,
            coefficient=self.spreading.coefficients,
        )

    def _sort(self, trajectory: Any, stream: Any) -> None:
        """Sorts the records by key, then by trajectory order."""
        import cupy

        struct, real = self.struct(), REALS[trajectory.dtype.name]
        points, keys = cupy.empty((self.points, 4), cupy.float32), cupy.empty(self.points, cupy.int32)
        blocks = (blocks_of(self.points, THREADS),)
        launch(f"place_points<{real}, {self.axes}>", blocks, THREADS, trajectory, points, keys, struct, stream=stream)
        order = cupy.argsort(keys, kind="stable")
        self.keys, self.records, self.order = keys[order], points[order], order.astype(cupy.int32)
        self.rank_of = cupy.empty(self.points, cupy.int32)
        self.rank_of[order] = cupy.arange(self.points, dtype=cupy.int32)
        columns = struct.bins[0] * struct.bins[1] * struct.size[0]
        self.starts = cupy.searchsorted(self.keys, cupy.arange(columns + 1, dtype=cupy.int32)).astype(cupy.int32)

    def tiles(self, one_coil: bool, stream: Any) -> Tiles:
        """Listed at the first call."""
        return self._listed("tiles", one_coil, self._list_tiles, stream)  # type: ignore[no-any-return]

    def regions(self, one_coil: bool, stream: Any) -> Regions:
        """Listed at the first call."""
        return self._listed("regions", one_coil, self._list_regions, stream)  # type: ignore[no-any-return]

    def _listed(self, kind: str, one_coil: bool, make: Callable[[bool, Any], Any], stream: Any) -> Any:
        with self._lock:
            found = self._lists.get((kind, one_coil))
            if found is None:
                found = self._lists[kind, one_coil] = make(one_coil, stream)
                # For later calls on other streams.
                stream.synchronize()
        return found

    def _list_tiles(self, one_coil: bool, stream: Any) -> Tiles:
        import cupy

        struct, (x, z), form = self.struct(), OWNED[self.axes, one_coil], f"<{self.axes}, {str(one_coil).lower()}>"
        tiles_x, tiles_z = blocks_of(struct.size[0], x), blocks_of(struct.size[2], z)
        tiles = blocks_of(tiles_x, PATCH[0]) * blocks_of(tiles_z, PATCH[1]) * struct.bins[0] * math.prod(PATCH)
        counts = cupy.empty(tiles, cupy.int32)
        blocks, count = (blocks_of(tiles, THREADS),), ctypes.c_int(tiles)
        launch(f"count_candidates{form}", blocks, THREADS, self.starts, counts, count, struct, stream=stream)
        mean = int(counts.sum(dtype=cupy.int64)) // tiles
        struct.part = part = max(SPREAD_PART, MEAN_PARTS * mean // 32 * 32)
        parts = cupy.where(counts < 0, 0, cupy.maximum((counts + (part - 1)) // part, 1)).astype(cupy.int32)
        ends = cupy.cumsum(parts, dtype=cupy.int32)
        is_heavy = parts > 1
        slot_ends = cupy.cumsum(cupy.where(is_heavy, parts, 0), dtype=cupy.int32)
        heavy_ends = cupy.cumsum(is_heavy, dtype=cupy.int32)
        total, slots, split = (int(end) for end in cupy.stack([ends[-1], slot_ends[-1], heavy_ends[-1]]).get())
        items, heavy = cupy.empty((total, 4), cupy.int32), cupy.empty((max(split, 1), 4), cupy.int32)
        args = (parts, ends, slot_ends, items, heavy, heavy_ends, count, struct)
        launch(f"fill_items{form}", blocks, THREADS, *args, stream=stream)
        return Tiles(items=items, count=total, heavy=heavy, split=split, slots=slots, part=part)

    def _list_regions(self, one_coil: bool, stream: Any) -> Regions:
        import cupy

        struct, form = self.struct(part=REGION_PART), f"<{self.axes}, {str(one_coil).lower()}>"
        sizes = zip(struct.size, REGION[self.axes, one_coil], strict=True)
        regions = math.prod(blocks_of(n, each) for n, each in sizes)
        parts = cupy.empty(regions, cupy.int32)
        blocks, count = (blocks_of(regions, THREADS),), ctypes.c_int(regions)
        launch(f"count_region{form}", blocks, THREADS, self.starts, parts, count, struct, stream=stream)
        ends = cupy.cumsum(parts, dtype=cupy.int32)
        total = int(ends[-1])
        items = cupy.empty((total, 2), cupy.int32)
        launch("fill_regions", blocks, THREADS, parts, ends, items, count, struct, stream=stream)
        return Regions(items=items, count=total)

    def window_cells(self) -> int:
        """Cells of shared memory per coil."""
        extents = [r + self.spreading.width - 1 if r > 1 else 1 for r in REGION[self.axes, False]]
        return math.prod(extents)

    def region_lanes(self, coils: int) -> int:
        """The coils of a block, as many as let two blocks share a multiprocessor."""
        room = shared_bytes_a_block() // 2
        lanes = lanes_for(coils)
        while lanes > 1 and self.region_bytes(lanes) > room:
            lanes //= 2
        return lanes

    def region_bytes(self, lanes: int) -> int:
        a_point = 4 * self.axes * blocks_of(self.spreading.width, 4) * 4 + 8
        cells, step = self.window_cells(), max(16 // lanes, 1)
        pitch = cells + (step - cells) % 16  # plane_pitch of interpolate.cuh
        return REGION_WARPS * max(BATCH, 32 // lanes) * a_point + lanes * pitch * 8

    def fft(self, grid: Any, inverse: bool, stream: Any) -> None:
        """In place, not scaled."""
        from cupy.cuda import cufft
        from cupyx.scipy.fft import get_fft_plan

        with self._lock:
            found = self._fft_plans.get((len(grid), stream.ptr))
            if found is None:
                found = get_fft_plan(grid, axes=tuple(range(1, grid.ndim)), value_type="C2C")
                self._fft_plans[len(grid), stream.ptr] = found
        found.fft(grid, grid, cufft.CUFFT_INVERSE if inverse else cufft.CUFFT_FORWARD)
