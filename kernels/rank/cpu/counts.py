"""The rank filter of boxes of bytes: counts of every window's samples, for a strip of windows side by side.

Every window has a histogram of 256 values, and a coarse one with bins of 16 values. Each step down the strip adds a row
of samples to the histograms and removes another. The windows that contain a sample are neighbours, and their
counts of one value are neighbours in memory: one instruction updates 16 windows. The result is found for 16 windows at
once, in two steps: the coarse histogram gives the bin that holds the rank; then the counts within the bins that any of
these windows needs give the value.

Adding or removing a sample takes 2 ceil(columns / 16) loads, additions and stores of vectors, however many rows the
window has: 4 stores for each result at 15 × 15, 8 at 31 × 31, and a core makes at most one store in a cycle. A result
takes a quarter of an instruction for each coarse bin, and an eighth for each value of the bins that are needed.
Measured, one thread of a busy AMD EPYC (Zen 3), noise: 14 ns a result at 15 × 15, 21 ns at 31 × 31; OpenCV 5 takes 39
and 33 ns.

Source: Huang, Yang and Tang, "A fast two-dimensional median filtering algorithm" (1979); Perreault and Hébert, "Median
filtering in constant time" (2007), for counts in two steps. Both keep the histogram of a single window.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.rank.cpu.samples import gather_row
from kernels.rank.task import Task
from kernels.runtime.compiled import compiled, ir, types
from kernels.smoothing.cpu.rows import address, fill, generated, load, store

LANES = 16  # windows at once, and values of one step
VALUES = 256
STRIP = 256  # columns of a tile: its histograms fit a core's second-level cache
MAX_COLUMNS = 255  # of a window
MAX_SAMPLES = (1 << 15) - 1  # of a window, on each side of the rank: counts have 16 bits
WORDS = ir.VectorType(ir.IntType(16), LANES)


def applies(task: Task) -> bool:
    """Whether counts compute a task."""
    planes, _, columns = task.axes
    rank = task.whole_rank
    return (
        task.dtype.itemsize == 1
        and task.footprint is None
        and planes.length == planes.taps == 1
        and columns.taps <= MAX_COLUMNS
        and max(rank, task.samples - 1 - rank) <= MAX_SAMPLES
        and task.nodata is None
    )


def _words(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.bitcast(address(context, builder, array_type, array, index), WORDS.as_pointer())


@generated
def _add(_typing: Any, counts: Any, at: Any, steps: Any, first: Any) -> Any:
    """counts[at + i] += steps[first + i] for all lanes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _words(context, builder, signature.args[0], *args[:2])
        step = builder.load(_words(context, builder, signature.args[2], *args[2:]), align=2)
        builder.store(builder.add(builder.load(place, align=2), step), place, align=2)
        return context.get_dummy_value()

    return types.void(counts, types.intp, steps, types.intp), code


@generated
def _sixteens(_typing: Any, counts: Any, at: Any, pitch: Any, rank: Any, found: Any) -> Any:
    """For each lane: found[lane] = the coarse bin that holds the rank, of the counts at `at`, `at + pitch`, …; and
    found[LANES (1 + i) + lane] = the samples in the first i bins, minus rank + 1."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def keep(number: int, value: Any) -> None:
            index = ir.IntType(64)(number * LANES)
            builder.store(value, _words(context, builder, signature.args[4], args[4], index), align=2)

        total = builder.not_(_every(builder, args[3]))
        keep(0, _passed(context, builder, signature.args[0], args[:3], total, lambda i, value: keep(1 + i, value)))
        return context.get_dummy_value()

    return types.void(counts, types.intp, types.intp, types.intp, found), code


@generated
def _values(_typing: Any, counts: Any, at: Any, pitch: Any, sixteen: Any, found: Any, results: Any, x: Any) -> Any:
    """results[x + lane] = the value of the rank, for lanes whose coarse bin is `sixteen`: its counts are at `at`."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def words(number: int, index: Any) -> Any:
            return _words(context, builder, signature.args[number], args[number], index)

        sixteen, every = args[3], _every(builder, args[3])
        before = builder.mul(builder.add(sixteen, ir.IntType(64)(1)), ir.IntType(64)(LANES))
        total = builder.load(words(4, before), align=2)
        passed = _passed(context, builder, signature.args[0], args[:3], total, lambda *_: None)
        chosen = builder.icmp_signed("==", builder.load(words(4, ir.IntType(64)(0)), align=2), every)
        value, goal = builder.add(passed, builder.shl(every, WORDS([4] * LANES))), words(5, args[6])
        builder.store(builder.select(chosen, value, builder.load(goal, align=2)), goal, align=2)
        return context.get_dummy_value()

    return types.void(counts, types.intp, types.intp, types.intp, found, results, types.intp), code


