"""Minima and maxima of boxes: passes and launches of strip, slabs, sweeps, box and, with channels, words.cuh."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kernels.rank.cuda.gather import C_TYPES, constants
from kernels.rank.task import SYMMETRIC, Axis, Difference, Task
from kernels.runtime.launch import kernel, multiprocessors, shared_bytes_a_multiprocessor
from kernels.smoothing.borders import MODES

# Of slabs.cuh, one of many windows: whether it opens and subtracts, how rows lie, and whether second rows are shared.
SLAB_KINDS = {
    "true": (("false, false", 3, "false, 15, 7, 1"), ("false, true", 0, "true, 15, 7, 3")),
    "false": (("true, true", 2, "false, 15, 7, 1"), ("true, false", 1, "true, 15, 7, 1")),
}
ENTRIES = tuple(
    f"{name}<{c_type}, {least}{rows}>"
    for name, rows in (
        ("extreme_box", ", 4, false"),
        ("extreme_box", ", 4, true"),
        ("extreme_box", ", 8, true"),
        ("extreme_rows", ""),
    )
    for c_type in C_TYPES.values()
    for least in ("true", "false")
) + tuple(
    f"extreme_strip<{C_TYPES[name]}, {least}, {keeps}, {opens}, {rows}>"
    for name in ("uint8", "uint16", "int16", "float32")
    for least in ("true", "false")
    for keeps in ("false", "true")
    for opens in ("false", "true")
    for rows in ((0, 1) if opens == "true" else (0, 1, 2) if name == "float32" else (0, 1, 2, 3))
)
ENTRIES += tuple(
    entry
    for sample in (C_TYPES[name] for name in ("uint8", "uint16", "int16", "float32"))
    for least in ("true", "false")
    for entry in (
        *(f"extreme_along<{sample}, {least}, {aligned}>" for aligned in ("true", "false")),
        *(f"extreme_down<{sample}, {least}, {kind}>" for kind in ("false, true", "false, false", "true, true")),
        *(
            f"extreme_slabs<{sample}, {least}, {steps}, {0 if sample == 'float' else lie}, {rest}, 128, 4, 14, 4>"
            for steps, lie, rest in SLAB_KINDS[least]
        ),
    )
)
ROW_THREADS, ROW_WORDS = 256, 16  # of words.cuh
BOX_THREADS = 256  # of box.cuh
BLOCKS = {4: 3, 8: 2}  # of a multiprocessor, by the rows of a group
STRIP_THREADS = 32  # of strip.cuh
# Blocks of a multiprocessor: at most, by a sample's bytes, if rows are loaded again, are kept, and are kept by a kernel
# that opens; at least, and at least with rows kept, by whether a kernel opens.
STRIP_BLOCKS = {1: (16, 16, 16), 2: (16, 20, 20), 4: (16, 24, 20)}
STRIP_FEWEST, STRIP_MANY = 4, (16, 11)
STRIP_OPENS = 208  # threads of a multiprocessor that have results, at least, if it opens
STRIP_LOST = (16, 20)  # vectors of a warp that only serve others, at most, and if pixels have three channels
FEW, SOME = 8, 20  # rows of a window: more than FEW are loaded twice, up to SOME in groups of four
VECTOR = 16  # bytes
# By the bytes of shared memory from which they hold: samples of a window down a column, more of which leave too few
# threads on a multiprocessor; bytes of one along a row, more of which leave too few results of a tile.
MOST = ((160 << 10, 64, 1040), (0, 24, 520))
ENOUGH_THREADS = 384  # of a multiprocessor
NARROW_BYTES = 128  # of the samples inside an axis: below this, a warp's columns are no whole lines of memory
# Of sweeps.cuh: rows at once, bytes of each, and blocks of a multiprocessor, at most, down columns; whole threads of a
# span and of a ring, and bytes of a tile, along rows.
SWEEP_THREADS, SWEEP_ROWS, SWEEP_PIECE, SWEEP_MOST, SWEEP_SPAN, SWEEP_PREFIXES, SWEEP_BYTES = 32, 8, 8, 16, 64, 64, 4096
# More rows of a window are swept, and more if it opens; the same if rows do not begin at vectors.
SWEPT = ((64, 40), (40, 25))
MANY_ROWS = 64  # more, of pixels with channels, take a pass of their own if slabs do not take them
MAX_BLOCKS = (1 << 31) - 1
MAX_LENGTH = 1 << 30  # of an axis, and of the samples inside one: positions have 32 bits


class Slab(NamedTuple):
    """How slabs.cuh takes windows of up to `most` rows and columns."""

    most: int
    threads: int
    rows: int  # of a slab, at most
    ahead: int  # rows on their way, at least
    blocks: int  # of a multiprocessor
    shares: bool = True  # the second rows of pairs lie in shared memory


# Of slabs.cuh: rows of a batch if windows are small; words of a row of results, at least; rows or columns of windows,
# at most, whose pixels with channels are loaded as words; channels, at most.
SLAB_BATCH, SLAB_FEWEST, SLAB_SPLIT, SLAB_CHANNELS = 16, 24, 51, 4
SLABS_OF_MANY = (
    Slab(37, 128, 90, 10, 4, False), Slab(41, 128, 80, 10, 4), Slab(51, 128, 50, 10, 4), Slab(65, 192, 64, 8, 2),
)  # fmt: skip
# By the bytes of a sample, whether a kernel opens, and how rows lie (with channels: at whole words or anywhere; else:
# at whole vectors or anywhere): rows of windows, or columns if it opens, at least, and shapes. Measured on an H200.
SLABS: Mapping[tuple[int, bool, str], tuple[int, tuple[Slab, ...]]] = MappingProxyType(
    {
        (1, False, "anywhere"): (5, (
            Slab(7, 128, 60, 6, 6, False), Slab(15, 128, 84, 7, 5, False), Slab(21, 128, 80, 10, 5, False),
            Slab(37, 128, 90, 10, 4, False), Slab(51, 128, 50, 10, 4),
        )),
        (1, False, "channels anywhere"): (7, (
            Slab(15, 192, 56, 14, 4, False), Slab(21, 192, 60, 10, 4, False), Slab(31, 192, 60, 10, 3),
        )),
        (1, True, "aligned"): (15, (
            Slab(15, 128, 56, 7, 6), Slab(21, 128, 60, 10, 5), Slab(31, 128, 90, 10, 4, False),
        )),
        (1, True, "anywhere"): (5, (
            Slab(9, 128, 48, 6, 5, False), Slab(15, 128, 56, 7, 6), Slab(21, 128, 60, 10, 5), Slab(31, 192, 60, 10, 2),
        )),
        (2, False, "aligned"): (31, (
            *SLABS_OF_MANY, Slab(101, 384, 100, 10, 1),
        )),
        (2, False, "anywhere"): (17, (
            *SLABS_OF_MANY, Slab(101, 256, 100, 10, 1),
        )),
        (2, False, "channels"): (15, (
            Slab(17, 128, 64, 14, 6, False), Slab(21, 128, 60, 10, 5, False), Slab(33, 128, 64, 10, 5),
            Slab(51, 128, 50, 10, 4), Slab(101, 384, 100, 8, 1),
        )),
        (2, False, "channels anywhere"): (7, (
            Slab(11, 192, 48, 12, 4, False), Slab(17, 192, 64, 14, 4, False), Slab(37, 128, 90, 10, 4, False),
            Slab(51, 256, 50, 10, 2), Slab(101, 384, 100, 8, 1),
        )),
        (2, True, "aligned"): (17, (
            Slab(21, 128, 60, 10, 4, False), Slab(37, 128, 90, 10, 4, False), Slab(51, 192, 50, 10, 2),
            Slab(65, 192, 64, 8, 2), Slab(101, 256, 100, 10, 1),
        )),
        (2, True, "anywhere"): (3, (
            Slab(5, 128, 64, 8, 5, False), Slab(9, 128, 48, 6, 5, False), Slab(15, 128, 56, 7, 6),
            Slab(21, 128, 60, 10, 5), Slab(37, 128, 72, 10, 4), Slab(51, 192, 50, 10, 2), Slab(65, 192, 64, 8, 2),
        )),
        **dict.fromkeys(((2, True, "channels"), (2, True, "channels anywhere")), (7, (
            Slab(11, 128, 48, 6, 5, False), Slab(17, 128, 64, 14, 5, False), Slab(37, 256, 90, 10, 2, False),
            Slab(51, 256, 50, 10, 2),
        ))),
        (4, False, "aligned"): (31, (
            *SLABS_OF_MANY, Slab(101, 384, 100, 10, 1),
        )),
        (4, False, "anywhere"): (7, (
            Slab(11, 192, 48, 12, 4, False), Slab(17, 192, 64, 14, 4, False), *SLABS_OF_MANY,
            Slab(101, 384, 100, 10, 1),
        )),
        (4, False, "channels"): (7, (
            Slab(11, 192, 48, 12, 4, False), Slab(17, 192, 64, 14, 4, False), Slab(37, 192, 72, 10, 3),
            Slab(51, 256, 50, 10, 2),
        )),
        (4, True, "aligned"): (15, (
            Slab(17, 128, 64, 14, 5, False), Slab(21, 128, 60, 10, 4, False), Slab(37, 128, 90, 10, 4, False),
            Slab(51, 256, 100, 10, 1, False), Slab(65, 192, 64, 8, 2),
        )),
        (4, True, "anywhere"): (7, (
            Slab(11, 128, 48, 6, 5, False), Slab(17, 128, 64, 14, 5, False), Slab(21, 128, 60, 10, 4, False),
            Slab(37, 128, 90, 10, 4, False), Slab(51, 256, 100, 10, 1, False), Slab(65, 192, 64, 8, 2),
        )),
        (4, True, "channels"): (7, (Slab(11, 128, 48, 6, 5, False), Slab(15, 256, 56, 14, 2, False))),
    }
)  # fmt: skip


class ExtremesTask(ctypes.Structure):
    """struct ExtremesTask of words.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("planes", "inner", "pieces")),
        *((name, ctypes.c_int) for name in ("length", "out_length", "first", "piece")),
        *((name, ctypes.c_int) for name in ("taps", "mode", "is_first", "is_last", "omit_nan", "has_nodata")),
    )


