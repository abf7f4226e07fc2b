"""Filters made of Gaussians and boxes: `millrace run dog | log | unsharp | deviation | subtract-background |
divide-background IN OUT`; and, as steps of a chain, `gaussian` and `box` themselves.

All but those two compute in float32, or float64 for float64 images and integers of 32 bits and more, from the samples
as they are: no result of a Gaussian is rounded to the image's integers on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from kernels import composites
from kernels.smoothing import gaussian_filter, uniform_filter
from kernels.smoothing.window import Window, box_window, gaussian_windows
from pipeline.formats.image.base import ImageHeader
from pipeline.workloads.common.extents import OR_TEXT
from pipeline.workloads.common.gaussians import definition_of
from pipeline.workloads.common.samples import computed_in, computed_in_floats
from pipeline.workloads.filters.window import Axes, NanPolicy, NoData, Size, borders
from pipeline.workloads.operator import image_operator
from pipeline.workloads.operator.edges import Edges

Sigma = Annotated[
    tuple[Annotated[float, Field(ge=0, allow_inf_nan=False), *OR_TEXT], ...],
    Field(
        description="standard deviation of the Gaussian in pixels, for all axes or for each: 2 or 1.5,3, or a length: "
        "2um"
    ),
]
Order = Annotated[
    tuple[Annotated[int, Field(ge=0, le=3)], ...] | None,
    Field(description="derivative along each axis, 0 to 3, per pixel; float32 for integer images [default: 0]"),
]
Ratio = Annotated[float, Field(gt=1, allow_inf_nan=False, description="of the wider Gaussian's deviation to --sigma")]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, description="how much of the difference is added")]
Reach = Sequence[tuple[int, int]]
Gaussian = tuple[Sequence[float], Sequence[int]]  # deviation, for all axes or for each, and derivative along each


def _operator(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    usual: dict[str, Any] = {"computes_in": computed_in_floats, "missing_as_nan": True, "extends": True}
    return lambda function: image_operator(function, **usual | options)


def _each(name: str, values: Any, axes: int) -> tuple[Any, ...]:
    if len(values) not in (1, axes):
        raise ValueError(f"{name} has {len(values)} values: give 1 or {axes}")
    return tuple(values) * (axes // len(values))


@lru_cache(maxsize=256)  # a stream of chunks repeats them
def _windows(
    of: Gaussian, axes: Sequence[int], dtype: Any = np.float32, *, nan_policy: str = "propagate"
) -> list[Window]:
    """The windows of a Gaussian. Those of float32 along neighbouring axes reach at least as far as all others."""
    sigma, orders = of
    sigmas = _each("sigma", sigma, len(orders))
    direct, border_modes = nan_policy == "omit", ["reflect"] * len(axes)
    return gaussian_windows(axes, sigmas, border_modes, np.dtype(dtype), orders=orders, direct=direct)


def _policy(asked: Any) -> str:
    return getattr(asked, "nan_policy", "propagate")


def _widest(
    gaussians: Sequence[Gaussian], axes: Any, dtype: Any = np.float32, *, nan_policy: str
) -> list[tuple[int, int]]:
    """The most samples that any of these Gaussians looks at before and after along each axis."""
    found = [_windows(each, axes, dtype, nan_policy=nan_policy) for each in gaussians]
    return [
        (max(each.before for each in along), max(each.after for each in along)) for along in zip(*found, strict=True)
    ]


def _reach_of(gaussians: Callable[..., list[Gaussian]]) -> Callable[[Any, int], Reach]:
    """Samples that the Gaussians of an operator's parameters look at along each axis."""
    return lambda asked, axes: _widest(gaussians(axes, **asked.own()), range(axes), nan_policy=_policy(asked))


def _looked_at(
    block: Any, reach: Reach, axes: Any, edges: Edges, border_modes: Sequence[str]
) -> tuple[Any, tuple[int, ...]]:
    """The part of a block that Gaussians of this reach look at, and its first coordinates. Halos are those of float32,
    which has the longest windows; axes of other modes than valid are not cut."""
    cut, offset = [slice(0, n) for n in block.shape], []
    for axis, (before, after), mode in zip(axes, reach, border_modes, strict=True):
        halo = edges.halo[axis]
        if mode == "valid":
            cut[axis] = slice(halo[0] - before, block.shape[axis] - (halo[1] - after))
        offset.append(edges.first[axis] + cut[axis].start)
    return block[tuple(cut)], tuple(offset)


