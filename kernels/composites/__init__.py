"""Filters made of Gaussians and boxes, on NumPy arrays (CPU) and CuPy arrays (CUDA): difference and Laplacian of
Gaussians, unsharp mask, background subtraction and division, and the deviation over a box. The mean over a box is
`kernels.smoothing.uniform_filter`.

`gaussian_laplace` is named as in scipy.ndimage, `difference_of_gaussians` and `unsharp_mask` as in scikit-image. All
compute in float32, or float64 for float64 images, from the samples as they are: no result of a Gaussian is rounded to
the image's integers on the way. With `offset`, pieces of an image have the same bits as the whole. CPU and GPU give the
same bits, except for floats below 1.2e-38, which CuPy's arithmetic sets to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypedDict, Unpack

import numpy as np

from kernels.runtime.arrays import check_array, check_out, namespace, on_stream
from kernels.runtime.filtering import filtered_axes, per_axis
from kernels.smoothing import gaussian_filter, uniform_filter
from kernels.smoothing.window import Window, box_window, check_lengths, gaussian_windows, output_shape

__all__ = [
    "deviation_filter", "difference_of_gaussians", "divide_background", "gaussian_laplace", "subtract_background",
    "unsharp_mask",
]  # fmt: skip

Sigma = float | Sequence[float]
_silent = np.errstate(divide="ignore", invalid="ignore", over="ignore")  # infinities and NaN go through


class BoxOptions(TypedDict, total=False):
    """Options of every filter here: see `kernels.smoothing.uniform_filter`."""

    mode: str | Sequence[str]
    cval: float
    axes: int | Sequence[int] | None
    channel_axis: int | None
    offset: int | Sequence[int]
    nan_policy: str
    out: Any
    workers: int | None
    stream: Any


class Options(BoxOptions, total=False):
    """Options of filters made of Gaussians: see also `kernels.smoothing.gaussian_filter`."""

    truncate: float | None
    radius: int | Sequence[int] | None


def difference_of_gaussians(
    image: Any, low_sigma: Sigma, high_sigma: Sigma | None = None, **options: Unpack[Options]
) -> Any:
    """A Gaussian minus a wider one: structures of about `low_sigma`, without their background.

    image      : NumPy or CuPy array, one of `kernels.runtime.filtering.DTYPES`, at least one sample
    low_sigma  : standard deviation of the first Gaussian, in samples along each filtered axis, 0 or more
    high_sigma : of the second; default 1.6 times the first, which is nearly a Laplacian of Gaussian
    mode, cval, axes, channel_axis, offset, truncate, radius, workers, stream : as in
                 `kernels.smoothing.gaussian_filter`; with mode "valid" the axis shrinks by the longest window
    nan_policy : float images: "propagate", "omit" (means over the samples that are not NaN; NaN stay NaN) or "raise"
    out        : array for the result, C-contiguous, of float32 or float64, not overlapping `image`

    Returns an array of the image's kind, of float32, or float64 for a float64 image.
    Raises ValueError or TypeError with a line that names the parameter.
    """
    wider: Any = np.multiply(1.6, low_sigma).tolist() if high_sigma is None else high_sigma
    omits = options.get("nan_policy") == "omit"

    def difference(image: Any, smooth: Iterator[Any]) -> Any:
        found = next(smooth)
        found -= next(smooth)
        if omits:
            found[namespace(image).isnan(image)] = math.nan
        return found

    return _combined(image, [(low_sigma, 0), (wider, 0)], difference, options)


def gaussian_laplace(image: Any, sigma: Sigma, **options: Unpack[Options]) -> Any:
    """The sum of the smoothed image's second derivatives, per sample squared: negative on bright spots.

    sigma : standard deviation in samples along each filtered axis, so large that each reaches a neighbour

    Everything else is as in `difference_of_gaussians`, but missing samples cannot be left out.
    """
    check_array("image", image)
    axes = filtered_axes(image.shape, image.dtype, options.get("axes"), options.get("channel_axis"))
    orders = [tuple(2 * (axis == along) for axis in axes) for along in axes]

    def total(_: Any, second: Iterator[Any]) -> Any:
        found = next(second)
        for each in second:
            found += each
        return found

    return _combined(image, [(sigma, order) for order in orders], total, options)


def unsharp_mask(image: Any, sigma: Sigma = 1.0, amount: float = 1.0, **options: Unpack[Options]) -> Any:
    """The image plus `amount` times its difference from its Gaussian. Integers are rounded to nearest, and saturate.

    amount : how much of the difference is added, a finite number
    out    : of the image's dtype

    Returns an array of the image's kind and dtype. Everything else is as in `difference_of_gaussians`.
    """
    number: Any = amount
    if not isinstance(number, Real) or not math.isfinite(float(number)):
        raise ValueError(f"amount must be a finite number; got {amount!r}")

    def sharp(floats: Any, smooth: Iterator[Any]) -> Any:
        found = _difference(floats, smooth)
        found *= floats.dtype.type(amount)
        found += floats
        if image.dtype.kind != "f":
            ends, xp = np.iinfo(image.dtype), namespace(found)
            xp.clip(xp.rint(found, out=found), ends.min, ends.max, out=found)
        return found

    return _combined(image, [(sigma, 0)], sharp, options, keeps_dtype=True)


def subtract_background(image: Any, sigma: Sigma = 50.0, **options: Unpack[Options]) -> Any:
    """The image minus its background, a wide Gaussian. As in `difference_of_gaussians`."""
    return _combined(image, [(sigma, 0)], _difference, options)


def divide_background(image: Any, sigma: Sigma = 50.0, **options: Unpack[Options]) -> Any:
    """The image divided by its background, a wide Gaussian: uneven light becomes even. As in
    `difference_of_gaussians`."""

    def quotient(floats: Any, smooth: Iterator[Any]) -> Any:
        found = next(smooth)
        return namespace(found).divide(floats, found, out=found)

    return _combined(image, [(sigma, 0)], quotient, options)


def _difference(floats: Any, smooth: Iterator[Any]) -> Any:
    found = next(smooth)
    return namespace(found).subtract(floats, found, out=found)


@_silent
def deviation_filter(image: Any, size: int | Sequence[int] = 3, **options: Unpack[BoxOptions]) -> Any:
    """The standard deviation over a box around each sample, divided by n and not n - 1: a measure of contrast, texture
    and noise. Computed in float64, of integers from exact sums, so that an even image has none.

    image      : NumPy or CuPy array, one of `kernels.runtime.filtering.DTYPES`, at least one sample
    size       : samples along each filtered axis, 1 or more
    mode, cval, axes, channel_axis, offset, workers, stream : as in `kernels.smoothing.uniform_filter`
    nan_policy : float images: "propagate", "omit" (over the samples that are not NaN; NaN if there are none) or "raise"
    out        : as in `difference_of_gaussians`

    Returns an array of the image's kind, of float32, or float64 for a float64 image.
    Raises ValueError or TypeError with a line that names the parameter.
    """
    axes, modes, out = _checked(image, options)
    sizes, cval, policy = per_axis("size", size, axes), options.pop("cval", 0), options.pop("nan_policy", "propagate")
    windows = [box_window(axis, *asked) for axis, *asked in zip(axes, sizes, modes, strict=True)]
    check_lengths(image.shape, windows)
    dtype = _checked_out(image, out, output_shape(image.shape, windows))
    xp, omits, count = namespace(image), policy == "omit", math.prod(sizes)
    asked: dict[str, Any] = {"mode": modes, "axes": axes, "nan_policy": "propagate" if omits else policy, **options}

    def total(values: Any, beyond: float) -> Any:
        """Over each box. Sums of integers are made exact again."""
        found = uniform_filter(values, sizes, cval=beyond, **asked)
        found *= math.prod(sizes)
        if image.dtype.kind != "f":
            return xp.rint(found, out=found)
        if not omits:
            return found
        whole = xp.rint(found)
        # Of an image whose missing samples are NaN: integers come as float64.
        return xp.where(abs(found - whole) <= abs(found) * 2.0**-50, whole, found)

    with on_stream(image, options.get("stream")):
        samples = image.astype(np.float64)
        if omits:
            missing = xp.isnan(samples)
            samples[missing] = 0
            count = total((~missing).astype(np.float64), 1)
        mean = total(samples, cval)
        samples *= samples
        found = total(samples, cval * cval)
        found *= count
        mean *= mean
        found -= mean
        found = xp.sqrt(xp.maximum(found, 0, out=found), out=found)
        found /= count
        return _filled(out, found, dtype)


@_silent
def _combined(
    image: Any,
    gaussians: Sequence[tuple[Sigma, int | Sequence[int]]],
    combine: Callable[[Any, Iterator[Any]], Any],
    options: Any,
    *,
    keeps_dtype: bool = False,
) -> Any:
    """What `combine` makes of the image and its Gaussians (standard deviation, derivative along each axis), all in
    floats and over the same places. It may write to the Gaussians, which are computed one by one."""
    axes, modes, out = _checked(image, options)
    offsets = per_axis("offset", options.pop("offset", 0), axes)
    dtype = np.dtype(np.float64 if image.dtype == np.float64 else np.float32)
    along = [_windows(each, axes, modes, dtype, options) for each in gaussians]
    widest = [
        replace(each[0], before=max(w.before for w in each), after=max(w.after for w in each))
        for each in zip(*along, strict=True)
    ]
    check_lengths(image.shape, widest)
    shape = output_shape(image.shape, widest)
    to = _checked_out(image, out, shape, image.dtype.newbyteorder("=") if keeps_dtype else None)
    with on_stream(image, options.get("stream")):
        floats = image.astype(dtype, copy=False)

        def smooth() -> Iterator[Any]:
            for windows, (sigma, order) in zip(along, gaussians, strict=True):
                part, starts = _inside(floats, widest, windows)
                at = tuple(offset + start for offset, start in zip(offsets, starts, strict=True))
                yield gaussian_filter(part, sigma, order=order, mode=modes, axes=axes, offset=at, **options)

        nothing = [replace(each, before=0, after=0) for each in widest]
        return _filled(out, combine(_inside(floats, widest, nothing)[0], smooth()), to)


def _windows(
    gaussian: tuple[Sigma, int | Sequence[int]], axes: Sequence[int], modes: Sequence[str], dtype: Any, asked: Any
) -> list[Window]:
    sigma, order = gaussian
    return gaussian_windows(
        axes, per_axis("sigma", sigma, axes), modes, dtype, truncate=asked.get("truncate"),
        radii=per_axis("radius", asked.get("radius"), axes), orders=per_axis("order", order, axes),
        direct=asked.get("nan_policy") == "omit",
    )  # fmt: skip


def _inside(floats: Any, widest: Sequence[Window], windows: Sequence[Window]) -> tuple[Any, list[int]]:
    """The part of an image from which these windows give as many results as the widest, and where it begins."""
    cut, starts = [slice(None)] * floats.ndim, []
    for most, window in zip(widest, windows, strict=True):
        first, last = (0, 0) if most.mode != "valid" else (most.before - window.before, most.after - window.after)
        cut[most.axis] = slice(first, floats.shape[most.axis] - last)
        starts.append(first)
    return floats[tuple(cut)], starts


def _checked(image: Any, options: Any) -> tuple[tuple[int, ...], tuple[str, ...], Any]:
    """The filtered axes, the border mode along each, and the array for the result, which are taken out of `options`."""
    check_array("image", image)
    axes = filtered_axes(image.shape, image.dtype, options.pop("axes", None), options.pop("channel_axis", None))
    return axes, per_axis("mode", options.pop("mode", "reflect"), axes), options.pop("out", None)


def _checked_out(image: Any, out: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """The dtype of the result; by default float32 or float64, as `out` or the image is."""
    if dtype is None:
        is_double = getattr(image if out is None else out, "dtype", None) == np.float64
        dtype = np.dtype(np.float64 if is_double else np.float32)
    check_out(out, shape, dtype, apart_from={"image": image})
    return dtype


def _filled(out: Any, found: Any, dtype: Any) -> Any:
    if out is None:
        return found.astype(dtype, copy=False)
    out[...] = found
    return out
