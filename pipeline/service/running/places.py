"""The runs that are under way, and whether another one has a place beside them."""

from __future__ import annotations

import threading
import time
from collections import Counter

from pipeline.service.jobs import MOST_DEATHS
from pipeline.service.running.run import Run

# So long may a job that is suspected of crashes keep others waiting.
ALONE_S = 30.0
# A job that is planned for longer gives up its place until it is planned.
PATIENCE_S = 20.0


class Places:
    """Places for `jobs_at_once` runs. Thread-safe."""

    def __init__(self, jobs_at_once: int) -> None:
        self._jobs_at_once = jobs_at_once
        self._runs: dict[str, Run] = {}  # by their job, or the first of several that run together
        self._to_be_alone: set[str] = set()  # running jobs that shared their workers' memory with one that made room
        self._lock = threading.Lock()

    def add(self, run: Run) -> None:
        with self._lock:
            self._runs[run.claimed.job.id] = run

    def remove(self, run: Run) -> None:
        job = run.claimed.job.id
        with self._lock:
            if self._runs.get(job) is run:  # not the run of a retry
                del self._runs[job]

    def runs(self) -> list[Run]:
        with self._lock:
            return list(self._runs.values())

    def run_with(self, job: str) -> Run | None:
        """The newest run of a job, alone or together with others."""
        runs = reversed(self.runs())
        return next((run for run in runs if any(each.job.id == job for each in run.jobs)), None)

    def has_free(self) -> bool:
        """Runs that are still being planned after PATIENCE_S take no place until they are planned."""
        tick = time.monotonic()
        with self._lock:
            for run in self._runs.values():
                if run.planning and tick - run.started > PATIENCE_S:
                    run.placed = False
            return sum(run.placed or not run.planning for run in self._runs.values()) < self._jobs_at_once

    def may_run(self, job: str) -> bool:
        """Whether a run, which is planned now, has a place; gives it one that is free."""
        with self._lock:
            run = self._runs[job]
            run.planning = False
            if not run.placed:
                run.placed = sum(each.placed for each in self._runs.values()) < self._jobs_at_once
            return run.placed

    def slow_planners(self) -> list[str]:
        """Owners who have as many jobs that are planned slowly as may run at once: their others wait."""
        with self._lock:
            slow = Counter(run.claimed.asked.owner for run in self._runs.values() if not run.placed and run.planning)
        return [owner for owner, count in slow.items() if count >= self._jobs_at_once]

    def let_alone(self, job: str) -> None:
        """No job is claimed until those end that run besides this one."""
        with self._lock:
            self._to_be_alone = self._runs.keys() - {job}

    def is_blocked(self) -> bool:
        """Whether no job may begin: one was let alone, or has begun that its next death would fail. Beside that one,
        others would be blamed for the death."""
        with self._lock:
            if self._to_be_alone & self._runs.keys():
                return True
        return any(
            run.claimed.job.deaths == MOST_DEATHS - 1
            and not run.has_progressed
            and time.monotonic() - run.started < ALONE_S
            for run in self.runs()
        )
