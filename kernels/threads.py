"""Threads that CPU bodies share their work among; they stay, since starting one costs more than many a tile."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["for_each"]

MAX_THREADS = 256

Part = TypeVar("Part")


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="kernels")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork


def for_each(compute: Callable[[Part], None], parts: Iterable[Part], workers: int) -> None:
    """Computes every part, the calling thread and up to `workers - 1` others each taking the next one.

    Raises what `compute` raises, once all who began are done.
    """
    parts = list(parts)
    remaining = iter(parts)

    def work() -> None:
        for part in remaining:
            compute(part)

    others = [_threads().submit(work) for _ in range(min(workers, len(parts)) - 1)]
    try:
        work()
    finally:
        started = [other for other in others if not other.cancel()]  # nothing is left for those who come late
        wait(started)
    for other in started:
        other.result()
