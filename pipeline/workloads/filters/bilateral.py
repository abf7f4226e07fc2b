"""The bilateral filter: `millrace run bilateral IN OUT --sigma-range 20`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pydantic import Field

from kernels.bilateral import MAX_SIZE, WEIGHT_ERROR, default_sizes
from kernels.bilateral import bilateral as filtered
from pipeline.errors import ParameterError
from pipeline.workloads.common.extents import OR_TEXT
from pipeline.workloads.common.samples import computed_in_floats
from pipeline.workloads.filters.window import Axes, NanPolicy, NoData, borders
from pipeline.workloads.operator import image_operator

SigmaRange = Annotated[
    float,
    Field(
        gt=0, allow_inf_nan=False, examples=[50], description="standard deviation of values: smaller keeps more edges"
    ),
]
SigmaSpatial = Annotated[
    tuple[Annotated[float, Field(gt=0, allow_inf_nan=False), *OR_TEXT], ...],
    Field(description="standard deviation of distance in pixels, for all axes or for each: 2 or 1,2, or a length: 2um"),
]
OddSize = Annotated[
    tuple[Annotated[int, Field(ge=1, le=MAX_SIZE)], ...] | None,
    Field(
        description="pixels of the window along each axis, odd "
        f"[default: three standard deviations on each side, at most {MAX_SIZE}]"
    ),
]


def _window(size: Any, sigma_spatial: Any, axes: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The deviations and the sizes along each axis; ValueError names an option."""
    for name, values in (("sigma_spatial", sigma_spatial), ("size", size)):
        if values is not None and len(values) not in (1, axes):
            raise ValueError(f"{name} has {len(values)} values: give 1 or {axes}")
    sigmas = tuple(sigma_spatial) * (axes // len(sigma_spatial))
    sizes = default_sizes(sigmas) if size is None else tuple(size) * (axes // len(size))
    if even := [each for each in sizes if each % 2 == 0]:
        raise ValueError(f"size must be odd; got {even[0]}")
    return sigmas, sizes


def _halo(asked: Any, axes: int) -> Sequence[int]:
    return [size // 2 for size in _window(asked.size, asked.sigma_spatial, axes)[1]]


def _define(
    block: NDArray[np.float64],
    *,
    sigma_range: float,
    sigma_spatial: Any,
    size: Any,
    axes: tuple[int, ...],
    nan_policy: str,
    out: Any,
) -> None:
    """The same by its definition: a weighted mean of each window."""
    sigmas, sizes = _window(size, sigma_spatial, len(axes))
    windows = sliding_window_view(block, sizes, axes)
    middle: Any = (Ellipsis, *(n // 2 for n in sizes))
    centre = windows[middle]
    grids = np.meshgrid(
        *[(np.arange(n) - n // 2) / sigma for n, sigma in zip(sizes, sigmas, strict=True)], indexing="ij"
    )
    along, total = tuple(range(-len(axes), 0)), np.nansum if nan_policy == "omit" else np.sum
    with np.errstate(invalid="ignore"):
        apart = windows - centre[(...,) + (None,) * len(axes)]
        weights = np.exp(-0.5 * ((apart / sigma_range) ** 2 + sum(grid**2 for grid in grids)))
        out[...] = total(weights * windows, along) / total(weights, along)
    out[np.isnan(centre) | np.isinf(windows).any(along)] = np.nan  # infinities are not left out


def _tolerance(dtype: np.dtype[Any], asked: Any, axes: int) -> float:
    """For each sample of a window, of its weight by distance: a weight's error, times the distance from the mean."""
    if _computes_in(dtype) == np.float64:
        return 1e-12 if dtype.kind == "f" else 0.6
    weights = 1.0
    for sigma, size in zip(*_window(asked.size, asked.sigma_spatial, axes), strict=True):
        weights *= float(np.exp(-0.5 * ((np.arange(size) - size // 2) / sigma) ** 2).sum())
    if dtype.kind == "f":
        return max(float(np.finfo(dtype).eps), 2 * WEIGHT_ERROR * weights) + 2e-6
    return float(0.51 + 4.5 * WEIGHT_ERROR * asked.sigma_range * weights)


def _computes_in(stored: np.dtype[Any]) -> np.dtype[Any]:
    if stored.kind in "ui" and stored.itemsize == 8:
        raise ParameterError(f"bilateral takes no {stored.name} images: convert the input to float64")
    return computed_in_floats(stored)


@image_operator(  # type: ignore[untyped-decorator]
    halo=_halo,
    computes_in=_computes_in,
    reference=_define,
    tolerance=_tolerance,
    keeps_range=True,
    missing_as_nan=True,
    extends=True,
)
def bilateral(
    block: Any,
    *,
    sigma_range: SigmaRange,
    sigma_spatial: SigmaSpatial = (1.0,),
    size: OddSize = None,
    axes: Axes = None,
    nan_policy: NanPolicy = "propagate",
    nodata: NoData = None,
    out: Any,
    stream: Any,
    edges: Any,
    xp: Any,
) -> None:
    """Smooth, but not across edges: a mean over neighbours with similar values."""
    assert axes is not None
    sigmas, sizes = _window(size, sigma_spatial, len(axes))
    options: dict[str, Any] = {"axes": axes, "out": out, "workers": 1, "stream": stream}
    omits = nan_policy == "omit" and block.dtype.kind == "f"
    # Values that are so far from all others have the weight 0; they are divided by sigma_range.
    far = xp.where(xp.isnan(block), np.finfo(block.dtype).max / 4 * min(sigma_range, 1), block) if omits else block
    filtered(far, sigma_range, sigmas, size=sizes, **borders(block, out, axes, edges), **options)
    if omits:
        xp.copyto(out, np.nan, where=xp.isnan(edges.wanted(block)))
