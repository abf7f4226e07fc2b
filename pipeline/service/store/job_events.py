"""Who waits for news of a job is woken when there are some: event loops by the threads that change jobs."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress


class News:
    """May be told from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: defaultdict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(list)

    def tell(self, jobs: Iterable[str]) -> None:
        """Something has happened to these jobs."""
        with self._lock:
            listeners = [each for job in jobs for each in self._listeners.get(job, ())]
        for loop, event in listeners:
            with suppress(RuntimeError):  # a loop that has been closed listens no more
                loop.call_soon_threadsafe(event.set)

    @contextmanager
    def of(self, job: str) -> Iterator[asyncio.Event]:
        """An event of the running loop, set whenever something has happened to the job; the listener clears it."""
        listener = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._listeners[job].append(listener)
        try:
            yield listener[1]
        finally:
            with self._lock:
                self._listeners[job].remove(listener)
                if not self._listeners[job]:
                    del self._listeners[job]