def _apply(
    function: Callable[..., Any],
    block: Any,
    gaussians: Sequence[Gaussian],
    sigmas: Sequence[Any],
    *others: Any,
    axes: Any,
    edges: Edges,
    out: Any,
    nan_policy: str = "propagate",
    **options: Any,
) -> None:
    """Fill `out` with a function of `kernels.composites`, which computes these Gaussians in floats."""
    dtype, found = block.dtype if block.dtype.kind == "f" else np.float32, borders(block, out, axes, edges)
    reach = _widest(gaussians, axes, dtype, nan_policy=nan_policy)
    part, offset = _looked_at(block, reach, axes, edges, found["mode"])
    each = [_each("sigma", sigma, len(axes)) for sigma in sigmas]
    options |= {"axes": axes, "offset": offset, "nan_policy": nan_policy, "out": out, "workers": 1}
    function(part, *each, *others, **found, **options)


def _described(gaussians: Callable[..., list[Gaussian]]) -> Callable[..., dict[str, str]]:
    """For the receipt: the definition of each Gaussian of an operator's parameters."""

    def describe(asked: Any, axes: Sequence[int], within: np.dtype[Any], header: ImageHeader) -> dict[str, str]:
        letters, result = [header.axes[axis] for axis in axes], header.dtype
        if gaussians is not _derived:  # see `_apply`
            within = result = within if within.kind == "f" else np.dtype(np.float32)
        found: dict[str, list[str]] = {}
        for sigma, orders in gaussians(len(axes), **asked.own()):
            windows = _windows((sigma, orders), axes, within, nan_policy=_policy(asked))
            said = definition_of(windows, letters, within, result)
            sigmas = found.setdefault(said, [])
            sigmas += [each for each in [",".join(f"{one:g}" for one in sigma)] if each not in sigmas]
        if len(found) == 1:
            return {"gaussian": next(iter(found))}
        return {"gaussian": "; ".join(f"sigma {' and '.join(sigmas)}: {said}" for said, sigmas in found.items())}

    return describe


def _work(floats: float) -> Callable[[Any], float]:
    """Floats of the arrays that are held at once. If samples are left out, a mask of the others is filtered, too."""
    return lambda asked: floats * (2.5 if _policy(asked) == "omit" else 1)


def _of(gaussians: Callable[..., list[Gaussian]]) -> dict[str, Any]:
    """Options of an operator of these Gaussians."""
    return {"halo": _reach_of(gaussians), "remarks": _described(gaussians), "anchored": True}


def _derived(axes: int, /, *, sigma: Any, order: Any, **_: Any) -> list[Gaussian]:
    return [(sigma, _each("order", order or (0,), axes))]


def _one(axes: int, /, *, sigma: Any, **_: Any) -> list[Gaussian]:
    return [(sigma, (0,) * axes)]


def _two(axes: int, /, *, sigma: Any, ratio: float, **_: Any) -> list[Gaussian]:
    return [(sigma, (0,) * axes), (tuple(each * ratio for each in sigma), (0,) * axes)]


def _second_derivatives(axes: int, /, *, sigma: Any, **_: Any) -> list[Gaussian]:
    return [(sigma, tuple(2 * (axis == along) for axis in range(axes))) for along in range(axes)]


def _float_of(source: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64 if computed_in(source) == np.float64 else np.float32)


def _dtype_derived(source: np.dtype[Any], asked: Any) -> np.dtype[Any]:
    return _float_of(source) if any(asked.order or ()) and source.kind != "f" else source


def _is_mean(asked: Any) -> bool:
    return not any(asked.order or ())


@_operator(**_of(_derived), dtype=_dtype_derived, keeps_range=_is_mean, missing_as_nan=_is_mean)
def gaussian(
    block: Any,
    *,
    sigma: Sigma,
    order: Order = None,
    axes: Axes = None,
    nan_policy: NanPolicy = "propagate",
    nodata: NoData = None,
    out: Any,
    stream: Any,
    edges: Any,
) -> None:
    """Smooth with a Gaussian, or take derivatives of the smoothed image."""
    assert axes is not None
    found, sigmas = borders(block, out, axes, edges), _each("sigma", sigma, len(axes))
    of = _derived(len(axes), sigma=sigma, order=order)
    reach = _widest(of, axes, block.dtype, nan_policy=nan_policy)
    part, offset = _looked_at(block, reach, axes, edges, found["mode"])
    options: dict[str, Any] = {"axes": axes, "offset": offset, "order": of[0][1], "nan_policy": nan_policy}
    gaussian_filter(part, sigmas, out=out, workers=1, stream=stream, **found, **options)


def _box_reach(asked: Any, axes: int) -> Reach:
    windows = [box_window(0, size, "reflect") for size in _each("size", asked.size or (3,), axes)]
    return [(window.before, window.after) for window in windows]


def _has_long_side(asked: Any) -> bool:
    return any(box_window(0, size, "reflect").is_long_box for size in asked.size or (3,))


