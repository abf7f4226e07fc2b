"""The adjoint transform pair by pair on CUDA: the steps of pairs.cuh, naive to fast, for FᴴD and Q."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.nufft.exact.structs import (
    COARSE_POINTS,
    CONSTANT_SAMPLES,
    LADDER_THREADS,
    NULL,
    STAGED_SAMPLES,
    ArraysStruct,
    StructuresStruct,
)
from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of


def _spread(task: Any) -> str:
    return str(task.samples is None).lower()


def _inputs(task: Any) -> tuple[Any, Any]:
    return NULL if task.samples is None else task.samples, NULL if task.weights is None else task.weights


def _weighted(task: Any) -> Any:
    """Samples times weights, [coils, points]."""
    import cupy

    weighted = cupy.empty((task.coils, task.plan.points), cupy.complex64)
    entry = f"exact_weigh<{_spread(task)}>"
    task.launch(entry, task.sample_grid(), LADDER_THREADS, *_inputs(task), weighted, task.struct)
    return weighted


def _row_blocks(task: Any, threads: int) -> int:
    rows, size = math.prod(task.plan.sizes[:2]), task.plan.sizes[2]
    return blocks_of(rows * blocks_of(size, COARSE_POINTS), threads)


def _run_scatter(task: Any) -> None:
    task.images.fill(0)
    args = (*_inputs(task), task.plan.phases, task.images, task.struct)
    task.launch(f"exact_scatter<{_spread(task)}>", task.sample_grid(32), 32, *args)


def _run_gather(task: Any, name: str) -> None:
    args = (_weighted(task), task.plan.phases, task.images, task.struct)
    grid = (blocks_of(math.prod(task.plan.sizes), LADDER_THREADS), task.coils)
    task.launch(f"{name}<{_spread(task)}>", grid, LADDER_THREADS, *args)


def _host_values(task: Any) -> tuple[Any, Any]:
    """Phases [points, 3] and weighted samples [coils, points, 2] on the host, since they are launch parameters."""
    import cupy

    phases = cupy.asnumpy(task.plan.phases, stream=task.stream)[:, :3]
    values = cupy.asnumpy(_weighted(task), stream=task.stream)
    return phases, values.view(np.float32).reshape(*values.shape, 2)


def _arrays(phases: Any, values: Any) -> Iterator[tuple[int, ArraysStruct]]:
    records = np.concatenate([phases, values.view(np.uint32)], 1)
    for begin in range(0, len(records), CONSTANT_SAMPLES):
        struct, part = ArraysStruct(), records[begin : begin + CONSTANT_SAMPLES]
        np.frombuffer(memoryview(struct), np.uint32).reshape(5, -1)[:, : len(part)] = part.T
        yield len(part), struct


def _structures(phases: Any, values: Any) -> Iterator[tuple[int, StructuresStruct]]:
    records = np.concatenate([phases, values.view(np.uint32)], 1)
    for begin in range(0, len(records), CONSTANT_SAMPLES):
        struct, part = StructuresStruct(), records[begin : begin + CONSTANT_SAMPLES]
        np.frombuffer(struct.sample, np.uint32).reshape(-1, 5)[: len(part)] = part
        yield len(part), struct


def _run_constant(task: Any, entry: str, chunks: Callable[[Any, Any], Iterator[Any]], points_a_thread: int) -> None:
    phases, values = _host_values(task)
    task.images.fill(0)
    points = math.prod(task.plan.sizes)
    blocks = blocks_of(points, LADDER_THREADS) if points_a_thread == 1 else _row_blocks(task, LADDER_THREADS)
    for image, of_coil in zip(task.images, values, strict=True):
        for count, struct in chunks(phases, of_coil):
            task.launch(entry, (blocks,), LADDER_THREADS, struct, ctypes.c_int(count), image, task.struct)


def _run_coarsened(task: Any, fast: str) -> None:
    _run_constant(task, f"exact_coarsened<{_spread(task)}, {fast}>", _structures, COARSE_POINTS)


def _run_staged(task: Any) -> None:
    weighted = _weighted(task)
    task.images.fill(0)
    grid = (_row_blocks(task, STAGED_SAMPLES), task.coils)
    args = (weighted, task.plan.phases, task.images, task.struct)
    task.launch(f"exact_staged<{_spread(task)}>", grid, STAGED_SAMPLES, *args)


def _entries(*names: str) -> tuple[str, ...]:
    """Entries for FᴴD and for Q, which replace `{}` by "false" and "true"."""
    return tuple(name.format(kind) for name in names for kind in ("false", "true"))


_WEIGH = "exact_weigh<{}>"

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "exact_scatter": Variant(
            summary="a thread a sample: atomic additions to every point",
            entries=_entries("exact_scatter<{}>"),
            run=_run_scatter,
        ),
        "exact_gather": Variant(
            summary="loop fission and interchange, a thread a point: no atomics, sums in memory",
            entries=_entries(_WEIGH, "exact_gather<{}>"),
            run=lambda task: _run_gather(task, "exact_gather"),
        ),
        "exact_registers": Variant(
            summary="the sum in registers: one write a point",
            entries=_entries(_WEIGH, "exact_registers<{}>"),
            run=lambda task: _run_gather(task, "exact_registers"),
        ),
        "exact_constant": Variant(
            summary="samples from constant memory: five arrays, broadcast to a warp",
            entries=_entries(_WEIGH, "exact_constant<{}>"),
            run=lambda task: _run_constant(task, f"exact_constant<{_spread(task)}>", _arrays, 1),
        ),
        "exact_structures": Variant(
            summary="a sample's five numbers side by side: one line of the constant cache instead of five",
            entries=_entries(_WEIGH, "exact_structures<{}>"),
            run=lambda task: _run_constant(task, f"exact_structures<{_spread(task)}>", _structures, 1),
        ),
        "exact_coarsened": Variant(
            summary="a thread eight points of a row: loads and the row's phase shared",
            entries=_entries(_WEIGH, "exact_coarsened<{}, false>"),
            run=lambda task: _run_coarsened(task, "false"),
        ),
        "exact_special": Variant(
            summary="sines and cosines by the special-function unit, phases reduced in fixed point",
            entries=_entries(_WEIGH, "exact_coarsened<{}, true>"),
            run=lambda task: _run_coarsened(task, "true"),
        ),
        "exact_staged": Variant(
            summary="samples through shared memory: one launch, nothing through the host",
            entries=_entries(_WEIGH, "exact_staged<{}>"),
            run=_run_staged,
        ),
    }
)
