"""Planning a gridding transform on CUDA: records of the trajectory's points, their order, and the work lists."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import Any

import numpy as np

from kernels.nufft.gridding.spreading import Spreading, deapodisation, grid_shape, kernel_for, lanes_for
from kernels.nufft.tuning import MEAN_PARTS, REGION_PART, SPREAD_PART
from kernels.runtime.launch import blocks_of, kernel, shared_bytes_a_block

THREADS = 256
TILE, TILES_A_BLOCK, PATCH = 4, 8, (2, 4)  # cells; tiles; a block's tiles along x and z
COEFFICIENTS = 12
REGION = {2: (8, 1, 8), 3: (4, 8, 8)}  # cells
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


def launch(entry: str, grid: tuple[int, ...], threads: int, *args: Any, stream: Any, shared_bytes: int = 0) -> None:
    if all(grid):
        kernel("nufft", entry).launch(grid, (threads,), args, shared_bytes=shared_bytes, stream=stream)


def rows_grid(along: int, rows: int) -> tuple[tuple[int, int, int], int]:
    """Blocks and threads of a kernel with one or several blocks per row of values, for any number of rows."""
    threads = min(THREADS, blocks_of(along, 32) * 32)
    at_once = min(rows, 1 << 15)
    return (blocks_of(along, threads), at_once, blocks_of(rows, at_once) if rows else 0), threads


def three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """Sizes along x, y, z as kernels take them; a 2-D image has no y."""
    return (sizes[0], 1, sizes[1]) if len(sizes) == 2 else (sizes[0], sizes[1], sizes[2])


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
                self._list_tiles(stream)
                self._list_regions(stream)
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

    def _list_tiles(self, stream: Any) -> None:
        """Lists the warps' work items: a tile each, or a part of a tile with many times the mean's candidates."""
        import cupy

        struct = self.struct()
        along_x = struct.size[0] if self.axes == 3 else struct.size[0] // TILE
        tiles = blocks_of(along_x, PATCH[0]) * blocks_of(struct.bins[1], PATCH[1]) * struct.bins[0] * TILES_A_BLOCK
        counts = cupy.empty(tiles, cupy.int32)
        blocks, count = (blocks_of(tiles, THREADS),), ctypes.c_int(tiles)
        launch(f"count_candidates<{self.axes}>", blocks, THREADS, self.starts, counts, count, struct, stream=stream)
        mean = int(counts.sum(dtype=cupy.int64)) // tiles
        struct.part = self.spread_part = max(SPREAD_PART, MEAN_PARTS * mean // 32 * 32)
        parts = cupy.where(counts < 0, 0, cupy.maximum((counts + (struct.part - 1)) // struct.part, 1))
        parts = parts.astype(cupy.int32)
        ends = cupy.cumsum(parts, dtype=cupy.int32)
        is_heavy = parts > 1
        slot_ends = cupy.cumsum(cupy.where(is_heavy, parts, 0), dtype=cupy.int32)
        heavy_ends = cupy.cumsum(is_heavy, dtype=cupy.int32)
        totals = cupy.stack([ends[-1], slot_ends[-1], heavy_ends[-1]]).get()
        self.tile_items, self.slots, self.heavy_tiles = (int(total) for total in totals)
        self.tile_list = cupy.empty((self.tile_items, 4), cupy.int32)
        self.heavy_list = cupy.empty((max(self.heavy_tiles, 1), 4), cupy.int32)
        args = (parts, ends, slot_ends, self.tile_list, self.heavy_list, heavy_ends, count, struct)
        launch(f"fill_items<{self.axes}>", blocks, THREADS, *args, stream=stream)

    def _list_regions(self, stream: Any) -> None:
        import cupy

        struct = self.struct(part=REGION_PART)
        regions = math.prod(blocks_of(n, each) for n, each in zip(struct.size, REGION[self.axes], strict=True))
        parts = cupy.empty(regions, cupy.int32)
        blocks, count = (blocks_of(regions, THREADS),), ctypes.c_int(regions)
        launch(f"count_region<{self.axes}>", blocks, THREADS, self.starts, parts, count, struct, stream=stream)
        ends = cupy.cumsum(parts, dtype=cupy.int32)
        self.region_items = int(ends[-1].get())
        self.region_list = cupy.empty((self.region_items, 2), cupy.int32)
        launch("fill_regions", blocks, THREADS, parts, ends, self.region_list, count, struct, stream=stream)

    def window_cells(self) -> int:
        """Cells of shared memory per coil."""
        extents = [r + self.spreading.width - 1 if r > 1 else 1 for r in REGION[self.axes]]
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
