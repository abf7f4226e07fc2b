"""Boxes over floats of more than 255 samples, one axis per pass, kernels of runs.cuh, and their launch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from kernels.runtime.launch import (
    blocks_of,
    kernel,
    multiprocessors,
    shared_bytes_a_block,
    shared_bytes_a_multiprocessor,
)
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda.block_partition import up_to
from kernels.smoothing.cuda.boxes import streamed
from kernels.smoothing.window import RUN, Window

ENTRIES = (
    *(f"{kernel}<{real}>" for kernel in ("box_run_totals", "box_runs") for real in ("float", "double", "Pair")),
    *(f"box_run_rows<{real}>" for real in ("float", "double")),
)
SCALARS = {"float32": ctypes.c_float, "float64": ctypes.c_double}
PAIR_BYTES = 8
THREADS, ROW_THREADS = 256, 512
MAX_BLOCKS = 1 << 30  # box_double loops if there is more to do
MOST_CHANNELS, MOST_LENGTH = 8, 1 << 30  # of box_run_rows, whose positions are numbers of 32 bits
RUN_WORDS = 2 * RUN + 3  # that it keeps of a run: heads, tails, and sums of runs
RESERVED_BYTES = 1024  # of shared memory, by the driver, for each block
THREADS_A_MULTIPROCESSOR = 2048
MOST_HEIGHT = 4  # runs of a band


class Pair(ctypes.Structure):
    """struct Pair of runs.cuh."""

    _fields_ = (("a", ctypes.c_float), ("b", ctypes.c_float))


class Runs(ctypes.Structure):
    """struct Runs of runs.cuh."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("lead", "steps", "rest", "count", "bands", "height", "outputs"))


def launch(axis: Any, window: Window, source: Any, target: Any, fill: Any, scale: Any, stream: Any) -> None:
    """One axis's pass. `axis` is struct Axis of smoothing.cu; fill and scale are ctypes values of the arrays' type."""
    real = streamed.REALS[source.dtype.name]
    runs = Runs(lead=window.lead, steps=(axis.taps - 1) // RUN, rest=(axis.taps - 1) % RUN)
    runs.count = (runs.lead + axis.out_length + axis.taps - 2) // RUN + 1
    runs.outputs = _row_outputs(axis, source.dtype.itemsize)
    if runs.outputs:
        shared = _row_bytes(axis, runs.outputs, source.dtype.itemsize)
        blocks = axis.outer * -(-axis.out_length // runs.outputs)
        kernel("smoothing", f"box_run_rows<{real}>").launch(
            (blocks,), (ROW_THREADS,), (source, target, axis, runs, fill, scale), shared_bytes=shared, stream=stream
        )
        return
    totals = type(source)((axis.outer, runs.count, axis.inner), source.dtype)
    columns = axis
    if source.dtype == np.float32 and axis.inner % 2 == 0 and (source.data.ptr | target.data.ptr) % PAIR_BYTES == 0:
        real, fill, scale = "Pair", Pair(fill, fill), Pair(scale, scale)
        columns = type(axis)(*(getattr(axis, name) for name, _ in axis._fields_))
        columns.inner //= 2
    threads = columns.outer * columns.inner  # of a row of runs
    kernel("smoothing", f"box_run_totals<{real}>").launch(
        (blocks_of(threads * runs.count, THREADS),), (THREADS,), (source, totals, columns, runs, fill), stream=stream
    )
    whole = _sums_of(totals, runs.steps - 1, axis, stream)
    heights = -(-(runs.lead + axis.out_length) // RUN)
    runs.height = min(max(heights * threads // (THREADS_A_MULTIPROCESSOR * multiprocessors()), 1), MOST_HEIGHT)
    runs.bands = -(-heights // runs.height)
    kernel("smoothing", f"box_runs<{real}>").launch(
        (blocks_of(threads * runs.bands, THREADS),), (THREADS,),
        (source, totals, whole, target, columns, runs, ctypes.c_longlong(whole.shape[1]), fill, scale), stream=stream,
    )  # fmt: skip


def doubled(samples: Any, taps: int, inner: int, c_type: str, stream: Any) -> Any:
    """Sums of `taps` samples, each `inner` after the one before, by doubling in device memory; those that reach past a
    line's end are not used."""
    sums, done = samples, 1
    for bit in f"{taps:b}"[1:]:
        source, sums = sums, type(samples)(samples.shape, samples.dtype)
        total, reach = ctypes.c_longlong(samples.size), ctypes.c_longlong(done * inner)
        kernel("smoothing", f"box_double<{c_type}>").launch(
            (min(blocks_of(samples.size, THREADS), MAX_BLOCKS),), (THREADS,),
            (source, samples, sums, total, reach, ctypes.c_int(bit == "1")), stream=stream,
        )  # fmt: skip
        done = 2 * done + (bit == "1")
    return sums


def _sums_of(totals: Any, taps: int, axis: Any, stream: Any) -> Any:
    """The sums of `taps` neighbours along the second axis; rows past the last are not used."""
    outer, count, inner = totals.shape
    window = Window(axis=1, before=0, after=taps - 1, mode="valid")
    if window.is_long_box or not streamed.applies(totals.shape, totals.dtype, [window]):
        return doubled(totals, taps, inner, streamed.REALS[totals.dtype.name], stream)
    sums = type(totals)((outer, count - taps + 1, inner), totals.dtype)
    along = type(axis)(
        outer=outer, length=count, inner=inner, out_length=sums.shape[1], before=0, taps=taps, mode=MODES.index("valid")
    )
    scalar = SCALARS[totals.dtype.name]
    streamed.launch(along, totals, sums, scalar(0), scalar(1), stream)
    return sums


def _row_outputs(axis: Any, itemsize: int) -> int:
    """Results of a line that a block of box_run_rows computes; 0 if too few fit shared memory."""
    if axis.inner > MOST_CHANNELS or axis.length + 2 * axis.taps > MOST_LENGTH:
        return 0
    for most in (shared_bytes_a_multiprocessor() // 2 - RESERVED_BYTES, shared_bytes_a_block()):
        room = most // (axis.inner * RUN_WORDS * itemsize) * RUN - 4 * RUN - axis.taps
        if 2 * room >= min(axis.taps, 2 * axis.out_length):
            return up_to(blocks_of(axis.out_length, blocks_of(axis.out_length, room)), RUN)
    return 0


def _row_bytes(axis: Any, outputs: int, itemsize: int) -> int:
    """Of shared memory, for the longest lead."""
    count = (RUN - 1 + outputs + axis.taps - 2) // RUN + 1
    return int(count * axis.inner * RUN_WORDS * itemsize)
