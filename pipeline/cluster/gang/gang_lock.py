"""Gangs take turns on the workers of a cluster: two at once would each hold what the other waits for."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from pipeline.cluster.communicators.base import Deadline
from pipeline.errors import ClusterError

# How often whoever waits looks up.
LOOK_SECONDS = 0.25

_turns: dict[str, threading.Lock] = defaultdict(threading.Lock)


class Lock(Protocol):
    """A `threading.Lock`, or what is one to other processes too."""

    def acquire(self, *, timeout: float) -> bool: ...

    def release(self) -> None: ...


@contextmanager
def one_at_a_time(cluster: str, turn_s: float | None, check: Callable[[], None], *further: Lock) -> Iterator[None]:
    """Nobody else of this process has a turn on the cluster meanwhile, and nobody who takes the further locks.

    turn_s : seconds to wait for it, then ClusterError; None: as long as it takes
    check  : called while waiting; what it raises ends that
    """
    patience = Deadline(float("inf") if turn_s is None else turn_s)
    with ExitStack() as held:
        for lock in (_turns[cluster], *further):
            while not lock.acquire(timeout=min(LOOK_SECONDS, patience.left_s)):
                check()
                if patience.left_s == 0.0:
                    raise ClusterError(
                        f"another gang runs on the workers of {cluster} and has not ended within {turn_s:g} s"
                    )
            held.callback(lock.release)
        yield
