"""Prefix sums of NumPy arrays: our own threads sum strips of a fixed length, then scan each from its prefix.

Each sum adds sums of runs and of groups of runs, and the sums of strips are compensated, so every result is within the
error bound, which allows about two hundred roundings.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled

Array = NDArray[Any]

STRIP = 1 << 16  # values; fixed, so that the bits do not depend on the number of workers
RUN, RUNS = 32, 32 * 64  # values of a run, and of a group of runs


def scanned(
    values: Array, heads: Array | None, exclusive: bool, out: Array | None, *, workers: int | None = None
) -> Array:
    """See kernels.classic.scan."""
    source = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    if out is None:
        out = np.empty_like(source)
    # Signed and unsigned integers of one size share machine code, since sums are modulo a power of two.
    bits = source if source.dtype.kind == "f" else source.view(f"u{source.itemsize}")
    target = out.view(bits.dtype)
    summed = np.float64 if source.dtype.kind == "f" else bits.dtype
    marks = np.zeros(0, np.uint8) if heads is None else np.ascontiguousarray(heads).view(np.uint8)
    firsts = range(0, source.size, STRIP)
    sums, begun = np.zeros(len(firsts), summed), np.zeros(len(firsts), np.bool_)

    def total(strip: int) -> None:
        """The sum of the strip's values from its last head on."""
        part = slice(strip * STRIP, (strip + 1) * STRIP)
        begins = np.flatnonzero(marks[part])
        begun[strip] = begins.size > 0
        with np.errstate(all="ignore"):  # set per thread
            sums[strip] = bits[part][begins[-1] if begins.size else 0 :].sum(dtype=summed)

    def scan(strip: int) -> None:
        part = slice(strip * STRIP, (strip + 1) * STRIP)
        scan_strip(bits[part], marks[part], before[strip : strip + 1], exclusive, target[part])

    with ThreadPoolExecutor(max(1, min(workers or len(os.sched_getaffinity(0)), len(firsts)))) as pool:
        list(pool.map(total, range(len(firsts))))
        before = _before(sums, begun)
        list(pool.map(scan, range(len(firsts))))
    return out


def _before(sums: Array, begun: Array) -> Array:
    """The prefix of each strip. `begun`: a segment begins in the strip, whose sum counts from there on."""
    before = np.zeros_like(sums)
    total, lost = np.zeros(2, sums.dtype)
    with np.errstate(all="ignore"):
        for strip, term in enumerate(sums[:-1], start=1):
            if begun[strip - 1]:
                total, lost = term, term - term
            else:
                carried, total = total, total + term
                taken = total - carried
                lost += (carried - (total - taken)) + (term - taken)  # Knuth's two-sum
            before[strip] = total + lost if np.isfinite(lost) else total
    return before


@compiled
def scan_strip(values: Array, heads: Array, before: Array, exclusive: bool, out: Array) -> None:
    """Prefix sums that start from `before[0]`; `out` may be `values`."""
    sums = np.zeros(3, before.dtype)  # before the group of runs, in the group before the run, in the run
    sums[0] = before[0]
    for k in range(values.size):
        if k % RUN == 0:
            sums[1] += sums[2]
            sums[2] = 0
            if k % RUNS == 0:
                sums[0] += sums[1]
                sums[1] = 0
        value = values[k]
        if heads.size > 0 and heads[k] != 0:
            sums[:] = 0
        if exclusive:
            out[k] = sums[0] + (sums[1] + sums[2])
        sums[2] += value
        if not exclusive:
            out[k] = sums[0] + (sums[1] + sums[2])
