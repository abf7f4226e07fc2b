"""The exact transform on CUDA: launches the kernels of this folder."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from kernels.nufft.exact import pairs
from kernels.nufft.exact.structs import (
    ADJOINT_THREADS,
    BLOCK_GROUPS,
    FORWARD_WARPS,
    GROUP,
    NULL,
    STAGE,
    STAGED_SAMPLES,
    TILE_COLUMNS,
    TILE_GROUPS,
    AdjointStruct,
    ForwardStruct,
    ShapeStruct,
)
from kernels.nufft.tuning import SLOT_BYTES, TABLE_BYTES
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, kernel, multiprocessors, on_stream, shared_bytes_a_block

Terms = Literal[1, 3]

THREADS = 256
MAX_COILS_AT_ONCE = 1 << 15  # one row of blocks each
TENSOR_CAPABILITY = 80  # has the fp16 product m16n8k16
REALS = {"float32": "float", "float64": "double"}


def launch(entry: str, grid: tuple[int, ...], threads: int, *args: Any, stream: Any, shared_bytes: int = 0) -> None:
    kernel("nufft", entry).launch(grid, (threads,), args, shared_bytes=shared_bytes, stream=stream)


def pointer(array: Any) -> Any:
    return NULL if array is None else array


class Plan:
    """A trajectory's phases; see kernels.nufft.exact. Safe from any thread."""

    def __init__(self, trajectory: Any, shape: tuple[int, ...], terms: Terms) -> None:
        import cupy

        self.shape, self.terms = shape, terms
        self.sizes = (1,) * (3 - len(shape)) + tuple(shape)
        self.points = len(trajectory)
        self.device = trajectory.device
        with self.device:
            stream = cupy.cuda.get_current_stream()
            trajectory = cupy.ascontiguousarray(trajectory, np.dtype(trajectory.dtype).newbyteorder("="))
            self.phases = cupy.empty((self.points, 4), cupy.uint32)
            self.steps = cupy.empty((3, self.points), cupy.complex64)
            if self.points:
                entry = f"exact_phases<{REALS[trajectory.dtype.name]}>"
                args = (trajectory, self.phases, self.steps, ctypes.c_int(len(shape)), self.struct(1))
                launch(entry, (blocks_of(self.points, THREADS),), THREADS, *args, stream=stream)
            self._ready = cupy.cuda.Event(disable_timing=True)  # for later calls on other streams
            self._ready.record(stream)
            capability = int(self.device.compute_capability)
        self.on_tensor_cores = capability >= TENSOR_CAPABILITY

    def struct(self, coils: int) -> ShapeStruct:
        return ShapeStruct(samples=self.points, coils=coils, size=self.sizes)

    def adjoint(self, samples: Any, weights: Any, images: Any, stream: Any) -> None:
        """Fills images [coils, *shape] from samples [coils, points], both C-contiguous complex64; weights: float32."""
        self._run(samples, images, weights, stream, "exact_tensor" if self.on_tensor_cores else "exact_staged")

    def forward(self, images: Any, samples: Any, stream: Any) -> None:
        """Fills samples [coils, points] from images [coils, *shape]: C-contiguous complex64."""
        name = "exact_forward_tensor" if self.on_tensor_cores else "exact_forward_staged"
        self._run(samples, images, None, stream, name)

    def _run(self, samples: Any, images: Any, weights: Any, stream: Any, variant: str) -> None:
        stream.wait_event(self._ready)
        for first in range(0, len(samples), MAX_COILS_AT_ONCE):
            part = slice(first, first + MAX_COILS_AT_ONCE)
            task = ExactTask(plan=self, samples=samples[part], images=images[part], weights=weights, stream=stream)
            if not self.points or not task.images.size:
                task.result(variant).fill(0)
            else:
                VARIANTS[variant].run(task)


