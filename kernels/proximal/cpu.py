"""Proximal operators on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled

Array = NDArray[Any]


def soft_threshold(values: Array, threshold: Any, vectors: bool) -> Array:
    out = np.empty(values.shape, values.dtype)
    rows = values.reshape(len(values), -1) if vectors else values.reshape(1, -1)
    _shrink(np.ascontiguousarray(rows), out.reshape(rows.shape), values.real.dtype.type(threshold))
    return out


@compiled
def _shrink(rows: Any, out: Any, threshold: Any) -> None:
    components, count = rows.shape
    for i in range(count):
        square = threshold * 0
        for k in range(components):
            square += rows[k, i].real * rows[k, i].real + rows[k, i].imag * rows[k, i].imag
        size = np.sqrt(square)
        factor = (size - threshold) / size if size > threshold else (size * 0 if size <= threshold else size)
        for k in range(components):
            out[k, i] = rows[k, i] * factor


def magnitudes(values: Array, vectors: bool) -> Array:
    if vectors:
        return np.asarray(np.sqrt((values.real**2 + values.imag**2).sum(axis=0)).sum(dtype=np.float64))
    return np.asarray(np.abs(values).sum(dtype=np.float64))


def inner(one: Array, other: Array) -> Array:
    parts = (np.ascontiguousarray(each).reshape(-1).view(each.real.dtype) for each in (one, other))
    return np.asarray(np.einsum("i,i->", *parts, dtype=np.float64))


def differences(image: Array, axes: tuple[int, ...]) -> Array:
    out = np.zeros((len(axes), *image.shape), image.dtype)
    for field, axis in zip(out, axes, strict=True):
        before = (slice(None),) * axis
        np.subtract(image[(*before, slice(1, None))], image[(*before, slice(-1))], out=field[(*before, slice(-1))])
    return out


def differences_adjoint(fields: Array, axes: tuple[int, ...]) -> Array:
    out = np.zeros(fields.shape[1:], fields.dtype)
    for field, axis in zip(fields, axes, strict=True):
        before = (slice(None),) * axis
        out[(*before, slice(-1))] -= field[(*before, slice(-1))]
        out[(*before, slice(1, None))] += field[(*before, slice(-1))]
    return out
