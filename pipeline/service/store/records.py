"""Records that the store takes and returns, and their conversion from rows."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pipeline import metrics
from pipeline.api_models import NO_LIMITS, TERMINAL, Estimate, JobLimits, JobUse, State
from pipeline.service.jobs import Job

DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A submitted job.

    group     : whose users see it; "" is the group of users without one
    after     : ids of jobs that have to succeed first
    after_any : ids of jobs that have to end first, however they do
    throttle  : how many jobs of its array may run at the same time; None: any number
    webhook   : a URL to notify when it ends
    written   : the output's resolved path, which identifies the file; None: `output`
    no_clobber: it fails rather than replace an older output
    """

    owner: str
    workload: str
    input: str
    output: str
    parameters: Mapping[str, Any]
    group: str = ""
    priority: int = 0
    after: frozenset[str] = frozenset()
    after_any: frozenset[str] = frozenset()
    limits: JobLimits = NO_LIMITS
    throttle: int | None = None
    webhook: str | None = None
    no_clobber: bool = False
    array_id: str | None = None
    array_index: int | None = None
    written: str | None = None


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """A stored job: the submission, the state machine's part, times and lease."""

    number: int
    asked: NewJob
    job: Job
    submitted_at: float
    changed_at: float
    started_at: float | None
    finished_at: float | None
    device_seconds: float
    held: bool  # not claimed until an operator releases it
    runner: str | None
    lease_until: float | None
    receipt: Mapping[str, Any] | None
    estimate: Estimate | None
    used: JobUse


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Filters of a list; None: any."""

    state: str | None = None
    owner: str | None = None
    workload: str | None = None
    array_id: str | None = None
    before: int | None = None  # only smaller numbers, for the next page
    groups: tuple[str, ...] | None = None  # only jobs of these

    def values(self) -> dict[str, Any]:
        """For the statement `fitting`."""
        alone = self.groups[0] if self.groups is not None and len(self.groups) == 1 else None
        return vars(self) | {"groups": None if self.groups is None else json.dumps(self.groups), "only_group": alone}


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a run that has ended used: its time on each device that it could use, and bytes of samples."""

    device_seconds: float = 0.0
    gpu_seconds: float = 0.0  # of those, on GPUs
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Data stored with an event.

    runner, lease_until : of a claim
    receipt             : of the result
    used, run_seconds   : of the run that has ended
    estimate, work      : of the plan, without its seconds; its work in the workload's unit
    memory_bytes, gpu_memory_bytes : the most that the run took
    """

    runner: str | None = None
    lease_until: float | None = None
    receipt: Mapping[str, Any] | None = None
    used: Used | None = None
    run_seconds: float = 0.0
    estimate: Mapping[str, Any] | None = None
    work: int = 0
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None


NO_FACTS = Facts()


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A notification of an ended job. `tries`: those that failed; `at`: when the job ended."""

    id: str
    job: str
    url: str
    body: str
    tries: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Usage:
    """An entry of the accounts, or a sum of some. day: days since 1970-01-01, UTC; None: of several."""

    day: int | None
    owner: str
    group: str
    device_seconds: float = 0.0
    gpu_seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    runs: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0

    def __add__(self, other: Usage) -> Usage:
        """The sum, of this owner, group and day."""
        amounts = {name: value for name, value in vars(self).items() if name not in ("day", "owner", "group")}
        return replace(self, **{name: value + getattr(other, name) for name, value in amounts.items()})

    def count(self) -> None:
        """For the metrics."""
        metrics.usage_device_seconds.labels(self.group).inc(self.device_seconds)
        metrics.usage_gpu_seconds.labels(self.group).inc(self.gpu_seconds)
        metrics.usage_bytes.labels(self.group, "read").inc(self.read_bytes)
        metrics.usage_bytes.labels(self.group, "written").inc(self.written_bytes)
        for outcome in TERMINAL:
            metrics.usage_jobs.labels(self.group, outcome).inc(getattr(self, outcome))


@dataclass(frozen=True)
class Ended:
    """A finished job, for the metrics; `lasted_s`: since its first claim, None if it was never claimed."""

    workload: str
    state: State
    lasted_s: float | None

    def count(self) -> None:
        metrics.jobs_finished.labels(self.workload, self.state).inc()
        if self.lasted_s is not None:
            metrics.job_duration.labels(self.workload, self.state).observe(self.lasted_s)


def day_of(at: float) -> int:
    """Days since 1970-01-01, UTC."""
    return int(at // DAY_S)


def storable(text: str) -> str:
    """Text for SQLite: a file name in it may have bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@lru_cache(maxsize=64)
def _limits(text: str) -> JobLimits:
    """Limits, which most jobs have in common."""
    return JobLimits.model_validate_json(text)


def job_of(row: sqlite3.Row, waiting_for: frozenset[str], waiting_for_end: frozenset[str]) -> Job:
    """The state machine's part of a row; the dependencies come from another table."""
    return Job(
        id=row["id"], state=State(row["state"]), epoch=row["epoch"], attempts=row["attempts"],
        deaths=row["deaths"], preemptions=row["preemptions"], waiting_for=waiting_for,
        waiting_for_end=waiting_for_end, cancelling=bool(row["cancelling"]), chunks=row["chunks"],
        chunks_done=row["chunks_done"], error=row["error"], story=tuple(json.loads(row["story"])),
    )  # fmt: skip


def stored(row: sqlite3.Row, waiting_for: frozenset[str], waiting_for_end: frozenset[str]) -> StoredJob:
    """A row as a record."""
    asked = NewJob(
        owner=row["owner"], workload=row["workload"], input=row["input"], output=row["output"],
        parameters=json.loads(row["parameters"]), group=row["owner_group"], priority=row["priority"],
        array_id=row["array_id"], array_index=row["array_index"], written=row["written"], throttle=row["throttle"],
        webhook=row["webhook"], no_clobber=bool(row["no_clobber"]), limits=_limits(row["limits"]),
    )  # fmt: skip
    used = JobUse(
        seconds=row["run_seconds"], memory_bytes=row["memory_bytes"], gpu_memory_bytes=row["gpu_memory_bytes"]
    )
    return StoredJob(
        number=row["number"], asked=asked, job=job_of(row, waiting_for, waiting_for_end),
        submitted_at=row["submitted_at"], changed_at=row["changed_at"], started_at=row["started_at"],
        finished_at=row["finished_at"], device_seconds=row["device_seconds"], held=bool(row["held"]),
        runner=row["runner"], lease_until=row["lease_until"],
        receipt=json.loads(row["receipt"]) if row["receipt"] is not None else None,
        estimate=Estimate.model_validate_json(row["estimate"]) if row["estimate"] is not None else None, used=used,
    )  # fmt: skip
