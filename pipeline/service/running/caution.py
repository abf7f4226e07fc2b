"""When the runner waits: after failures that are not a job's fault, and while the clock cannot be believed."""

from __future__ import annotations

import logging
import threading
import time

LOG = logging.getLogger("millrace.service")
# How far the clock may be from where the newest event puts it, and for how long one that is further off is doubted.
CLOCK_OFF_S, DOUBT_S = 7 * 86_400.0, 86_400.0
# Pause in claiming after one failure that is not a job's fault, and after many in a row.
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0


class Backoff:
    """A pause in claiming after each failure that is not a job's fault, doubled until a job succeeds.

    Otherwise all waiting jobs would use up their attempts while a disk is full or a server is down. Thread-safe.
    """

    def __init__(self) -> None:
        self._failures = 0  # since a job succeeded
        self._until = 0.0  # on the monotonic clock
        self._lock = threading.Lock()

    def failed(self) -> None:
        with self._lock:
            self._until = time.monotonic() + min(FIRST_PAUSE_S * 2 ** min(self._failures, 16), MOST_PAUSE_S)
            self._failures += 1

    def succeeded(self) -> None:
        with self._lock:
            self._failures, self._until = 0, 0.0

    @property
    def is_over(self) -> bool:
        """Whether a job may be claimed."""
        return time.monotonic() >= self._until


class ClockCheck:
    """Whether the wall clock can be believed enough to delete by it: it may be months off as a machine starts."""

    def __init__(self, newest: float, tick: float) -> None:
        """newest : when the newest event happened, by the wall clock of then
        tick : the monotonic clock now
        """
        self._known = newest, tick
        self._doubted_at: float | None = None

    def is_believed(self, now: float, tick: float) -> bool:
        """The wall clock is as expected, or has been otherwise for long enough: the machine may have been off."""
        was, at = self._known
        if abs(now - was - (tick - at)) > CLOCK_OFF_S:
            if self._doubted_at is None:
                self._doubted_at = tick
                LOG.warning(
                    "the clock is %.0f days from the newest event: no finished job is forgotten for %.0f hours",
                    (now - was) / 86_400, DOUBT_S / 3600,
                )  # fmt: skip
            if tick - self._doubted_at < DOUBT_S:
                return False
        self._known, self._doubted_at = (now, tick), None
        return True
