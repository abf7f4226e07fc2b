"""The options of filters that look at a window around each pixel."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field

from kernels.rank import MAX_RADIUS, MAX_SAMPLES, footprint_named
from pipeline.errors import InputError
from pipeline.workloads.common.extents import OR_TEXT
from pipeline.workloads.operator.edges import Edges

Size = Annotated[
    tuple[Annotated[int, Field(ge=1), *OR_TEXT], ...] | None,
    Field(description="pixels of the window along each axis: 3 for all, 3,5 for each, or a length: 2um [default: 3]"),
]
Footprint = Annotated[Literal["box", "disk", "ball", "cross"], Field(description="shape of the window")]
Radius = Annotated[
    Annotated[int, Field(ge=1, le=MAX_RADIUS), *OR_TEXT] | None,
    Field(
        description=f"pixels on each side of the centre of a disk, ball or cross, 1 … {MAX_RADIUS}, or a length: 2um"
    ),
]
Axes = Annotated[
    tuple[str, ...] | None,
    Field(
        json_schema_extra={"unit": "AXIS"},
        description="axes to filter, by letter or number: YX or 0,1 [default: Y, X, and Z of volumes]",
    ),
]
NanPolicy = Annotated[
    Literal["propagate", "omit", "raise"], Field(description="float images: let NaN spread, leave it out, or refuse it")
]
NoData = Annotated[
    float | None,
    Field(description="a value that marks missing pixels, which are left out [default: that of a GeoTIFF]"),
]


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
        raise ValueError(f"footprint {footprint} needs --radius, in pixels")
    return {"footprint": footprint_named(footprint, radius, axes)}


class Borders(TypedDict):
    mode: tuple[str, ...]
    cval: float


def borders(block: Any, out: Any, axes: Any, edges: Edges) -> Borders:
    """The border mode along each axis: the job's if the block is the whole image, and `out` as long; else only whole
    windows."""
    modes = tuple(edges.mode if out.shape[axis] == block.shape[axis] else "valid" for axis in axes)
    return {"mode": modes, "cval": edges.cval if edges.mode == "constant" else 0}


def is_symmetric(asked: Any) -> bool:
    """Whether the window is the same if it is mirrored at its centre."""
    return all(side % 2 == 1 for side in asked.size or ())


def sides_of(asked: Any, axes: int) -> tuple[int, ...]:
    """The samples of the window along each axis, checked against the other options; ValueError names one."""
    if math.isnan(asked.cval) and asked.nan_policy == "raise":
        raise ValueError("cval nan does not fit --nan-policy raise: give a number, or another policy")
    found = window(asked.size, asked.footprint, asked.radius, axes)
    sizes: tuple[int, ...] = found["size"] if "size" in found else found["footprint"].shape
    if math.prod(sizes) > MAX_SAMPLES:
        raise ValueError(f"size makes a window of {math.prod(sizes):,} pixels; at most {MAX_SAMPLES:,} are supported")
    return sizes


def refused(error: ValueError) -> InputError:
    """The mistake that a kernel found in the samples of a block."""
    way_out = "; replace them, or choose another --nan-policy" if "NaN" in str(error) else ""
    return InputError(f"{error}{way_out}")
