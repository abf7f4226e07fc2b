"""The work of the five stages: seconds, bytes and chunks, and how well they overlapped."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from pipeline import metrics

STAGES = metrics.STAGES
# Those of every chunk; the others are in a record once a chunk has been in them.
ALWAYS = tuple(stage for stage in STAGES if stage not in ("decode", "encode"))
# Seconds, bytes and chunks by stage, as processes send them to each other.
StageCounts = Mapping[str, tuple[float, int, int]]


@dataclass
class StageTotals:
    """One stage's work so far. `lanes`: the number of threads (or streams) that share it."""

    seconds: float = 0.0
    nbytes: int = 0
    chunks: int = 0
    lanes: int = 1

    def add(self, seconds: float, nbytes: int, chunks: int) -> None:
        self.seconds += seconds
        self.nbytes += nbytes
        self.chunks += chunks


@dataclass(frozen=True)
class Interval:
    """One chunk in one stage, in seconds of `time.perf_counter`."""

    stage: str
    chunk: int
    began: float
    ended: float


@dataclass
class StageRecord:
    """Totals of all stages of one run, and on request every interval. Thread-safe."""

    totals: dict[str, StageTotals] = field(default_factory=lambda: {stage: StageTotals() for stage in ALWAYS})
    wall_seconds: float = 0.0
    keeps_timeline: bool = False
    # Whether this process counts other processes' work in its metrics, because theirs are not scraped.
    gathers: bool = False
    timeline: list[Interval] = field(default_factory=list)
    # The latest reports of other processes on unfinished work, by a key of the work.
    under_way: dict[Hashable, StageCounts] = field(default_factory=dict)
    _lanes: Mapping[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def share(self, lanes: Mapping[str, int]) -> None:
        """The number of threads (or streams) of each stage; 1 by default."""
        self._lanes = lanes
        for stage in lanes.keys() & self.totals.keys():
            self.totals[stage].lanes = lanes[stage]

    def add(self, stage: str, chunk: int, began: float, ended: float, nbytes: int) -> None:
        """Add one chunk in one stage, from `began` to `ended` in seconds of `time.perf_counter`."""
        if self.keeps_timeline:
            self.timeline.append(Interval(stage, chunk, began, ended))
        self._add(stage, ended - began, nbytes, 1)
        metrics.stages[stage].add(ended - began, nbytes)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the run's wall time."""
        lanes = {stage: totals.lanes for stage, totals in self.totals.items()}
        began = time.perf_counter()
        with metrics.AtWork(lanes) if self.gathers else nullcontext():
            yield
        self.wall_seconds = time.perf_counter() - began

    def include(self, stages: StageCounts) -> None:
        """Add another process's work."""
        for stage, (seconds, nbytes, chunks) in stages.items():
            self._add(stage, seconds, nbytes, chunks)
            if self.gathers:
                metrics.stages[stage].add(seconds, nbytes, chunks)

    def counts(self) -> StageCounts:
        """This process's work so far, for another one's `include`."""
        return {stage: (totals.seconds, totals.nbytes, totals.chunks) for stage, totals in self.totals.items()}

    def now(self) -> dict[str, StageTotals]:
        """The current totals, including unfinished work of other processes."""
        with self._lock:
            found = {stage: replace(totals) for stage, totals in self.totals.items()}
        for told in list(self.under_way.values()):
            for stage, counts in told.items():
                found.setdefault(stage, StageTotals()).add(*counts)
        return found

    def _add(self, stage: str, seconds: float, nbytes: int, chunks: int) -> None:
        with self._lock:
            if stage not in self.totals:
                self.totals[stage] = StageTotals(lanes=self._lanes.get(stage, 1))
            self.totals[stage].add(seconds, nbytes, chunks)

    @property
    def overlap_efficiency(self) -> float:
        """Busy fraction of the busiest stage: 1 if it never waited for the others."""
        if self.wall_seconds <= 0:
            return 0.0
        return max(totals.seconds / totals.lanes for totals in self.totals.values()) / self.wall_seconds
