"""Boxes of floats of more than 255 samples along one axis: sums in runs of 16, by the contract of kernels.smoothing."""

from __future__ import annotations

from typing import Any

from kernels.runtime.compiled import compiled
from kernels.smoothing.cpu.floats import doublings, enter, sum_across, sum_down
from kernels.smoothing.cpu.rows import Axis, Tile, add, beyond, convert, load, pair_sum, store, whole_blocks
from kernels.smoothing.window import RUN


def run_steps(taps: int) -> Any:
    """`doublings` of the whole runs that every window has."""
    return doublings((taps - 1) // RUN - 1)


def run_box_scratch_rows(rows: Axis) -> int:
    """Along a row: three that `sum_across` takes, sums of totals, and two each, as runs at both ends are whole, of
    samples, heads, tails and results. Down the rows: those that `sum_down` takes, its last result but one, the tail,
    and all heads from a window's first to the latest."""
    if rows.taps == 1:
        return 12
    totals = 3 + sum(int(taps) + 2 for taps in run_steps(rows.taps)[:, 0])
    return totals + 2 + rows.taps + 2 * RUN


@compiled
def run_box_tile(
    image: Any,
    border: Any,
    out: Any,
    scratch: Any,
    pitch: int,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    offset: int,
    steps: Any,
    factor: Any,
) -> None:
    """Sum the window along one axis, down the rows or along the columns, and multiply by `factor`.

    image, border, out, scratch : as in `gaussian_tile`, all of one float dtype
    offset                      : absolute coordinate of the first sample along that axis
    steps                       : `run_steps` of the axis's taps
    """
    outside = beyond(columns, tile)
    for plane in range(tile.plane0, tile.plane1):
        if rows.taps > 1:
            _down(
                image, border, out, scratch, pitch, rows, columns, channels, tile, outside, plane, offset, steps, factor
            )
            continue
        for y in range(tile.y0, tile.y1):
            lead = (tile.x0 + columns.first + offset) % RUN
            row = 4 * pitch
            enter(image, border, scratch, row + lead * channels, rows, columns, channels, tile, outside, plane, y)
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            _across(scratch, row, pitch, columns.taps, channels, lead, tile.x1 - tile.x0, steps, factor, out, at)


@compiled
def _across(
    scratch: Any,
    row: int,
    pitch: int,
    taps: int,
    channels: int,
    lead: int,
    count: int,
    steps: Any,
    factor: Any,
    out: Any,
    at: int,
) -> None:
    """One row."""
    runs = (lead + count + taps - 2) // RUN + 1
    longer, heads, tails, whole = 3 * pitch, row + 2 * pitch, row + 4 * pitch, row + 6 * pitch
    _scan(scratch, row, 0, channels, tails, runs, channels)
    _scan(scratch, row, (RUN - 1) * channels, -channels, heads, runs, channels)
    for run in range(runs):
        for c in range(channels):
            scratch[run * channels + c] = scratch[tails + (run * RUN + RUN - 1) * channels + c]
    sums = sum_across(scratch, 0, steps, channels, runs * channels, pitch) + channels
    pair_sum(scratch, sums, (taps - 1) // RUN * channels, longer, whole_blocks(runs * channels))
    _spread(scratch, sums, longer, RUN - (taps - 1) % RUN, whole, (lead + count - 1) // RUN + 1, channels)
    first = lead * channels
    tail = tails + first + (taps - 1) * channels
    _finish(scratch, heads + first, tail, whole + first, factor, out, at, count * channels)


@compiled
def _scan(array: Any, source: int, first: int, step: int, at: int, runs: int, channels: int) -> None:
    """The sums of every run's samples from its `first` on; the next is `step` after it. Four runs at a time, since each
    sum waits for the one before."""
    size = RUN * channels
    for run in range(0, runs, 4):
        for c in range(channels):
            place = run * size + first + c
            a, b = load(array, source + place), load(array, source + place + size)
            d, e = load(array, source + place + 2 * size), load(array, source + place + 3 * size)
            for j in range(RUN):
                store(array, at + place, a)
                store(array, at + place + size, b)
                store(array, at + place + 2 * size, d)
                store(array, at + place + 3 * size, e)
                if j < RUN - 1:
                    place += step
                    a = a + load(array, source + place)
                    b = b + load(array, source + place + size)
                    d = d + load(array, source + place + 2 * size)
                    e = e + load(array, source + place + 3 * size)


@compiled
def _spread(array: Any, sums: int, longer: int, fewest: int, at: int, runs: int, channels: int) -> None:
    """The whole runs' sums of every result: the first `fewest` of each run have fewer."""
    for run in range(runs):
        for c in range(channels):
            few, more = load(array, sums + run * channels + c), load(array, longer + run * channels + c)
            for j in range(RUN):
                store(array, at + (run * RUN + j) * channels + c, few)
            for j in range(fewest, RUN):
                store(array, at + (run * RUN + j) * channels + c, more)


@compiled
def _down(
    image: Any,
    border: Any,
    out: Any,
    scratch: Any,
    pitch: int,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    outside: Any,
    plane: int,
    offset: int,
    steps: Any,
    factor: Any,
) -> None:
    """All rows of a tile. The ring of heads holds samples until their run is complete."""
    width = whole_blocks((tile.x1 - tile.x0) * channels)
    first = tile.y0 + rows.first
    lead = (first + offset) % RUN
    last = lead + tile.y1 - tile.y0 + rows.taps - 2
    slots, rest = rows.taps + 2 * RUN, (rows.taps - 1) % RUN
    ring = 3 * pitch
    for s in range(steps.shape[0]):
        ring += (steps[s, 0] + 2) * pitch
    older, tail = ring, ring + pitch
    ring += 2 * pitch
    for place in range(lead, last + 1):
        run, j = place // RUN, place % RUN
        row = ring + place % slots * pitch
        enter(image, border, scratch, row, rows, columns, channels, tile, outside, plane, first + place - lead)
        if j == 0 or place == lead:
            convert(scratch, row, scratch, tail, width)
        else:
            add(scratch, row, scratch, tail, width)
        start = place - rows.taps + 1
        if start >= lead:
            y = tile.y0 + start - lead
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            head, count = ring + start % slots * pitch, (tile.x1 - tile.x0) * channels
            if j >= rest:
                _finish(scratch, head, tail, 0, factor, out, at, count)
            else:
                _finish_longer(scratch, head, tail, older, _total(run - 1, pitch), factor, out, at, count)
        if j == RUN - 1:
            convert(scratch, 0, scratch, older, width)
            convert(scratch, tail, scratch, _total(run, pitch), width)
            sum_down(scratch, _total(run, pitch), steps, run, width, pitch)
            for above in range(place - 1, max(lead, place - RUN + 1) - 1, -1):
                below = ring + (above + 1) % slots * pitch
                pair_sum(scratch, below, ring + above % slots * pitch, ring + above % slots * pitch, width)


@compiled
def _total(run: int, pitch: int) -> int:
    """Where `sum_down` expects its row number `run`."""
    return (3 + run % 3) * pitch


@compiled
def _finish(array: Any, head: int, tail: int, whole: int, factor: Any, out: Any, at: int, count: int) -> None:
    for i in range(count):
        store(out, at + i, (load(array, head + i) + load(array, tail + i) + load(array, whole + i)) * factor)


@compiled
def _finish_longer(
    array: Any, head: int, tail: int, whole: int, last: int, factor: Any, out: Any, at: int, count: int
) -> None:
    for i in range(count):
        sums = load(array, whole + i) + load(array, last + i)
        store(out, at + i, (load(array, head + i) + load(array, tail + i) + sums) * factor)
