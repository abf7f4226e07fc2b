"""Footprints of rank filters: which samples around a place count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHAPES = ("box", "disk", "ball", "cross")
MAX_RADIUS = 15  # of a footprint that is not a box


def disk(radius: int) -> NDArray[np.bool_]:
    """The samples of a plane at most `radius` from the centre, as skimage.morphology.disk has them."""
    return _round(radius, 2)


def ball(radius: int) -> NDArray[np.bool_]:
    """The samples of a volume at most `radius` from the centre, as skimage.morphology.ball has them."""
    return _round(radius, 3)


def cross(radius: int, ndim: int) -> NDArray[np.bool_]:
    """The samples on the axes through the centre, at most `radius` from it."""
    distances = _distances(radius, ndim)
    return np.asarray(sum((distance != 0).astype(np.int8) for distance in distances) <= 1)


def footprint_named(name: str, radius: int, ndim: int) -> NDArray[np.bool_] | None:
    """The footprint of that name over so many axes; None for a box, whose window is given by its sizes.

    Raises ValueError for a name that is not in `SHAPES`, or does not fit the number of axes.
    """
    if name not in SHAPES:
        raise ValueError(f"footprint must be one of {', '.join(SHAPES)}; got {name!r}")
    if name in ("disk", "ball") and ndim != (2 if name == "disk" else 3):
        raise ValueError(
            f"footprint {name} needs {2 if name == 'disk' else 3} axes, and {ndim} {'is' if ndim == 1 else 'are'} "
            f"filtered: choose axes, or take {'ball' if ndim == 3 else 'disk' if ndim == 2 else 'cross'}"
        )
    if name == "box":
        return None
    return cross(radius, ndim) if name == "cross" else _round(radius, ndim)


def checked_footprint(footprint: Any, ndim: int) -> NDArray[np.bool_]:
    """A mask of odd sizes, one for each filtered axis, with at least one sample.

    Raises ValueError or TypeError with a line that names it.
    """
    mask = np.asarray(footprint)
    if mask.dtype != bool:
        if mask.dtype.kind not in "iuf" or not np.isin(mask, (0, 1)).all():
            raise TypeError(f"footprint must be a boolean array; got {mask.dtype}")
        mask = mask.astype(bool)
    if mask.ndim != ndim:
        raise ValueError(f"footprint has {mask.ndim} dimensions for {ndim} filtered axes")
    if any(length % 2 == 0 for length in mask.shape):
        shape = "×".join(map(str, mask.shape))
        raise ValueError(f"footprint of {shape} has an even side, so no centre: add a row of False to it")
    if max(mask.shape) > 2 * MAX_RADIUS + 1 and not mask.all():
        raise ValueError(f"footprint reaches {max(mask.shape) // 2} samples; at most {MAX_RADIUS}, except for boxes")
    if not mask.any():
        raise ValueError("footprint holds no sample: set at least one to True")
    return mask


def _round(radius: int, ndim: int) -> NDArray[np.bool_]:
    distances = _distances(radius, ndim)
    return np.asarray(sum(distance.astype(np.int64) ** 2 for distance in distances) <= radius * radius)


def _distances(radius: int, ndim: int) -> Sequence[NDArray[Any]]:
    if isinstance(radius, bool) or not isinstance(radius, int | np.integer) or not 1 <= radius <= MAX_RADIUS:
        raise ValueError(f"radius must be a whole number of samples in 1 … {MAX_RADIUS}; got {radius!r}")
    return np.meshgrid(*[np.arange(-radius, radius + 1)] * ndim, indexing="ij", sparse=True)