def _every(builder: Any, value: Any) -> Any:
    """The value in all lanes."""
    first = builder.insert_element(WORDS(ir.Undefined), builder.trunc(value, WORDS.element), ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.VectorType(ir.IntType(32), LANES)([0] * LANES))


def _passed(context: Any, builder: Any, array_type: Any, args: Any, total: Any, keep: Any) -> Any:
    """Adds 16 counts to `total` one after another and returns how often the sum stays negative.
    Calls keep(i, sum before count i)."""
    counts, at, pitch = args
    passed = WORDS([0] * LANES)
    for i in range(LANES):
        keep(i, total)
        index = builder.add(at, builder.mul(pitch, ir.IntType(64)(i)))
        total = builder.add(total, builder.load(_words(context, builder, array_type, counts, index), align=2))
        passed = builder.sub(passed, builder.ashr(total, WORDS([15] * LANES)))
    return passed


@compiled
def _move(
    counts: Any, values: Any, within: int, inner: int, side: int, pitch: int, steps: Any, first: int, reach: int
) -> None:
    """Adds `steps[first:]` to the counts of each sample of a row. Successive samples are one vector apart, since a load
    that overlaps the preceding store would have to wait for it."""
    for phase in range(LANES):
        for x in range(phase, side, LANES):
            value = np.int64(load(values, x * inner + within))
            at, above = value * pitch + x, (VALUES + (value >> 4)) * pitch + x
            for i in range(0, reach, LANES):
                _add(counts, at + i, steps, first + i)
                _add(counts, above + i, steps, first + i)


@compiled
def _narrow(results: Any, target: Any, at: int, apart: int, count: int) -> None:
    for i in range(count):
        store(target, at + i * apart, load(results, i))


@compiled
def counted_tile(
    source: Any, sources: Any, runs: Any, lengths: Any, inner: int, target: Any, out_lengths: Any,
    taps: Any, rank: int, cval: int, tile: Any,
) -> None:  # fmt: skip
    """Fills a tile of the result with the samples of a rank, for all inner samples.

    runs   : of `samples.runs_of`, for the tile's columns with their halo
    taps   : of the window along the three axes
    cval   : value beyond the edge
    others : as of `ordered.ordered_tile`
    """
    rows = sources[1]
    outs = tile[1, 3] - tile[0, 3]
    side = outs + taps[2] - 1
    reach = (taps[2] + LANES - 1) // LANES * LANES
    pitch = ((side + reach) // LANES + 1 | 1) * LANES
    counts = np.empty((VALUES + LANES) * pitch, np.int16)
    steps, found = np.empty(2 * reach, np.int16), np.empty(18 * LANES, np.int16)
    results = np.empty(outs + LANES, np.int16)
    for i in range(reach):
        steps[i] = 1 if i < taps[2] else 0
        steps[reach + i] = -steps[i]
    values = np.empty(side * inner, np.uint8)
    for within in range(tile[0, 4], tile[1, 4]):
        fill(counts, 0, len(counts), 0)
        for y in range(tile[0, 2] + 1 - taps[1], tile[1, 2]):
            for row, first in ((y + taps[1] - 1, 0), (y - 1, reach)):
                if row < tile[0, 2]:
                    continue
                from1 = rows[row]
                line = -1 if from1 < 0 else (tile[0, 0] * lengths[1] + from1) * lengths[2] * inner
                gather_row(source, line, runs, inner, cval, False, (0, 0), values, 0)
                _move(counts, values, within, inner, side, pitch, steps, first, reach)
            if y < tile[0, 2]:
                continue
            to = ((tile[0, 0] * out_lengths[1] + y) * out_lengths[2] + tile[0, 3]) * inner + within
            for x in range(0, outs, LANES):
                at = taps[2] - 1 + x
                _sixteens(counts, VALUES * pitch + at, pitch, rank, found)
                least = most = found[0]
                for i in range(1, LANES):
                    least, most = min(least, found[i]), max(most, found[i])
                for sixteen in range(least, min(most, LANES - 1) + 1):
                    _values(counts, sixteen * LANES * pitch + at, pitch, sixteen, found, results, x)
            _narrow(results, target, to, inner, outs)
