"""Tessellation of NumPy arrays: count, prefix sum, and one compiled loop that fills."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled

Array = NDArray[Any]


def tessellate(curves: Array, tolerance: float, max_segments: int) -> dict[str, Array]:
    """Offsets and points; see kernels.classic.tessellation."""
    curves = np.ascontiguousarray(curves, np.float32)
    offsets = np.zeros(len(curves) + 1, np.int64)
    np.cumsum(segments(curves, tolerance, max_segments) + 1, out=offsets[1:])
    points = np.empty((int(offsets[-1]), 2), np.float32)
    _fill(curves, offsets, points)
    return {"offsets": offsets, "points": points}


def segments(curves: Array, tolerance: float, max_segments: int) -> Array:
    """The number of segments of each curve, int64."""
    a, b, c = (curves[:, k].astype(np.float64) for k in range(3))
    bend = (a - 2.0 * b) + c
    root = np.sqrt(np.sqrt(bend[:, 0] * bend[:, 0] + bend[:, 1] * bend[:, 1]) * (0.25 / tolerance))
    return np.where(root < max_segments, np.maximum(np.ceil(root), 1), max_segments).astype(np.int64)


@compiled
def _fill(curves: Array, offsets: Array, points: Array) -> None:
    one, two = np.float32(1), np.float32(2)
    for curve in range(curves.shape[0]):
        begin = offsets[curve]
        last = offsets[curve + 1] - 1 - begin
        for i in range(last + 1):
            t = np.float32(i) / np.float32(last)
            s = one - t
            of_a, of_b, of_c = s * s, two * s * t, t * t
            for axis in range(2):
                points[begin + i, axis] = (of_a * curves[curve, 0, axis] + of_b * curves[curve, 1, axis]) + (
                    of_c * curves[curve, 2, axis]
                )
