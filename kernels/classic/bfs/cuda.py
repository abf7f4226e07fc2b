"""Breadth-first search on CUDA: which kernels of bfs.cu search each level."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.classic.bfs.cpu import ALPHA, BETA
from kernels.classic.sort.cuda import sort
from kernels.runtime.ladder import Ladder, Variant
from kernels.runtime.launch import blocks_of, kernel, multiprocessors, on_stream, pointer

OPTIONS = ()

# Tuned on an H200 (sm_90). The first two lines repeat constants of the headers.
QUEUE_THREADS, CHUNK_THREADS, UP_THREADS, SMALL_THREADS = 256, 256, 256, 512
CHUNK, SMALL_BLOCKS = 1024, 8  # edges of a queue entry; blocks of a cluster, from compute capability 9.0 on
SMALL_ENTRIES, SMALL_EDGES = 2048, 1 << 14  # per block of search_small; above, a launch per level is faster
BLOCKS_A_MULTIPROCESSOR = 8

ENTRY_BYTES, TALLY = 16, 5  # size of an entry; counters of a tally
TALLIES = 64  # cleared together
MEMCPY_DEVICE_TO_HOST = 2
UNREACHED = -1
RMAT = (0.57, 0.19, 0.19)  # of Graph500


class GraphStruct(ctypes.Structure):
    """struct Graph of queues.cuh."""

    _fields_ = (("offsets", ctypes.c_void_p), ("columns", ctypes.c_void_p), ("vertices", ctypes.c_int))


class SearchStruct(ctypes.Structure):
    """struct Search of chunks.cuh."""

    _fields_ = (("graph", GraphStruct), ("levels", ctypes.c_void_p), ("visited", ctypes.c_void_p))


@dataclass(frozen=True, kw_only=True)
class Task:
    """One search."""

    offsets: Any  # CuPy int64
    columns: Any
    source: int
    symmetric: bool
    out: Any
    stream: Any

    @property
    def vertices(self) -> int:
        return int(self.out.size)

    def graph(self) -> GraphStruct:
        return GraphStruct(offsets=pointer(self.offsets), columns=pointer(self.columns), vertices=self.vertices)

    def launch(self, entry: str, blocks: int, threads: int, *args: Any) -> None:
        kernel("bfs", entry).launch((blocks,), (threads,), args, stream=self.stream)


def levels(
    offsets: Any,
    columns: Any,
    source: int,
    *,
    symmetric: bool = False,
    out: Any = None,
    stream: Any = None,
    variant: str | None = None,
) -> Any:
    """The levels of a graph of CuPy arrays; see kernels.classic.bfs.

    variant : a name in `VARIANTS`; default the fastest
    """
    import cupy

    with on_stream(offsets, stream) as current:
        if int(offsets[-1:].get(stream=current)[0]) != columns.size:
            raise ValueError(f"offsets must rise from 0 to the number of columns, {columns.size}")
        out = cupy.empty(len(offsets) - 1, np.int32) if out is None else out
        task = Task(
            offsets=cupy.ascontiguousarray(offsets, np.int64),
            columns=cupy.ascontiguousarray(columns),
            source=source,
            symmetric=symmetric,
            out=out,
            stream=current,
        )
        VARIANTS[PRODUCTION if variant is None else variant].run(task)
    return out


def _run_queues(task: Task, entry: str) -> None:
    """One launch per level; the host reads how many vertices it found."""
    import cupy

    task.out.fill(UNREACHED)
    task.out[task.source] = 0
    queue, found = cupy.empty(task.vertices, np.int32), cupy.empty(task.vertices, np.int32)
    queue[0] = task.source
    graph, tail = task.graph(), cupy.zeros(1, np.int32)
    count, level = 1, 0
    while count > 0:
        level += 1
        tail.fill(0)
        args = (graph, queue, ctypes.c_int(count), task.out, ctypes.c_int(level), found, tail)
        task.launch(entry, blocks_of(count, QUEUE_THREADS), QUEUE_THREADS, *args)
        count = int(tail.get(stream=task.stream)[0])
        queue, found = found, queue


class _Searching:
    """A search by chunks: its device arrays and the host's copy of the frontier's counts."""

    def __init__(self, task: Task) -> None:
        import cupy

        self.task = task
        self.entries, self.vertices, self.edges = 0, 0, 0
        words, entries = blocks_of(task.vertices, 32), task.vertices + task.columns.size // CHUNK + 1
        task.out.fill(UNREACHED)
        self.visited = cupy.zeros(words, np.uint32)
        self.queues = [cupy.empty(ENTRY_BYTES * entries, np.uint8) for _ in range(2)]
        self.tallies = cupy.zeros((TALLIES, TALLY), np.uint64)
        self.host_tally = np.frombuffer(cupy.cuda.alloc_pinned_memory(8 * TALLY), np.uint64, TALLY)
        self.next_tally = 0
        self.struct = SearchStruct(graph=task.graph(), levels=pointer(task.out), visited=pointer(self.visited))
        self.bits: list[Any] = []
        self.level, self.up, self.before = 0, False, 0
        self.unexplored = task.columns.size
        self.small_blocks = SMALL_BLOCKS if int(cupy.cuda.Device().compute_capability) >= 90 else 1
        self._launch("start_search", 1, CHUNK_THREADS, ctypes.c_int(task.source), self.queues[0])

    def _zero_tallies(self, count: int) -> int:
        """The address of `count` consecutive tallies, cleared."""
        if self.next_tally + count > TALLIES:
            self.tallies.fill(0)
            self.next_tally = 0
        self.next_tally += count
        return pointer(self.tallies) + (self.next_tally - count) * 8 * TALLY

    def _launch(self, entry: str, blocks: int, threads: int, *args: Any) -> None:
        """Launches a kernel that counts into a tally, its last argument, and waits for the result."""
        import cupy

        tally, stream = self._zero_tallies(1), self.task.stream
        self.task.launch(entry, blocks, threads, self.struct, *args, ctypes.c_void_p(tally))
        cupy.cuda.runtime.memcpyAsync(self.host_tally.ctypes.data, tally, 8 * TALLY, MEMCPY_DEVICE_TO_HOST, stream.ptr)
        stream.synchronize()
        self.entries, self.vertices, self.edges, searched, last = (int(number) for number in self.host_tally)
        self.level = max(self.level, last)
        self.unexplored -= max(searched, self.edges)

    def turns_up(self) -> bool:
        return self.task.symmetric and self.edges * ALPHA > self.unexplored and self.vertices > self.before

    def turns_down(self) -> bool:
        return self.vertices * BETA < self.task.vertices and self.vertices < self.before

    def is_small(self) -> bool:
        return self.entries <= self.small_blocks * SMALL_ENTRIES and self.edges <= self.small_blocks * SMALL_EDGES

    def small(self) -> None:
        before, blocks = self.level, self.small_blocks
        most = (ctypes.c_longlong(blocks * SMALL_ENTRIES), ctypes.c_longlong(blocks * SMALL_EDGES))
        args = (*self.queues, ctypes.c_longlong(self.entries), *most, ctypes.c_int(self.level + 1))
        self._launch("search_small", blocks, SMALL_THREADS, *args, ctypes.c_void_p(self._zero_tallies(3)))
        if (self.level - before) % 2:
            self.queues.reverse()
        self.before = 0

    def top_down(self) -> None:
        self.level, self.before = self.level + 1, self.vertices
        blocks = min(self.entries, BLOCKS_A_MULTIPROCESSOR * multiprocessors())
        count, level = ctypes.c_longlong(self.entries), ctypes.c_int(self.level)
        self._launch("expand_chunks", blocks, CHUNK_THREADS, self.queues[0], count, level, self.queues[1])
        self.queues.reverse()

    def turn_up(self) -> None:
        import cupy

        self.up = True
        self.bits = self.bits or [cupy.empty_like(self.visited) for _ in range(2)]
        self.bits[0].fill(0)
        count, blocks = ctypes.c_longlong(self.entries), blocks_of(self.entries, CHUNK_THREADS)
        self.task.launch("entries_to_bits", blocks, CHUNK_THREADS, self.queues[0], count, self.bits[0])

    def bottom_up(self) -> None:
        self.level, self.before = self.level + 1, self.vertices
        level, blocks = ctypes.c_int(self.level), blocks_of(self.task.vertices, UP_THREADS)
        self._launch("expand_bottom_up", blocks, UP_THREADS, self.bits[0], self.bits[1], level)
        self.bits.reverse()

    def turn_down(self) -> None:
        self.up = False
        edges, blocks = self.edges, blocks_of(self.task.vertices, CHUNK_THREADS)
        level = ctypes.c_int(self.level)
        self._launch("bits_to_entries", blocks, CHUNK_THREADS, self.bits[0], level, self.queues[0])
        self.unexplored += edges  # already subtracted once


def _run_chunks(task: Task, *, alone: bool, directions: bool) -> None:
    """alone: a few blocks search small levels; directions: also bottom-up, when that reads fewer edges."""
    search = _Searching(task)
    while search.vertices > 0:
        if search.up:
            if search.turns_down():
                search.turn_down()
                continue
            search.bottom_up()
        elif search.entries == 0:
            break  # vertices without edges
        elif alone and search.is_small():
            search.small()
        elif directions and search.turns_up():
            search.turn_up()
            search.bottom_up()
        else:
            search.top_down()


_CHUNKS = ("start_search", "expand_chunks")
_SUMMARIES = {
    "expand_global": "one thread per frontier vertex, one queue: an atomic addition to its counter per vertex found",
    "expand_block": "a block's queue in shared memory first: one global addition per block",
    "expand_hierarchical": "queues of every eighth lane before the block's: fewer threads on one counter",
}


def _queues(entry: str) -> Callable[[Any], None]:
    return lambda task: _run_queues(task, entry)


# Naive to fast; the last is the one in production.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        **{name: Variant(summary=summary, entries=(name,), run=_queues(name)) for name, summary in _SUMMARIES.items()},
        "chunks": Variant(
            summary="a block's threads share its edges evenly, long rows are split; visited vertices are bits",
            entries=_CHUNKS,
            run=lambda task: _run_chunks(task, alone=False, directions=False),
        ),
        "small_levels": Variant(
            summary="one cluster of blocks searches small levels, one after the other, without the host",
            entries=(*_CHUNKS, "search_small"),
            run=lambda task: _run_chunks(task, alone=True, directions=False),
        ),
        "directions": Variant(
            summary="large frontiers are expanded bottom-up, from unvisited vertices: most edges are never read",
            entries=(*_CHUNKS, "search_small", "entries_to_bits", "expand_bottom_up", "bits_to_entries"),
            run=lambda task: _run_chunks(task, alone=True, directions=True),
        ),
    }
)
PRODUCTION = "directions"


def ladders() -> tuple[Ladder, ...]:
    """Graphs with few and with many levels; an edge counts as one operation, so GFLOP/s are GTEPS."""
    few = ("small_levels", PRODUCTION)
    return (
        _ladder("R-MAT graph of 2²² vertices", lambda: rmat_graph(22), 1 << 22, 1 << 27, tuple(VARIANTS)),
        _ladder("random graph of 2²² vertices", lambda: random_graph(22), 1 << 22, 1 << 27, tuple(VARIANTS)),
        _ladder("grid of 2048 × 2048", lambda: grid_graph(2048, 2048), 1 << 22, 4 * 2048 * 2047, tuple(VARIANTS)),
        _ladder("chain of 10⁵ vertices", lambda: grid_graph(1, 100_000), 100_000, 2 * 99_999, few),
    )


def _ladder(
    name: str, made: Callable[[], tuple[Any, Any, int]], vertices: int, edges: int, variants: tuple[str, ...]
) -> Ladder:
    graph = cache(made)

    def prepare(variant: str) -> Callable[[], Any]:
        offsets, columns, source = graph()
        return lambda: levels(offsets, columns, source, symmetric=True, variant=variant)

    return Ladder(
        name=f"{name}, {edges} edges",
        variants=variants,
        bytes=4 * edges + 12 * vertices,
        flops=edges,
        limit="copy",
        prepare=prepare,
        libraries=dict,
    )


def rmat_graph(scale: int) -> tuple[Any, Any, int]:
    """Graph500's R-MAT graph with 16 × 2^scale undirected edges: offsets, columns, and the vertex of highest degree."""
    import cupy

    rng, count = cupy.random.default_rng(1), 16 << scale
    ends = [cupy.zeros(count, np.uint32) for _ in range(2)]
    a, b, c = RMAT
    for _ in range(scale):
        lot = rng.random(count, np.float32)
        ends[0] = 2 * ends[0] + (lot >= a + b)
        ends[1] = 2 * ends[1] + (((lot >= a) & (lot < a + b)) | (lot >= a + b + c))
    # Permute the vertices by an odd factor and an offset, so that numbers do not reveal degrees.
    first, second = ((end.astype(np.uint32) * 2654435769 + 12345) & ((1 << scale) - 1) for end in ends)
    return *_in_rows(first, second, 1 << scale), 12345 & ((1 << scale) - 1)


def random_graph(scale: int) -> tuple[Any, Any, int]:
    """A graph with 16 × 2^scale undirected edges between random vertices, and vertex 0 as the source."""
    import cupy

    rng, count = cupy.random.default_rng(1), 16 << scale
    first, second = (rng.integers(0, 1 << scale, count, np.uint32) for _ in range(2))
    return *_in_rows(first, second, 1 << scale), 0


def grid_graph(rows: int, columns: int) -> tuple[Any, Any, int]:
    """A grid graph, each vertex connected to its four neighbours, and a corner as the source."""
    import cupy

    place = cupy.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    first = cupy.concatenate((place[:, :-1].ravel(), place[:-1].ravel()))
    second = cupy.concatenate((place[:, 1:].ravel(), place[1:].ravel()))
    return *_in_rows(first, second, rows * columns), 0


def _in_rows(first: Any, second: Any, vertices: int) -> tuple[Any, Any]:
    """Undirected edges as offsets and columns."""
    import cupy

    first, second = cupy.concatenate((first, second)), cupy.concatenate((second, first))
    rows, columns = sort(first, second)
    offsets = cupy.searchsorted(rows, cupy.arange(vertices + 1, dtype=np.uint32)).astype(np.int64)
    return offsets, columns.view(np.int32)
