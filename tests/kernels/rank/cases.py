"""Rank filters by their definition: every window is gathered from the extended image, and sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from kernels.smoothing.borders import border_indices

Array = NDArray[Any]
# Numba compiles the networks of minima and maxima for each type and side, for a second and a half each: every type and
# every side has one of them.
SQUARES = {"uint8": (3, 7), "uint16": (5,), "int16": (3,), "float32": (5,), "float64": (3, 5, 7)}


def percentiles_of(dtype: str, sizes: Sequence[int]) -> tuple[float, ...]:
    """The median and another; minima and maxima, except of squares that are not in SQUARES."""
    is_square = len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0] in (3, 5, 7)
    return (50.0, 30.0) if is_square and sizes[0] not in SQUARES[dtype] else (50.0, 0.0, 100.0, 30.0)


def samples_of(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Random samples with ties and extreme values; floats also have both zeros, infinities and subnormals."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        values = rng.normal(size=shape).astype(dtype)
        ends = np.array([0.0, -0.0, np.inf, -np.inf, np.finfo(dtype).max, np.finfo(dtype).tiny / 4], dtype)
    else:
        held = np.iinfo(dtype)
        values = rng.integers(held.min, held.max, shape, dtype, endpoint=True)
        ends = np.array([held.min, held.max, held.max // 2], dtype)
    few = rng.random(shape)
    values[few < 0.15] = rng.choice(ends, int((few < 0.15).sum()))
    return values


def extended(image: Array, axis: int, taps: int, mode: str, cval: float) -> Array:
    """The image with what the border mode puts beyond its edges along an axis."""
    if mode == "valid":
        return image
    at = border_indices(np.arange(-(taps // 2), image.shape[axis] + (taps - 1) // 2), image.shape[axis], mode)
    found = np.take(image, np.maximum(at, 0), axis)
    beyond = (slice(None),) * axis + (at < 0,)
    found[beyond] = cval
    return found


def defined(
    image: Array,
    mask: Array,
    axes: Sequence[int],
    modes: Sequence[str],
    *,
    percentile: float | None = None,
    rank: int | None = None,
    cval: float = 0,
    nan_policy: str = "propagate",
    nodata: float | None = None,
) -> Array:
    """A percentile, or the sample of a rank, of every window. mask: boolean array over the axes."""
    whole = image
    for axis, taps, mode in zip(axes, mask.shape, modes, strict=True):
        whole = extended(whole, axis, taps, mode, cval)
    windows = sliding_window_view(whole, mask.shape, tuple(axes))[..., mask]
    missing = np.isnan(windows) | (False if nodata is None else windows == nodata)
    order = np.lexsort((~np.signbit(windows), windows, missing), axis=-1)
    ordered, counts = np.take_along_axis(windows, order, -1), (~missing).sum(-1)
    size = windows.shape[-1]
    if rank is None:
        chosen = counts - 1 if percentile == 100 else (counts * float(percentile or 0) / 100).astype(np.int64)
    else:
        chosen = counts - 1 if rank == size - 1 else rank * counts // size
    out = np.take_along_axis(ordered, np.maximum(chosen, 0)[..., None], -1)[..., 0]
    out[counts == 0] = 0 if image.dtype.kind != "f" and nodata is None else np.nan if nodata is None else nodata
    if nan_policy == "propagate" and image.dtype.kind == "f":
        out[np.isnan(windows).any(-1)] = np.nan
    return out


def same_bits(found: Array, expected: Array, what: str = "") -> None:
    """Both zeros are told apart; every NaN is like any other."""
    np.testing.assert_array_equal(found, expected, err_msg=what, strict=True)
    if found.dtype.kind == "f":
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(expected[number]), err_msg=what)
