"""A stage of a decimated Gaussian along two neighbouring axes at once, kernels of planes.cuh: their use and launch."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import Any

from kernels.runtime.launch import kernel, multiprocessors
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda.block_partition import up_to
from kernels.smoothing.decimated import Resampling

THREADS = 256
STRIP_SAMPLES = 4 * THREADS  # of a row that a block of decimate_plane sums
MOST_WEIGHTS = 48
MOST_CHANNELS = 8
MOST_BLOCKS = (1 << 31) - 1
BLOCKS_A_MULTIPROCESSOR = 12  # several times what runs at once, so that the last ones finish together
# Of decimate_plane: it reads `order` coarse rows' worth above those that it writes.
LEAST_STEPS, LEAST_SMALL_STEPS = 24, 8  # the second if the first leave multiprocessors idle
C_TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "int16": "short", "float32": "float"}
STAGES = ((2, 6), (4, 6), (8, 4), (8, 6))  # factors and orders
BYTE_STAGES = ((4, 6), (8, 4))  # the last to be interpolated for results that are bytes
PREFILTERS = ((2, 7), (4, 19), (4, 23), (8, 29), (8, 43))  # factors and taps
ENTRIES = (
    *(f"decimate_plane<{c}, {factor}, {taps}>" for c in C_TYPES.values() for factor, taps in PREFILTERS),
    *(
        f"interpolate_plane<{c}, {factor}, {order}, {order_y}>"
        for c, (factor, order), order_y in itertools.product(C_TYPES.values(), STAGES, (4, 6))
        if c != "unsigned char" or (factor, order) in BYTE_STAGES
    ),
)


class Plane(ctypes.Structure):
    """struct Plane of planes.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("rows", "columns", "out_rows", "out_columns", "first_y", "first_x")),
        ("cell_x", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in ("channels", "factor_y", "taps_y", "factor_x", "taps_x", "mode_y", "mode_x")
        ),
        *((name, ctypes.c_int) for name in ("tile", "steps")),
    )


class PlaneWeights(ctypes.Structure):
    """struct PlaneWeights of planes.cuh."""

    _fields_ = (("y", ctypes.c_float * MOST_WEIGHTS), ("x", ctypes.c_float * MOST_WEIGHTS))


def applies(values: Any, steps: Sequence[Resampling]) -> bool:
    if values.dtype.name not in C_TYPES or len(steps) != 2 or steps[0].axis + 1 != steps[1].axis:
        return False
    if any(step.stage.factor == 1 for step in steps):  # a derivative
        return False
    channels = math.prod(values.shape[steps[1].axis + 1 :])
    most = max(values.size, math.prod(values.shape[: steps[0].axis]) * steps[0].count * steps[1].count * channels)
    return bool(channels <= MOST_CHANNELS and most <= MOST_BLOCKS)


def decimate(values: Any, steps: Sequence[Resampling], out: Any, stream: Any) -> None:
    down, across = steps
    plane = _plane(values, steps, len(down.stage.down), len(across.stage.down))
    held = (STRIP_SAMPLES - 3) // plane.channels  # pixels of a strip, which may start three samples early
    results = THREADS * (2 if down.stage.factor == 2 else 1)
    most = min((held - plane.taps_x) // plane.factor_x + 1, results // plane.channels)
    plane.tile = min(most, plane.out_columns)
    planes = math.prod(values.shape[: down.axis])
    tiles = -(-plane.out_columns // plane.tile)
    wanted = max(BLOCKS_A_MULTIPROCESSOR * multiprocessors() // (tiles * planes), 1)
    idle = tiles * planes * -(-plane.out_rows // LEAST_STEPS) < 2 * multiprocessors()
    plane.steps = min(max(-(-plane.out_rows // wanted), LEAST_SMALL_STEPS if idle else LEAST_STEPS), plane.out_rows)
    blocks = tiles * planes * -(-plane.out_rows // plane.steps)
    weights = PlaneWeights()
    weights.y[: plane.taps_y], weights.x[: plane.taps_x] = down.stage.down, across.stage.down
    entry = f"decimate_plane<{C_TYPES[values.dtype.name]}, {down.stage.factor}, {plane.taps_y}>"
    fills = ctypes.c_float(down.fill), ctypes.c_float(across.fill)
    kernel("smoothing", entry).launch((blocks,), (THREADS,), (values, out, plane, weights, *fills), stream=stream)


def interpolate(values: Any, steps: Sequence[Resampling], out: Any, stream: Any) -> None:
    down, across = steps
    plane = _plane(values, steps, down.stage.order, across.stage.order)
    plane.cell_x, plane.first_x = divmod(plane.first_x, plane.factor_x)
    cells = -(-(plane.first_x + plane.out_columns) // plane.factor_x)
    # Tiles of whole vectors of 16 bytes, so that all rows of all tiles are aligned if the image's rows are.
    unit = 16 // math.gcd(16, plane.channels * plane.factor_x * out.dtype.itemsize)
    plane.tile = min(THREADS // plane.channels // unit * unit, cells) * plane.channels
    planes = math.prod(values.shape[: down.axis])
    tiles = -(-cells * plane.channels // plane.tile)
    wanted = max(2 * BLOCKS_A_MULTIPROCESSOR * multiprocessors() // (tiles * planes), 1)
    # Whole cells, which are interpolated several rows at a time.
    plane.steps = min(max(up_to(-(-plane.out_rows // wanted), 8), 4 * plane.factor_y), plane.out_rows)
    blocks = tiles * planes * -(-plane.out_rows // plane.steps)
    weights = PlaneWeights()
    for held, step in ((weights.y, down), (weights.x, across)):
        flat = [weight for phase in step.stage.up for weight in phase]
        held[: len(flat)] = flat
    entry = (
        f"interpolate_plane<{C_TYPES[out.dtype.name]}, {across.stage.factor}, {across.stage.order}, {down.stage.order}>"
    )
    kernel("smoothing", entry).launch((blocks,), (THREADS,), (values, out, plane, weights), stream=stream)


def _plane(values: Any, steps: Sequence[Resampling], taps_y: int, taps_x: int) -> Plane:
    down, across = steps
    return Plane(
        rows=values.shape[down.axis], columns=values.shape[across.axis], out_rows=down.count, out_columns=across.count,
        first_y=down.first, first_x=across.first, channels=math.prod(values.shape[across.axis + 1 :]),
        factor_y=down.stage.factor, taps_y=taps_y, factor_x=across.stage.factor, taps_x=taps_x,
        mode_y=MODES.index(down.mode), mode_x=MODES.index(across.mode),
    )  # fmt: skip
