"""Filters made of Gaussians and boxes: `millrace run dog | log | unsharp | deviation | subtract-background |
divide-background IN OUT`; and, as steps of a chain, `gaussian` and `box` themselves.

All but those two compute in float32, or float64 for float64 images and integers of 32 bits and more, from the samples
as they are: no result of a Gaussian is rounded to the image's integers on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from kernels.smoothing import box as box_filter
from kernels.smoothing import gaussian as gaussian_filter
from kernels.smoothing.window import Window, box_window, gaussian_windows
from pipeline.workloads.common.samples import computed_in, computed_in_floats
from pipeline.workloads.filters.window import Axes, Size, modes
from pipeline.workloads.operator import image_operator
from pipeline.workloads.operator.edges import Edges

Sigma = Annotated[
    tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...],
    Field(description="standard deviation of the Gaussian in pixels, for all axes or for each: 2 or 1.5,3"),
]
Ratio = Annotated[float, Field(gt=1, allow_inf_nan=False, description="of the wider Gaussian's deviation to --sigma")]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, description="how much of the difference is added")]
Reach = Sequence[tuple[int, int]]
Gaussian = tuple[Sequence[float], Sequence[int]]  # deviation, for all axes or for each, and derivative along each


def _operator(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Infinities and NaN go through without warnings."""
    silent = np.errstate(divide="ignore", invalid="ignore", over="ignore")
    return lambda function: image_operator(silent(function), **{"computes_in": computed_in_floats} | options)


