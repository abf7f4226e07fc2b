"""Breadth-first search of NumPy arrays: one thread; the queue holds all vertices found, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.compiled import compiled

Array = NDArray[Any]

# Beamer's constants: bottom-up once the frontier has more than 1/ALPHA of the unexplored edges, top-down again once it
# has less than 1/BETA of the vertices.
ALPHA, BETA = 14, 24


def levels(offsets: Array, columns: Array, source: int, *, symmetric: bool = False, out: Array | None = None) -> Array:
    """The levels, int32; see kernels.classic.bfs."""
    if out is None:
        out = np.empty(len(offsets) - 1, np.int32)
    out.fill(-1)
    _search(np.ascontiguousarray(offsets), np.ascontiguousarray(columns), source, symmetric, out)
    return out


@compiled
def _search(offsets: Array, columns: Array, source: int, symmetric: bool, levels: Array) -> None:
    vertices = levels.size
    queue = np.empty(vertices, np.int32)
    queue[0] = source
    levels[source] = 0
    begin, end, level, left = 0, 1, 0, columns.size - (offsets[source + 1] - offsets[source])
    edges, before, up = columns.size - left, 0, False
    while begin < end:
        level += 1
        count = end - begin
        if symmetric and not up and edges * ALPHA > left and count > before:
            up = True
        elif up and count * BETA < vertices and count < before:
            up = False
        if up:
            found = _from_below(offsets, columns, levels, level, queue, end)
        else:
            found = _from_above(offsets, columns, levels, level, queue, begin, end)
        begin, end, before = end, found, count
        edges = 0
        for k in range(begin, end):
            edges += offsets[queue[k] + 1] - offsets[queue[k]]
        left -= edges


@compiled
def _from_above(offsets: Array, columns: Array, levels: Array, level: int, queue: Array, begin: int, end: int) -> int:
    """Expands queue[begin:end] along its edges; returns the new end of the queue."""
    tail = end
    for k in range(begin, end):
        vertex = queue[k]
        for e in range(offsets[vertex], offsets[vertex + 1]):
            other = columns[e]
            if levels[other] < 0:
                levels[other] = level
                queue[tail] = other
                tail += 1
    return tail


@compiled
def _from_below(offsets: Array, columns: Array, levels: Array, level: int, queue: Array, tail: int) -> int:
    """Searches every unvisited vertex for a neighbour on the previous level; returns the new end of the queue."""
    for vertex in range(levels.size):
        if levels[vertex] < 0:
            for e in range(offsets[vertex], offsets[vertex + 1]):
                if levels[columns[e]] == level - 1:
                    levels[vertex] = level
                    queue[tail] = vertex
                    tail += 1
                    break
    return tail
