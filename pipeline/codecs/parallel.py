"""The threads that decode and encode blocks: one pool a process, which every reader and writer thread shares."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_THREADS = 32
_WAITING_THREADS = 32
_AT_ONCE_BYTES = 64 << 20


class _Work:
    """The items of one call. Those who help take the next item until none is left, or one has failed."""

    def __init__(self, work: Callable[[Any], object], items: Sequence[Any]) -> None:
        self._work = work
        self._left: Iterator[Any] = iter(items)  # of a list or range it is safe in several threads
        self._lock = threading.Lock()
        self._helping = 0
        self._is_over = False  # no further helper comes in
        self._last_left = threading.Lock()
        self._last_left.acquire()
        self.errors: list[BaseException] = []

    def drain(self) -> None:
        for item in self._left:
            if self.errors:
                return
            try:
                self._work(item)
            except BaseException as error:
                self.errors.append(error)

    def help(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._helping += 1
        self.drain()
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._helping -= 1
            if self._is_over and not self._helping:
                self._last_left.release()

    def wait(self) -> None:
        """Waits for the helpers that are at work."""
        with self._lock:
            self._is_over = True
            if not self._helping:
                return
        self._last_left.acquire()


# Waiting for calls to help with, by process, since threads do not survive a fork, and number of threads.
_queues: dict[tuple[int, int], SimpleQueue[_Work]] = {}


def for_each(work: Callable[[T], object], items: Sequence[T], nbytes: int = 0, *, waits: bool = False) -> None:
    """Call `work` with each item, on this thread and on those of the pool that are free; returns once all are done.

    nbytes : memory that `work` takes for an item: few large ones are in work at once
    waits  : `work` mostly waits, as for a server: more items are in work than there are cores

    The calling thread takes part, so calls may be nested and progress never depends on a free thread. Raises the first
    error; items that have not begun are then left out.
    """
    threads = _WAITING_THREADS if waits else thread_count()
    wanted = min(threads, items_at_once(len(items), nbytes))
    if wanted < 2:
        for item in items:
            work(item)
        return
    call, queue = _Work(work, items), _queue(threads)
    for _ in range(wanted - 1):
        queue.put(call)
    call.drain()
    call.wait()
    if call.errors:
        raise call.errors[0]


def items_at_once(count: int, nbytes: int) -> int:
    """How many of `count` items of so many bytes may be in work at once."""
    return min(count, max(_AT_ONCE_BYTES // max(nbytes, 1), 1))


def threads_for(count: int, nbytes: int) -> int:
    """How many threads share `count` items of so many bytes."""
    return min(thread_count(), items_at_once(count, nbytes))


def thread_count() -> int:
    """Threads of a pool: one for each core."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


def split(items: Iterable[T], condition: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """The items for which the condition holds, and the others."""
    found: tuple[list[T], list[T]] = [], []
    for item in items:
        found[not condition(item)].append(item)
    return found


def _queue(threads: int) -> SimpleQueue[_Work]:
    """The queue of the pool, whose threads are started with it."""
    pool = os.getpid(), threads
    if pool not in _queues:
        made: SimpleQueue[_Work] = SimpleQueue()
        if _queues.setdefault(pool, made) is made:  # else another thread was first
            for number in range(threads):
                threading.Thread(target=_serve, args=(made,), name=f"codec-{number}", daemon=True).start()
    return _queues[pool]


def _serve(queue: SimpleQueue[_Work]) -> None:
    while True:
        queue.get().help()
