"""FFTs between images and the grid, an axis at a time, by the kernels of grid_lines.cuh."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from kernels.nufft.gridding.plan import SortedTrajectory, launch, three
from kernels.runtime.launch import blocks_of, shared_bytes_a_block

SMALLEST, LARGEST = 48, 1024  # values of a line; kernels of its size are compiled for each
NEIGHBOURS, ROW_THREADS = 8, 256  # lines of a block across memory; threads of a block along it
SIZES = (80, 84, 360, 512)  # that between them have passes of every radix


class LinePassStruct(ctypes.Structure):
    """struct LinePass of grid_lines.cuh."""

    _fields_ = [
        ("image", ctypes.c_int),
        ("outers", ctypes.c_int),
        ("inner", ctypes.c_int),
        ("from_stride", ctypes.c_longlong),
        ("to_stride", ctypes.c_longlong),
        ("from_outer", ctypes.c_longlong),
        ("to_outer", ctypes.c_longlong),
        ("from_coil", ctypes.c_longlong),
        ("to_coil", ctypes.c_longlong),
    ]


@functools.cache
def twiddles(size: int, device: int) -> Any:
    """exp(−2πi k / size), complex64 on a device."""
    import cupy

    with cupy.cuda.Device(device):
        return cupy.asarray(np.exp(-2j * np.pi * np.arange(size) / size), cupy.complex64)


def fits(grid: tuple[int, ...]) -> bool:
    """Whether the current device can transform lines of a grid, and gains from it."""
    most = max(grid)
    return min(grid) >= SMALLEST and most <= LARGEST and buffers_bytes(most, NEIGHBOURS) <= shared_bytes_a_block()


def buffers_bytes(size: int, lines: int) -> int:
    return 2 * (size + size // 8) * lines * 8


def transform(plan: SortedTrajectory, images: Any, grid: Any, inverse: bool, stream: Any) -> None:
    """Images [coils, *shape] to the values of a grid [coils, *grid]; inverse, the reverse, overwriting the grid."""
    coils = len(images)
    for axis, struct in _passes(three(plan.shape), three(plan.grid), inverse):
        size, rows = three(plan.grid)[axis], axis == 2
        threads = -(-size // 8)
        lines = max(ROW_THREADS // threads, 1) if rows else NEIGHBOURS
        blocks = blocks_of(struct.outers, lines) if rows else struct.outers * blocks_of(struct.inner, lines)
        source = images if axis == 0 and not inverse else grid
        target = images if axis == 0 and inverse else grid
        entry = f"grid_lines<{size}, {str(rows).lower()}, {str(inverse).lower()}>"
        args = (source, target, plan.scales[axis], twiddles(size, plan.device.id), struct)
        launch(
            entry,
            (blocks, coils),
            threads * lines,
            *args,
            stream=stream,
            shared_bytes=buffers_bytes(size, lines),
            dependent_launch=True,
        )


def _passes(
    image: tuple[int, int, int], grid: tuple[int, int, int], inverse: bool
) -> Iterator[tuple[int, LinePassStruct]]:
    """The axes in order, x first if forward, and their lines; in 2-D there is no y."""
    cells, pixels = math.prod(grid), math.prod(image)
    on_grid = {0: (grid[1] * grid[2], grid[2]), 1: (grid[2], grid[1] * grid[2]), 2: (1, grid[2])}  # stride, outer's
    outers = {0: image[1], 1: grid[0], 2: grid[0] * grid[1]}
    for axis in (0, 1, 2)[:: -1 if inverse else 1]:
        if grid[axis] == 1:
            continue
        here, there = (*on_grid[axis], cells), (*on_grid[axis], cells)
        if axis == 0:
            of_images = (image[1] * image[2], image[2], pixels)
            here, there = (here, of_images) if inverse else (of_images, there)
        yield (
            axis,
            LinePassStruct(
                image=image[axis],
                outers=outers[axis],
                inner=image[2],
                from_stride=here[0],
                to_stride=there[0],
                from_outer=here[1],
                to_outer=there[1],
                from_coil=here[2],
                to_coil=there[2],
            ),
        )
