"""Gangs take turns on the workers of a cluster: two at once would each hold what the other waits for."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.cluster.communicator import Deadline
from pipeline.errors import ClusterError

# How often whoever waits looks up.
LOOK_SECONDS = 0.25

_turns: dict[str, threading.Lock] = defaultdict(threading.Lock)


@contextmanager
def one_at_a_time(cluster: str, turn_s: float | None, check: Callable[[], None]) -> Iterator[None]:
    """Nobody else of this process has a turn on the cluster meanwhile.

    turn_s : seconds to wait for it, then ClusterError; None: as long as it takes
    check  : called while waiting; what it raises ends that
    """
    lock, patience = _turns[cluster], Deadline(float("inf") if turn_s is None else turn_s)
    while not lock.acquire(timeout=min(LOOK_SECONDS, patience.left_s)):
        check()
        if patience.left_s == 0.0:
            raise ClusterError(f"another gang runs on the workers of {cluster} and has not ended within {turn_s:g} s")
    try:
        yield
    finally:
        lock.release()