@dataclass(frozen=True, kw_only=True)
class ExactTask:
    """One transform: samples [coils, points] and images [coils, *shape], complex64, one of them the result.

    `samples` is None to compute the point spread of the weights.
    """

    plan: Plan
    samples: Any
    images: Any
    weights: Any
    stream: Any

    @property
    def coils(self) -> int:
        return len(self.images)

    @property
    def struct(self) -> ShapeStruct:
        return self.plan.struct(self.coils)

    def result(self, variant: str) -> Any:
        return self.samples if variant.startswith("exact_forward") else self.images

    def launch(self, entry: str, grid: tuple[int, ...], threads: int, *args: Any, shared_bytes: int = 0) -> None:
        launch(entry, grid, threads, *args, stream=self.stream, shared_bytes=shared_bytes)

    def sample_grid(self, threads: int = THREADS) -> tuple[int, int]:
        return blocks_of(self.plan.points, threads), self.coils


def _largest(task: ExactTask, values: Any, weights: Any) -> Any:
    """Bits of each coil's largest real or imaginary part."""
    import cupy

    count = values.size // task.coils
    found = cupy.zeros(task.coils, cupy.uint32)
    grid = (min(blocks_of(count, 4 * THREADS), 64), task.coils)
    args = (values, pointer(weights), found, ctypes.c_longlong(count), ctypes.c_int(task.coils))
    task.launch("exact_largest", grid, THREADS, *args)
    return found


def adjoint_shared_bytes(terms: int) -> int:
    """Shared memory of exact_adjoint_product."""
    parts, stages = (2, 2) if terms > 1 else (1, 4)
    return parts * 2 * STAGE * stages * (TILE_COLUMNS + 8 + 2 * GROUP * TILE_GROUPS + 8)


