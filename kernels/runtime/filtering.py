"""Checks that the filters of images share: axes, values for each of them, and the value beyond the edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

__all__ = ["DTYPES", "NAN_POLICIES", "axis_number", "check_cval", "filtered_axes", "per_axis"]

DTYPES = ("uint8", "uint16", "int16", "float32", "float64")
NAN_POLICIES = ("propagate", "omit", "raise")


def filtered_axes(
    shape: tuple[int, ...], dtype: Any, axes: int | Sequence[int] | None, channel_axis: int | None
) -> tuple[int, ...]:
    """The axes to filter, by default all but the channels. TypeError or ValueError if an image has no such axes."""
    ndim = len(shape)
    if np.dtype(dtype).name not in DTYPES:
        raise TypeError(f"image has dtype {dtype}; supported are {', '.join(DTYPES)}")
    if ndim == 0 or 0 in shape:
        raise ValueError(f"image has shape {shape}: there is nothing to filter")
    channel = None if channel_axis is None else axis_number(channel_axis, ndim, "channel_axis")
    if axes is None:
        return tuple(axis for axis in range(ndim) if axis != channel)
    listed: Sequence[Any] = [axes] if isinstance(axes, int | np.integer) else axes
    chosen = tuple(axis_number(axis, ndim, "axes") for axis in listed)
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"axes {axes} names an axis twice")
    if channel in chosen:
        raise ValueError(f"axes {axes} contains channel_axis {channel_axis}")
    return chosen


def axis_number(axis: Any, ndim: int, name: str) -> int:
    """The number of an axis, 0 or more."""
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise ValueError(f"{name} {axis!r} is out of range for an image of {ndim} dimensions")
    return int(axis) % ndim


def per_axis(name: str, value: Any, axes: Sequence[int]) -> tuple[Any, ...]:
    """One value for each axis: a number, a text or None applies to all."""
    if value is None or isinstance(value, str | Real):
        return (value,) * len(axes)
    values = tuple(value)
    if len(values) != len(axes):
        raise ValueError(f"{name} has {len(values)} values for {len(axes)} filtered axes")
    return values


def check_cval(dtype: Any, cval: float, name: str = "cval") -> None:
    """TypeError or ValueError unless a dtype holds the value."""
    if type(cval) is int and cval == 0:
        return
    if not hasattr(cval, "__float__") or getattr(cval, "ndim", 0) != 0:
        raise TypeError(f"{name} must be a number; got {type(cval).__name__}")
    if np.dtype(dtype).kind == "f":
        most = float(np.finfo(dtype).max)
        if math.isfinite(cval) and abs(cval) > most:
            raise ValueError(f"{name} must be within ±{most:g} for {dtype} images, or infinite; got {cval}")
        return
    held = np.iinfo(dtype)
    if not math.isfinite(cval) or cval != int(cval) or not held.min <= cval <= held.max:
        raise ValueError(f"{name} must be a whole number in {held.min} … {held.max} for {dtype} images; got {cval}")
