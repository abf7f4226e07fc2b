"""The lock that lets one gang at a time use a cluster's workers: two at once would deadlock."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from pipeline.cluster.communicators.base import Deadline
from pipeline.errors import ClusterError

# How often a waiting gang calls `check`.
LOOK_SECONDS = 0.25

_locks: dict[str, threading.Lock] = defaultdict(threading.Lock)


class Lock(Protocol):
    """A `threading.Lock`, or a lock between processes."""

    def acquire(self, *, timeout: float) -> bool: ...

    def release(self) -> None: ...


@contextmanager
def one_at_a_time(cluster: str, lock_s: float | None, check: Callable[[], None], *further: Lock) -> Iterator[None]:
    """Hold this process's lock of the cluster, and the further locks.

    lock_s : seconds to wait for the locks, then ClusterError; None: without limit
    check  : called while waiting; an exception from it ends the wait
    """
    patience = Deadline(float("inf") if lock_s is None else lock_s)
    with ExitStack() as held:
        for lock in (_locks[cluster], *further):
            while not lock.acquire(timeout=min(LOOK_SECONDS, patience.left_s)):
                check()
                if patience.left_s == 0.0:
                    raise ClusterError(
                        f"another gang runs on the workers of {cluster} and has not ended within {lock_s:g} s"
                    )
            held.callback(lock.release)
        yield
