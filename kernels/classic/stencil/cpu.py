"""Stencil steps of NumPy arrays: our own threads process slabs of planes step by step, with Numba-compiled code. Each
point is one expression, so the bits depend on the field alone."""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled

Array = NDArray[Any]

MIN_POINTS_A_WORKER = 1 << 16  # below this a thread costs more than it saves


def stencil(
    field: Array, centre: float, neighbour: float, steps: int, out: Array | None, *, workers: int | None = None
) -> Array:
    """The field after `steps` steps; see kernels.classic.stencil."""
    source = np.ascontiguousarray(field, np.float32)
    if out is None:
        out = np.empty(field.shape, np.float32)
    if steps == 0 or not out.size:
        out[...] = field
        return out
    workers = min(workers or len(os.sched_getaffinity(0)), len(field), -(-out.size // MIN_POINTS_A_WORKER))
    ends = [len(field) * i // workers for i in range(workers + 1)]
    other = np.empty_like(out) if steps > 1 else out
    factors = np.float32(centre), np.float32(neighbour)
    with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        for step in range(steps):
            target = out if (steps - step) % 2 else other
            take = functools.partial(_step, source, target, *factors)
            if pool is None:
                take(0, len(field))
            else:
                list(pool.map(take, ends[:-1], ends[1:]))
            source = target
    return out


def _step(source: Array, target: Array, centre: np.float32, neighbour: np.float32, first: int, end: int) -> None:
    """Planes first … end - 1 of one step."""
    _inside(source, target, centre, neighbour, first, end)
    for side in (0, -1):
        target[first:end, side] = source[first:end, side]
        target[first:end, :, side] = source[first:end, :, side]
    for plane in {0, len(source) - 1}.intersection(range(first, end)):
        target[plane] = source[plane]


@compiled
def _inside(source: Array, target: Array, centre: np.float32, neighbour: np.float32, first: int, end: int) -> None:
    nz, ny, nx = source.shape
    for z in range(max(first, 1), min(end, nz - 1)):
        for y in range(1, ny - 1):
            row, south, north = source[z, y], source[z, y - 1], source[z, y + 1]
            below, above, result = source[z - 1, y], source[z + 1, y], target[z, y]
            for x in range(1, nx - 1):
                around = ((row[x - 1] + row[x + 1]) + (south[x] + north[x])) + (below[x] + above[x])
                result[x] = centre * row[x] + neighbour * around
