"""Stencil steps on CUDA: which kernels of stencil.cu run, how many steps each takes at once, and their grids."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import blocks_of, kernel, multiprocessors, on_stream, shared_bytes_a_block

OPTIONS: tuple[str, ...] = ()

# Tuned on an H200 (sm_90); tiles and threads as in the headers.
POINT_TILE, POINT_THREADS = (32, 8), 256  # x, y
VECTOR_TILE, VECTOR_THREADS = (128, 16), 256
TEMPORAL_ROWS, TEMPORAL_WIDTH, TEMPORAL_THREADS = 32, 128 - 8, 512
BLOCKS_A_MULTIPROCESSOR = 32  # enough that the last blocks to finish do not matter
MIN_DEPTH = 32  # planes of a block, which reads two more

LADDER_SHAPE = (512, 1024, 1024)
LADDER_STEPS = 4


class FieldStruct(ctypes.Structure):
    """struct Field of points.cuh."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("nx", "ny", "nz", "depth")),
        ("centre", ctypes.c_float),
        ("neighbour", ctypes.c_float),
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """Steps on a field that is not empty. All arrays are C-contiguous."""

    field: Any
    centre: float
    neighbour: float
    steps: int  # 1 or more
    out: Any
    stream: Any

    def passes(self, launches: Iterable[Callable[[Task, Any, Any], None]]) -> None:
        """Launches passes between two buffers; the last one writes to `out`."""
        import cupy

        launches = tuple(launches)
        other = cupy.empty_like(self.out) if len(launches) > 1 else self.out
        source = self.field
        for left, launch in zip(range(len(launches), 0, -1), launches, strict=True):
            target = self.out if left % 2 else other
            launch(self, source, target)
            source = target

    def launch(
        self,
        entry: str,
        arrays: tuple[Any, Any],
        tile: tuple[int, int],
        threads: int,
        depth: int,
        *,
        shared_bytes: int = 0,
    ) -> None:
        nz, ny, nx = self.out.shape
        blocks = _blocks(nx, ny, tile) * blocks_of(nz, depth)
        struct = FieldStruct(nx, ny, nz, depth, self.centre, self.neighbour)
        kernel("stencil", entry).launch(
            (blocks,), (threads,), (*arrays, struct), shared_bytes=shared_bytes, stream=self.stream
        )

    def depth(self, tile: tuple[int, int], least: int = MIN_DEPTH) -> int:
        """Planes of a block: as many as leave enough blocks for the device."""
        nz, ny, nx = map(int, self.out.shape)
        slabs = blocks_of(BLOCKS_A_MULTIPROCESSOR * multiprocessors(), _blocks(nx, ny, tile))
        return max(blocks_of(nz, max(slabs, 1)), least)


def stencil(
    field: Any, centre: float, neighbour: float, steps: int, out: Any, *, stream: Any = None, variant: str | None = None
) -> Any:
    """Steps on a CuPy array; see kernels.classic.stencil. `variant`: a name in VARIANTS; default the fastest."""
    import cupy

    with on_stream(field, stream) as current:
        field = cupy.ascontiguousarray(field, np.float32)
        out = cupy.empty(field.shape, cupy.float32) if out is None else out
        if steps == 0 or not field.size:
            out[...] = field
            return out
        task = Task(field=field, centre=centre, neighbour=neighbour, steps=steps, out=out, stream=current)
        VARIANTS[variant or production(steps)].run(task)
    return out


def production(steps: int) -> str:
    """The variant that the public function runs."""
    return "vectors" if steps == 1 else "temporal_4"


def _blocks(nx: int, ny: int, tile: tuple[int, int]) -> int:
    return math.prod(map(blocks_of, (nx, ny), tile))


def _aligned(*arrays: Any) -> str:
    """Whether rows are whole vectors of 16 bytes, as a template argument."""
    return str(all(array.shape[2] % 4 == 0 and array.data.ptr % 16 == 0 for array in arrays)).lower()


def _launch_vectors(task: Task, source: Any, target: Any) -> None:
    entry = f"vectors<{_aligned(source, target)}>"
    task.launch(entry, (source, target), VECTOR_TILE, VECTOR_THREADS, task.depth(VECTOR_TILE))


def _shared_bytes(steps: int) -> int:
    """Shared memory of a block of temporal; `vectors`, for one step, needs none."""
    return 2 * steps * TEMPORAL_ROWS * 128 * 4 if steps > 1 else 0


