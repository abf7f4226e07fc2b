"""What the five stages did: seconds, bytes and chunks, and how well they overlapped."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from pipeline import metrics

STAGES = ("read", "upload", "compute", "download", "write")


@dataclass
class StageTotals:
    """One stage's work so far. `lanes`: how many threads (or streams) do it side by side."""

    seconds: float = 0.0
    nbytes: int = 0
    chunks: int = 0
    lanes: int = 1


@dataclass
class StageRecord:
    """Totals of all stages of one run; any thread may add to it."""

    totals: dict[str, StageTotals] = field(default_factory=lambda: {stage: StageTotals() for stage in STAGES})
    wall_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, stage: str, seconds: float, nbytes: int) -> None:
        with self._lock:
            totals = self.totals[stage]
            totals.seconds += seconds
            totals.nbytes += nbytes
            totals.chunks += 1
        metrics.stage_seconds.labels(stage).inc(seconds)
        metrics.stage_bytes.labels(stage).inc(nbytes)

    @property
    def overlap_efficiency(self) -> float:
        """Busy share of the busiest stage: 1 where it never waited for the others."""
        if self.wall_seconds <= 0:
            return 0.0
        return max(totals.seconds / totals.lanes for totals in self.totals.values()) / self.wall_seconds
