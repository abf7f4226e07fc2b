"""Validation of public parameters: each error is one line that names the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array

DTYPES = ("complex64", "complex128")
REALS = ("float32", "float64")
METHODS = ("auto", "gridding", "exact")
MAX_POINTS = (1 << 31) - 1
MAX_SIZE = 1 << 15  # of an axis; sizes of the doubled and finer grids then fit 17 bits
SMALLEST_EPS_ON_HOST, SMALLEST_EPS_ON_CUDA, LARGEST_EPS = 1e-12, 1e-6, 0.1


def on_host(array: Any) -> bool:
    """Whether `array` is a NumPy array."""
    return isinstance(array, np.ndarray)


def _is_one_of(dtypes: Sequence[str], dtype: Any) -> bool:
    return dtype in dtypes or dtype.name in dtypes  # to make a name takes 3 µs


def checked_kind(name: str, array: Any, host: bool | None = None) -> bool:
    """Whether an array is NumPy's; TypeError if it is neither NumPy's nor CuPy's, or not like the plan."""
    check_array(name, array)
    if host is not None and on_host(array) != host:
        raise TypeError(f"{name} must be a {'NumPy' if host else 'CuPy'} array, as the plan is; got {type(array)}")
    return on_host(array)


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(int(n) for n in shape)
    except TypeError as exc:
        raise TypeError(f"shape must be 2 or 3 whole numbers; got {shape!r}") from exc
    if len(sizes) not in (2, 3) or any(n < 1 or n > MAX_SIZE or n != m for n, m in zip(sizes, shape, strict=True)):
        raise ValueError(f"shape must be 2 or 3 whole numbers from 1 to {MAX_SIZE}; got {tuple(shape)}")
    return sizes


def checked_trajectory(trajectory: Any, shape: tuple[int, ...]) -> None:
    host = checked_kind("trajectory", trajectory)
    if trajectory.dtype.name not in REALS:
        raise TypeError(f"trajectory has dtype {trajectory.dtype}; supported are {', '.join(REALS)}")
    if trajectory.ndim != 2 or trajectory.shape[1] != len(shape) or len(trajectory) > MAX_POINTS:
        raise ValueError(
            f"trajectory must be an array [M, {len(shape)}] for an image of shape {shape}, M at most {MAX_POINTS}; "
            f"got shape {trajectory.shape}"
        )
    if host and not np.isfinite(trajectory).all():
        row, column = np.argwhere(~np.isfinite(trajectory))[0]
        raise ValueError(f"trajectory: column {column} of point {row} is {trajectory[row, column]}")


def checked_eps(eps: float, trajectory: Any) -> float:
    smallest = SMALLEST_EPS_ON_HOST if on_host(trajectory) else SMALLEST_EPS_ON_CUDA
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not smallest <= eps <= LARGEST_EPS:
        raise ValueError(f"eps must be from {smallest:g} to {LARGEST_EPS:g}; got {eps!r}")
    return float(eps)


def checked_array(name: str, array: Any, host: bool, trailing: tuple[int, ...]) -> Any:
    """The array, whose last axes must be `trailing`."""
    checked_kind(name, array, host)
    supported = DTYPES if host else DTYPES[:1]
    if not _is_one_of(supported, array.dtype):
        raise TypeError(f"{name} has dtype {array.dtype}; supported are {', '.join(supported)}")
    if array.ndim < len(trailing) or tuple(array.shape[array.ndim - len(trailing) :]) != trailing:
        wanted = ", ".join(("...", *map(str, trailing)))
        raise ValueError(f"{name} must have shape [{wanted}]; got {tuple(array.shape)}")
    return array


def checked_weights(weights: Any, points: int, host: bool) -> Any:
    """The weights, or None."""
    if weights is None:
        return None
    checked_kind("weights", weights, host)
    if not _is_one_of(REALS, weights.dtype):
        raise TypeError(f"weights has dtype {weights.dtype}; supported are {', '.join(REALS)}")
    if weights.shape != (points,):
        raise ValueError(f"weights must have shape [{points}], one a point; got {tuple(weights.shape)}")
    return weights
