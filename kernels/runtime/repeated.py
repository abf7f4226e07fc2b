"""Calls that are repeated with the same arrays, launched as CUDA graphs: one launch by the host instead of several."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_GRAPHS = 16
PER_THREAD_STREAM = 2  # CUDA's handle, the same for a different stream in each thread


@dataclass(frozen=True, kw_only=True)
class _Captured:
    graph: Any
    pool: Any  # owns the graph's temporary arrays


class RepeatedCalls:
    """The latest calls: launched one by one the first time, captured the second time. Thread-safe.

    A graph's temporary arrays stay allocated with it: at most `most` times what a call needs.
    """

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self._most = most
        self._calls: OrderedDict[tuple[Any, ...], _Captured | None] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, key: tuple[Any, ...], stream: Any, run: Callable[[Any], None]) -> None:
        """Does what run(stream) does.

        key : the addresses, sizes and names that a call depends on
        run : launches kernels on the stream it is given, and takes temporary arrays from CuPy's current pool
        """
        handle = stream.ptr
        if handle == PER_THREAD_STREAM or (handle > PER_THREAD_STREAM and stream.is_capturing()):
            run(stream)
            return
        key = (*key, handle)
        with self._lock:  # a graph may not be launched by two threads at once
            if key in self._calls:
                found = self._calls[key]
                self._calls.move_to_end(key)
                if found is None:
                    found = self._calls[key] = _capture(run)
                found.graph.launch(stream)
                return
            self._calls[key] = None
            if len(self._calls) > self._most:
                self._calls.popitem(last=False)
        run(stream)


def _capture(run: Callable[[Any], None]) -> _Captured:
    import cupy

    pool = cupy.cuda.MemoryPool()
    aside = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be captured
    with cupy.cuda.using_allocator(pool.malloc), aside:
        aside.begin_capture()
        try:
            run(aside)
        finally:
            graph = aside.end_capture()
    return _Captured(graph=graph, pool=pool)
