"""When the next job may be begun after failures that were no job's fault."""

from __future__ import annotations

import threading
import time

# Until the next claim after one such failure, and after many in a row.
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0


class Backoff:
    """A pause after each failure, twice as long each time until a job succeeds.

    What is full or away now may be back then, and would else use up all attempts of all jobs that wait. It may be used
    from any thread.
    """

    def __init__(self) -> None:
        self._failures = 0  # since a job succeeded
        self._until = 0.0  # on the monotonic clock
        self._lock = threading.Lock()

    def failed(self) -> None:
        """A job failed by no fault of its own."""
        with self._lock:
            self._until = time.monotonic() + min(FIRST_PAUSE_S * 2 ** min(self._failures, 16), MOST_PAUSE_S)
            self._failures += 1

    def succeeded(self) -> None:
        """A job succeeded: whatever was wrong is over."""
        with self._lock:
            self._failures, self._until = 0, 0.0

    @property
    def is_over(self) -> bool:
        """Whether a job may be begun."""
        return time.monotonic() >= self._until
