"""Boxes over floats of more than 64 samples, one axis per pass, kernels of runs.cuh, and their launch."""

from __future__ import annotations

import ctypes
from typing import Any

from kernels.runtime.launch import (
    blocks_a_multiprocessor,
    blocks_of,
    kernel,
    multiprocessors,
    shared_bytes_a_block,
)
from kernels.smoothing.cuda.block_partition import up_to
from kernels.smoothing.cuda.boxes import streamed
from kernels.smoothing.window import RUN, Window

# Threads of a block of box_run_rows and blocks a multiprocessor, as registers allow, by bytes of a sample.
ROW_SHAPES = {4: ((640, 2), (1024, 1)), 8: ((768, 1),)}
THREADS = 256
MAX_BLOCKS = 1 << 30  # box_double loops if there is more to do
MAX_STRIPS = (1 << 31) - 1
MOST_LENGTH = 1 << 30  # of box_run_rows, whose positions are numbers of 32 bits
RUN_WORDS, BORDER_BYTES = 2 * RUN + 3, 8  # that it keeps of a run, and of a sample beyond the edge
# Runs of a step of box_run_columns, and blocks a multiprocessor: the first that fits so often, or the first that fits.
COLUMN_SHAPES = {4: ((8, 2), (16, 1)), 8: ((8, 1), (4, 1))}
COLUMNS = 32  # of a block
ENTRIES = (
    *(f"{entry}<{real}>" for entry in ("box_run_totals", "box_runs") for real in ("float", "double")),
    *(f"box_run_columns<float, {step}, {blocks}>" for step, blocks in COLUMN_SHAPES[4]),
    *(f"box_run_columns<double, {step}, {blocks}>" for step, blocks in COLUMN_SHAPES[8]),
    *(f"box_run_rows<float, {threads}, {blocks}>" for threads, blocks in ROW_SHAPES[4]),
    *(f"box_run_rows<double, {threads}, {blocks}>" for threads, blocks in ROW_SHAPES[8]),
)


