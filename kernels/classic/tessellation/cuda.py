"""Tessellation on CUDA: which kernels of tessellation.cu count and fill."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream

OPTIONS = ("--fmad=false",)  # same bits as on the CPU

# Tuned on an H200 (sm_90), as in tessellation.cu.
THREADS, FIXED_THREADS, FILLED = 256, 32, 2048


@dataclass(kw_only=True)
class Task:
    """Curves to tessellate; a run sets the result."""

    curves: Any  # CuPy float32 [n, 3, 2], n > 0, C-contiguous
    tolerance: float
    max_segments: int
    stream: Any
    offsets: Any = field(init=False)
    points: Any = field(init=False)

    @property
    def count(self) -> int:
        return len(self.curves)

    def launch(self, entry: str, blocks: int, threads: int, *args: Any) -> None:
        kernel("tessellation", entry).launch((blocks,), (threads,), args, stream=self.stream)

    def rule(self) -> tuple[Any, Any]:
        return ctypes.c_double(0.25 / self.tolerance), ctypes.c_int(self.max_segments)

    def sum_up(self) -> None:
        """Turns counts into offsets and allocates the points; the host reads their number."""
        import cupy

        cupy.cumsum(self.offsets, out=self.offsets)
        total = int(self.offsets[-1:].get(stream=self.stream)[0])
        self.points = cupy.empty((total, 2), np.float32)


def tessellate(
    curves: Any, tolerance: float, max_segments: int, *, stream: Any = None, variant: str | None = None
) -> dict[str, Any]:
    """Offsets and points of a CuPy array of curves; see kernels.classic.tessellation.

    variant : a name in `VARIANTS`; default the fastest
    """
    import cupy

    with on_stream(curves, stream) as current:
        if len(curves) == 0:
            return {"offsets": cupy.zeros(1, np.int64), "points": cupy.empty((0, 2), np.float32)}
        task = Task(
            curves=cupy.ascontiguousarray(curves, np.float32),
            tolerance=tolerance,
            max_segments=max_segments,
            stream=current,
        )
        VARIANTS[PRODUCTION if variant is None else variant].run(task)
    return {"offsets": task.offsets, "points": task.points}


def _count(task: Task) -> None:
    import cupy

    task.offsets = cupy.empty(task.count + 1, np.int64)
    args = (task.curves, ctypes.c_longlong(task.count), *task.rule(), task.offsets[1:])
    task.launch("count_points", blocks_of(task.count, THREADS), THREADS, *args)
    task.sum_up()


def _run_fixed(task: Task) -> None:
    import cupy

    task.offsets = cupy.empty(task.count + 1, np.int64)
    slots = cupy.empty((task.count, task.max_segments + 1, 2), np.float32)
    task.launch("fill_fixed", task.count, FIXED_THREADS, task.curves, *task.rule(), slots, task.offsets[1:])
    task.sum_up()
    args = (slots, task.offsets, ctypes.c_int(task.max_segments), task.points)
    task.launch("pack", task.count, FIXED_THREADS, *args)


def _run_filled(task: Task, entry: str, curves_a_block: int) -> None:
    _count(task)
    args = (task.curves, ctypes.c_longlong(task.count), task.offsets, task.points)
    task.launch(entry, blocks_of(task.count, curves_a_block), THREADS, *args)


def _filling(entry: str, curves_a_block: int) -> Callable[[Any], None]:
    return lambda task: _run_filled(task, entry, curves_a_block)


def _run_balanced(task: Task) -> None:
    import cupy

    _count(task)
    tiles, count = blocks_of(len(task.points), FILLED), ctypes.c_longlong(task.count)
    first_curves = cupy.empty(tiles, np.int32)
    blocks = blocks_of(task.count, THREADS)
    task.launch("find_first_curves", blocks, THREADS, task.offsets, count, first_curves)
    args = (task.curves, count, task.offsets, first_curves, task.points)
    task.launch("fill_balanced", tiles, THREADS, *args)


# Naive to fast; the last is the one in production.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "fixed": Variant(
            summary="one block per curve with room for the maximum, packed afterwards: all points move twice",
            entries=("fill_fixed", "pack"),
            run=_run_fixed,
        ),
        "threads": Variant(
            summary="count, prefix sum, fill by one thread per curve: nothing moves twice, but writes are scattered",
            entries=("count_points", "fill_threads"),
            run=_filling("fill_threads", THREADS),
        ),
        "warps": Variant(
            summary="one warp per curve: coalesced writes, but lanes idle at a curve's end",
            entries=("count_points", "fill_warps"),
            run=_filling("fill_warps", THREADS // 32),
        ),
        "balanced": Variant(
            summary="2048 points of the result per block; marks locate the curves' first points: no thread idles",
            entries=("count_points", "find_first_curves", "fill_balanced"),
            run=_run_balanced,
        ),
    }
)
PRODUCTION = "balanced"


def ladders() -> tuple[Ladder, ...]:
    """Curves of similar size, and curves of which a few make most of the points."""
    return (
        _ladder("2²¹ curves of 8 to 61 points", 2e-3, even=True),
        _ladder("2²¹ curves, a fiftieth of which make most points", 2e-3, even=False),
    )


def _ladder(name: str, tolerance: float, *, even: bool) -> Ladder:
    count, most = 1 << 21, 256

    @cache
    def curves() -> Any:
        """Bends are set, not random, so that the number of points is known without a device."""
        import cupy

        rng, made = cupy.random.default_rng(1), cupy.zeros((count, 3, 2), np.float32)
        made[:, 0] = rng.random((count, 2), np.float32)
        made[:, 2] = made[:, 0]
        made[:, 1] = made[:, 0]
        made[:, 1, 0] += cupy.asarray(_bends(count, tolerance, even=even))
        return made

    points = int((_segments(count, even=even) + 1).sum())

    def prepare(variant: str) -> Callable[[], Any]:
        return lambda: tessellate(curves(), tolerance, most, variant=variant)

    return Ladder(
        name=f"{name}, {points} points",
        variants=tuple(VARIANTS),
        bytes=count * (2 * 24 + 4 * 8) + 8 * points,
        flops=14 * points,
        limit="copy",
        prepare=prepare,
        libraries=dict,
    )


def _segments(count: int, *, even: bool) -> Any:
    """The number of segments of each curve of a ladder."""
    mixed = np.arange(count, dtype=np.uint32) * np.uint32(2654435769) >> np.uint32(8)  # pseudo-random
    return 7 + mixed % 54 if even else np.where(mixed % 50 == 0, 250, 1 + mixed % 3)


def _bends(count: int, tolerance: float, *, even: bool) -> Any:
    """Half of a − 2b + c for these segments, slightly below the limit for one more."""
    return ((_segments(count, even=even) - 0.1) ** 2 * 2 * tolerance).astype(np.float32)
