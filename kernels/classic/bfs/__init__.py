"""Breadth-first search over a graph in compressed rows (CSR), on NumPy arrays (CPU) and CuPy arrays (CUDA).

Graph  : `offsets` [n + 1], int32 or int64, and `columns` [m], int32: the edges out of vertex v lead to
         columns[offsets[v]:offsets[v + 1]]. Self loops, repeated edges and vertices without edges are allowed.
Result : int32 [n]: the least number of edges from the source; 0 for the source itself, −1 for unreachable vertices.

Results are exact and identical on every device. Fewer than 2³¹ vertices, any number of edges.

Sources: Luo, Wong, Hwu, "An effective GPU implementation of breadth-first search" (2010); Merrill, Garland, Grimshaw,
"Scalable GPU graph traversal" (2012); Beamer, Asanović, Patterson, "Direction-optimizing breadth-first search" (2012).
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out

__all__ = ["UNREACHED", "levels"]

UNREACHED = -1
MAX_VERTICES = (1 << 31) - 1


def levels(
    offsets: Any, columns: Any, source: int, *, symmetric: bool = False, out: Any = None, stream: Any = None
) -> Any:
    """The number of edges between `source` and each vertex.

    offsets, columns : NumPy or CuPy arrays, both from the same library. NumPy arrays are checked completely; of CuPy
                       arrays only the last offset is checked.
    symmetric        : promises that every edge exists in both directions, so that the search may also run bottom-up,
                       from unvisited vertices to the frontier, which reads far fewer edges. Not checked: if it is
                       false, levels can be too high.
    out              : int32 [n], C-contiguous, for the result; must not share memory with the graph
    stream           : CUDA: the stream to launch on; default CuPy's current one. The call waits for the device, since
                       the host must see when the search ends.

    Returns the levels, int32 [n]. Raises ValueError or TypeError; the message names the parameter.
    """
    source = _check_graph(offsets, columns, source)
    check_out(out, (len(offsets) - 1,), np.int32, apart_from={"offsets": offsets, "columns": columns})
    if isinstance(offsets, np.ndarray):
        from kernels.classic.bfs import cpu

        _check_rows(offsets, columns)
        return cpu.levels(offsets, columns, source, symmetric=symmetric, out=out)
    from kernels.classic.bfs import cuda

    return cuda.levels(offsets, columns, source, symmetric=symmetric, out=out, stream=stream)


def _check_graph(offsets: Any, columns: Any, source: Any) -> int:
    for name, array, dtypes in (("offsets", offsets, ("int32", "int64")), ("columns", columns, ("int32",))):
        check_array(name, array)
        if array.dtype.name not in dtypes or not array.dtype.isnative:
            raise TypeError(f"{name} has dtype {array.dtype}; supported are {', '.join(dtypes)}")
        if array.ndim != 1:
            raise ValueError(f"{name} must have one axis; got shape {array.shape}")
    if type(offsets) is not type(columns):
        raise TypeError(f"columns must be a {type(offsets).__name__}, as offsets is; got {type(columns).__name__}")
    vertices = len(offsets) - 1
    if not 1 <= vertices <= MAX_VERTICES:
        raise ValueError(f"offsets must have n + 1 entries, n from 1 to {MAX_VERTICES}; got {len(offsets)}")
    try:
        number = operator.index(source)
    except TypeError:
        raise TypeError(f"source must be a vertex's number; got {type(source).__name__}") from None
    if not 0 <= number < vertices:
        raise ValueError(f"source must be from 0 to {vertices - 1}; got {number}")
    return int(number)


def _check_rows(offsets: Any, columns: Any) -> None:
    if offsets[0] != 0 or offsets[-1] != len(columns) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"offsets must rise from 0 to the number of columns, {len(columns)}")
    if len(columns) and not (columns.min() >= 0 and columns.max() < len(offsets) - 1):
        place = np.flatnonzero((columns < 0) | (columns >= len(offsets) - 1))[0]
        raise ValueError(f"columns: entry {place} is {columns[place]}, of {len(offsets) - 1} vertices")
