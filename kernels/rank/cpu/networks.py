"""Medians, minima and maxima of small squares by networks of minima and maxima, over whole rows of samples at once.

Two rows of results are computed together. The rows that the windows of both share are sorted down every column; sorted
columns are merged in pairs, pairs with pairs; then each result's own row is added. Only samples that can still be the
median are kept: with r samples to come, r + 1 places around the middle.

A network is traced: the functions below run once on symbols, when this module is imported, and record each minimum and
maximum; those that no result needs are dropped, the others become LLVM code, which the loops over rows vectorise.

Minimum and maximum filters combine samples along each row first, then down the columns of two windows.

Sources: Adams, "Fast median filters using separable sorting networks" (2021); Batcher, "Sorting networks and their
applications" (1968).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from kernels.rank.cpu.samples import gather_row, scatter_row
from kernels.rank.task import Task
from kernels.runtime.compiled import compiled, types
from kernels.smoothing.cpu.rows import address, generated, written_row

SIZES = (3, 5, 7)
BLOCK = 64  # samples
COLUMN, PAIR, RESULT, LEAST, MOST = ((0,) * length for length in (1, 2, 3, 5, 7))  # steps, by their lengths

Value = int  # of a trace: the number of an input or of an operation


def applies(task: Task) -> bool:
    """Whether a network computes a task."""
    planes, rows, columns = task.axes
    return (
        task.dtype.itemsize < 8  # vector units before AVX-512 do not compare 64 bits so well
        and task.footprint is None
        and planes.length == planes.taps == 1
        and rows.taps == columns.taps
        and rows.taps in SIZES
        and task.whole_rank in (0, task.samples // 2, task.samples - 1)
        and task.nodata is None
    )


def step_of(task: Task) -> tuple[int, ...]:
    """The last step of a task."""
    return LEAST if task.whole_rank == 0 else MOST if task.whole_rank == task.samples - 1 else RESULT


class Trace:
    """Minima and maxima in execution order."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.operations: list[tuple[bool, Value, Value]] = []  # is a minimum, first operand, second operand

    def _add(self, is_minimum: bool, a: Value, b: Value) -> Value:
        self.operations.append((is_minimum, a, b))
        return self.inputs + len(self.operations) - 1

    def low(self, a: Value, b: Value) -> Value:
        return self._add(True, a, b)

    def high(self, a: Value, b: Value) -> Value:
        return self._add(False, a, b)

    def sort(self, values: Sequence[Value]) -> list[Value]:
        """Ascending."""
        if len(values) == 1:
            return [*values]
        half = len(values) // 2
        return self.merge(self.sort(values[:half]), self.sort(values[half:]))

    def merge(self, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
        """Two ascending lists as one."""
        half = 1 << (max(len(a), len(b)) - 1).bit_length()
        below, values = half - len(a), [*a, *b]

        def exchange(i: int, j: int) -> None:
            if j < len(values):
                values[i], values[j] = self.low(values[i], values[j]), self.high(values[i], values[j])

        for i in range(len(a)):
            exchange(i, i + half)
        apart = half // 2
        while apart:
            for i in range(len(values)):
                if (i + below) // apart % 2 == 1:
                    exchange(i, i + apart)
            apart //= 2
        return values

    def ranked(self, a: Sequence[Value], b: Sequence[Value], rank: int) -> Value:
        """The value of a rank among those of two ascending lists: of all ways to take rank + 1 from the front of both,
        the one whose last is least."""
        lasts = []
        for i in range(max(0, rank + 1 - len(b)), min(rank + 1, len(a)) + 1):
            j = rank + 1 - i
            lasts.append(b[j - 1] if i == 0 else a[i - 1] if j == 0 else self.high(a[i - 1], b[j - 1]))
        found = lasts[0]
        for last in lasts[1:]:
            found = self.low(found, last)
        return found

    def needed(self, results: Sequence[Value]) -> list[bool]:
        """For each value, whether the results depend on it."""
        needed = [False] * (self.inputs + len(self.operations))
        for result in results:
            needed[result] = True
        for number in reversed(range(len(self.operations))):
            if needed[self.inputs + number]:
                for value in self.operations[number][1:]:
                    needed[value] = True
        return needed


def _column(size: int) -> tuple[Trace, list[Value]]:
    """Sorts a column of the rows that two windows share."""
    trace = Trace(size - 1)
    return trace, trace.sort([*range(size - 1)])


def _pair(size: int) -> tuple[Trace, list[Value]]:
    """Merges two sorted columns."""
    core, trace = size - 1, Trace(2 * (size - 1))
    return trace, trace.merge([*range(core)], [*range(core, 2 * core)])


def _whole(size: int) -> tuple[Trace, list[Value]]:
    """In one step, from the rows of both windows, column by column: cheapest for 3 × 3."""
    trace = Trace((size + 1) * size)
    columns = [[*range(at * (size + 1), (at + 1) * (size + 1))] for at in range(size)]
    cores = [trace.sort(column[1:-1]) for column in columns]
    held = trace.merge(trace.merge(cores[0], cores[1]), cores[2])
    middle, kept = size * size // 2, size * size - size * (size - 1)
    dropped = middle - kept
    rows = [[column[at] for column in columns] for at in (0, size)]
    return trace, [trace.ranked(held[dropped : middle + 1], trace.sort(row), middle - dropped) for row in rows]


def _results(size: int) -> tuple[Trace, list[Value]]:
    """Both medians, from pairs of columns, the last column, and each window's own row."""
    core, pairs, whole = size - 1, size // 2, size * size
    trace, middle = Trace(core * size + 2 * size), whole // 2
    lists = [[*range(2 * core * at, 2 * core * (at + 1))] for at in range(pairs)]
    lists.append([*range(2 * core * pairs, core * size)])
    held, dropped, known = lists[0], 0, len(lists[0])
    for more in lists[1:]:
        merged = trace.merge(held, more)
        known += len(more)
        least, most = max(middle - (whole - known) - dropped, 0), middle - dropped
        held, dropped = merged[least : most + 1], dropped + least
    rows = [[*range(core * size + at, core * size + at + size)] for at in (0, size)]
    return trace, [trace.ranked(held, trace.sort(row), middle - dropped) for row in rows]


def _along(size: int, is_minimum: bool) -> tuple[Trace, list[Value]]:
    """The extreme of a window along a row."""
    trace = Trace(size)
    return trace, [reduce(trace.low if is_minimum else trace.high, range(size))]


def _down(size: int, is_minimum: bool) -> tuple[Trace, list[Value]]:
    """The extremes of two windows down a column."""
    trace = Trace(size + 1)
    choose = trace.low if is_minimum else trace.high
    shared = reduce(choose, range(1, size))
    return trace, [choose(0, shared), choose(shared, size)]


NETWORKS = {(step, size): make(size) for size in (5, 7) for step, make in enumerate((_column, _pair, _results), 1)}
NETWORKS[len(RESULT), 3] = _whole(3)
for _size, _last in product(SIZES, (LEAST, MOST)):  # after the step that is one shorter
    NETWORKS[len(_last) - 1, _size] = _along(_size, _last is LEAST)
    NETWORKS[len(_last), _size] = _down(_size, _last is LEAST)


@generated
def _network(_typing: Any, step: Any, size: Any, source: Any, origins: Any, target: Any, goals: Any, x: Any) -> Any:
    """target[goals[k] + x] = result k of source[origins[i] + x], by the network of that step and size.

    Numba specialises a function by its arguments' types only, so the lengths of two tuples encode step and size.
    """
    trace, results = NETWORKS[len(step), len(size)]
    needed = trace.needed(results)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        scope = written_row(builder)
        source_type, origins_type, target_type, goals_type = signature.args[2:6]

        def loaded(array_type: Any, array: Any, index: Any) -> Any:
            value = builder.load(address(context, builder, array_type, array, index))
            value.set_metadata("noalias", scope)
            return value

        def place(array_type: Any, array: Any, number: int) -> Any:
            return builder.add(loaded(array_type, array, context.get_constant(types.intp, number)), args[6])

        values: list[Any] = [
            loaded(source_type, args[2], place(origins_type, args[3], number)) if needed[number] else None
            for number in range(trace.inputs)
        ]
        compared = builder.icmp_signed if source_type.dtype.signed else builder.icmp_unsigned
        for number, (is_minimum, a, b) in enumerate(trace.operations, trace.inputs):
            value = None
            if needed[number]:
                first, second = (a, b) if is_minimum else (b, a)
                value = builder.select(compared("<", values[a], values[b]), values[first], values[second])
            values.append(value)
        for number, result in enumerate(results):
            at = place(goals_type, args[5], number)
            stored = builder.store(values[result], address(context, builder, target_type, args[4], at))
            stored.set_metadata("alias.scope", scope)
        return context.get_dummy_value()

    return types.void(step, size, source, origins, target, goals, x), emit


@compiled
def _over_row(step: Any, size: Any, source: Any, origins: Any, target: Any, goals: Any, first: int, end: int) -> None:
    for x in range(first, end):
        _network(step, size, source, origins, target, goals, x)


@compiled
def _results_of(step: Any, size: Any, work: Any, origins: Any, target: Any, goals: Any, count: int) -> None:
    """In whole blocks, so that no loop ends in single samples: the last overlaps the one before."""
    whole = count // BLOCK * BLOCK
    _over_row(step, size, work, origins, target, goals, 0, whole)
    if whole < count:
        _over_row(step, size, work, origins, target, goals, count - BLOCK, count)


@compiled
def network_tile(
    source: Any,
    sources: Any,
    runs: Any,
    lengths: Any,
    inner: int,
    target: Any,
    out_lengths: Any,
    step: Any,
    taps: Any,
    is_float: bool,
    ends: Any,
    cval: int,
    tile: Any,
) -> bool:
    """Fill a tile of medians, minima or maxima, of all inner samples. Returns whether it did: not if it met a NaN.
    Integers are written where they belong, results of floats as keys first.

    runs   : of `samples.runs_of`, for the tile's columns with their halo
    step   : RESULT, LEAST or MOST
    taps   : as many of anything as the window has along both axes
    ends   : the lowest and the highest key of numbers
    cval   : bits beyond the edge
    others : as of `ordered.ordered_tile`
    """
    rows = sources[1]
    size = len(taps)
    core, held, steps = size - 1, size + 1, len(step)
    is_extreme = steps > 3
    outs = (tile[1, 3] - tile[0, 3]) * inner
    wide = outs + core * inner
    blocks = (wide + BLOCK - 1) // BLOCK * BLOCK
    pitch = blocks + BLOCK
    # Rows of samples, sorted columns, pairs of them, results.
    work = np.empty((held + 3 * core + 3) * pitch + core * inner, source.dtype)
    columns, pairs, results = np.empty(core, np.int64), np.empty(2 * core, np.int64), np.empty(2, np.int64)
    column_inputs, pair_inputs = np.empty(core, np.int64), np.empty(2 * core, np.int64)
    inputs, goals = np.empty(size * held, np.int64), np.empty(2, np.int64)
    line, column_goal = np.empty(size, np.int64), np.empty(1, np.int64)
    # Loops, since Numba takes seconds to compile arithmetic on arrays.
    for i in range(core):
        columns[i] = (held + i) * pitch
        inputs[core * core + i] = columns[i] + core * inner
    for i in range(2 * core):
        pairs[i] = (held + core + i) * pitch
        pair_inputs[i] = columns[i % core] + i // core * inner
    for i in range(2):
        results[i] = (held + 3 * core + i) * pitch
    for i in range(core * core):
        inputs[i] = pairs[i % (2 * core)] + i // (2 * core) * 2 * inner
    for i in range(size):
        line[i] = columns[0] + i * inner
    plane, end = tile[0, 0], tile[1, 2]
    read = tile[0, 2]
    for y in range(tile[0, 2], end, 2):
        while read < min(y + held, end + core):
            at = -1 if rows[read] < 0 else (plane * lengths[1] + rows[read]) * lengths[2] * inner
            row = read % held * pitch
            if is_extreme:
                column_goal[0], row = row, columns[0]
            if not gather_row(source, at, runs, inner, cval, is_float, ends, work, row):
                return False
            if is_extreme:
                _over_row(step[1:], taps, work, line, work, column_goal, 0, blocks)
            read += 1
        if is_extreme:
            for i in range(held):
                inputs[i] = (y + i) % held * pitch
        elif size == 3:
            for i in range(size * held):
                inputs[i] = (y + i % held) % held * pitch + i // held * inner
        else:
            for i in range(core):
                column_inputs[i] = (y + 1 + i) % held * pitch
            for i in range(size):
                inputs[core * size + i] = y % held * pitch + i * inner
                inputs[core * size + size + i] = (y + size) % held * pitch + i * inner
            _over_row(COLUMN, taps, work, column_inputs, work, columns, 0, blocks)
            _over_row(PAIR, taps, work, pair_inputs, work, pairs, 0, blocks)
        if outs >= BLOCK and y + 1 < end and not is_float:
            for i in range(2):
                goals[i] = ((plane * out_lengths[1] + y + i) * out_lengths[2] + tile[0, 3]) * inner
            _results_of(step, taps, work, inputs, target, goals, outs)
            continue
        _results_of(step, taps, work, inputs, work, results, blocks)
        for row in range(y, min(y + 2, end)):
            to = ((plane * out_lengths[1] + row) * out_lengths[2] + tile[0, 3]) * inner
            scatter_row(work, results[row - y], is_float, target, to, outs)
    return True
