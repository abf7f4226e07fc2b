"""The rolling-ball background of images and volumes, on NumPy arrays (CPU) and CuPy arrays (CUDA).

A ball of `radius` samples, and as many units of the sample values, rolls below the image seen as a landscape:
    apex(p) = min over |q| <= radius of x(p + q) + c(q),   c(q) = radius - sqrt(radius² - |q|²)
is the height of its top where it touches. That is the background of scikit-image's `restoration.rolling_ball`; ImageJ's
is the height that the ball reaches anywhere, an opening:
    background(p) = max over |q| <= radius of apex(p + q) - c(q)
Samples beyond the edges, and NaN, do not stop the ball. Heights are float32, or float64 for float64 images: the same
bits on every device.

Source: Sternberg, "Biomedical image processing" (1983).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.arrays import check_array, check_workers, namespace, on_stream
from kernels.runtime.filtering import filtered_axes

__all__ = ["MAX_RADIUS", "apexes", "check_radius", "rolling_ball"]

MAX_RADIUS = 200
MAX_AXES = 3


def rolling_ball(
    image: Any,
    radius: float = 50,
    *,
    is_opened: bool = True,
    axes: int | Sequence[int] | None = None,
    channel_axis: int | None = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """The background below an image.

    image        : NumPy or CuPy array, one of `kernels.runtime.filtering.DTYPES`, at least one sample
    radius       : of the ball, in samples and in units of their values, above 0, at most `MAX_RADIUS`
    is_opened    : ImageJ's background; False: scikit-image's, the height of the ball's top
    axes         : two or three axes that the ball rolls along; default all but `channel_axis`
    channel_axis : the axis of the channels
    workers      : CPU threads; default one per core
    stream       : CUDA stream to launch on; default CuPy's current stream

    Returns an array of the image's kind and shape, of float32, or float64 for a float64 image.
    Raises ValueError or TypeError with a line that names the parameter.
    """
    if not hasattr(image, "dtype") or not hasattr(image, "ndim"):
        raise TypeError(f"image must be a NumPy or CuPy array; got {type(image).__name__}")
    check_workers(workers)
    check_array("image", image)
    chosen = filtered_axes(image.shape, image.dtype, axes, channel_axis)
    reach = int(check_radius(radius))
    dtype = np.float64 if image.dtype == np.float64 else np.float32
    around = tuple(slice(reach, reach + n) if axis in chosen else slice(None) for axis, n in enumerate(image.shape))
    with on_stream(image, stream):
        heights = image.astype(dtype)
        for sign in (1, -1) if is_opened else (1,):
            padded = namespace(image).full(_grown(image.shape, chosen, reach), sign * np.inf, dtype)
            padded[around] = heights
            heights = apexes(padded, radius, chosen, sign=sign, workers=workers, stream=stream)
    return heights


def check_radius(radius: Any) -> float:
    if (
        isinstance(radius, bool)
        or not isinstance(radius, int | float | np.number)
        or not 0 < float(radius) <= MAX_RADIUS
    ):
        raise ValueError(f"radius must lie above 0 and be at most {MAX_RADIUS}; got {radius!r}")
    return float(radius)


def apexes(
    heights: Any, radius: float, axes: Sequence[int], *, sign: int = 1, workers: int | None = None, stream: Any = None
) -> Any:
    """Where the ball is stopped from above (1), or what it reaches from there (-1): see the module.

    heights : float32 or float64, with a halo of int(radius) along the axes, which the result lacks
    """
    if not 2 <= len(axes) <= MAX_AXES:
        raise ValueError(f"axes: a ball rolls along two or three; got {len(axes)}")
    others = [axis for axis in range(heights.ndim) if axis not in axes]
    order = [*others, *sorted(axes)]
    moved = heights.transpose(order)
    lengths = (1,) * (MAX_AXES - len(axes)) + moved.shape[len(others) :]
    caps = _caps(float(radius), len(axes), heights.dtype)
    result = _body(moved, (-1, *lengths), caps, sign, workers, stream)
    shape = [*moved.shape[: len(others)], *(n - 2 * int(radius) for n in moved.shape[len(others) :])]
    return result.reshape(shape).transpose(np.argsort(order))


def _caps(radius: float, axes: int, dtype: Any) -> NDArray[Any]:
    """How far the ball lies below its top, over three axes; infinity outside it."""
    reach = int(radius)
    steps = np.arange(-reach, reach + 1, dtype=np.float64) ** 2
    squares = sum(np.meshgrid(*[steps] * axes, indexing="ij"))
    with np.errstate(invalid="ignore"):
        caps = np.where(squares <= radius * radius, radius - np.sqrt(radius * radius - squares), math.inf)
    return np.asarray(caps.astype(dtype).reshape((1,) * (MAX_AXES - axes) + caps.shape))


def _grown(shape: Sequence[int], axes: Sequence[int], reach: int) -> tuple[int, ...]:
    return tuple(n + 2 * reach if axis in axes else n for axis, n in enumerate(shape))


def _body(heights: Any, shape: Sequence[int], caps: Any, sign: int, workers: int | None, stream: Any) -> Any:
    if isinstance(heights, np.ndarray):
        from kernels.rolling_ball import cpu

        return cpu.touched(np.ascontiguousarray(heights).reshape(shape), caps, sign, workers=workers)
    from kernels.rolling_ball import cuda

    return cuda.touched(heights, shape, caps, sign, stream=stream)
