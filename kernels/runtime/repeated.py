"""Calls that are repeated with the same arrays, launched as CUDA graphs: one launch by the host instead of several."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MOST_GRAPHS = 16
PER_THREAD_STREAM = 2  # CUDA's handle, the same for a different stream in each thread
_PREPARED: set[tuple[int, Hashable]] = set()  # devices and keys of steps that have run


class CaptureSpace:
    """Where graphs that follow one another are captured: their temporary arrays share a pool of its own.

    It takes its memory from CuPy's pool outside, so that a bound of that one holds, and keeps it: a pool that runs out
    gives back what no array uses, and graphs still do.
    """

    def __init__(self) -> None:
        import cupy

        kept: list[Any] = []
        outside: list[Any] = []  # allocator and stream, whose memory is reused in its order

        def more(size: int) -> Any:  # no method: the pool would keep this object alive
            allocate, stream = outside
            with stream:
                kept.append(allocate(size))
            return kept[-1]

        self._outside = outside
        self._pool = cupy.cuda.MemoryPool(more)
        weakref.finalize(self, self._pool.free_all_blocks).atexit = False  # CuPy's pools do not by themselves
        self._aside = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be captured

    def captured(self, run: Callable[[Any], None]) -> Any:
        """A graph of what run(stream) launches, for the current stream; run takes temporary arrays from CuPy's current
        pool."""
        import cupy

        self._outside[:] = cupy.cuda.get_allocator(), cupy.cuda.get_current_stream()
        with cupy.cuda.using_allocator(self._pool.malloc), self._aside:
            self._aside.begin_capture()
            try:
                run(self._aside)
            finally:
                graph = self._aside.end_capture()
        return graph


class Captured:
    """A step on the current stream: plain the first time, which loads kernels and makes plans, then as a CUDA graph.

    key : names what the step loads and makes; once a step of the same key has run, others are graphs from the start
    """

    def __init__(self, step: Callable[[], None], key: Hashable = None) -> None:
        self._step, self._key = step, key
        self._space: CaptureSpace | None = None
        self._graph: Any = None

    def __call__(self) -> None:
        import cupy

        if self._space is None:
            self._space = CaptureSpace()
            key = (cupy.cuda.Device().id, self._key)
            if key not in _PREPARED:
                self._step()
                if self._key is not None:
                    _PREPARED.add(key)
                return
        here = cupy.cuda.get_current_stream()
        if self._graph is None:
            here.synchronize()
            self._graph = self._space.captured(lambda _stream: self._step())
        self._graph.launch(here)


class RepeatedCalls:
    """The latest calls: launched one by one the first time, captured the second time. Thread-safe.

    The temporary arrays of the largest call stay allocated, for each stream that calls come from.
    """

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self._most = most
        self._graphs: OrderedDict[tuple[Any, ...], Any] = OrderedDict()  # None: seen once
        self._spaces: dict[int, CaptureSpace] = {}
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
        key = (handle, *key)
        with self._lock:  # a graph may not be launched by two threads at once
            if key in self._graphs:
                self._graphs.move_to_end(key)
                if self._graphs[key] is None:
                    self._graphs[key] = self._captured(handle, run)
                self._graphs[key].launch(stream)
                return
        run(stream)  # to the end before it counts: it may make tables, which no capture can
        with self._lock:
            self._graphs.setdefault(key, None)
            if len(self._graphs) > self._most:
                (oldest, *_), _graph = self._graphs.popitem(last=False)
                if all(other != oldest for other, *_ in self._graphs):
                    self._spaces.pop(oldest, None)

    def _captured(self, handle: int, run: Callable[[Any], None]) -> Any:
        if handle not in self._spaces:
            self._spaces[handle] = CaptureSpace()
        return self._spaces[handle].captured(run)
