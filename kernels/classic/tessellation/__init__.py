"""Tessellation: quadratic Bezier curves as polylines, on NumPy arrays (CPU) and CuPy arrays (CUDA).

Curves    : float32 [n, 3, 2]: a, b, c of a (1−t)² + 2 b t (1−t) + c t², each x, y, all finite.
Polylines : each curve gets the fewest segments, of equal steps of t, that keep it within the tolerance of its chords:
            √(|a − 2b + c| / (4 × tolerance)), rounded up, at least one and at most `max_segments`.
Result    : `offsets` int64 [n + 1], and `points` float32 [offsets[n], 2]: curve i is points[offsets[i]:offsets[i + 1]],
            from a to c, whose coordinates are exact.

The bits are the same on CPU and CUDA: counts use float64 and points float32 arithmetic, in one order, without FMA.

Source: the flatness of quadratic curves, e.g. Sederberg, "Computer aided geometric design", ch. 10 (2012).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array

__all__ = ["MAX_SEGMENTS", "Polylines", "tessellate"]

MAX_SEGMENTS = 1 << 16
MAX_CURVES = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True)
class Polylines:
    """The points of all curves, concatenated, and the offset of each curve."""

    offsets: Any  # int64 [n + 1]
    points: Any  # float32 [offsets[n], 2]


def tessellate(curves: Any, tolerance: float, *, max_segments: int = 256, stream: Any = None) -> Polylines:
    """The polylines of quadratic Bezier curves.

    curves       : NumPy or CuPy array. NumPy arrays are checked for values that are not finite; CuPy arrays are not:
                   such a curve has `max_segments` segments.
    tolerance    : maximum distance between a curve and its polyline, in the curves' unit, above 0
    max_segments : limit for one curve, up to 65536; a curve at the limit may exceed the tolerance
    stream       : CUDA: the stream to launch on; default CuPy's current one. The call waits for the device once, to
                   read the number of points.

    Returns the polylines, arrays of the curves' library. Raises ValueError or TypeError; the message names the
    parameter.
    """
    _check_curves(curves)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float | np.number):
        raise TypeError(f"tolerance must be a number; got {type(tolerance).__name__}")
    tolerance = float(tolerance)
    if not (math.isfinite(tolerance) and tolerance > 0 and math.isfinite(0.25 / tolerance)):
        raise ValueError(f"tolerance must be finite and over 0, and 1/tolerance finite; got {tolerance}")
    if isinstance(max_segments, bool) or not isinstance(max_segments, int) or not 1 <= max_segments <= MAX_SEGMENTS:
        raise ValueError(f"max_segments must be a whole number from 1 to {MAX_SEGMENTS}; got {max_segments!r}")
    if isinstance(curves, np.ndarray):
        from kernels.classic.tessellation import cpu

        return Polylines(**cpu.tessellate(curves, tolerance, max_segments))
    from kernels.classic.tessellation import cuda

    return Polylines(**cuda.tessellate(curves, tolerance, max_segments, stream=stream))


def _check_curves(curves: Any) -> None:
    check_array("curves", curves)
    if np.dtype(curves.dtype).newbyteorder("=") != np.float32:
        raise TypeError(f"curves has dtype {curves.dtype}; supported is float32")
    if curves.ndim != 3 or curves.shape[1:] != (3, 2) or curves.shape[0] > MAX_CURVES:
        raise ValueError(f"curves must be an array [n, 3, 2], n at most {MAX_CURVES}; got shape {curves.shape}")
    if isinstance(curves, np.ndarray) and not np.isfinite(curves).all():
        curve, point, axis = np.argwhere(~np.isfinite(curves))[0]
        raise ValueError(f"curves: {'xy'[axis]} of {'abc'[point]} of curve {curve} is {curves[curve, point, axis]}")
