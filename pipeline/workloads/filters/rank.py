"""Rank filters: `millrace run median | percentile | minimum | maximum IN OUT`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from kernels.rank import MAX_RADIUS, MAX_SAMPLES, footprint_named, percentile_filter
from pipeline.errors import InputError
from pipeline.workloads.common.extents import OR_TEXT
from pipeline.workloads.operator import image_operator

Size = Annotated[
    tuple[Annotated[int, Field(ge=1), *OR_TEXT], ...] | None,
    Field(description="samples of the window along each axis: 3 for all, 3,5 for each, or a length: 2um [default: 3]"),
]
Footprint = Annotated[Literal["box", "disk", "ball", "cross"], Field(description="shape of the window")]
Radius = Annotated[
    Annotated[int, Field(ge=1, le=MAX_RADIUS)] | None,
    Field(description=f"samples on each side of the centre of a disk, ball or cross, 1 … {MAX_RADIUS}"),
]
Axes = Annotated[
    tuple[str, ...] | None,
    Field(description="axes to filter, by letter or number: YX or 0,1 [default: Y, X, and Z of volumes]"),
]
NanPolicy = Annotated[
    Literal["propagate", "omit", "raise"], Field(description="float images: let NaN spread, leave it out, or refuse it")
]
NoData = Annotated[float | None, Field(description="a value that marks missing samples, which are left out")]
Percentile = Annotated[float, Field(ge=0, le=100, description="0: the minimum; 50: the median; 100: the maximum")]


def window(size: tuple[int, ...] | None, footprint: str, radius: int | None, axes: int) -> dict[str, Any]:
    """The window over so many axes, as the functions of `kernels.rank` take it.

    Raises ValueError that names the option, if they give none.
    """
    if footprint == "box":
        if radius is not None:
            raise ValueError("radius belongs to --footprint disk, ball or cross; a box has --size")
        sizes = size or (3,)
        if len(sizes) not in (1, axes):
            raise ValueError(f"size has {len(sizes)} values: give 1 or {axes}")
        return {"size": sizes * (axes // len(sizes))}
    if size is not None:
        raise ValueError(f"size belongs to --footprint box; a {footprint} has --radius")
    if radius is None:
        raise ValueError(f"footprint {footprint} needs --radius, in samples")
    return {"footprint": footprint_named(footprint, radius, axes)}


def halo(asked: Any, axes: int) -> Sequence[tuple[int, int]]:
    """Samples that the window reaches before and after along each axis."""
    if math.isnan(asked.cval) and asked.nan_policy == "raise":
        raise ValueError("cval nan does not fit --nan-policy raise: give a number, or another policy")
    found = window(asked.size, asked.footprint, asked.radius, axes)
    sizes = found["size"] if "size" in found else found["footprint"].shape
    if math.prod(sizes) > MAX_SAMPLES:
        raise ValueError(f"size makes a window of {math.prod(sizes):,} samples; at most {MAX_SAMPLES:,} are supported")
    return [(size // 2, (size - 1) // 2) for size in sizes]


def _take(block: Any, percentile: float, size: Any, footprint: str, radius: int | None, axes: Any, **rest: Any) -> None:
    """The percentile of each window, as `kernels.rank` computes it."""
    try:
        found = window(size, footprint, radius, len(axes))
        percentile_filter(block, percentile, axes=axes, mode="valid", workers=1, **found, **rest)
    except ValueError as error:
        way_out = "; mend them, or choose another --nan-policy" if "NaN" in str(error) else ""
        raise InputError(f"{error}{way_out}") from error


def _define(
    block: NDArray[np.float64],
    *,
    percentile: float,
    size: Any,
    footprint: str,
    radius: int | None,
    axes: tuple[int, ...],
    nan_policy: str,
    nodata: float | None,
    out: Any,
) -> None:
    """The same by its definition: all samples of each window are sorted."""
    found = window(size, footprint, radius, len(axes))
    mask = found.get("footprint")
    mask = np.ones(found["size"], bool) if mask is None else mask
    samples = sliding_window_view(block, mask.shape, axes)[..., mask]
    missing = np.zeros(samples.shape, bool) if nodata is None else samples == nodata
    spoilt = np.isnan(samples).any(axis=-1) if nan_policy == "propagate" else np.zeros(samples.shape[:-1], bool)
    ordered = np.sort(np.where(missing, np.nan, samples), axis=-1)
    counts = (~np.isnan(ordered)).sum(axis=-1)
    ranks = counts - 1 if percentile == 100 else np.floor(counts * percentile / 100).astype(np.int64)
    out[...] = np.take_along_axis(ordered, np.maximum(ranks, 0)[..., None], axis=-1)[..., 0]
    out[counts == 0] = np.nan if nodata is None else nodata
    out[spoilt] = np.nan


_operator = partial(image_operator, halo=halo, tolerance=0, keeps_range=True)


@_operator(reference=_define)  # type: ignore[untyped-decorator]
def percentile(
    block: Any,
    *,
    percentile: Percentile,
    size: Size = None,
    footprint: Footprint = "box",
    radius: Radius = None,
    axes: Axes = None,
    nan_policy: NanPolicy = "propagate",
    nodata: NoData = None,
    out: Any,
    stream: Any,
) -> None:
    """Take a percentile of the samples in a window around each pixel."""
    rest = {"nan_policy": nan_policy, "nodata": nodata, "out": out, "stream": stream}
    _take(block, percentile, size, footprint, radius, axes, **rest)


def _of(name: str, summary: str, percentile: float) -> Any:
    """The operator of one percentile."""

    def take(
        block: Any,
        *,
        size: Size = None,
        footprint: Footprint = "box",
        radius: Radius = None,
        axes: Axes = None,
        nan_policy: NanPolicy = "propagate",
        nodata: NoData = None,
        out: Any,
        stream: Any,
    ) -> None:
        rest = {"nan_policy": nan_policy, "nodata": nodata, "out": out, "stream": stream}
        _take(block, percentile, size, footprint, radius, axes, **rest)

    take.__name__ = take.__qualname__ = name
    take.__doc__ = summary
    return _operator(take, reference=partial(_define, percentile=percentile))


median = _of("median", "Take the median of the samples in a window around each pixel: noise goes, edges stay.", 50)
minimum = _of("minimum", "Take the smallest sample in a window around each pixel.", 0)
maximum = _of("maximum", "Take the largest sample in a window around each pixel.", 100)
