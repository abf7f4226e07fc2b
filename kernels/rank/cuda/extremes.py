"""Minima and maxima of boxes, axis by axis: passes, arguments and launches of extremes.cuh."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Any

from kernels.rank.cuda.gather import C_TYPES, constants
from kernels.rank.task import Axis, Task
from kernels.runtime.launch import kernel
from kernels.smoothing.borders import MODES

KERNELS = ("extreme_columns", "extreme_rows")
ENTRIES = tuple(
    f"{name}<{c_type}, {least}>" for name in KERNELS for c_type in C_TYPES.values() for least in ("true", "false")
)
COLUMN_THREADS, ROW_THREADS, ROW_WORDS = 128, 256, 16  # of extremes.cuh
MOST_SLOTS = 64  # of a column: more leave too few threads on a multiprocessor
NARROW_BYTES = 128  # of the samples inside an axis: below this, a warp's columns are no whole lines of memory
BLOCKS = 4096  # enough for every device
MAX_BLOCKS = (1 << 31) - 1
MAX_LENGTH = 1 << 30  # of an axis: positions have 32 bits


class ExtremesTask(ctypes.Structure):
    """struct ExtremesTask of extremes.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("planes", "inner", "pieces")),
        *((name, ctypes.c_int) for name in ("length", "out_length", "first", "piece")),
        *((name, ctypes.c_int) for name in ("taps", "step", "mode", "is_first", "is_last", "omit_nan", "has_nodata")),
    )


def applies(task: Task) -> bool:
    """Whether a task is the minimum or the maximum of a box. Integers have no value to spare for missing samples."""
    is_extreme = int(task.rank.of(task.samples)) in (0, task.samples - 1)
    is_short = all(axis.length < MAX_LENGTH for axis in task.axes)
    return is_short and is_extreme and task.footprint is None and (task.nodata is None or task.dtype.kind == "f")


def run(image: Any, task: Task, out: Any, stream: Any) -> None:
    import cupy

    passes = [*_passes(task)]
    least = "true" if int(task.rank.of(task.samples)) == 0 else "false"
    cval, nodata, empty = constants(task)
    source = image
    for number, each in enumerate(passes):
        size = each.planes * each.out_length * each.inner
        target = out if number == len(passes) - 1 else cupy.empty(size, task.dtype)
        each.is_first, each.is_last = number == 0, number == len(passes) - 1
        each.omit_nan, each.has_nodata = task.omit_nan, task.nodata is not None
        _launch(each, f"{C_TYPES[task.dtype.name]}, {least}", task.dtype.itemsize, stream,
                (source, target, each, cval, nodata, empty))  # fmt: skip
        source = target


def _passes(task: Task) -> Iterator[ExtremesTask]:
    """The last axis first. At least one, which may have a window of one sample."""
    lengths = [axis.length for axis in task.axes]
    wide = [index for index in (2, 1, 0) if task.axes[index].taps > 1] or [2]
    for index in wide:
        axis = task.axes[index]
        planes = task.planes * math.prod(lengths[:index])
        inner = math.prod(lengths[index + 1 :]) * task.inner
        is_narrow = inner * task.dtype.itemsize < NARROW_BYTES
        most = _most_row_taps(inner, task.dtype.itemsize) if is_narrow else MOST_SLOTS
        parts = _parts(axis.taps, most, stepped=not is_narrow)
        length, left = axis.length, axis.taps - 1
        for number, (taps, step) in enumerate(parts):
            left -= (taps - 1) * step
            yield ExtremesTask(
                planes=planes, length=length, out_length=axis.out_length + left, inner=inner, taps=taps, step=step,
                **_border(axis, number),
            )  # fmt: skip
            length = axis.out_length + left
        lengths[index] = axis.out_length


def _border(axis: Axis, number: int) -> dict[str, int]:
    """Only an axis's first pass looks beyond its edge."""
    first, mode = (axis.first, axis.mode) if number == 0 else (0, "valid")
    return {"first": first, "mode": MODES.index(mode)}


def _most_row_taps(inner: int, itemsize: int) -> int:
    """A row's window takes at most half of a block's samples."""
    samples = ROW_THREADS * ROW_WORDS * max(4, itemsize) // itemsize
    return samples // 2 // inner


def _parts(taps: int, most: int, *, stepped: bool) -> list[tuple[int, int]]:
    """Windows, each over the results of the one before, that make one of `taps`: (taps, step)."""
    if taps <= most:
        return [(taps, 1)]
    if not stepped:
        return [(most, 1), *_parts(taps - most + 1, most, stepped=False)]
    many = min(most, math.isqrt(taps))
    step = taps // many
    return [*_parts(taps - (many - 1) * step, most, stepped=True), (many, step)]


def _launch(task: ExtremesTask, types: str, itemsize: int, stream: Any, arguments: Any) -> None:
    word = max(4, itemsize)
    each = word // itemsize
    if task.inner * itemsize < NARROW_BYTES:
        row = task.out_length * task.inner
        halo = (task.taps - 1) * task.inner + each
        threads = min(ROW_THREADS, -(-(row + halo) // (each * ROW_WORDS * 32)) * 32)
        task.piece = min(threads * ROW_WORDS * each - halo, row)
        task.pieces = -(-row // task.piece)
        kernel("rank", f"extreme_rows<{types}>").launch(
            (min(task.planes * task.pieces, MAX_BLOCKS),), (threads,), arguments,
            shared_bytes=threads * ROW_WORDS * word, stream=stream,
        )  # fmt: skip
        return
    across = -(-task.inner // (COLUMN_THREADS * each))
    results = -(-task.out_length // task.step)
    wanted = -(-BLOCKS // (across * task.step * task.planes))
    task.pieces = max(1, min(wanted, results // (4 * task.taps)))
    task.piece = -(-results // task.pieces)
    blocks = across * task.pieces * task.step * task.planes
    kernel("rank", f"extreme_columns<{types}>").launch(
        (min(blocks, MAX_BLOCKS),), (COLUMN_THREADS,), arguments,
        shared_bytes=COLUMN_THREADS * word * task.taps, stream=stream,
    )  # fmt: skip
