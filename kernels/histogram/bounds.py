"""Edges in the values' own dtype, such that every comparison comes out as it would with the exact edges."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rounded_edges(edges: NDArray[np.float64], dtype: Any) -> tuple[NDArray[Any], float]:
    """(lower edges of the bins, largest value that counts), of the dtype.

    x >= e holds for a float32 x just where x >= the least float32 that is not below e.
    """
    with np.errstate(over="ignore"):
        near = edges.astype(dtype)
    infinity = np.array(np.inf, dtype)
    up = np.where(near < edges, np.nextafter(near, infinity), near)
    down = np.where(near > edges, np.nextafter(near, -infinity), near)
    return up[:-1].astype(dtype), float(down[-1])
