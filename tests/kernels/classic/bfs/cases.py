"""Test graphs and their levels: what the tests and benchmarks of every device iterate over.

The oracle relaxes all edges at once until no level falls (Bellman and Ford's method): no queue, no frontier.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.bfs import UNREACHED, levels
from kernels.classic.bfs.cuda import RMAT

Array = NDArray[Any]

KINDS = ("random", "sparse", "grid", "rmat", "chain", "star", "complete", "loops", "empty", "islands", "fans")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One graph and a source."""

    kind: str
    vertices: int
    source: int = 0
    symmetric: bool = True
    offsets: str = "int64"  # dtype

    @property
    def name(self) -> str:
        way = "symmetric" if self.symmetric else "directed"
        return f"{self.kind}-{self.vertices}-from-{self.source}-{way}-{self.offsets}"

    def graph(self) -> tuple[Array, Array]:
        """Offsets and columns; the same for every call."""
        offsets, columns = made_graph(self.kind, self.vertices, symmetric=self.symmetric)
        return offsets.astype(self.offsets), columns

    def apply(self, offsets: Any, columns: Any, **options: Any) -> Any:
        """The public function on arrays of any supported library."""
        return levels(offsets, columns, self.source, symmetric=self.symmetric, **options)

    def exact(self) -> Array:
        return exact(*self.graph(), self.source)

    def check(self, result: Array, expected: Array | None = None) -> None:
        """AssertionError unless every level is right."""
        np.testing.assert_array_equal(result, self.exact() if expected is None else expected, self.name, strict=True)

    def bytes(self) -> int:
        """Minimum traffic if every edge is read: columns, offsets, levels."""
        offsets, columns = self.graph()
        return int(columns.nbytes + 8 * len(offsets) + 4 * self.vertices)

    def flops(self) -> int:
        return 0


def exact(offsets: Array, columns: Array, source: int) -> Array:
    vertices = len(offsets) - 1
    found = np.full(vertices, vertices, np.int64)
    found[source] = 0
    from_vertex = np.repeat(np.arange(vertices), np.diff(offsets))
    while True:
        before = found.copy()
        np.minimum.at(found, columns, before[from_vertex] + 1)
        if np.array_equal(before, found):
            return np.where(found < vertices, found, UNREACHED).astype(np.int32)


def check_levels(offsets: Array, columns: Array, source: int, result: Array) -> None:
    """Checks the defining property of levels, for graphs too large for `exact`: 0 at the source; elsewhere one more
    than the lowest level among the vertices with an edge to it, or unreached if none of them is reached."""
    vertices = len(offsets) - 1
    far = np.iinfo(np.int32).max - 1
    assert result[source] == 0
    assert ((result >= 0) | (result == UNREACHED)).all()
    finite = np.where(result == UNREACHED, far, result).astype(np.int32)
    least = np.full(vertices, far, np.int32)
    np.minimum.at(least, columns, np.repeat(finite, np.diff(offsets)))
    right = np.where(least < far, least + 1, UNREACHED)
    right[source] = 0
    np.testing.assert_array_equal(result, right)


def in_rows(first: Array, second: Array, vertices: int, *, symmetric: bool) -> tuple[Array, Array]:
    """Edges as offsets int64 and columns int32, in the given order within each row."""
    if symmetric:
        first, second = np.concatenate((first, second)), np.concatenate((second, first))
    offsets = np.zeros(vertices + 1, np.int64)
    np.cumsum(np.bincount(first, minlength=vertices), out=offsets[1:])
    return offsets, second[np.argsort(first, kind="stable")].astype(np.int32)


def rmat_edges(scale: int, count: int, rng: Any) -> tuple[Array, Array]:
    """Graph500's R-MAT edges: one quadrant of the matrix per bit, so that few vertices have most edges."""
    first, second = np.zeros(count, np.int64), np.zeros(count, np.int64)
    a, b, c = RMAT
    for _ in range(scale):
        lot = rng.random(count)
        first = 2 * first + (lot >= a + b)
        second = 2 * second + (((lot >= a) & (lot < a + b)) | (lot >= a + b + c))
    return first, second


def made_graph(kind: str, vertices: int, *, symmetric: bool) -> tuple[Array, Array]:
    rng = np.random.default_rng([vertices, KINDS.index(kind)])
    steps = np.arange(vertices)
    if kind in ("random", "sparse"):  # sparse: about a fifth of the vertices stand alone
        first, second = rng.integers(0, vertices, (2, vertices * (8 if kind == "random" else 1)))
    elif kind == "grid":
        side = int(vertices**0.5)
        place = np.arange(side * side).reshape(side, side)
        first = np.concatenate((place[:, :-1].ravel(), place[:-1].ravel()))
        second = np.concatenate((place[:, 1:].ravel(), place[1:].ravel()))
    elif kind == "rmat":
        scale = (vertices - 1).bit_length()
        first, second = rmat_edges(scale, 16 * vertices, rng)
        inside = (first < vertices) & (second < vertices)
        first, second = first[inside], second[inside]
    elif kind == "chain":
        first, second = steps[:-1], steps[1:]
    elif kind == "star":
        first, second = np.zeros(vertices - 1, np.int64), steps[1:]
    elif kind == "complete":
        first, second = (side.ravel() for side in np.meshgrid(steps, steps))
    elif kind == "loops":  # each vertex to itself, twice, and to the next
        first, second = np.concatenate((steps, steps, steps[:-1])), np.concatenate((steps, steps, steps[1:]))
    elif kind == "empty":
        first = second = steps[:0]
    elif kind == "islands":  # of seven vertices each, in rings
        first, second = steps, steps // 7 * 7 + (steps + 1) % 7
        second = np.minimum(second, vertices - 1)
    else:  # fans: a chain of hubs, each with many leaves of its own and repeated edges
        hubs = steps // 1500 * 1500
        first = np.concatenate((hubs, hubs[::1500]))
        second = np.concatenate((steps, np.minimum(hubs[::1500] + 1500, vertices - 1)))
        first, second = np.concatenate((first, first)), np.concatenate((second, second))
    return in_rows(first, second, vertices, symmetric=symmetric)


def cases() -> Iterator[Case]:
    """Every kind, undirected and directed; sizes around 1, 2 and a word's 32 bits; first, middle and last sources."""
    for kind, symmetric in itertools.product(KINDS, (True, False)):
        size = 203 if kind == "complete" else 503 if kind in ("chain", "loops") else 4001
        for source in (0, size // 2):
            yield Case(kind=kind, vertices=size, source=source, symmetric=symmetric)
    for kind, vertices in itertools.product(("random", "chain", "empty", "complete"), (1, 2, 31, 32, 33, 64, 97)):
        yield Case(kind=kind, vertices=vertices, source=vertices - 1, offsets="int32")
    yield Case(kind="rmat", vertices=8192, source=5, symmetric=True, offsets="int32")
    yield Case(kind="star", vertices=5000, source=4999)
