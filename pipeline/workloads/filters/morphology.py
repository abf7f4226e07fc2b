"""Grey morphology: `millrace run erode | dilate | open | close | tophat | bottomhat IN OUT`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kernels.morphology import difference, grey_dilation, grey_erosion
from kernels.rank.task import SYMMETRIC, Difference
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

# Of each operation the filters, one after the other.
_FILTERS: dict[str, tuple[Any, ...]] = {
    "erode": (grey_erosion,),
    "dilate": (grey_dilation,),
    "open": (grey_erosion, grey_dilation),
    "close": (grey_dilation, grey_erosion),
    "tophat": (grey_erosion, grey_dilation),
    "bottomhat": (grey_dilation, grey_erosion),
}


def _halo(asked: Any, axes: int, *, operation: str) -> Sequence[tuple[int, int]]:
    """What the window reaches; of two filters, its whole length on both sides, since one window is mirrored."""
    sides = sides_of(asked, axes)
    if operation == "erode":
        return [(size // 2, (size - 1) // 2) for size in sides]
    if operation == "dilate":
        return [((size - 1) // 2, size // 2) for size in sides]
    # Beyond an edge, a mirror shows the first filter's results from the other side of the edge: of even windows from a
    # sample farther inside.
    return [(size if asked.mode == "mirror" and size % 2 == 0 else size - 1,) * 2 for size in sides]


def _apply(
    block: Any,
    *,
    operation: str,
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
    """The operation on a block with its halo; each filter takes its part of that away."""
    assert axes is not None
    options: dict[str, Any] = {"axes": axes, "nan_policy": nan_policy, "nodata": nodata, "stream": stream}
    options |= {**borders(block, out, axes, edges), "workers": 1}
    filters = _FILTERS[operation]
    try:
        options |= window(size, footprint, radius, len(axes))
        if len(filters) == 1:
            filters[0](block, out=out, **options)
            return
        kept = block[tuple(slice((n - m) // 2, (n + m) // 2) for n, m in zip(block.shape, out.shape, strict=True))]
        taken = Difference(image=kept if "hat" in operation else None, reverse=operation == "bottomhat")
        is_one_step = _is_one_step(block, edges, axes, options)
        spare = [] if edges.mode != "mirror" else _even(axes, options)
        both = replace(taken, opens=True)
        at_once = is_one_step and not spare and not isinstance(block, np.ndarray)
        if at_once and filters[1](block, out=out, difference=both, **options) is not None:
            return
        found = filters[0](block, **options)
        if not is_one_step:
            is_left = filters[0] is grey_erosion  # an erosion reaches farther to the left, a dilation to the right
            lost = (n - m for n, m in zip(block.shape, found.shape, strict=True))
            first = tuple(at + (each + is_left) // 2 for at, each in zip(edges.first, lost, strict=True))
            replace(edges, first=first).extend(found, axes)
        found = found[tuple(slice(1, -1) if axis in spare else slice(None) for axis in range(found.ndim))]
        filters[1](found, out=out, difference=None if taken.image is None else taken, **options)
    except ValueError as error:
        raise refused(error) from error
    if taken.image is not None and not taken.is_done:
        of, subtracted = (out, kept) if taken.reverse else (kept, out)
        difference(of, subtracted, out, nodata, stream)


def _is_one_step(block: Any, edges: Any, axes: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether an opening's first step needs no edges of its own: the block lies within the image, or the edges are
    mirrors or none and the windows symmetric, so that the first step's results there are those of its windows."""
    if "size" not in options:
        return False
    ends = zip(axes, options["size"], options["mode"], strict=True)
    is_inside = all(
        size == 1
        or (mode == "valid" and 0 <= edges.first[axis] <= edges.first[axis] + block.shape[axis] <= edges.shape[axis])
        for axis, size, mode in ends
    )
    return is_inside or (edges.mode in SYMMETRIC and all(size % 2 == 1 for size in options["size"]))


def _even(axes: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """The axes along which the block is cut and the window is even."""
    sizes, cut = options.get("size", (1,) * len(axes)), options["mode"]
    return [axis for axis, size, mode in zip(axes, sizes, cut, strict=True) if size % 2 == 0 and mode == "valid"]


def _of(operation: str, summary: str) -> Any:
    return image_operator(
        _apply, name=operation, given={"operation": operation}, summary=summary, tolerance=0,
        halo=partial(_halo, operation=operation), computes_in=computed_in, keeps_range="hat" not in operation,
        symmetric=is_symmetric, extends=True, work_floats=len(_FILTERS[operation]) - 1,
    )  # fmt: skip


erode = _of("erode", "Take the smallest value in the window around each pixel: bright structures shrink.")
dilate = _of("dilate", "Take the largest value in the window around each pixel: bright structures grow.")
open = _of("open", "Remove bright structures that are smaller than the window: erode, then dilate.")  # noqa: A001
close = _of("close", "Remove dark structures that are smaller than the window: dilate, then erode.")
tophat = _of("tophat", "Keep bright structures that are smaller than the window: the image minus its opening.")
bottomhat = _of("bottomhat", "Keep dark structures that are smaller than the window: the closing minus the image.")