class Runs(ctypes.Structure):
    """struct Runs of runs.cuh."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("lead", "steps", "rest", "bands", "height", "outputs"))


def launch(axis: Any, window: Window, source: Any, target: Any, fill: Any, scale: Any, stream: Any) -> None:
    """One axis's pass. `axis` is struct Axis of smoothing.cu; fill and scale are ctypes values of the arrays' type."""
    runs = Runs(lead=window.lead, steps=(axis.taps - 1) // RUN, rest=(axis.taps - 1) % RUN)
    args = axis, runs, source, target, fill, scale, stream
    if not (_launch_rows(*args) if axis.inner < streamed.MIN_COLUMNS else _launch_columns(*args)):
        _launch_far(*args)


def _launch_rows(axis: Any, runs: Runs, source: Any, target: Any, fill: Any, scale: Any, stream: Any) -> bool:
    itemsize, real = source.dtype.itemsize, streamed.REALS[source.dtype.name]
    runs.outputs, threads = row_tile(axis, itemsize)
    if not runs.outputs:
        return False
    parts = axis.inner * blocks_of(axis.out_length, runs.outputs)  # tiles of a line, by channel
    most, blocks = next(shape for shape in ROW_SHAPES[itemsize] if threads <= shape[0])
    shared = row_bytes(axis.taps, threads, itemsize)
    resident = min(blocks_a_multiprocessor(shared), most * blocks // threads) * multiprocessors()
    lines = max(min(axis.outer, resident // parts), 1)  # at once
    kernel("smoothing", f"box_run_rows<{real}, {most}, {blocks}>").launch(
        (parts * lines,), (threads,), (source, target, axis, runs, fill, scale), shared_bytes=shared, stream=stream
    )
    return True


def row_tile(axis: Any, itemsize: int) -> tuple[int, int]:
    """Results of a line that a block of box_run_rows computes at once, and its threads; 0 if too few fit."""
    if (axis.length + 2 * axis.taps) * axis.inner > MOST_LENGTH:
        return 0, 0
    held = (shared_bytes_a_block() - row_bytes(axis.taps, 0, itemsize)) // (RUN_WORDS * itemsize)
    for most, _ in ROW_SHAPES[itemsize]:
        room = (min(most, held // 32 * 32) * RUN - (RUN - 1) - (axis.taps - 1)) // RUN * RUN
        if 2 * room >= min(axis.taps, 2 * axis.out_length):
            outputs = up_to(blocks_of(axis.out_length, blocks_of(axis.out_length, room)), RUN)
            return outputs, up_to(blocks_of(RUN - 1 + outputs + axis.taps - 1, RUN), 32)
    return 0, 0


def row_bytes(taps: int, threads: int, itemsize: int) -> int:
    """Of shared memory: samples of two tiles, sums of runs and of those past a tile's end, and samples beyond edges."""
    return threads * RUN_WORDS * itemsize + (3 * (taps // RUN + 2) + 1) * itemsize + BORDER_BYTES * (taps + 2 * RUN)


def _launch_columns(axis: Any, runs: Runs, source: Any, target: Any, fill: Any, scale: Any, stream: Any) -> bool:
    itemsize, real = source.dtype.itemsize, streamed.REALS[source.dtype.name]
    strips = axis.outer * blocks_of(axis.inner, COLUMNS)
    held = {shape: column_bytes(axis.taps, itemsize, shape[0]) for shape in COLUMN_SHAPES[itemsize]}
    fitting = [each for each in held if held[each] <= shared_bytes_a_block()]
    if not fitting or axis.length + 2 * axis.taps > MOST_LENGTH:
        return False
    step, blocks = next((each for each in fitting if blocks_a_multiprocessor(held[each]) >= each[1]), fitting[0])
    shared = held[step, blocks]
    resident = min(blocks_a_multiprocessor(shared), blocks) * multiprocessors()
    heights = blocks_of(runs.lead + axis.out_length, RUN)
    # Few bands, since each also sums the runs of its first window.
    bands = max(min(resident // strips, 2 * heights // runs.steps), 1)
    runs.height = blocks_of(heights, bands)
    runs.bands = blocks_of(heights, runs.height)
    if strips * runs.bands > MAX_STRIPS:
        return False
    kernel("smoothing", f"box_run_columns<{real}, {step}, {blocks}>").launch(
        (strips * runs.bands,), (COLUMNS * step,), (source, target, axis, runs, fill, scale), shared_bytes=shared,
        stream=stream,
    )  # fmt: skip
    return True


def column_bytes(taps: int, itemsize: int, step: int) -> int:
    """Of shared memory, for tails and the rings of T, of all levels and of M."""
    whole, size = (taps - 1) // RUN - 1, 4 * step
    kept = size
    for bit in range(whole.bit_length() - 2, -1, -1):
        if size <= (whole >> bit + 1) + step:
            size *= 2
        kept += size
    tails = 2 * (step + 1) * RUN * COLUMNS
    return (tails + kept * (COLUMNS + 32 // step)) * itemsize


def _launch_far(axis: Any, runs: Runs, source: Any, target: Any, fill: Any, scale: Any, stream: Any) -> None:
    real = streamed.REALS[source.dtype.name]
    runs_of_line = (runs.lead + axis.out_length + axis.taps - 2) // RUN + 1
    totals = type(source)((axis.outer, runs_of_line, axis.inner), source.dtype)
    count = ctypes.c_longlong(runs_of_line)
    kernel("smoothing", f"box_run_totals<{real}>").launch(
        (blocks_of(totals.size, THREADS),), (THREADS,), (source, totals, axis, runs, fill, count), stream=stream
    )
    whole = doubled(totals, runs.steps - 1, axis.inner, real, stream)
    kernel("smoothing", f"box_runs<{real}>").launch(
        (blocks_of(target.size, THREADS),), (THREADS,),
        (source, totals, whole, target, axis, runs, fill, scale, count), stream=stream,
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