def _each(name: str, values: Any, axes: int) -> tuple[Any, ...]:
    if len(values) not in (1, axes):
        raise ValueError(f"{name} has {len(values)} values: give 1 or {axes}")
    return tuple(values) * (axes // len(values))


def _windows(sigma: Sequence[float], orders: Sequence[int], dtype: Any = np.float32) -> list[Window]:
    """Of float32, which reach at least as far as those of every other type."""
    axes = range(len(orders))
    sigmas = _each("sigma", sigma, len(orders))
    return gaussian_windows(axes, sigmas, ["reflect"] * len(axes), np.dtype(dtype), orders=orders)


def _reach_of(gaussians: Callable[..., list[Gaussian]]) -> Callable[[Any, int], Reach]:
    """Samples that the Gaussians of an operator's parameters look at along each axis."""

    def reach(asked: Any, axes: int) -> Reach:
        found = [_windows(*each) for each in gaussians(axes, **asked.own())]
        return [
            (max(each.before for each in along), max(each.after for each in along))
            for along in zip(*found, strict=True)
        ]

    return reach


def _smoothed(block: Any, of: Gaussian, axes: Any, edges: Edges, stream: Any) -> Any:
    """A Gaussian of the wanted part of a block, in float32 or float64."""
    sigma, orders = of
    if block.dtype.kind != "f":
        block = block.astype(np.float32)
    part, offset = _looked_at(block, of, axes, edges, ["valid"] * len(axes))
    sigmas = _each("sigma", sigma, len(axes))
    options: dict[str, Any] = {"order": orders, "axes": axes, "offset": offset}
    return gaussian_filter(part, sigmas, mode="valid", workers=1, stream=stream, **options)


def _looked_at(block: Any, of: Gaussian, axes: Any, edges: Edges, border_modes: Sequence[str]) -> tuple[Any, list[int]]:
    """The part of a block that a Gaussian in its dtype looks at, and its first coordinates. Halos are those of float32,
    which has the longest windows; axes of other modes than valid are not cut."""
    cut, offset = [slice(0, n) for n in block.shape], []
    for axis, window, mode in zip(axes, _windows(*of, block.dtype), border_modes, strict=True):
        before, after = edges.halo[axis]
        if mode == "valid":
            cut[axis] = slice(before - window.before, block.shape[axis] - (after - window.after))
        offset.append(edges.first[axis] + cut[axis].start)
    return block[tuple(cut)], offset


def _wanted(block: Any, edges: Edges) -> Any:
    """The block without its halo."""
    return block[tuple(slice(before, n - after) for n, (before, after) in zip(block.shape, edges.halo, strict=True))]


def _one(axes: int, /, *, sigma: Any, **_: Any) -> list[Gaussian]:
    return [(sigma, (0,) * axes)]


def _two(axes: int, /, *, sigma: Any, ratio: float, **_: Any) -> list[Gaussian]:
    return [(sigma, (0,) * axes), (tuple(each * ratio for each in sigma), (0,) * axes)]


def _second_derivatives(axes: int, /, *, sigma: Any, **_: Any) -> list[Gaussian]:
    return [(sigma, tuple(2 * (axis == along) for axis in range(axes))) for along in range(axes)]


def _float_of(source: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if computed_in(source) == np.float64 else np.float32)


@_operator(halo=_reach_of(_one), anchored=True, keeps_range=True, keeps_rows=True)
def gaussian(block: Any, *, sigma: Sigma, axes: Axes = None, out: Any, stream: Any, edges: Any) -> None:
    """Smooth with a Gaussian."""
    assert axes is not None
    found, sigmas = modes(block, out, axes), _each("sigma", sigma, len(axes))
    part, offset = _looked_at(block, (sigma, (0,) * len(axes)), axes, edges, found)
    options: dict[str, Any] = {"axes": axes, "offset": offset}
    gaussian_filter(part, sigmas, mode=found, out=out, workers=1, stream=stream, **options)


def _box_reach(asked: Any, axes: int) -> Reach:
    windows = [box_window(0, size, "reflect") for size in _each("size", asked.size or (3,), axes)]
    return [(window.before, window.after) for window in windows]


def _has_long_side(asked: Any) -> bool:
    return any(box_window(0, size, "reflect").is_long_box for size in asked.size or (3,))


@_operator(halo=_box_reach, computes_in=computed_in, keeps_range=True, keeps_rows=True, anchored=_has_long_side)
def box(block: Any, *, size: Size = None, axes: Axes = None, out: Any, stream: Any, edges: Any) -> None:
    """Take the mean over a box around each pixel."""
    assert axes is not None
    options: dict[str, Any] = {"axes": axes, "out": out, "workers": 1, "stream": stream}
    options["offset"] = [edges.first[axis] for axis in axes]
    box_filter(block, _each("size", size or (3,), len(axes)), mode=modes(block, out, axes), **options)


@_operator(halo=_reach_of(_two), anchored=True, dtype=_float_of)
def dog(
    block: Any, *, sigma: Sigma = (1.0,), ratio: Ratio = 1.6, axes: Axes = None, out: Any, stream: Any, edges: Any
) -> None:
    """Difference of two Gaussians: keep structures of about --sigma, without their background."""
    assert axes is not None
    narrow, wide = (_smoothed(block, each, axes, edges, stream) for each in _two(len(axes), sigma=sigma, ratio=ratio))
    out[...] = narrow - wide


@_operator(halo=_reach_of(_second_derivatives), anchored=True, dtype=_float_of)
def log(block: Any, *, sigma: Sigma = (2.0,), axes: Axes = None, out: Any, stream: Any, edges: Any) -> None:
    """Laplacian of Gaussian: the sum of the smoothed image's second derivatives, negative on bright spots."""
    assert axes is not None
    derivatives = _second_derivatives(len(axes), sigma=sigma)
    out[...] = sum(_smoothed(block, each, axes, edges, stream) for each in derivatives)


@_operator(halo=_reach_of(_one), anchored=True, keeps_range=False)
def unsharp(
    block: Any,
    *,
    sigma: Sigma = (1.0,),
    amount: Amount = 1.0,
    axes: Axes = None,
    out: Any,
    stream: Any,
    edges: Any,
    xp: Any,
) -> None:
    """Sharpen by an unsharp mask: add the difference from the smoothed image; integers saturate."""
    assert axes is not None
    smooth = _smoothed(block, (sigma, (0,) * len(axes)), axes, edges, stream)
    image = _wanted(block, edges).astype(smooth.dtype)
    sharp = image + smooth.dtype.type(amount) * (image - smooth)
    if out.dtype.kind != "f":
        ends = np.iinfo(out.dtype)
        sharp = xp.rint(sharp).clip(ends.min, ends.max)
    out[...] = sharp


@_operator(halo=_reach_of(_one), anchored=True, dtype=_float_of, name="subtract-background")
def subtract_background(
    block: Any, *, sigma: Sigma = (50.0,), axes: Axes = None, out: Any, stream: Any, edges: Any, xp: Any
) -> None:
    """Subtract the background, a wide Gaussian of the image."""
    assert axes is not None
    xp.subtract(_wanted(block, edges), _smoothed(block, (sigma, (0,) * len(axes)), axes, edges, stream), out=out)


@_operator(halo=_reach_of(_one), anchored=True, dtype=_float_of, name="divide-background")
def divide_background(
    block: Any, *, sigma: Sigma = (50.0,), axes: Axes = None, out: Any, stream: Any, edges: Any, xp: Any
) -> None:
    """Divide by the background, a wide Gaussian of the image: uneven light becomes even."""
    assert axes is not None
    xp.divide(_wanted(block, edges), _smoothed(block, (sigma, (0,) * len(axes)), axes, edges, stream), out=out)


@_operator(halo=_box_reach, dtype=_float_of, anchored=_has_long_side)
def deviation(block: Any, *, size: Size = None, axes: Axes = None, out: Any, stream: Any, edges: Any, xp: Any) -> None:
    """Take the standard deviation over a box around each pixel, a measure of contrast, texture and noise."""
    assert axes is not None
    sizes = _each("size", size or (3,), len(axes))
    samples, values = block.astype(np.float64), math.prod(sizes)
    options: dict[str, Any] = {"mode": "valid", "axes": axes, "workers": 1, "stream": stream}
    options["offset"] = [edges.first[axis] for axis in axes]
    mean, squares = (box_filter(each, sizes, **options) * values for each in (samples, samples * samples))
    if block.dtype.kind != "f":  # the sums of integers are exact, so that even images have no deviation
        mean, squares = xp.rint(mean), xp.rint(squares)
    out[...] = xp.sqrt(xp.maximum(values * squares - mean * mean, 0)) / values
