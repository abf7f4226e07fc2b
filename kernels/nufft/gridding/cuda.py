"""Gridding on CUDA: launches the kernels of this folder, from the naive form to production."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kernels.nufft.exact.structs import NULL
from kernels.nufft.gridding import lines
from kernels.nufft.gridding.plan import (
    REALS,
    REGION_WARPS,
    THREADS,
    TILE,
    TILES_A_BLOCK,
    SortedTrajectory,
    launch,
    rows_grid,
)
from kernels.nufft.gridding.spreading import KERNELS, Spreading, lanes_for
from kernels.nufft.tuning import MAX_CAPTURED_CELLS, MAX_CELLS_AT_ONCE, REGION_PART
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, pointer
from kernels.runtime.repeated import RepeatedCalls

NARROW = 5  # cells of the widest kernel that reaches into one more bin, not two
CELL_WARPS, CELLS, GATHER_THREADS = 4, {2: 32, 3: 256}, 128  # of one coil's kernels; cells of a tile
ORDERED_VALUES = 1024  # values, of all coils of a chunk, that a block reorders
SHARED_WIDTHS = {2: 4, 3: 5}  # kernel widths of the ladder's shared-memory step: those for 1e-3
PRODUCTION = ("spread_tiles", "spread_cells", "interpolate_tiles", "gather_cells")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One transform: samples [coils, M] and images [coils, *shape], one of them the result."""

    plan: Plan
    samples: Any
    images: Any
    weights: Any
    stream: Any