class BoxTask(ctypes.Structure):
    """struct BoxTask of box.cuh."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("planes", "in_plane", "out_plane", "image_plane", "image_pitch")),
        *((name, ctypes.c_int) for name in ("in_pitch", "out_pitch", "columns", "out_columns", "tile")),
        *((name, ctypes.c_int) for name in ("rows", "out_rows", "tiles", "bands", "band")),
        *((name, ctypes.c_int) for name in ("first_y", "first_x", "mode_y", "mode_x")),
        *((name, ctypes.c_int) for name in ("taps_y", "taps_x", "step", "pair", "inner", "slots", "span", "steps")),
        *((name, ctypes.c_int) for name in ("is_first", "is_last", "omit_nan", "has_nodata")),
        *((name, ctypes.c_int) for name in ("aligned_in", "aligned_out", "aligned_image", "subtracts")),
    )


def applies(task: Task) -> bool:
    """Whether a task is the minimum or the maximum of a box. Integers have no value to spare for missing samples."""
    is_extreme = task.whole_rank in (0, task.samples - 1)
    lengths = [axis.length + axis.taps for axis in task.axes]
    is_short = max(lengths) < MAX_LENGTH and math.prod(lengths[1:]) * task.inner < MAX_LENGTH
    return is_short and is_extreme and task.footprint is None and (task.nodata is None or task.dtype.kind == "f")


def run(image: Any, task: Task, out: Any, stream: Any, difference: Difference | None = None) -> list[Any]:
    """Returns the arrays between passes."""
    opens, made = difference is not None and difference.opens, list[Any]()
    passes, together = [*_passes(task)], _pixels(task)
    if opens and not _can_open(task):
        return made
    if not (len(together) == 1 and _run(image, task, out, stream, difference, together, made, by_strips=True)) and (
        len(passes) == 1 or not opens
    ):
        _run(image, task, out, stream, difference, passes, made, by_strips=opens)
    return made


def _run(
    image: Any,
    task: Task,
    out: Any,
    stream: Any,
    difference: Difference | None,
    passes: list[ExtremesTask | BoxTask],
    made: list[Any],
    *,
    by_strips: bool,
) -> bool:
    """Launches the passes; if the only one has to be taken `by_strips` and cannot, it returns False."""
    import cupy

    least = "true" if task.whole_rank == 0 else "false"
    types, values, source = f"{C_TYPES[task.dtype.name]}, {least}", constants(task), image
    for number, each in enumerate(passes):
        each.is_first, each.is_last = number == 0, number == len(passes) - 1
        each.omit_nan, each.has_nodata = task.omit_nan, task.nodata is not None
        if each.is_last:
            target = out
        else:
            made.append(target := cupy.empty(_samples(each), task.dtype))
        if isinstance(each, ExtremesTask):
            if by_strips:
                return False
            _launch_rows(each, types, task.dtype.itemsize, stream, (source, target, each, *values))
        else:
            other = source
            if each.is_last and difference is not None and difference.image is not None:
                each.subtracts = 1 + difference.reverse
                other = difference.image.reshape(each.planes, each.out_rows, each.out_columns)  # a view if it can be
                if other.strides[-1] != other.itemsize:
                    other = cupy.ascontiguousarray(other)
                each.image_plane, each.image_pitch = (step // other.itemsize for step in other.strides[:2])
            opens = difference is not None and difference.opens
            arguments = (source, target, other, each, *values)
            if _launch_slabs(each, types, task.dtype.itemsize, stream, arguments, opens):
                pass
            elif _is_swept(task, each.taps_y, each.taps_x, each.columns, each.inner, opens):
                made += _launch_sweeps(each, types, task.dtype.itemsize, stream, arguments, opens)
            elif not _launch_strip(each, types, task.dtype.itemsize, stream, arguments, opens):
                if by_strips:
                    return False
                _launch_box(each, types, task.dtype.itemsize, stream, arguments)
            if each.is_last and difference is not None:
                difference.is_done = True
        source = target
    return True


def _is_swept(task: Task, down: int, across: int, columns: int, inner: int, opens: bool = False) -> bool:
    """Whether sweeps.cuh takes windows of this many rows and columns."""
    each = VECTOR // task.dtype.itemsize
    first, *sides = task.taps
    passes = (first > 1) + (max(sides) > 1 if task.inner == 1 else sum(taps > 1 for taps in sides))
    is_plain = task.dtype.itemsize < 8 and (task.dtype.kind != "f" or (not task.may_miss and passes == 1))
    # A window holds three whole threads at least, and ends one fold away.
    fits = 3 * each + 2 <= across <= min(2 * SWEEP_SPAN * each, columns) or (across == 1 and not opens)
    is_many = (
        SWEPT[columns % each > 0][opens] < down and _ring_bytes(down, opens) + 1024 <= shared_bytes_a_multiprocessor()
    )
    return is_plain and is_many and fits and inner == 1 and columns >= each


def _ring_bytes(taps: int, opens: bool) -> int:
    """Of shared memory, for windows down the columns of a block of sweeps.cuh."""
    return (1 + opens) * -(-(taps - 1) // SWEEP_ROWS) * SWEEP_ROWS * SWEEP_THREADS * SWEEP_PIECE


def _can_open(task: Task) -> bool:
    """Whether the first step's results beyond the edges are those of windows there: so it is if edges are mirrors, or
    none, and if windows are symmetric; and if the windows of both steps lie in the image."""
    return all(
        axis.taps == 1
        or axis.mode == "valid"
        or (axis.taps % 2 == 1 and axis.first == -(axis.taps // 2) and axis.mode in SYMMETRIC)
        for axis in task.axes
    )


def _samples(each: ExtremesTask | BoxTask) -> int:
    """Of a pass's results."""
    if isinstance(each, ExtremesTask):
        return int(each.planes * each.out_length * each.inner)
    return int(each.planes * each.out_plane)