def run_adjoint(task: ExactTask, terms: Terms) -> None:
    import cupy

    plan = task.plan
    largest = _largest(task, task.samples, task.weights)
    scaled = cupy.empty(task.samples.shape, cupy.complex64)
    args = (task.samples, pointer(task.weights), plan.phases, largest, scaled, task.struct)
    task.launch("exact_samples", task.sample_grid(), THREADS, *args)
    column_tiles = blocks_of((plan.sizes[2] + 1) // 2, TILE_COLUMNS // 2)
    row_bytes = 2 * TILE_COLUMNS * column_tiles * (2 if terms > 1 else 1)
    chunk = max(TABLE_BYTES // row_bytes // STAGE, 1) * STAGE
    for first in range(0, plan.points, chunk):
        count = min(chunk, plan.points - first)
        factors = (plan.phases[first:], plan.steps.ravel()[first:], scaled.ravel()[first:])
        table = _table(task, terms, plan.phases[first:], count, TILE_COLUMNS * column_tiles)
        product = AdjointStruct(
            samples=count,
            stride=plan.points,
            stages=blocks_of(count, STAGE),
            groups=plan.sizes[0] * blocks_of(plan.sizes[1], GROUP),
            column_tiles=column_tiles,
            column_pairs=TILE_COLUMNS // 2,
            coils=task.coils,
            size=plan.sizes,
        )
        _multiply_rows(task, product, (*table, *factors), largest, terms, add=first > 0)


def _table(task: ExactTask, terms: Terms, phases: Any, count: int, columns: int) -> list[Any]:
    import cupy

    rows = blocks_of(count, STAGE) * STAGE
    table = [cupy.empty((rows, columns), cupy.float16) if part < terms else NULL for part in range(2)]
    sizes = (ctypes.c_longlong(count), ctypes.c_longlong(rows), ctypes.c_int(columns // 2))
    args = (phases, *table, *sizes, ctypes.c_int(task.plan.sizes[2]))
    task.launch(f"exact_table<{terms}>", (blocks_of(rows * columns // 8, THREADS),), THREADS, *args)
    return table


def _multiply_rows(
    task: ExactTask, product: AdjointStruct, factors: tuple[Any, ...], largest: Any, terms: Terms, *, add: bool
) -> None:
    """The product for groups of rows, as many at a time as their partial sums fit into SLOT_BYTES."""
    import cupy

    total, size = task.coils * product.groups, task.plan.sizes[2]
    entry, shared_bytes = f"exact_adjoint_product<{terms}>", adjoint_shared_bytes(terms)
    most = multiprocessors() * 2
    first = 0
    while first < total:
        groups = total - first
        blocks, slots = _shares(groups, product, most)
        while slots * groups * GROUP * size * 8 > SLOT_BYTES and groups > TILE_GROUPS:
            groups = blocks_of(groups, 2 * TILE_GROUPS) * TILE_GROUPS
            blocks, slots = _shares(groups, product, most)
        product.first_group, product.last_group, product.blocks = first, first + groups, blocks
        product.tiles = blocks_of(groups, TILE_GROUPS) * product.column_tiles
        found = cupy.empty((slots, groups * GROUP * size), cupy.complex64)
        args = (*factors, found, product)
        task.launch(entry, (blocks,), ADJOINT_THREADS, *args, shared_bytes=shared_bytes)
        rows = (min(groups * GROUP, 1 << 20),)
        args = (found, largest, task.images, ctypes.c_int(add), product)
        task.launch("exact_combine", rows, product.column_pairs, *args)
        first += groups


def _shares(groups: int, product: AdjointStruct, most: int) -> tuple[int, int]:
    """The number of blocks that share `groups` groups, and the most of them that work on one tile."""
    total = blocks_of(groups, TILE_GROUPS) * product.column_tiles * product.stages
    blocks = min(most, total)
    return blocks, (product.stages - 1) // (total // blocks) + 2


@dataclass(frozen=True, kw_only=True)
class ForwardParts:
    """How a forward transform is divided: samples per block, parts by columns, shares of the coils' rows."""

    samples: int
    columns: int
    shares: int
    struct: ForwardStruct


def forward_parts(plan: Plan, coils: int, terms: Terms) -> ForwardParts:
    samples = 128 if terms > 1 else 256
    parts = 2 if terms > 1 else 1
    steps = blocks_of((plan.sizes[2] + 1) // 2, 8)
    fitting = ((shared_bytes_a_block() // samples - 16) // parts - 16) // 32
    columns = blocks_of(steps, fitting)
    along = blocks_of(plan.sizes[1], GROUP * BLOCK_GROUPS) * BLOCK_GROUPS
    groups, tiles = plan.sizes[0] * along, blocks_of(plan.points, samples) * columns
    row_parts, shares = _cut(groups // BLOCK_GROUPS, tiles, coils, FORWARD_WARPS * 64 // samples, multiprocessors())
    struct = ForwardStruct(
        samples=plan.points,
        coils=coils,
        size=plan.sizes,
        groups=groups,
        along=along,
        steps=steps,
        part_steps=blocks_of(steps, columns),
        row_parts=row_parts,
    )
    return ForwardParts(samples=samples, columns=columns, shares=shares, struct=struct)


@lru_cache(maxsize=256)
def _cut(blocks: int, tiles: int, coils: int, warp_rows: int, processors: int) -> tuple[int, int]:
    """The parts of a coil's `blocks` of rows, and the CUDA blocks that share all coils' parts for each of `tiles`."""

    def cost(row_parts: int, shares: int) -> float:
        """Rows, in units of a warp's, on the busiest multiprocessor; computing cos and sin counts as a few."""
        items = blocks_of(coils * row_parts, shares * warp_rows)
        return blocks_of(tiles * shares, processors) * (items * math.ceil(blocks / row_parts) + 2 / warp_rows)

    options = [
        (row_parts, shares)
        for row_parts in (n for n in (1, 2, 4, 8, 16, 32) if n <= blocks)
        for shares in range(1, min(blocks_of(coils * row_parts, warp_rows), 64) + 1)
    ]
    return min(options, key=lambda option: (cost(*option), option))


def run_forward(task: ExactTask, terms: Terms) -> None:
    import cupy

    plan = task.plan
    largest = _largest(task, task.images, None)
    parts = forward_parts(plan, task.coils, terms)
    struct = parts.struct
    lanes = task.coils * struct.groups * struct.steps * 32
    fragments = [cupy.empty((lanes, 4), cupy.uint32) if part < terms else NULL for part in range(2)]
    args = (task.images, largest, *fragments, struct)
    task.launch(f"exact_fragments<{terms}>", (blocks_of(lanes, THREADS),), THREADS, *args)
    sums = cupy.empty((parts.columns * struct.row_parts, task.coils, plan.points), cupy.complex64)
    shared_bytes = parts.samples * ((2 if terms > 1 else 1) * (struct.part_steps * 32 + 16) + 16)
    grid = (blocks_of(plan.points, parts.samples), parts.shares, parts.columns)
    entry = f"exact_forward_product<{terms}, {FORWARD_WARPS * 64 // parts.samples}>"
    args = (*fragments, plan.phases, sums, struct)
    task.launch(entry, grid, 32 * FORWARD_WARPS, *args, shared_bytes=shared_bytes)
    args = (sums, plan.phases, largest, task.samples, ctypes.c_int(len(sums)), task.struct)
    task.launch("exact_finish", task.sample_grid(), THREADS, *args)


def _run_forward_staged(task: ExactTask) -> None:
    args = (task.images, task.plan.phases, task.samples, task.struct)
    task.launch("exact_forward_staged", task.sample_grid(STAGED_SAMPLES), STAGED_SAMPLES, *args)


# Q is the adjoint transform of ones; without kernels of its own this variant takes them as samples.
def _run_tensor(task: ExactTask) -> None:
    import cupy

    if task.samples is None:
        ones = cupy.ones((task.coils, task.plan.points), cupy.complex64)
        task = replace(task, samples=ones)
    run_adjoint(task, task.plan.terms)


_ADJOINT = ("exact_largest", "exact_samples", "exact_combine")
_PHASES = tuple(f"exact_phases<{real}>" for real in REALS.values())

# In source order, naive to fast; the last adjoint and the last forward one are in production.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        **pairs.VARIANTS,
        "exact_tensor": Variant(
            summary="one real matrix product on tensor cores, of one fp16 term or of three",
            entries=(
                *_PHASES,
                *_ADJOINT,
                *(f"exact_table<{terms}>" for terms in (1, 3)),
                *(f"exact_adjoint_product<{terms}>" for terms in (1, 3)),
            ),
            run=_run_tensor,
        ),
        "exact_forward_staged": Variant(
            summary="forward, a thread a sample: points through shared memory",
            entries=(*_PHASES, "exact_forward_staged"),
            run=_run_forward_staged,
        ),
        "exact_forward_tensor": Variant(
            summary="forward, one real matrix product on tensor cores and the sum over rows in its registers",
            entries=(
                *_PHASES,
                "exact_largest",
                "exact_finish",
                *(f"exact_fragments<{terms}>" for terms in (1, 3)),
                *(f"exact_forward_product<{terms}, {rows}>" for terms, rows in ((1, 2), (3, 4))),
            ),
            run=lambda task: run_forward(task, task.plan.terms),
        ),
    }
)


def adjoint(
    samples: Any, trajectory: Any, shape: tuple[int, ...], weights: Any, terms: Terms, stream: Any = None
) -> Any:
    """Images [..., *shape] of samples [..., M]; see kernels.nufft.exact."""
    import cupy

    with on_stream(trajectory, stream) as current:
        weights = None if weights is None else cupy.ascontiguousarray(weights, cupy.float32)
        images = cupy.empty((*samples.shape[:-1], *shape), cupy.complex64)
        flat = images.reshape(math.prod(samples.shape[:-1]), *shape)
        samples = cupy.ascontiguousarray(samples, cupy.complex64).reshape(len(flat), samples.shape[-1])
        Plan(trajectory, shape, terms).adjoint(samples, weights, flat, current)
    return images


def forward(images: Any, trajectory: Any, terms: Terms, stream: Any = None) -> Any:
    """Samples [..., M] of images [..., *shape]; see kernels.nufft.exact."""
    import cupy

    points, axes = trajectory.shape
    with on_stream(trajectory, stream) as current:
        leading, shape = images.shape[:-axes], images.shape[-axes:]
        samples = cupy.empty((*leading, points), cupy.complex64)
        flat = samples.reshape(math.prod(leading), points)
        images = cupy.ascontiguousarray(images, cupy.complex64).reshape(len(flat), *shape)
        Plan(trajectory, shape, terms).forward(images, flat, current)
    return samples
