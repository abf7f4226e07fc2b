"""Counts of this process's pipelines: chunks, bytes, work, and how busy each stage is.

Every chunk is counted a dozen times, so counting is one short lock and a few additions; the metrics are assembled at a
scrape. Times advance while a pipeline runs, not only at its end.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import ContextDecorator

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pipeline.metrics.families import counter_family, cumulated, histogram_family
from pipeline.metrics.table import STAGE_SECONDS, STAGES

_DURATION = "millrace_stage_duration_seconds"


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


stages: Mapping[str, StageCount] = {stage: StageCount() for stage in STAGES}
_wall = Level()  # 1 while any pipeline runs
_work: dict[tuple[str, str], WorkCount] = {}
_adding = threading.Lock()


def work_of(workload: str, unit: str) -> WorkCount:
    """The count of a workload: one only, since Prometheus refuses duplicate series."""
    with _adding:
        return _work.setdefault((workload, unit), WorkCount(workload, unit))


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
        _wall.change((AtWork._pipelines > 0) - before, now)
        for stage, lanes in self._lanes.items():
            stages[stage].lanes.change(sign * lanes, now)


class _Pipelines(Collector):
    """Assembles the metrics at a scrape."""

    def collect(self) -> Iterable[Metric]:
        yield from _of_stages()
        wall = counter_family("millrace_pipeline_wall_seconds_total")
        wall.add_metric([], _wall.integral)
        yield wall
        yield from _of_work(list(_work.values()))


def _of_stages() -> Iterable[Metric]:
    seconds, nbytes = counter_family("millrace_stage_seconds_total"), counter_family("millrace_stage_bytes_total")
    lanes, durations = counter_family("millrace_stage_lane_seconds_total"), histogram_family(_DURATION)
    for stage, count in stages.items():
        busy, moved, buckets = count.told()
        seconds.add_metric([stage], busy)
        nbytes.add_metric([stage], moved)
        lanes.add_metric([stage], count.lanes.integral)
        durations.add_metric([stage], cumulated(_DURATION, buckets), busy)
    return seconds, nbytes, lanes, durations


def _of_work(counts: list[WorkCount]) -> Iterable[Metric]:
    chunks, work = counter_family("millrace_chunks_total"), counter_family("millrace_work_total")
    read, written = counter_family("millrace_input_bytes_total"), counter_family("millrace_output_bytes_total")
    for count in counts:
        for outcome, number in count.chunks.items():
            chunks.add_metric([count.workload, outcome], number)
        work.add_metric([count.workload, count.unit], count.work)
        read.add_metric([count.workload], count.input_bytes)
        written.add_metric([count.workload], count.output_bytes)
    return chunks, read, written, work


REGISTRY.register(_Pipelines())
