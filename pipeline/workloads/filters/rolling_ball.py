"""The rolling ball: `millrace run rolling-ball IN OUT --radius 50`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from kernels.rolling_ball import MAX_RADIUS, apexes
from pipeline.workloads.common.extents import OR_TEXT
from pipeline.workloads.common.samples import computed_in
from pipeline.workloads.filters.window import Axes, NoData
from pipeline.workloads.operator import image_operator

Radius = Annotated[
    float,
    Field(
        gt=0,
        le=MAX_RADIUS,
        description="of the ball, in pixels and in units of their values; a length, 20um, gives pixels",
    ),
    *OR_TEXT,
]
Background = Annotated[bool, Field(description="write the background instead of the image without it")]
NanPolicy = Annotated[Literal["omit", "raise"], Field(description="float images: leave NaN out, or refuse it")]


def _halo(asked: Any, axes: int) -> Sequence[int]:
    """For the ball's top, and for all that it reaches from there."""
    if axes not in (2, 3):
        raise ValueError(f"axes: a ball rolls along two or three; got {axes}")
    return [2 * int(asked.radius)] * axes


@image_operator(  # type: ignore[untyped-decorator]
    halo=_halo, computes_in=computed_in, name="rolling-ball", missing_as_nan=True, work_floats=4, anchored=True
)
def rolling_ball(
    block: Any,
    *,
    radius: Radius = 50.0,
    background: Background = False,
    axes: Axes = None,
    nan_policy: NanPolicy = "omit",
    nodata: NoData = None,
    out: Any,
    stream: Any,
    edges: Any,
    xp: Any,
) -> None:
    """Subtract the background that a ball rolling below the image reaches, as in ImageJ."""
    assert axes is not None
    reach, along = int(radius), [int(axis) for axis in axes]
    image = edges.wanted(block)
    heights = block.astype(np.float64 if block.dtype == np.float64 else np.float32)
    for sign in (1, -1):  # beyond the image's edges, nothing stops the ball
        replace(edges, mode="constant", cval=sign * math.inf).extend(heights, along)
        heights = apexes(heights, radius, along, sign=sign, workers=1, stream=stream)
        first = tuple(at + reach if axis in along else at for axis, at in enumerate(edges.first))
        edges = replace(edges, first=first)
    if not background:
        xp.subtract(image, heights, out=heights)
    elif image.dtype.kind == "f":
        xp.copyto(heights, np.nan, where=xp.isnan(image))
    if out.dtype.kind != "f":
        ends = np.iinfo(out.dtype)
        xp.clip(xp.rint(heights, out=heights), ends.min, ends.max, out=heights)
    out[...] = heights
