"""Boxes of floats of more than 64 samples along an axis: sums in runs of 16, by the contract of kernels.smoothing."""

from __future__ import annotations

from typing import Any

from kernels.runtime.compiled import compiled
from kernels.smoothing.cpu.floats import doublings, enter, sum_across, sum_down
from kernels.smoothing.cpu.rows import (
    QUAD,
    SQUARE,
    Axis,
    Tile,
    add,
    beyond,
    convert,
    copy_quad,
    load,
    pair_sum,
    scaled,
    store,
    transpose,
    whole_blocks,
)
from kernels.smoothing.window import MOST_DOUBLED, RUN

# Of the scratch array: three that `sum_across` takes, sums of totals, two of samples, as runs at both ends are whole,
# and five each of heads and tails, for whole blocks of runs.
ACROSS_ROWS = 16


def run_steps(taps: int) -> Any:
    """`doublings` of the whole runs that every long window has; of all samples of others."""
    return doublings((taps - 1) // RUN - 1 if is_long(taps) else taps)


@compiled
def is_long(taps: int) -> bool:
    return taps > MOST_DOUBLED


@compiled
def whole_runs(samples: int) -> int:
    return -(-samples // RUN) * RUN


def run_box_scratch_rows(rows: Axis) -> int:
    """Along a row: ACROSS_ROWS. Down the rows: those that `sum_down` takes; for long windows also its last result but
    one, the tail, and all heads from a window's first to the latest."""
    summed = 3 + sum(int(taps) + 2 for taps in run_steps(rows.taps)[:, 0])
    return ACROSS_ROWS + summed + (2 + whole_runs(rows.taps) if is_long(rows.taps) else 0)


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
    offset_y: int,
    offset_x: int,
    steps_y: Any,
    steps_x: Any,
    factor: Any,
) -> None:
    """Window sums down the rows and along the columns, of which at least one is long, times `factor`.

    image, border, out, scratch : as in `gaussian_tile`, all of one float dtype
    offset_*                    : absolute coordinate of the first sample along that axis
    steps_*                     : `run_steps` of the axis's taps
    """
    outside = beyond(columns, tile)
    lead = (tile.x0 + columns.first + offset_x) % RUN
    count, first = (tile.x1 - tile.x0 + columns.taps - 1) * channels, tile.y0 + rows.first
    sums = scratch[ACROSS_ROWS * pitch :]  # down the rows
    for plane in range(tile.plane0, tile.plane1):
        if is_long(rows.taps):
            _down(
                image, border, out, scratch, sums, pitch, rows, columns, channels, tile, outside, plane, offset_y, lead,
                steps_y, steps_x, factor,
            )  # fmt: skip
            continue
        for position in range(first, tile.y1 + rows.first + rows.taps - 1):
            newest = (3 + (position - first) % 3) * pitch if steps_y.shape[0] else 0
            enter(image, border, sums, newest, rows, columns, channels, tile, outside, plane, position)
            row = sum_down(sums, newest, steps_y, position - first, count, pitch)
            y = position - rows.first - rows.taps + 1
            if y >= tile.y0:
                convert(sums, row, scratch, 4 * pitch + lead * channels, count)
                at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
                width = tile.x1 - tile.x0
                _across(scratch, pitch, columns.taps, channels, lead, width, steps_x, factor, out, at)


@compiled
def _across(
    scratch: Any,
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
    """The row that begins `lead` pixels after the scratch array's fifth. For long windows, samples change places, so
    that those of neighbouring runs are neighbours."""
    row = 4 * pitch
    if not is_long(taps):
        first, width = row + lead * channels, (count + taps - 1) * channels
        scaled(scratch, sum_across(scratch, first, steps, channels, width, pitch), factor, out, at, count * channels)
        return
    runs, last, rest = (lead + count + taps - 2) // RUN + 1, (taps - 1) // RUN * channels, (taps - 1) % RUN
    width = whole_blocks(runs * channels + (QUAD if channels > 1 else 0))
    longer, heads, tails = 3 * pitch, row + 2 * pitch, row + 7 * pitch
    _apart(scratch, row, heads, width, runs, channels)
    convert(scratch, heads, scratch, tails, width)
    for j in range(1, RUN):
        tail = tails + j * width
        pair_sum(scratch, tail - width, heads + j * width, tail, width)
    for j in range(RUN - 2, -1, -1):
        head = heads + j * width
        pair_sum(scratch, head + width, head, head, width)
    totals = tails + (RUN - 1) * width
    sums = sum_across(scratch, totals, steps, channels, width, pitch) + channels
    pair_sum(scratch, sums, totals + last, longer, width)
    for j in range(RUN):
        head, tail = heads + j * width, tails + last + (j + rest) * width
        if j + rest < RUN:
            _finish(scratch, head, tail, sums, factor, scratch, head, width)
        else:
            _finish(scratch, head, tail + channels - RUN * width, longer, factor, scratch, head, width)
    _together(scratch, heads, width, lead, count, channels, out, at)


@compiled
def _apart(array: Any, source: int, at: int, width: int, runs: int, channels: int) -> None:
    """Sample j of run r goes to place r of row j."""
    if channels == 1:
        for run in range(0, runs, SQUARE):
            for j in range(0, RUN, SQUARE):
                transpose(array, source + run * RUN + j, RUN, array, at + j * width + run, width)
        return
    for run in range(runs):
        for c in range(0, channels, QUAD):  # what is too much is overwritten, or behind the row
            first, to = source + run * RUN * channels + c, at + run * channels + c
            for j in range(RUN):
                copy_quad(array, first + j * channels, array, to + j * width)


@compiled
def _together(array: Any, source: int, width: int, lead: int, count: int, channels: int, out: Any, at: int) -> None:
    """The reverse, from place `lead` of the first run on."""
    run, end = 0, lead + count
    while run * RUN < end:
        first, to = source + run * channels, at + (run * RUN - lead) * channels
        if channels == 1 and run > 0 and (run + SQUARE) * RUN <= end:
            for j in range(0, RUN, SQUARE):
                transpose(array, first + j * width, width, out, to + j, RUN)
            run += SQUARE
            continue
        if channels > 1 and run > 0 and (run + 1) * RUN < end:
            for j in range(RUN):
                for c in range(0, channels, QUAD):
                    copy_quad(array, first + j * width + c, out, to + j * channels + c)
        else:
            for j in range(max(lead - run * RUN, 0), min(end - run * RUN, RUN)):
                for c in range(channels):
                    out[to + j * channels + c] = array[first + j * width + c]
        run += 1


@compiled
def _down(
    image: Any,
    border: Any,
    out: Any,
    scratch: Any,
    sums: Any,
    pitch: int,
    rows: Axis,
    columns: Axis,
    channels: int,
    tile: Tile,
    outside: Any,
    plane: int,
    offset: int,
    lead_x: int,
    steps: Any,
    steps_x: Any,
    factor: Any,
) -> None:
    """All rows of a tile. The ring of heads holds samples until their run is complete."""
    count = (tile.x1 - tile.x0 + columns.taps - 1) * channels
    width, both = whole_blocks(count), columns.taps > 1
    across = 4 * pitch + lead_x * channels
    first = tile.y0 + rows.first
    lead = (first + offset) % RUN
    last = lead + tile.y1 - tile.y0 + rows.taps - 2
    slots, rest = whole_runs(rows.taps), (rows.taps - 1) % RUN
    ring = 3 * pitch
    for s in range(steps.shape[0]):
        ring += (steps[s, 0] + 2) * pitch
    older, tail = ring, ring + pitch
    ring += 2 * pitch
    for place in range(lead, last + 1):
        run, j = place // RUN, place % RUN
        row = ring + place % slots * pitch
        enter(image, border, sums, row, rows, columns, channels, tile, outside, plane, first + place - lead)
        if j == 0 or place == lead:
            convert(sums, row, sums, tail, width)
        else:
            add(sums, row, sums, tail, width)
        start = place - rows.taps + 1
        if start >= lead:
            y = tile.y0 + start - lead
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            head = ring + start % slots * pitch
            target, to, scale = (scratch, across, factor / factor) if both else (out, at, factor)
            if j >= rest:
                _finish(sums, head, tail, 0, scale, target, to, count)
            else:
                _finish_longer(sums, head, tail, older, _total(run - 1, pitch), scale, target, to, count)
            if both:
                wanted = tile.x1 - tile.x0
                _across(scratch, pitch, columns.taps, channels, lead_x, wanted, steps_x, factor, out, at)
        if j == RUN - 1:
            convert(sums, 0, sums, older, width)
            convert(sums, tail, sums, _total(run, pitch), width)
            sum_down(sums, _total(run, pitch), steps, run, width, pitch)
            _add_heads(sums, ring + (place - j) % slots * pitch, pitch, width)


@compiled
def _add_heads(array: Any, at: int, pitch: int, count: int) -> None:
    """A run's rows become their sums from each one on."""
    for i in range(count):
        head = load(array, at + (RUN - 1) * pitch + i)
        for j in range(RUN - 2, -1, -1):
            head = head + load(array, at + j * pitch + i)
            store(array, at + j * pitch + i, head)


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
