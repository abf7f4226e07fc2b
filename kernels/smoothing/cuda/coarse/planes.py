"""A stage of a decimated Gaussian along two neighbouring axes at once, kernels of planes.cuh: their use and launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from kernels.runtime.launch import kernel, multiprocessors
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda.block_partition import up_to
from kernels.smoothing.decimated import Resampling

THREADS = 256
MOST_PLACES, PLACE_THREADS = {1: 256, 3: 128}, {1: 288, 3: 128}  # of interpolate_plane, by the channels of a thread
STRIP_SAMPLES = 4 * THREADS  # of a row that a block of decimate_plane sums
MOST_WEIGHTS = 48
MOST_CHANNELS = 8
MOST_BLOCKS = (1 << 31) - 1
BLOCKS_A_MULTIPROCESSOR = 12  # several times what runs at once, so that the last ones finish together
# Of decimate_plane, which reads `order` coarse rows' worth above those that it writes: coarse rows of a block, and the
# second if the first leave multiprocessors idle; blocks that a multiprocessor holds, of floats by factor.
LEAST_STEPS, LEAST_SMALL_STEPS, MOST_ROUNDS = 24, 4, 3
RESIDENT, RESIDENT_FLOAT = 4, {2: 4, 3: 3, 4: 3, 8: 2}
C_TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "int16": "short", "float32": "float"}
# By the type of the input, the factor and taps of a stage down the columns. Bytes have those of all others if derived.
PREFILTERS = {
    "uint8": ((2, 7), (3, 17), (4, 13), (4, 19), (4, 23), (8, 15), (8, 29), (8, 43), (8, 47)),
    "uint16": ((2, 7), (3, 17), (4, 19), (4, 23), (8, 29), (8, 43), (8, 47)),
    "int16": ((2, 7), (3, 17), (4, 19), (4, 23), (8, 29), (8, 43), (8, 47)),
    "float32": ((2, 7), (3, 17), (4, 13), (4, 19), (4, 23), (8, 29), (8, 43), (8, 47)),
}
# By the type of the result, the factor and order of a stage along the rows, and the order down the columns. Order 2
# down the columns, which only bytes have, is order 4 with two weights of 0.
_SPLINES = tuple((*across, down) for across in ((3, 6), (4, 6), (8, 4), (8, 6)) for down in (4, 6))
SPLINES = {
    "uint8": ((4, 4, 4), (8, 2, 4), (8, 4, 4)),
    "uint16": _SPLINES,
    "int16": _SPLINES,
    "float32": (*_SPLINES, (2, 6, 6), (4, 4, 4)),
}


def _interpolation(dtype: str, factor: int, order: int, order_y: int, channels: int) -> tuple[str, int]:
    """The kernel, and the channels that each of its threads interpolates."""
    group = 3 if channels == 3 and (dtype == "uint8" or (dtype == "uint16" and order == order_y)) else 1
    return f"interpolate_plane<{C_TYPES[dtype]}, {factor}, {order}, {order_y}, {group}>", group


_INTERPOLATIONS = (
    _interpolation(name, *stage, channels)[0] for name, each in SPLINES.items() for stage in each for channels in (1, 3)
)
ENTRIES = (
    *(
        f"decimate_plane<{C_TYPES[name]}, {factor}, {taps}>"
        for name, each in PREFILTERS.items()
        for factor, taps in each
    ),
    *dict.fromkeys(_INTERPOLATIONS),
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
    results = 4 * THREADS // plane.factor_y  # that the block sums along a row
    most = min((held - plane.taps_x) // plane.factor_x + 1, results // plane.channels)
    plane.tile = min(most, plane.out_columns)
    planes = math.prod(values.shape[: down.axis])
    tiles = -(-plane.out_columns // plane.tile)
    # As many bands as fill the multiprocessors one to three times.
    resident = RESIDENT_FLOAT[plane.factor_y] if values.dtype.kind == "f" else RESIDENT
    at_once = resident * multiprocessors()
    rounds = min(max(tiles * planes * plane.out_rows // (at_once * LEAST_STEPS), 1), MOST_ROUNDS)
    bands = max(rounds * at_once // (tiles * planes), 1)
    plane.steps = min(max(-(-plane.out_rows // bands), LEAST_SMALL_STEPS), plane.out_rows)
    blocks = tiles * planes * -(-plane.out_rows // plane.steps)
    weights = PlaneWeights()
    # Unsigned samples are taken by their bits, as floats of 2**-149 of their value.
    scale_y, scale_x = (2.0**126, 2.0**23) if values.dtype.kind == "u" else (1.0, 1.0)
    weights.y[: plane.taps_y] = [scale_y * weight for weight in down.stage.down]
    weights.x[: plane.taps_x] = [scale_x * weight for weight in across.stage.down]
    entry = f"decimate_plane<{C_TYPES[values.dtype.name]}, {down.stage.factor}, {plane.taps_y}>"
    args = (values, out, plane, weights, ctypes.c_float(down.fill), ctypes.c_float(across.fill / scale_x))
    # The finest stage waits, since it needs the L1 cache, which the kernel before may have given to shared memory.
    early = down.mode == "valid"  # of a coarser grid
    kernel("smoothing", entry).launch((blocks,), (THREADS,), args, stream=stream, dependent_launch=early)


def interpolate(values: Any, steps: Sequence[Resampling], out: Any, stream: Any) -> None:
    down, across = steps
    order, order_y = across.stage.order, max(down.stage.order, 4)
    plane = _plane(values, steps, order_y, order)
    plane.cell_x, plane.first_x = divmod(plane.first_x, plane.factor_x)
    cells = -(-(plane.first_x + plane.out_columns) // plane.factor_x)
    entry, group = _interpolation(out.dtype.name, plane.factor_x, order, order_y, plane.channels)
    threads, apart = PLACE_THREADS[group], plane.channels // group  # places of a cell
    # Tiles of whole vectors of 16 bytes, so that all rows of all tiles are aligned if the image's rows are.
    unit = 16 // math.gcd(16, plane.channels * plane.factor_x * out.dtype.itemsize)
    most = min(threads // apart - order + (group == 1), MOST_PLACES[group] // apart)  # in pairs, if grouped
    plane.tile = min(most // unit * unit, cells) * apart
    planes = math.prod(values.shape[: down.axis])
    tiles = -(-cells * apart // plane.tile)
    wanted = max(2 * BLOCKS_A_MULTIPROCESSOR * multiprocessors() // (tiles * planes), 1)
    # Whole cells, which are interpolated several rows at a time: four, if they leave no multiprocessor idle.
    idle = tiles * planes * plane.out_rows < 4 * plane.factor_y * 2 * multiprocessors()
    least = plane.factor_y if idle else 4 * plane.factor_y
    plane.steps = min(max(up_to(-(-plane.out_rows // wanted), math.lcm(8, plane.factor_y)), least), plane.out_rows)
    blocks = tiles * planes * -(-plane.out_rows // plane.steps)
    weights = PlaneWeights()
    for held, step, width in ((weights.y, down, order_y), (weights.x, across, order)):
        flat = [weight for phase in step.stage.up for weight in (*phase, 0.0, 0.0)[:width]]
        held[: len(flat)] = flat
    args = (values, out, plane, weights)
    kernel("smoothing", entry).launch((blocks,), (threads,), args, stream=stream, dependent_launch=True)


def _plane(values: Any, steps: Sequence[Resampling], taps_y: int, taps_x: int) -> Plane:
    down, across = steps
    return Plane(
        rows=values.shape[down.axis], columns=values.shape[across.axis], out_rows=down.count, out_columns=across.count,
        first_y=down.first, first_x=across.first, channels=math.prod(values.shape[across.axis + 1 :]),
        factor_y=down.stage.factor, taps_y=taps_y, factor_x=across.stage.factor, taps_x=taps_x,
        mode_y=MODES.index(down.mode), mode_x=MODES.index(across.mode),
    )  # fmt: skip