def _passes(task: Task) -> Iterator[ExtremesTask | BoxTask]:
    """The last axes first. At least one, which may have a window of one sample."""
    first, rows, columns = task.axes
    none, itemsize = Axis(length=1, out_length=1, first=0, taps=1, mode="valid"), task.dtype.itemsize
    planes, across = task.planes * first.length, columns.out_length * task.inner
    if task.inner == 1 and (max(rows.taps, columns.taps) > 1 or first.taps == 1):
        if rows.length == rows.taps == 1 and planes < MAX_LENGTH:  # rows of one image
            planes, rows = 1, _whole(none, planes)
        yield from _box(planes, rows, columns, task)
    else:
        if columns.taps > 1 and task.inner * itemsize < NARROW_BYTES:
            yield from _rows(planes * rows.length, columns, task.inner, itemsize)
        elif columns.taps > 1:
            yield from _box(planes * rows.length, columns, _whole(none, task.inner), task)
        if rows.taps > 1 or max(columns.taps, first.taps) == 1:
            yield from _box(planes, rows, _whole(none, across), task)
    if first.taps > 1:
        yield from _box(task.planes, first, _whole(none, rows.out_length * across), task)


def _pixels(task: Task) -> list[ExtremesTask | BoxTask]:
    """Passes along both axes of pixels with channels, of which slabs or strips can take one."""
    first, rows, columns = task.axes
    if task.inner == 1 or first.taps > 1 or columns.taps == 1:
        return []
    samples = Axis(
        length=columns.length * task.inner, out_length=columns.out_length * task.inner,
        first=columns.first * task.inner, taps=1, mode=columns.mode,
    )  # fmt: skip
    passes = [*_box(task.planes * first.length, rows, samples, task)]
    passes[0].taps_x, passes[0].inner = columns.taps, task.inner
    return [*passes]


