"""The check that every public `read` and `write` makes before it touches a file."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from pipeline.formats.base import ImageHeader, Region


def require_fit(header: ImageHeader, region: Region, samples: NDArray[Any]) -> None:
    """ValueError unless the region lies in the image and `samples` has its shape, the header's dtype and C order.

    A region may be empty; the caller then has nothing to do.
    """
    inside = len(region.start) == len(region.stop) == len(header.shape) and all(
        0 <= start <= stop <= size for start, stop, size in zip(region.start, region.stop, header.shape, strict=True)
    )
    if not inside:
        raise ValueError(f"region {region.start} to {region.stop} is not within an image of {header.shape}")
    if samples.shape != region.shape or samples.dtype != header.dtype or not samples.flags.c_contiguous:
        raise ValueError(
            f"an array of {samples.shape} {samples.dtype} stands for a region of {region.shape} {header.dtype}, "
            "which must be C-contiguous"
        )
