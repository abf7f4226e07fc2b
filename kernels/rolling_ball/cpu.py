"""The rolling ball on the CPU: rows of results, tap by tap, in our own threads with Numba-compiled code."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from kernels.runtime.arrays import native
from kernels.runtime.compiled import compiled
from kernels.runtime.threads import for_each
from kernels.smoothing.cpu.rows import load, reload, store

# Of a part. Large balls take few lines at once, so that a cancelled computation ends soon.
MOST_LINES, MOST_STEPS = 8, 1 << 28


def touched(heights: Any, caps: Any, sign: int, *, workers: int | None = None) -> Any:
    """heights: [planes, three axes] with the halo of the caps, which the result lacks."""
    planes, *lengths = heights.shape
    outs = tuple(n - taps + 1 for n, taps in zip(lengths, caps.shape, strict=True))
    source = native(heights if sign > 0 else -heights).reshape(-1)
    out = np.empty((planes, *outs), heights.dtype)
    target, sizes = out.reshape(-1), np.array(lengths, np.int64)
    lines = math.prod(out.shape[:-1])
    part = min(MOST_LINES, max(MOST_STEPS // (caps.size * outs[-1]), 1))

    def compute(first: int) -> None:
        touched_rows(source, sizes, target, caps, first, min(first + part, lines))

    for_each(compute, range(0, lines, part), workers or len(os.sched_getaffinity(0)))
    return out if sign > 0 else np.negative(out, out=out)


@compiled
def touched_rows(source: Any, lengths: Any, target: Any, caps: Any, first: int, last: int) -> None:
    taps0, taps1, taps2 = caps.shape
    outs0, outs1, outs2 = lengths[0] - taps0 + 1, lengths[1] - taps1 + 1, lengths[2] - taps2 + 1
    for line in range(first, last):
        y, rest = line % outs1, line // outs1
        z, plane = rest % outs0, rest // outs0
        target[line * outs2 : (line + 1) * outs2] = np.inf
        for dz in range(taps0):
            for dy in range(taps1):
                at = ((plane * lengths[0] + z + dz) * lengths[1] + y + dy) * lengths[2]
                for dx in range(taps2):
                    if caps[dz, dy, dx] < np.inf:
                        _lower(target, line * outs2, source, at + dx, caps[dz, dy, dx], outs2)


@compiled
def _lower(target: Any, to: int, source: Any, at: int, cap: Any, count: int) -> None:
    for i in range(count):
        height, lowest = load(source, at + i) + cap, reload(target, to + i)
        store(target, to + i, height if height < lowest else lowest)