def _launch_temporal(steps: int) -> Callable[[Task, Any, Any], None]:
    tile = (TEMPORAL_WIDTH, TEMPORAL_ROWS - 2 * steps)

    def launch(task: Task, source: Any, target: Any) -> None:
        entry, depth = f"temporal<{_aligned(source, target)}, {steps}>", task.depth(tile, MIN_DEPTH * steps)
        task.launch(entry, (source, target), tile, TEMPORAL_THREADS, depth, shared_bytes=_shared_bytes(steps))

    return launch


_LAUNCHES: Mapping[int, Callable[[Task, Any, Any], None]] = MappingProxyType(
    {1: _launch_vectors, 2: _launch_temporal(2), 4: _launch_temporal(4)}
)


def _one_by_one(entry: str, *, along_z: bool) -> Callable[[Task], None]:
    """A run with one pass per step, of a kernel with one thread per point or column."""

    def launch(task: Task, source: Any, target: Any) -> None:
        depth = task.depth(POINT_TILE) if along_z else 1
        task.launch(entry, (source, target), POINT_TILE, POINT_THREADS, depth)

    return lambda task: task.passes([launch] * task.steps)


def split_steps(steps: int, sizes: Iterable[int], shared_bytes: int) -> list[int]:
    """The steps of each pass, largest first: of `sizes`, those whose blocks fit the shared memory."""
    passes = []
    for size in sizes:
        if _shared_bytes(size) <= shared_bytes:
            passes += [size] * (steps // size)
            steps %= size
    return passes


def _passes_of(*sizes: int) -> Callable[[Task], None]:
    def run(task: Task) -> None:
        task.passes(_LAUNCHES[size] for size in split_steps(task.steps, sizes, shared_bytes_a_block()))

    return run


def _both(*kernels: str) -> tuple[str, ...]:
    return tuple(made.format(aligned) for made, aligned in itertools.product(kernels, ("true", "false")))


# In the order of the source, naive to fast.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "naive": Variant(
            summary="one thread per point: seven reads, six of them from caches at best",
            entries=("naive",),
            run=_one_by_one("naive", along_z=False),
        ),
        "pencil": Variant(
            summary="one thread per column along z: indices computed once, the next plane's points still in the cache",
            entries=("pencil",),
            run=_one_by_one("pencil", along_z=True),
        ),
        "register_queue": Variant(
            summary="below, here and above pass through registers: five reads per point",
            entries=("register_queue",),
            run=_one_by_one("register_queue", along_z=True),
        ),
        "shared_plane": Variant(
            summary="the plane's neighbours from shared memory: one read per point and rim, a barrier per plane",
            entries=("shared_plane",),
            run=_one_by_one("shared_plane", along_z=True),
        ),
        "vectors": Variant(
            summary="16 bytes per read, neighbours along x by shuffles, no barrier: in production for one step",
            entries=_both("vectors<{}>"),
            run=_passes_of(1),
        ),
        "temporal_2": Variant(
            summary="two steps in one pass over memory",
            entries=(*_both("temporal<{}, 2>"), *_both("vectors<{}>")),
            run=_passes_of(2, 1),
        ),
        "temporal_4": Variant(
            summary="four steps in one pass over memory (two where shared memory is small): in production for several",
            entries=(*_both("temporal<{}, 4>", "temporal<{}, 2>"), *_both("vectors<{}>")),
            run=_passes_of(4, 2, 1),
        ),
    }
)


def ladders() -> tuple[Ladder, ...]:
    """One step and several steps on a field far larger than L2."""
    shape, several = LADDER_SHAPE, LADDER_STEPS
    points = math.prod(shape)
    return tuple(
        Ladder(
            name=f"{steps} step{'s' * (steps > 1)} on a float32 field {' × '.join(map(str, shape))}",
            variants=variants,
            bytes=8 * points,
            flops=8 * points * steps,
            limit="copy",
            prepare=_preparing(shape, steps),
            libraries=dict,
        )
        for steps, variants in (
            (1, ("naive", "pencil", "register_queue", "shared_plane", "vectors")),
            (several, ("naive", "vectors", "temporal_2", "temporal_4")),
        )
    )


def _preparing(shape: tuple[int, ...], steps: int) -> Callable[[str], Callable[[], Any]]:
    def prepare(variant: str) -> Callable[[], Any]:
        import cupy

        field = cupy.random.default_rng(1).random(shape, dtype=cupy.float32)
        out = cupy.empty_like(field)
        return lambda: stencil(field, 0.4, 0.1, steps, out, variant=variant)

    return prepare
