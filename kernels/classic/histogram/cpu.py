"""Histograms of NumPy arrays: our own threads count strips, and their counts are added."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled

Array = NDArray[Any]

STRIP = 1 << 20  # samples


def histogram(
    values: Array,
    edges: Array | None,
    *,
    channel_axis: int | None,
    channels: int,
    bins: int,
    workers: int | None = None,
) -> Array:
    """Counts [channels, bins]; see kernels.classic.histogram."""
    if channel_axis is not None:
        values = np.moveaxis(values, channel_axis, -1)
    flat = np.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(-1)
    strip = STRIP // channels * channels or channels
    firsts = range(0, flat.size, strip)

    def count(firsts: list[int]) -> Array:
        counts = np.zeros((channels, bins), np.int64)
        for first in firsts:
            part = flat[first : first + strip]
            if edges is None:
                count_integers(part, counts)
            else:
                _count_between(part, edges, counts)
        return counts

    workers = max(1, min(workers or len(os.sched_getaffinity(0)), len(firsts)))
    with ThreadPoolExecutor(workers) as pool:
        return np.asarray(sum(pool.map(count, [list(firsts[k::workers]) for k in range(workers)])))


@compiled
def count_integers(values: Array, counts: Array) -> None:
    """counts[channel, value] += 1, with interleaved channels. A single channel alternates between four tables, so that
    runs of equal values do not wait for the previous increment."""
    channels, bins = counts.shape
    if channels > 1:
        channel = 0
        for k in range(values.size):
            counts[channel, values[k]] += 1
            channel = channel + 1 if channel + 1 < channels else 0
        return
    tables = np.zeros((4, bins), np.int64)
    whole = values.size // 4 * 4
    for k in range(0, whole, 4):
        tables[0, values[k]] += 1
        tables[1, values[k + 1]] += 1
        tables[2, values[k + 2]] += 1
        tables[3, values[k + 3]] += 1
    for k in range(whole, values.size):
        tables[0, values[k]] += 1
    for table in range(4):
        for b in range(bins):
            counts[0, b] += tables[table, b]


def _count_between(values: Array, edges: Array, counts: Array) -> None:
    """Adds the samples of all channels to their bins, compared in float64."""
    channels, bins = counts.shape
    exact = values.astype(np.float64)
    place = np.searchsorted(edges, exact, side="right") - 1
    place[exact == edges[-1]] = bins - 1
    counted = (exact >= edges[0]) & (exact <= edges[-1])
    channel = np.arange(values.size) % channels
    numbers = (channel * bins + place)[counted]
    counts += np.bincount(numbers, minlength=channels * bins).reshape(channels, bins)
