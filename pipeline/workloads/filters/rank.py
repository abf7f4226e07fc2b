"""Rank filters: `millrace run median | percentile | minimum | maximum IN OUT`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from kernels.rank import percentile_filter
from pipeline.workloads.common.samples import computed_in
from pipeline.workloads.filters.window import (
    Axes,
    Footprint,
    NanPolicy,
    NoData,
    Radius,
    Size,
    borders,
    is_symmetric,
    refused,
    sides_of,
    window,
)
from pipeline.workloads.operator import image_operator

Percentile = Annotated[
    float, Field(ge=0, le=100, examples=[90], description="0: the minimum; 50: the median; 100: the maximum")
]


def _halo(asked: Any, axes: int) -> Sequence[tuple[int, int]]:
    """Samples that the window reaches before and after along each axis."""
    return [(size // 2, (size - 1) // 2) for size in sides_of(asked, axes)]


def _take(
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
    edges: Any,
) -> None:
    """The percentile of each window, as `kernels.rank` computes it."""
    assert axes is not None
    options: dict[str, Any] = {"axes": axes, "nan_policy": nan_policy, "nodata": nodata, "out": out, "stream": stream}
    try:
        options |= {**window(size, footprint, radius, len(axes)), **borders(block, out, axes, edges)}
        percentile_filter(block, percentile, workers=1, **options)
    except ValueError as error:
        raise refused(error) from error


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


_operator = partial(
    image_operator,
    _take,
    halo=_halo,
    computes_in=computed_in,
    tolerance=0,
    keeps_range=True,
    reference=_define,
    symmetric=is_symmetric,
    extends=True,
)

percentile = _operator(name="percentile", summary="Take a percentile of the window around each pixel.")
median = _operator(
    name="median", given={"percentile": 50.0},
    summary="Take the median of the window around each pixel: noise goes, edges stay.",
)  # fmt: skip
minimum = _operator(
    name="minimum", given={"percentile": 0.0}, summary="Take the smallest value in the window around each pixel."
)
maximum = _operator(
    name="maximum", given={"percentile": 100.0}, summary="Take the largest value in the window around each pixel."
)
