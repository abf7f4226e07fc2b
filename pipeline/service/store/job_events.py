"""Wakes asyncio listeners when a thread changes a job."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress


class JobEvents:
    """Listeners by job. `notify` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: defaultdict[str, list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(list)

    def notify(self, jobs: Iterable[str]) -> None:
        """Wakes the listeners of these jobs."""
        with self._lock:
            listeners = [each for job in jobs for each in self._listeners.get(job, ())]
        for loop, event in listeners:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(event.set)

    @contextmanager
    def of(self, job: str) -> Iterator[asyncio.Event]:
        """An event of the running loop, set whenever the job changes; the listener clears it."""
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