class Plan(SortedTrajectory):
    """The transforms of a trajectory; see kernels.nufft.Nufft."""

    def __init__(self, trajectory: Any, shape: tuple[int, ...], eps: float, spreading: Spreading | None = None) -> None:
        super().__init__(trajectory, shape, eps, spreading)
        self._cells, self._repeated = math.prod(self.grid), RepeatedCalls()
        with self.device:
            self.by_lines = lines.fits(self.grid)

    def adjoint(self, samples: Any, weights: Any, images: Any, stream: Any, variant: str | None = None) -> None:
        """Images [coils, *shape] of samples [coils, M], both C-contiguous complex64; weights float32 or None."""
        if not self.points:
            with stream:
                images.fill(0)
            return
        self._run(
            variant or ("spread_cells" if len(samples) == 1 else "spread_tiles"), samples, weights, images, stream
        )

    def forward(self, images: Any, samples: Any, stream: Any, variant: str | None = None) -> None:
        """Samples [coils, M] of images [coils, *shape], both C-contiguous complex64."""
        if self.points:
            chosen = variant or ("gather_cells" if len(samples) == 1 else "interpolate_tiles")
            self._run(chosen, samples, None, images, stream)

    def _run(self, variant: str, samples: Any, weights: Any, images: Any, stream: Any) -> None:
        def run(stream: Any) -> None:
            for part in self._coil_parts(len(samples)):
                task = Task(plan=self, samples=samples[part], images=images[part], weights=weights, stream=stream)
                VARIANTS[variant].run(task)

        if variant in PRODUCTION and self.by_lines and 0 < len(samples) * self._cells <= MAX_CAPTURED_CELLS:
            key = (variant, len(samples), samples.data.ptr, pointer(weights), images.data.ptr)
            self._repeated(key, stream, run)
        else:
            run(stream)

    def _coil_parts(self, coils: int) -> list[slice]:
        most = max(MAX_CELLS_AT_ONCE // self._cells, 1)
        step = most if most < 32 else most // 32 * 32
        return [slice(begin, min(begin + step, coils)) for begin in range(0, coils, step)]


def _empty_grid(task: Task) -> Any:
    import cupy

    return cupy.empty((len(task.samples), *task.plan.grid), cupy.complex64)


def _crop(task: Task, grid: Any) -> None:
    struct = task.plan.struct(coils=len(task.images))
    blocks, threads = rows_grid(struct.image[2], len(task.images) * struct.image[0] * struct.image[1])
    launch("crop_images", blocks, threads, grid, *task.plan.scales, task.images, struct, stream=task.stream)


def _padded(task: Task) -> Any:
    """The FFT of the images, zero-padded to the grid."""
    grid = _empty_grid(task)
    struct = task.plan.struct(coils=len(task.images))
    blocks, threads = rows_grid(struct.size[2], len(task.images) * struct.size[0] * struct.size[1])
    launch("pad_images", blocks, threads, task.images, *task.plan.scales, grid, struct, stream=task.stream)
    task.plan.fft(grid, False, task.stream)
    return grid


def _weighted(task: Task) -> Any:
    return task.samples if task.weights is None else task.samples * task.weights


def _run_spread_points(task: Task, in_order: bool) -> None:
    with task.stream:
        grid, plan = _empty_grid(task), task.plan
        grid.fill(0)
        entry = f"spread_points<{plan.axes}, {str(in_order).lower()}>"
        blocks = (blocks_of(plan.points, THREADS), len(task.samples))
        order = plan.order if in_order else plan.rank_of
        args = (plan.records, plan.keys, order, _weighted(task), grid, plan.struct(coils=len(task.samples)))
        launch(entry, blocks, THREADS, *args, stream=task.stream)
        plan.fft(grid, True, task.stream)
        _crop(task, grid)


def _run_spread_shared(task: Task) -> None:
    with task.stream:
        grid, plan = _empty_grid(task), task.plan
        grid.fill(0)
        struct = plan.struct(coils=len(task.samples), part=REGION_PART)
        regions = plan.regions(False, task.stream)
        args = (plan.records, plan.starts, regions.items, plan.order, _weighted(task), grid, struct)
        entry, blocks = f"spread_shared<{plan.axes}, {plan.spreading.width}>", (regions.count, len(task.samples))
        launch(entry, blocks, THREADS, *args, stream=task.stream, shared_bytes=plan.window_cells() * 8)
        plan.fft(grid, True, task.stream)
        _crop(task, grid)


def _images_of(task: Task, grid: Any) -> None:
    """The grid's inverse FFT, cropped; overwrites the grid."""
    if task.plan.by_lines:
        lines.transform(task.plan, task.images, grid, True, task.stream)
    else:
        task.plan.fft(grid, True, task.stream)
        _crop(task, grid)


def _grid_of(task: Task) -> Any:
    """The FFT of the images, zero-padded to the grid."""
    if not task.plan.by_lines:
        return _padded(task)
    grid = _empty_grid(task)
    lines.transform(task.plan, task.images, grid, False, task.stream)
    return grid


def _run_spread_tiles(task: Task) -> None:
    import cupy

    with task.stream:
        grid, plan, coils = _empty_grid(task), task.plan, len(task.samples)
        lanes, tiles = lanes_for(coils), plan.tiles(False, task.stream)
        struct = plan.struct(coils=coils, lanes=lanes, items=tiles.count, part=tiles.part)
        chunks = blocks_of(coils, lanes)
        ordered = cupy.empty((chunks, plan.points, lanes), cupy.complex64)
        partial = cupy.empty((max(tiles.slots, 1), coils, TILE * TILE), cupy.complex64)
        entry, blocks = (
            f"order_samples<{str(task.weights is not None).lower()}>",
            blocks_of(plan.points, ORDERED_VALUES // lanes),
        )
        weights = task.samples if task.weights is None else task.weights
        given: tuple[Any, ...] = (task.samples, weights, plan.rank_of, ordered, struct)
        launch(entry, (blocks, chunks), THREADS, *given, stream=task.stream)
        given = (plan.records, plan.starts, tiles.items, ordered, grid, partial, struct)
        blocks = blocks_of(tiles.count, TILES_A_BLOCK)
        entry = f"spread_tiles<{plan.axes}, {str(plan.spreading.width > NARROW).lower()}>"
        launch(entry, (blocks, chunks), 32 * TILES_A_BLOCK, *given, stream=task.stream)
        given = (tiles.heavy, partial, grid, struct)
        launch(f"add_parts<{plan.axes}>", (tiles.split,), THREADS, *given, stream=task.stream)
        _images_of(task, grid)


def _run_spread_cells(task: Task) -> None:
    """One coil after the other."""
    import cupy

    with task.stream:
        plan, tiles = task.plan, task.plan.tiles(True, task.stream)
        grid, cells = cupy.empty((1, *plan.grid), cupy.complex64), CELLS[plan.axes]
        partial = cupy.empty((max(tiles.slots, 1), cells), cupy.complex64)
        struct = plan.struct(items=tiles.count, part=tiles.part)
        weighted, wide = str(task.weights is not None).lower(), str(plan.spreading.width > NARROW).lower()
        weights, blocks = NULL if task.weights is None else task.weights, (blocks_of(tiles.count, CELL_WARPS),)
        for coil in range(len(task.samples)):
            one = replace(task, samples=task.samples[coil : coil + 1], images=task.images[coil : coil + 1])
            given = (plan.records, plan.starts, tiles.items, plan.order, one.samples, weights, grid, partial, struct)
            _dependent(f"spread_cells<{plan.axes}, {wide}, {weighted}>", blocks, 32 * CELL_WARPS, *given, task=task)
            _dependent(f"add_cells<{plan.axes}>", (tiles.split,), cells, tiles.heavy, partial, grid, struct, task=task)
            _images_of(one, grid)


def _dependent(entry: str, blocks: tuple[int, ...], threads: int, *args: Any, task: Task) -> None:
    launch(entry, blocks, threads, *args, stream=task.stream, dependent_launch=True)


def _run_interpolate_points(task: Task, in_order: bool) -> None:
    with task.stream:
        grid, plan = _padded(task), task.plan
        entry = f"interpolate_points<{plan.axes}, {str(in_order).lower()}>"
        blocks = (blocks_of(plan.points, THREADS), len(task.samples))
        order = plan.order if in_order else plan.rank_of
        args = (plan.records, plan.keys, order, grid, task.samples, plan.struct(coils=len(task.samples)))
        launch(entry, blocks, THREADS, *args, stream=task.stream)


def _run_interpolate_tiles(task: Task) -> None:
    import cupy

    with task.stream:
        grid, plan, coils = _grid_of(task), task.plan, len(task.samples)
        lanes, regions = plan.region_lanes(coils), plan.regions(False, task.stream)
        struct, chunks = plan.struct(coils=coils, lanes=lanes, part=REGION_PART), blocks_of(coils, lanes)
        ordered = cupy.empty((chunks, plan.points, lanes), cupy.complex64)
        entry = f"interpolate_tiles<{plan.axes}, {plan.spreading.width}>"
        args = (plan.records, plan.starts, regions.items, grid, ordered, struct)
        blocks, shared_bytes = (regions.count, chunks), plan.region_bytes(lanes)
        launch(entry, blocks, 32 * REGION_WARPS, *args, stream=task.stream, shared_bytes=shared_bytes)
        blocks = (blocks_of(plan.points, ORDERED_VALUES // lanes), chunks)
        launch("restore_samples", blocks, THREADS, ordered, plan.rank_of, task.samples, struct, stream=task.stream)


def _run_gather_cells(task: Task) -> None:
    """One coil after the other."""
    with task.stream:
        plan = task.plan
        struct, width = plan.struct(part=REGION_PART), plan.spreading.width
        for coil in range(len(task.samples)):
            one = replace(task, samples=task.samples[coil : coil + 1], images=task.images[coil : coil + 1])
            grid = _grid_of(one)
            if plan.axes == 2:
                blocks = (blocks_of(plan.points, GATHER_THREADS),)
                args: tuple[Any, ...] = (plan.records, plan.keys, plan.order, grid, one.samples, struct)
                _dependent(f"gather_points<{width}>", blocks, GATHER_THREADS, *args, task=task)
            else:
                regions = plan.regions(True, task.stream)
                args = (plan.records, plan.starts, regions.items, plan.order, grid, one.samples, struct)
                _dependent(f"gather_cells<{width}>", (regions.count,), GATHER_THREADS, *args, task=task)


_BOTH = ("false", "true")
_PLANNING = (
    *(f"place_points<{real}, {axes}>" for real in REALS.values() for axes in KERNELS),
    *(
        f"{entry}<{axes}, {one}>"
        for entry in ("count_candidates", "fill_items", "count_region")
        for axes in KERNELS
        for one in _BOTH
    ),
    "fill_regions",
)


def _both(entry: str, tail: str = "") -> tuple[str, ...]:
    return tuple(f"{entry}<{axes}{tail}>" for axes in KERNELS)


# In source order, naive to fast; the last of each direction is in production.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "spread_points": Variant(
            summary="adjoint, one thread a point and coil: atomic additions anywhere in the grid",
            entries=(*_PLANNING, *_both("spread_points", ", false"), "crop_images"),
            run=lambda task: _run_spread_points(task, False),
        ),
        "spread_sorted": Variant(
            summary="the same over points sorted by cell: neighbouring threads share cache lines",
            entries=_both("spread_points", ", true"),
            run=lambda task: _run_spread_points(task, True),
        ),
        "spread_shared": Variant(
            summary="a block a region: atomic additions in shared memory, then one per cell to the grid",
            entries=tuple(f"spread_shared<{axes}, {width}>" for axes, width in SHARED_WIDTHS.items()),
            run=_run_spread_shared,
        ),
        "spread_tiles": Variant(
            summary="a warp owns 4 × 4 cells and visits the points that reach them, all coils at once: no atomics",
            entries=(
                *_both("spread_tiles", ", false"),
                *_both("spread_tiles", ", true"),
                *_both("add_parts"),
                "order_samples<false>",
                "order_samples<true>",
            ),
            run=_run_spread_tiles,
        ),
        "spread_cells": Variant(
            summary="one coil: a lane owns cells, and a warp's lanes visit the same points",
            entries=(
                *(f"spread_cells<{axes}, {a}, {b}>" for axes in KERNELS for a in _BOTH for b in _BOTH),
                *_both("add_cells"),
                *(f"grid_lines<{n}, {rows}, true>" for n in lines.SIZES for rows in _BOTH),
            ),
            run=_run_spread_cells,
        ),
        "interpolate_points": Variant(
            summary="forward, one thread a point and coil",
            entries=(*_both("interpolate_points", ", false"), "pad_images"),
            run=lambda task: _run_interpolate_points(task, False),
        ),
        "interpolate_sorted": Variant(
            summary="the same over points sorted by cell",
            entries=_both("interpolate_points", ", true"),
            run=lambda task: _run_interpolate_points(task, True),
        ),
        "interpolate_tiles": Variant(
            summary="a region of the grid in shared memory, the weights computed once for all coils",
            entries=(
                *dict.fromkeys(
                    f"interpolate_tiles<{axes}, {k.width}>" for axes, found in KERNELS.items() for k in found
                ),
                "restore_samples",
            ),
            run=_run_interpolate_tiles,
        ),
        "gather_cells": Variant(
            summary="one coil: a thread a point; in 3-D a warp a point, from a region of the grid in shared memory",
            entries=(
                *(f"gather_points<{found.width}>" for found in KERNELS[2]),
                *(f"gather_cells<{width}>" for width in sorted({found.width for found in KERNELS[3]})),
                *(f"grid_lines<{n}, {rows}, false>" for n in lines.SIZES for rows in _BOTH),
            ),
            run=_run_gather_cells,
        ),
    }
)
