"""How long workers have been silent, and whether a process does anything."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

# The most that one interval between two looks counts: this process may have been suspended too.
LONGEST_INTERVAL_S = 2.0
_TICKS_S = os.sysconf("SC_CLK_TCK")


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


def cpu_seconds(process: int) -> float:
    """CPU time of a process so far; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_S