@_operator(halo=_box_reach, computes_in=computed_in, keeps_range=True, anchored=_has_long_side)
def box(
    block: Any,
    *,
    size: Size = None,
    axes: Axes = None,
    nan_policy: NanPolicy = "propagate",
    nodata: NoData = None,
    out: Any,
    stream: Any,
    edges: Any,
) -> None:
    """Take the mean over a box around each pixel."""
    assert axes is not None
    options: dict[str, Any] = {"axes": axes, "nan_policy": nan_policy, "out": out, "workers": 1, "stream": stream}
    options["offset"] = tuple(edges.first[axis] for axis in axes)
    uniform_filter(block, _each("size", size or (3,), len(axes)), **borders(block, out, axes, edges), **options)


@_operator(**_of(_two), dtype=_float_of, work_floats=_work(3.25))
def dog(
    block: Any,
    *,
    sigma: Sigma = (1.0,),
    ratio: Ratio = 1.6,
    axes: Axes = None,
    nan_policy: NanPolicy = "propagate",
    nodata: NoData = None,
    out: Any,
    stream: Any,
    edges: Any,
) -> None:
    """Difference of two Gaussians: keep structures of about --sigma, without their background."""
    assert axes is not None
    both = _two(len(axes), sigma=sigma, ratio=ratio)
    options = {"axes": axes, "edges": edges, "nan_policy": nan_policy, "out": out, "stream": stream}
    _apply(composites.difference_of_gaussians, block, both, [each for each, _ in both], **options)


@_operator(**_of(_second_derivatives), dtype=_float_of, missing_as_nan=False, work_floats=_work(5))
def log(block: Any, *, sigma: Sigma = (2.0,), axes: Axes = None, out: Any, stream: Any, edges: Any) -> None:
    """Laplacian of Gaussian: the sum of the smoothed image's second derivatives, negative on bright spots."""
    assert axes is not None
    derivatives = _second_derivatives(len(axes), sigma=sigma)
    _apply(composites.gaussian_laplace, block, derivatives, [sigma], axes=axes, edges=edges, out=out, stream=stream)


@_operator(**_of(_one), work_floats=_work(2.25))
def unsharp(
    block: Any,
    *,
    sigma: Sigma = (1.0,),
    amount: Amount = 1.0,
    axes: Axes = None,
    nan_policy: NanPolicy = "propagate",
    nodata: NoData = None,
    out: Any,
    stream: Any,
    edges: Any,
) -> None:
    """Sharpen by an unsharp mask: add the difference from the smoothed image; integers saturate."""
    assert axes is not None
    options = {"axes": axes, "edges": edges, "nan_policy": nan_policy, "out": out, "stream": stream}
    _apply(composites.unsharp_mask, block, _one(len(axes), sigma=sigma), [sigma], amount, **options)


def _without_background(
    block: Any,
    *,
    operation: str,
    sigma: Sigma = (50.0,),
    axes: Axes = None,
    nan_policy: NanPolicy = "propagate",
    nodata: NoData = None,
    out: Any,
    stream: Any,
    edges: Any,
) -> None:
    assert axes is not None
    options = {"axes": axes, "edges": edges, "nan_policy": nan_policy, "out": out, "stream": stream}
    function = getattr(composites, f"{operation}_background")
    _apply(function, block, _one(len(axes), sigma=sigma), [sigma], **options)


def _background(operation: str, summary: str) -> Any:
    options: dict[str, Any] = {"given": {"operation": operation}, "name": f"{operation}-background", "summary": summary}
    return _operator(**_of(_one), dtype=_float_of, work_floats=_work(2.25), **options)(_without_background)


subtract_background = _background("subtract", "Subtract the background, a wide Gaussian of the image.")
divide_background = _background(
    "divide", "Divide by the background, a wide Gaussian of the image: uneven light becomes even."
)


@_operator(halo=_box_reach, dtype=_float_of, work_floats=_work(6), anchored=_has_long_side)
def deviation(
    block: Any,
    *,
    size: Size = None,
    axes: Axes = None,
    nan_policy: NanPolicy = "propagate",
    nodata: NoData = None,
    out: Any,
    stream: Any,
    edges: Any,
) -> None:
    """Take the standard deviation over a box around each pixel, a measure of contrast, texture and noise."""
    assert axes is not None
    options: dict[str, Any] = {"axes": axes, "nan_policy": nan_policy, "out": out, "workers": 1, "stream": stream}
    options["offset"] = [edges.first[axis] for axis in axes]
    sizes = _each("size", size or (3,), len(axes))
    composites.deviation_filter(block, sizes, **borders(block, out, axes, edges), **options)
