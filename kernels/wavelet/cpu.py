"""Wavelet transforms on the CPU: one thread, without the GIL, an axis at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled
from kernels.wavelet.levels import Level

Array = NDArray[Any]


class Body:
    """The transforms of [batch, x, y, z] by a filter."""

    def __init__(self, taps: NDArray[np.float64], dtype: Any) -> None:
        signs = (-1.0) ** np.arange(len(taps))
        self._low, self._high = taps.astype(dtype), (taps[::-1] * signs).astype(dtype)

    def forward(self, image: Array, out: Array, levels: tuple[Level, ...], shift: Any, threshold: Any) -> None:
        source = image if shift is None else np.roll(image, [-lag for lag in shift], (1, 2, 3))
        if not levels:
            out[...] = source
        for level in levels:
            box = (slice(None), *map(slice, level.size))
            values = source[box]
            for axis in reversed(level.axes):
                made = np.empty(values.shape, values.dtype)
                _each(_analyse, values, made, axis, self._low, self._high)
                values = made
            out[box] = values
            source = out
        if threshold is not None:
            _shrink(out.reshape(-1), out.real.dtype.type(threshold))

    def inverse(self, coefficients: Array, out: Array, levels: tuple[Level, ...], shift: Any) -> None:
        for level in reversed(levels):
            box = (slice(None), *map(slice, level.size))
            values = coefficients[box]
            for axis in level.axes:
                made = np.empty(values.shape, values.dtype)
                _each(_synthesise, values, made, axis, self._low, self._high)
                values = made
            coefficients[box] = values
        out[...] = coefficients if shift is None else np.roll(coefficients, shift, (1, 2, 3))


def _each(step: Any, source: Array, made: Array, axis: int, low: Array, high: Array) -> None:
    """A step along an axis of each image, as contiguous [before, n, rows, columns]: one layout to compile for."""
    x, y, z = made.shape[1:]
    shape = ((1, x, y, z), (x, y, 1, z), (x * y, z, 1, 1))[axis]
    for one, other in zip(source, made, strict=True):
        step(np.ascontiguousarray(one).reshape(shape), other.reshape(shape), low, high)


@compiled
def _analyse(source: Any, made: Any, low: Any, high: Any) -> None:
    before, n, rows, columns = source.shape
    pairs, taps = n // 2, len(low)
    even, kept = 2 * pairs, n - pairs
    for p in range(before):
        for r in range(rows):
            for k in range(pairs):
                for c in range(columns):
                    smooth, detail = source[p, 0, r, c] * low[0] * 0, source[p, 0, r, c] * low[0] * 0
                    for j in range(taps):
                        value = source[p, (2 * k + j) % even, r, c]
                        smooth += value * low[j]
                        detail += value * high[j]
                    made[p, k, r, c] = smooth
                    made[p, kept + k, r, c] = detail
            if kept > pairs:
                for c in range(columns):
                    made[p, pairs, r, c] = source[p, even, r, c]


@compiled
def _synthesise(source: Any, made: Any, low: Any, high: Any) -> None:
    before, n, rows, columns = source.shape
    pairs, taps = n // 2, len(low)
    even, kept = 2 * pairs, n - pairs
    for p in range(before):
        for r in range(rows):
            for k in range(pairs):
                for c in range(columns):
                    first, second = source[p, 0, r, c] * low[0] * 0, source[p, 0, r, c] * low[0] * 0
                    for j in range(0, taps, 2):
                        place = (k - j // 2) % pairs
                        smooth, detail = source[p, place, r, c], source[p, kept + place, r, c]
                        first += smooth * low[j] + detail * high[j]
                        second += smooth * low[j + 1] + detail * high[j + 1]
                    made[p, 2 * k, r, c] = first
                    made[p, 2 * k + 1, r, c] = second
            if kept > pairs:
                for c in range(columns):
                    made[p, even, r, c] = source[p, pairs, r, c]


@compiled
def _shrink(values: Any, threshold: Any) -> None:
    for i in range(len(values)):
        size = np.sqrt(values[i].real * values[i].real + values[i].imag * values[i].imag)
        if size > threshold:
            values[i] *= (size - threshold) / size
        elif size <= threshold:  # false for NaN, which stays
            values[i] = 0
