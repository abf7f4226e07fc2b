"""The thread pool of the CPU bodies. Threads are reused: starting one costs more than many tiles do."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["Interrupted", "check_wanted", "for_each", "interruptible"]

MAX_THREADS = 256

Part = TypeVar("Part")


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="kernels")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork


class Interrupted(Exception):
    """The computation was cancelled."""


class _Calling(threading.local):
    given_up: threading.Event | None = None


_calling = _Calling()
_NEVER = threading.Event()


@contextmanager
def interruptible(given_up: threading.Event) -> Iterator[None]:
    """Inside this context, the calling thread's computations raise Interrupted soon after the event is set."""
    before, _calling.given_up = _calling.given_up, given_up
    try:
        yield
    finally:
        _calling.given_up = before


def check_wanted() -> None:
    """Raises Interrupted if the calling thread's computation was cancelled: for long work between parts."""
    if (_calling.given_up or _NEVER).is_set():
        raise Interrupted


def for_each(compute: Callable[[Part], None], parts: Iterable[Part], workers: int) -> None:
    """Computes all parts: the calling thread and up to `workers - 1` others each take the next one. None waits for
    another, except the calling thread at the end, for all.

    Raises what `compute` raises, after all threads have finished; Interrupted between parts (see `interruptible`).
    """
    parts = list(parts)
    remaining, given_up = iter(parts), _calling.given_up or _NEVER

    def work() -> None:
        for part in remaining:
            if given_up.is_set():
                raise Interrupted
            compute(part)

    others = [_threads().submit(work) for _ in range(min(workers, len(parts)) - 1)]
    try:
        work()
    finally:
        started = [other for other in others if not other.cancel()]  # the cancelled ones had no part left
        wait(started)
    for other in started:
        other.result()
