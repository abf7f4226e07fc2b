"""Counts of this process's pipelines: chunks, bytes, work, and how busy each stage is.

Every chunk is counted a dozen times, so counting is one short lock and a few additions; `registered` assembles the
metrics at a scrape. Times advance while a pipeline runs, not only at its end.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ContextDecorator

from pipeline.metrics.table import STAGE_SECONDS, STAGES


class Level:
    """A level that changes at times, such as the number of busy lanes, and its integral over time."""

    def __init__(self) -> None:
        self._level = 0
        self._integral = 0.0
        self._since = time.perf_counter()
        self._lock = threading.Lock()

    def change(self, by: int, now: float) -> None:
        """`now`: from `time.perf_counter`, the same for levels that change together."""
        with self._lock:
            self._advance(now)
            self._level += by

    @property
    def integral(self) -> float:
        """The integral until now."""
        with self._lock:
            self._advance(time.perf_counter())
            return self._integral

    def _advance(self, now: float) -> None:
        if now > self._since:  # otherwise a scrape came in between
            self._integral += self._level * (now - self._since)
            self._since = now


class StageCount:
    """Totals of one stage in all pipelines of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.nbytes = 0
        self.buckets = [0] * (len(STAGE_SECONDS) + 1)
        self.lanes = Level()
        self._lock = threading.Lock()

    def add(self, seconds: float, nbytes: int, chunks: int = 1) -> None:
        """Adds the total of `chunks` chunks; each is assumed to have taken the same time."""
        bucket = bisect_left(STAGE_SECONDS, seconds if chunks == 1 else seconds / max(chunks, 1))
        with self._lock:
            self.seconds += seconds
            self.nbytes += nbytes
            self.buckets[bucket] += chunks

    def told(self) -> tuple[float, int, list[int]]:
        with self._lock:
            return self.seconds, self.nbytes, list(self.buckets)


class WorkCount:
    """Totals of one workload's chunks in this process; `unit`: of their work."""

    def __init__(self, workload: str, unit: str) -> None:
        self.workload = workload
        self.unit = unit
        self.chunks = {"written": 0, "kept": 0, "failed": 0}
        self.input_bytes = 0
        self.output_bytes = 0
        self.work = 0
        self._lock = threading.Lock()

    def read(self, nbytes: int) -> None:
        with self._lock:
            self.input_bytes += nbytes

    def written(self, nbytes: int, work: int) -> None:
        with self._lock:
            self.chunks["written"] += 1
            self.output_bytes += nbytes
            self.work += work

    def kept(self, chunks: int) -> None:
        """Adds chunks that an earlier run finished."""
        with self._lock:
            self.chunks["kept"] += chunks

    def failed(self) -> None:
        with self._lock:
            self.chunks["failed"] += 1


class LatestValue:
    """The value that was set last."""

    value = 0.0

    def set(self, value: float) -> None:
        self.value = value


class LatestValues(defaultdict[str, LatestValue]):
    """The latest value of each workload."""

    def __init__(self) -> None:
        super().__init__(LatestValue)

    def labels(self, workload: str) -> LatestValue:
        return self[workload]


stages: Mapping[str, StageCount] = {stage: StageCount() for stage in STAGES}
wall = Level()  # 1 while any pipeline runs
work: dict[tuple[str, str], WorkCount] = {}
audit_error_ratio = LatestValues()
_adding = threading.Lock()


def work_of(workload: str, unit: str) -> WorkCount:
    """The count of a workload: one only, since Prometheus refuses duplicate series."""
    with _adding:
        return work.setdefault((workload, unit), WorkCount(workload, unit))


class AtWork(ContextDecorator):
    """A reentrant context, or a decorator, in which chunks move through one pipeline."""

    _pipelines = 0
    _entering = threading.Lock()

    def __init__(self, lanes: Mapping[str, int]) -> None:
        """`lanes`: the number of threads or streams of each stage; 1 by default."""
        self._lanes = {stage: lanes.get(stage, 1) for stage in STAGES}
        self._depth = 0

    def __enter__(self) -> None:
        with AtWork._entering:
            self._depth += 1
            if self._depth == 1:
                self._begin_or_end(1)

    def __exit__(self, *_: object) -> None:
        with AtWork._entering:
            self._depth -= 1
            if self._depth == 0:
                self._begin_or_end(-1)

    def _begin_or_end(self, sign: int) -> None:
        now, before = time.perf_counter(), AtWork._pipelines > 0
        AtWork._pipelines += sign
        wall.change((AtWork._pipelines > 0) - before, now)
        for stage, lanes in self._lanes.items():
            stages[stage].lanes.change(sign * lanes, now)
