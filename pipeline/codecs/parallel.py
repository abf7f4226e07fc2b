"""The threads that decode and encode blocks: one pool a process, which every reader and writer thread shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_MOST_THREADS = 32
_AT_ONCE_BYTES = 64 << 20
# By process: threads do not survive a fork.
_pools: dict[int, ThreadPoolExecutor] = {}


def for_each(work: Callable[[T], object], items: Sequence[T], nbytes: int = 0) -> None:
    """Call `work` with each item, on this thread and on those of the pool that are free; returns once all are done.

    nbytes : memory that `work` takes for an item: few large ones are in work at once

    The calling thread takes part, so calls may be nested and progress never depends on a free thread. Raises the first
    error; items that have not begun are then left out.
    """
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    wanted = min(threads, len(items), max(_AT_ONCE_BYTES // max(nbytes, 1), 1))
    left = iter(items)
    errors: list[BaseException] = []

    def drain() -> None:
        for item in left:  # the iterator of a list or range is safe in several threads
            if errors:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    helpers: list[Future[None]] = []
    if wanted > 1:
        helpers = [_pool(threads).submit(drain) for _ in range(wanted - 1)]
    drain()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    if errors:
        raise errors[0]


def _pool(threads: int) -> ThreadPoolExecutor:
    process = os.getpid()
    if process not in _pools:
        # Of two threads that come here at once, one pool is dropped; its threads end when they are idle.
        _pools.setdefault(process, ThreadPoolExecutor(threads, thread_name_prefix="codec"))
    return _pools[process]
