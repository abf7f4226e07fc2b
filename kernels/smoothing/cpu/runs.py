"""Boxes of floats of more than 255 samples along one axis: sums in runs of 16, by the contract of kernels.smoothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.compiled import compiled
from kernels.smoothing.cpu.floats import doublings, enter, sum_across, sum_down
from kernels.smoothing.cpu.rows import Axis, Tile, add, beyond, convert, load, pair_sum, store, whole_blocks
from kernels.smoothing.window import RUN as RUN_SAMPLES

RUN = np.int64(RUN_SAMPLES)


def run_steps(taps: int) -> Any:
    """`doublings` of the whole runs that every window has."""
    return doublings((taps - 1) // RUN_SAMPLES - 1)


def run_box_scratch_rows(rows: Axis) -> int:
    """Along a row: two pitches each for the samples and heads, tails, totals, and two for the sums of totals. Down the
    rows: what `sum_down` takes, its last result but one, the tail, and the heads of all rows from a window's first on."""
    if rows.taps == 1:
        return 10
    totals = 3 + sum(int(taps) + 2 for taps in run_steps(rows.taps)[:, 0])
    return totals + 2 + rows.taps + 2 * RUN_SAMPLES


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
    """Window sums along the rows or the columns, whichever have a window, times `factor`.

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
            samples = 8 * pitch
            enter(image, border, scratch, samples + lead * channels, rows, columns, channels, tile, outside, plane, y)
            at = ((plane * rows.out_length + y) * columns.out_length + tile.x0) * channels
            _across(scratch, samples, pitch, columns.taps, channels, lead, tile.x1 - tile.x0, steps, factor, out, at)


@compiled
def _across(
    scratch: Any,
    head: int,
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
    """One row: the samples are at `head`, where the heads replace them."""
    runs = (lead + count + taps - 2) // RUN + 1
    tail, size = 6 * pitch, RUN * channels
    for run in range(runs):
        for c in range(channels):
            first = head + run * size + c
            total = scratch[first]
            scratch[tail + run * size + c] = total
            for j in range(channels, size, channels):
                total = total + scratch[first + j]
                scratch[tail + run * size + c + j] = total
            scratch[run * channels + c] = total
            rest = scratch[first + size - channels]
            for j in range(size - 2 * channels, -1, -channels):
                rest = rest + scratch[first + j]
                scratch[first + j] = rest
    whole = sum_across(scratch, 0, steps, channels, runs * channels, 2 * pitch)
    shift, further = (taps - 1) * channels, (taps - 1) // RUN * channels
    for place in range(lead * channels, (lead + count) * channels):
        c, run = place % channels, place // size
        sums = scratch[whole + (run + 1) * channels + c]
        if place // channels % RUN + (taps - 1) % RUN >= RUN:
            sums = sums + scratch[run * channels + further + c]
        out[at + place - lead * channels] = (scratch[head + place] + scratch[tail + place + shift] + sums) * factor


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
