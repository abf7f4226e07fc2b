"""How long workers have been silent: the time since the scheduler last heard a heartbeat of each."""

from __future__ import annotations

import time
from collections.abc import Mapping

# The most that one interval between two looks counts: this process may have been suspended too.
LONGEST_INTERVAL_S = 2.0


class Silence:
    """Measured by this process's clock: the scheduler may be on another host, and clocks are set."""

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._last: dict[str, tuple[float, float]] = {}

    def seconds(self, heard: Mapping[str, float]) -> dict[str, float]:
        """The silence of each worker, by address.

        heard : when the scheduler last heard of each, by its own clock; ask several times a minute
        """
        now = time.monotonic()
        passed = min(now - self._looked_at, LONGEST_INTERVAL_S)
        self._looked_at = now
        self._last = {address: (moment, self._silent(address, moment, passed)) for address, moment in heard.items()}
        return {address: silent_s for address, (_, silent_s) in self._last.items()}

    def _silent(self, address: str, moment: float, passed: float) -> float:
        before, silent_s = self._last.get(address, (None, 0.0))
        return silent_s + passed if moment == before else 0.0
