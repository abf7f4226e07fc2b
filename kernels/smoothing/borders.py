"""Samples beyond the edge of an image: the border modes of scipy.ndimage as an index map."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

# "valid" is our addition: the output shrinks to the windows that lie inside the image (as in numpy.convolve).
BORDER_MODES = ("reflect", "mirror", "nearest", "wrap", "constant")
MODES = (*BORDER_MODES, "valid")
OUTSIDE = -1


def border_indices(positions: ArrayLike, length: int, mode: str) -> NDArray[np.int64]:
    """Index along an axis from which the sample at each position comes.

    positions : integers, any shape, any value (negative and ≥ `length` lie beyond the edge)
    length    : samples along the axis, ≥ 1
    mode      : one of `BORDER_MODES`

    Returns int64 indices of the same shape in [0, length); `OUTSIDE` for positions that mode "constant" sets to `cval`.

    reflect  d c b a | a b c d | d c b a        mirror    d c b | a b c d | c b a
    nearest  a a a a | a b c d | d d d d        wrap    a b c d | a b c d | a b c d
    """
    at = np.asarray(positions, dtype=np.int64)
    if mode == "nearest":
        return np.clip(at, 0, length - 1)
    if mode == "wrap":
        return at % length
    if mode == "reflect":
        folded = at % (2 * length)
        return np.minimum(folded, 2 * length - 1 - folded)
    if mode == "mirror":
        period = max(2 * length - 2, 1)
        folded = at % period
        return np.minimum(folded, period - folded)
    if mode == "constant":
        return np.where((at >= 0) & (at < length), at, OUTSIDE)
    raise ValueError(f"border mode must be one of {', '.join(BORDER_MODES)}; got {mode!r}")