def _whole(axis: Axis, length: int) -> Axis:
    return Axis(length=length, out_length=length, first=axis.first, taps=axis.taps, mode=axis.mode)


def _rows(planes: int, axis: Axis, inner: int, itemsize: int) -> Iterator[ExtremesTask]:
    """Passes along rows of few channels; a window takes at most half of a block's samples."""
    most = ROW_THREADS * ROW_WORDS * max(4, itemsize) // itemsize // 2 // inner
    length, left, parts = axis.length, axis.taps - 1, [most] * ((axis.taps - 2) // (most - 1))
    parts.append(axis.taps - sum(parts) + len(parts))
    for number, taps in enumerate(parts):
        left -= taps - 1
        first, mode = (axis.first, axis.mode) if number == 0 else (0, "valid")
        yield ExtremesTask(
            planes=planes, length=length, out_length=axis.out_length + left, inner=inner, taps=taps, first=first,
            mode=MODES.index(mode),
        )  # fmt: skip
        length = axis.out_length + left


def _box(planes: int, rows: Axis, columns: Axis, task: Task) -> Iterator[BoxTask]:
    """Passes of a box over the results of the one before; between them rows begin at whole vectors."""
    itemsize = task.dtype.itemsize
    each = VECTOR // itemsize
    most, most_bytes = next(limits for shared, *limits in MOST if shared <= shared_bytes_a_multiprocessor())
    if _is_swept(task, rows.taps, columns.taps, columns.length, 1):
        most = rows.taps
    down, pairs, across = _parts(rows.taps, most), list[int](), columns.taps
    while across * itemsize > most_bytes:
        pairs.insert(0, across // 2 // each * each)
        across -= pairs[0]
    count = max(len(down), 1 + len(pairs))
    down, pairs = [*down, *[(1, 1)] * (count - len(down))], [0, *[0] * (count - 1 - len(pairs)), *pairs]
    left_down, left_across = rows.taps - 1, sum(pairs)
    height, width, pitch = rows.length, columns.length, columns.length
    for number, ((taps, step), pair) in enumerate(zip(down, pairs, strict=True)):
        left_down -= (taps - 1) * step
        left_across -= pair
        out_height, out_width = rows.out_length + left_down, columns.out_length + left_across
        out_pitch = out_width if number == count - 1 else -(-out_width // each) * each
        border = (rows, columns) if number == 0 else (Axis(length=0, out_length=0, first=0, taps=1, mode="valid"),) * 2
        yield BoxTask(
            planes=planes, in_plane=height * pitch, out_plane=out_height * out_pitch, in_pitch=pitch,
            out_pitch=out_pitch, columns=width, out_columns=out_width, rows=height, out_rows=out_height,
            first_y=border[0].first, first_x=border[1].first, mode_y=MODES.index(border[0].mode),
            mode_x=MODES.index(border[1].mode), taps_y=taps, taps_x=across if number == 0 else 1, step=step, pair=pair,
            inner=1,
        )  # fmt: skip
        height, width, pitch = out_height, out_pitch, out_pitch


def _parts(taps: int, most: int) -> list[tuple[int, int]]:
    """Windows, each over the results of the one before, that make one of `taps`: (taps, step)."""
    if taps <= most:
        return [(taps, 1)]
    many = min(most, math.isqrt(taps))
    step = taps // many
    return [*_parts(taps - (many - 1) * step, most), (many, step)]


def _launch_rows(task: ExtremesTask, types: str, itemsize: int, stream: Any, arguments: Any) -> None:
    word = max(4, itemsize)
    each = word // itemsize
    row = task.out_length * task.inner
    halo = (task.taps - 1) * task.inner + each
    threads = min(ROW_THREADS, -(-(row + halo) // (each * ROW_WORDS * 32)) * 32)
    task.piece = min(threads * ROW_WORDS * each - halo, row)
    task.pieces = -(-row // task.piece)
    kernel("rank", f"extreme_rows<{types}>").launch(
        (min(task.planes * task.pieces, MAX_BLOCKS),), (threads,), arguments,
        shared_bytes=threads * ROW_WORDS * word, stream=stream,
    )  # fmt: skip


def _launch_box(task: BoxTask, types: str, itemsize: int, stream: Any, arguments: Any) -> None:
    each = VECTOR // itemsize
    ahead = (0 if task.aligned_out else each - 1) + each - 1  # at most: samples of a tile before its first window
    is_many, group = task.taps_y > FEW, 8 if task.taps_y > SOME else 4
    task.slots = -(-(task.taps_y - 1) // group) if is_many else 0 if task.taps_y == 1 else task.taps_y // 2 * 2 + 2
    is_short = task.taps_x < 2 * each
    is_direct = task.taps_x == 1 and task.aligned_out and task.first_x % each == 0
    if is_short:
        lost = 0 if is_direct else ahead // each + (2 if task.taps_x <= each else 3)
    else:
        lost = (ahead + task.taps_x - 1) // each + 1
    bytes_a_thread = VECTOR * (task.slots * (2 if is_many else 1) + group) + 4 * each
    if not is_short:
        bytes_a_thread += group * (VECTOR + max(4, itemsize))
    rows = -(-task.out_rows // task.step)
    threads, task.band = _shape(
        bytes_a_thread, lost, -(-(task.out_columns + ahead) // each), rows, task.planes * task.step,
        task.taps_y, BLOCKS[group] * BOX_THREADS, multiprocessors(), shared_bytes_a_multiprocessor(),
    )  # fmt: skip
    task.tile = (threads - lost) * each
    task.tiles = -(-(task.out_columns + (0 if task.aligned_out else each - 1)) // task.tile)
    task.bands = -(-rows // task.band)
    kernel("rank", f"extreme_box<{types}, {group}, {'true' if is_many else 'false'}>").launch(
        (task.tiles * task.step * task.bands * task.planes,), (threads,), arguments,
        shared_bytes=threads * bytes_a_thread, stream=stream,
    )  # fmt: skip


def _launch_slabs(task: BoxTask, types: str, itemsize: int, stream: Any, arguments: Any, opens: bool) -> bool:
    """Launches the kernel of slabs.cuh if it is to take the pass; returns whether it is."""
    source, target, image, _, cval, *_ = arguments
    each, inner, steps = 1 if itemsize == 4 else 2, task.inner, 1 + opens  # samples of a word
    arrays = (
        (task.in_pitch, task.in_plane, source), (task.out_pitch, task.out_plane, target),
        (task.image_pitch, task.image_plane, image),
    )  # fmt: skip
    words, vectors = (
        all(
            pitch % count == plane % count == array.data.ptr % (count * itemsize) == 0 for pitch, plane, array in arrays
        )
        for count in (each, VECTOR // itemsize)
    )
    lie = "channels" * (inner > 1) + " anywhere" * (not words) if inner > 1 else "aligned" if vectors else "anywhere"
    shape = _slab(itemsize, opens, lie, task.taps_y, task.taps_x)
    is_plain = task.pair == 0 and task.step == 1 and (itemsize < 4 or _compares_floats(task))
    if shape is None or not is_plain or inner > SLAB_CHANNELS or not 0 <= task.image_pitch * itemsize < 1 << 32:
        return False
    # As slabs.cuh numbers how rows lie; windows that begin at odd samples take one more.
    words = words and each == 2 and (inner == 1 or task.taps_x <= SLAB_SPLIT)
    odd = words and steps * task.first_x % 2
    rows_lie = 2 + odd if words else int(each == 2 and inner == 1)
    down, threads = task.taps_y // 2, shape.threads
    batch, lanes = _slab_batch(task.taps_y), each if rows_lie == 0 or inner > 1 else 1
    rows, lead = shape.rows // batch * batch, -(-steps * 2 * down // batch) * batch
    shared_bytes = 4 * (rows // lanes * (threads * lanes + inner) + shape.shares * steps * down * threads)
    held = min(shape.blocks, shared_bytes_a_multiprocessor() // (shared_bytes + 1024))
    results = (threads * each // inner - steps * (task.taps_x - 1)) * inner - odd
    if held == 0 or results < SLAB_FEWEST * each:
        return False
    step = BoxTask.from_buffer_copy(task)
    step.first_y, step.first_x = steps * task.first_y, steps * task.first_x
    step.tile = results if rows_lie == 0 else results // each * each
    step.tiles = -(-task.out_columns // step.tile)
    step.band = _slab_band(step.tiles * task.planes, task.out_rows, rows, batch, lead, multiprocessors() * held)
    step.bands = -(-task.out_rows // step.band)
    ahead = next(count for count in range(min(shape.ahead, batch), batch + 1) if batch % count == 0)
    constants = (
        opens, task.subtracts > 0, rows_lie, shape.shares, task.taps_y, task.taps_x, inner, threads, rows // batch,
        ahead, shape.blocks,
    )  # fmt: skip
    kernel("rank", f"extreme_slabs<{types}, {', '.join(map(str, constants)).lower()}>").launch(
        (step.tiles * step.bands * task.planes,), (threads,), (source, target, image, step, cval),
        shared_bytes=shared_bytes, stream=stream,
    )  # fmt: skip
    return True


def _slab(itemsize: int, opens: bool, lie: str, *taps: int) -> Slab | None:
    """How slabs.cuh takes a window of rows and columns; None if another kernel is to."""
    least, shapes = SLABS.get((itemsize, opens, lie), (0, ()))
    if min(taps) < 3 or (max(taps) if opens else taps[0]) < least or any(count % 2 == 0 for count in taps):
        return None
    return next((shape for shape in shapes if max(taps) <= shape.most), None)


def _slab_batch(taps: int) -> int:
    """Rows that are computed at once: whole runs."""
    return SLAB_BATCH // (taps - 1) * (taps - 1) if taps <= 12 else taps - 1


@functools.lru_cache(maxsize=256)
def _slab_band(others: int, out_rows: int, rows: int, batch: int, lead: int, held: int) -> int:
    """Rows of a band, whole batches, for the least time by this model: blocks come in waves, each of those the device
    holds, and take as long as their slabs; the more waves, the less the last one's end counts."""
    best, least = 0, math.inf
    for slabs in range(lead // rows + 1, -(-(out_rows + lead) // rows) + 1):
        bands = -(-out_rows // (slabs * rows - lead))
        waves = -(-others * bands // held)
        time = (waves + 0.15) * (slabs + 0.5)
        if time < least:
            best, least = bands, time
    rows = -(-out_rows // best)
    return -(-rows // batch) * batch


def _launch_sweeps(task: BoxTask, types: str, itemsize: int, stream: Any, arguments: Any, opens: bool) -> list[Any]:
    """Launches the kernels of sweeps.cuh, for a pass that `_is_swept`. Returns the arrays between them."""
    import cupy

    each = VECTOR // itemsize
    source, target, image, _, cval, *_ = arguments
    c_type, least = types.split(", ")
    made, before = list[Any](), task
    is_direct = task.taps_x > 1 or not (task.subtracts or task.out_pitch % each or target.data.ptr % VECTOR)
    names = ["along"] * opens + ["down"] + ["along"] * (task.taps_x > 1) + ["box"] * (not is_direct)
    for number, name in enumerate(names):
        step = BoxTask.from_buffer_copy(before)
        rows = step.rows if opens and number == 0 else task.out_rows
        columns = step.columns if name == "down" else task.out_columns
        if opens and number == 0 and task.mode_x == MODES.index("valid"):
            columns += task.taps_x - 1
        step.out_rows, step.out_columns, step.subtracts = rows, columns, 0
        if number == len(names) - 1:
            step.out_pitch, step.out_plane, step.subtracts = task.out_pitch, task.out_plane, task.subtracts
            to = target
        else:
            step.out_pitch = -(-columns // each) * each
            step.out_plane = rows * step.out_pitch
            made.append(to := cupy.empty((task.planes, rows, step.out_pitch), source.dtype))
        aligned = [
            pitch % each == plane % each == array.data.ptr % VECTOR == 0
            for pitch, plane, array in (
                (step.in_pitch, step.in_plane, source), (step.out_pitch, step.out_plane, to),
            )
        ]  # fmt: skip
        if name == "down":
            _launch_down(step, f"{c_type}, {least}", opens, aligned[0], stream, (source, to, step, cval))
        elif name == "along":
            is_least = (least == "true") != (opens and number == 0)
            further = (source, to, image, step, cval)
            _launch_along(step, f"{c_type}, {is_least}".lower(), each, all(aligned), stream, further)
        else:
            step.taps_y, step.first_y = 1, 0
            step.aligned_in, step.aligned_out = aligned
            _launch_box(step, types, itemsize, stream, (source, to, image, step, *arguments[4:]))
        source = to
        before = BoxTask.from_buffer_copy(step)
        before.in_pitch, before.in_plane, before.rows, before.columns = step.out_pitch, step.out_plane, rows, columns
    return made


def _launch_down(task: BoxTask, types: str, opens: bool, aligned: bool, stream: Any, arguments: Any) -> None:
    task.tiles = -(-task.columns * arguments[0].itemsize // ((SWEEP_THREADS - (not aligned)) * SWEEP_PIECE))
    shared_bytes = _ring_bytes(task.taps_y, opens)
    held = min(shared_bytes_a_multiprocessor() // (shared_bytes + 1024), SWEEP_MOST)
    task.band = _band(task.tiles * task.planes, task.out_rows, (1 + opens) * task.taps_y, multiprocessors() * held)
    task.bands = -(-task.out_rows // task.band)
    kernel("rank", f"extreme_down<{types}, {opens}, {aligned}>".lower()).launch(
        (task.tiles * task.bands * task.planes,), (SWEEP_THREADS,), arguments,
        shared_bytes=shared_bytes, stream=stream,
    )  # fmt: skip


def _launch_along(task: BoxTask, types: str, each: int, aligned: bool, stream: Any, arguments: Any) -> None:
    reach = task.first_x % each + task.taps_x - 1
    back = -(-reach // each)  # threads from a window's first to its last
    task.span = min(1 << (back - 3).bit_length() - 1, SWEEP_SPAN)
    task.slots = 1 << (SWEEP_THREADS + back).bit_length()
    vectors = -(-task.out_columns // each)
    task.tile = -(-vectors // max(1, vectors * VECTOR // SWEEP_BYTES)) * each
    task.tiles = -(-task.out_columns // task.tile)
    task.steps = -(-(back + task.tile // each + (not aligned)) // SWEEP_THREADS)
    words = (each + 1) * (task.slots + SWEEP_PREFIXES) + 2 * task.slots
    kernel("rank", f"extreme_along<{types}, {aligned}>".lower()).launch(
        (task.tiles * (-(-task.rows * task.planes // 2)),), (SWEEP_THREADS,), arguments,
        shared_bytes=words * max(4, 32 // each), stream=stream,
    )  # fmt: skip


def _compares_floats(task: BoxTask) -> bool:
    """Whether floats need no keys: NaN spread, and none is missing."""
    return not (task.omit_nan or task.has_nodata) and bool(task.is_first and task.is_last)


def _launch_strip(task: BoxTask, types: str, itemsize: int, stream: Any, arguments: Any, opens: bool) -> bool:
    """Launches the kernel of strip.cuh if it can take the pass; returns whether it can."""
    each, steps = VECTOR // itemsize, 2 if opens else 1
    source, target, image, *_ = arguments
    task.aligned_in = task.in_pitch % each == source.data.ptr % VECTOR == 0
    task.aligned_out = task.out_pitch % each == target.data.ptr % VECTOR == 0
    task.aligned_image = task.image_plane % each == task.image_pitch % each == image.data.ptr % VECTOR == 0
    task.first_y, task.first_x = task.first_y * steps, task.first_x * steps
    rows = 3 if task.inner == 3 and itemsize < 4 else 2  # as strip.cuh has them
    if task.inner == 1:
        rows = 0 if task.aligned_in and task.aligned_out else 1
    if rows == 1:
        task.aligned_in = task.aligned_out = False
    slack = 0 if task.aligned_out else each  # results before the tile's, of which some are stored with them
    used = (STRIP_THREADS * each - slack - task.first_x % each - steps * (task.taps_x - 1) * task.inner) // each
    lost = STRIP_THREADS - used + (not task.aligned_in)
    if (
        itemsize not in STRIP_BLOCKS or (itemsize == 4 and not _compares_floats(task)) or task.pair > 0 or task.step > 1
        or lost > STRIP_LOST[rows == 3] or (not task.aligned_in and task.columns < 2 * each) or (opens and rows > 1)
        or (rows > 1 and task.taps_y > MANY_ROWS)
    ):  # fmt: skip
        return False
    pairs, sizes, fit = (task.taps_y - 1) // 2, list[int](), list[int]()
    for keeps in range(2):  # the rows before those that two results share
        vectors = pairs + keeps * (pairs + 1) + opens * (2 * pairs + 1)
        sizes.append(STRIP_THREADS * (VECTOR * vectors + each * (max(4, 2 * itemsize) + 4)))
        most = STRIP_BLOCKS[itemsize][keeps and 1 + opens]
        fit.append(min(shared_bytes_a_multiprocessor() // (sizes[-1] + 1024), most))
    is_kept = fit[1] >= STRIP_MANY[opens]
    held, shared_bytes = fit[is_kept], sizes[is_kept]
    if held * (STRIP_THREADS - lost) < STRIP_OPENS if opens else held < STRIP_FEWEST:
        return False
    task.tile = (STRIP_THREADS - lost) * each
    task.tiles = -(-(task.out_columns + max(slack - 1, 0)) // task.tile)
    task.band = _band(task.tiles * task.planes, task.out_rows, steps * task.taps_y, multiprocessors() * held)
    task.bands = -(-task.out_rows // task.band)
    kernel("rank", f"extreme_strip<{types}, {is_kept}, {opens}, {rows}>".lower()).launch(
        (task.tiles * task.bands * task.planes,), (STRIP_THREADS,), arguments, shared_bytes=shared_bytes, stream=stream
    )
    return True


@functools.lru_cache(maxsize=256)
def _band(others: int, rows: int, taps: int, held: int) -> int:
    """Rows of a band, for the least time by this model: blocks come in waves, each of those the device holds, and a
    row before a band's first result costs a third of one that has a result."""
    best, least = rows, math.inf
    for waves in range(1, 17):
        band = -(-rows // min(max(1, waves * held // others), rows))
        time = -(-others * -(-rows // band) // held) * (band + (taps - 1) / 3 + 8)
        if time < least:
            best, least = band, time
    return best


@functools.lru_cache(maxsize=256)
def _shape(
    bytes_a_thread: int,
    lost: int,
    vectors: int,
    rows: int,
    others: int,
    taps: int,
    most: int,
    processors: int,
    shared: int,
) -> tuple[int, int]:
    """Threads of a block and rows of a band, for the least time by this model: a block's time is its rows', and blocks
    come in waves, each of those that the device holds; the last ends half a one late."""
    best, least = (0, 0), math.inf
    for threads in range(BOX_THREADS, 0, -32):
        held = min(shared // (threads * bytes_a_thread + 1024), most // threads)
        if threads <= lost or held < 1:
            continue
        tiles = -(-vectors // (threads - lost))
        slowed = max(1.0, ENOUGH_THREADS / (threads * held)) ** 0.5
        for waves in range(1, 5):
            bands = min(max(1, waves * processors * held // (tiles * others)), rows)
            band = -(-rows // bands)
            turns = -(-tiles * others * bands // (processors * held))
            time = (turns + 0.5) * (band + (taps - 1) / 2 + 8) * held * threads * slowed
            if time < least:
                best, least = (threads, band), time
    return best
