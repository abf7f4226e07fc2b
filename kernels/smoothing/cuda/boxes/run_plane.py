"""Boxes over float32 of 65 to 128 samples, both axes at once, `box_run_plane`: when it applies, and its launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import blocks_of, kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.cuda.axis import axis_of
from kernels.smoothing.cuda.fused import view_of
from kernels.smoothing.window import RUN, Window

MOST_TAPS = 128
THREADS, MOST_PLACES = 32 * RUN, 25 * RUN  # columns of a strip, and of results
# (taps - 1) // RUN of the compiled kernels, and (taps - 1) % RUN: of 127 samples in images of one channel, and any
SHAPES = ((4, -1), (5, -1), (6, -1), (7, -1), (7, 14))
MAX_LENGTH = 1 << 30  # positions are 32-bit numbers
MAX_BLOCKS = (1 << 31) - 1
ENTRIES = tuple(f"box_run_plane<{steps}, {rest}>" for steps, rest in SHAPES)


class RunPlane(ctypes.Structure):
    """struct RunPlane of run_plane.cuh."""

    _fields_ = tuple(
        (name, ctypes.c_int)
        for name in (
            "lead_y", "rest_y", "lead_x", "rest_x", "tiles", "outputs", "first", "end", "bands", "height",
        )
    )  # fmt: skip


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if dtype != np.float32 or view is None or view.down is None or view.across is None:
        return False
    steps = {(window.taps - 1) // RUN for window in windows}
    if not all(window.is_long_box for window in windows) or len(steps) > 1 or (*steps, -1) not in SHAPES:
        return False
    if max(view.rows, view.columns * view.channels) > MAX_LENGTH or shared_bytes_a_block() < _shared_bytes(*steps):
        return False
    return view.planes * view.channels * blocks_of(view.columns, RUN) * blocks_of(view.rows, RUN) <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    down, across = windows
    rows, columns = (axis_of(image.shape, window) for window in windows)
    rest_y, rest_x = ((window.taps - 1) % RUN for window in windows)
    steps = (down.taps - 1) // RUN
    outputs = (min(THREADS - (across.taps - 1), MOST_PLACES) - across.lead) // RUN * RUN
    tiles = blocks_of(columns.out_length, outputs)
    first, end = (down.lead + down.taps - 1) // RUN, blocks_of(down.lead + down.taps - 1 + rows.out_length, RUN)
    bands, height = _bands(rows.outer * tiles * columns.inner, end - first, steps + 2)
    plane = RunPlane(
        lead_y=down.lead, rest_y=rest_y, lead_x=across.lead, rest_x=rest_x, tiles=tiles, outputs=outputs,
        first=first, end=end, bands=bands, height=height,
    )  # fmt: skip
    scale = ctypes.c_float(float(np.float32(1 / (down.taps * across.taps))))
    rest = rest_y if rest_y == rest_x and (steps, rest_y) in SHAPES and columns.inner == 1 else -1
    kernel("smoothing", f"box_run_plane<{steps}, {rest}>").launch(
        (rows.outer * tiles * bands * columns.inner,), (THREADS,),
        (image, out, rows, columns, plane, ctypes.c_float(cval), scale),
        shared_bytes=_shared_bytes(steps), stream=stream, dependent_launch=True,
    )  # fmt: skip


def _shared_bytes(steps: int) -> int:
    return 4 * steps * RUN * THREADS


def _bands(strips: int, runs: int, begin: int) -> tuple[int, int]:
    """How many bands, and the runs of each, finish first, if a block takes as long as for `begin` runs to start."""
    at_once = multiprocessors()
    heights = {blocks_of(runs, bands) for bands in range(1, min(runs, max(4 * at_once // strips, 1)) + 1)}
    height = min(heights, key=lambda each: blocks_of(strips * blocks_of(runs, each), at_once) * (each + begin))
    return blocks_of(runs, height), height
