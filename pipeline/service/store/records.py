"""What the store is given and gives back, and a row of its table of jobs as such a record."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import metrics
from pipeline.api_models import State
from pipeline.service.jobs import Job


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """What a user submits.

    after   : ids of jobs that have to succeed first
    written : the output's path with links and dots resolved, by which two names of one file are known; None: `output`
    """

    owner: str
    workload: str
    input: str
    output: str
    parameters: Mapping[str, Any]
    priority: int = 0
    after: frozenset[str] = frozenset()
    array_id: str | None = None
    array_index: int | None = None
    written: str | None = None


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """A job as it stands in the store: what was asked, the state machine's part, and when what happened."""

    number: int
    asked: NewJob
    job: Job
    submitted_at: float
    changed_at: float
    started_at: float | None
    finished_at: float | None
    device_seconds: float
    runner: str | None
    lease_until: float | None
    receipt: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Which jobs a list shows; None: whichever they are."""

    state: str | None = None
    owner: str | None = None
    workload: str | None = None
    array_id: str | None = None
    before: int | None = None  # only those with smaller numbers, for the next page


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    number: int
    at: float
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What comes with an event, besides the event: who claims and until when, the receipt of a result, and for how long
    the run that ended kept a device busy."""

    runner: str | None = None
    lease_until: float | None = None
    receipt: Mapping[str, Any] | None = None
    device_seconds: float = 0.0


NO_FACTS = Facts()


@dataclass(frozen=True)
class Ended:
    """A job that is over, for the metrics; `lasted_s`: since its first claim, None where it never had one."""

    workload: str
    state: State
    lasted_s: float | None

    def count(self) -> None:
        metrics.jobs_finished.labels(self.workload, self.state).inc()
        if self.lasted_s is not None:
            metrics.job_duration.labels(self.workload, self.state).observe(self.lasted_s)


def storable(text: str) -> str:
    """Text as SQLite takes it: a file's name in it may have bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def stored(row: sqlite3.Row, waiting_for: frozenset[str]) -> StoredJob:
    """`waiting_for`: what stands in another table."""
    asked = NewJob(
        owner=row["owner"], workload=row["workload"], input=row["input"], output=row["output"],
        parameters=json.loads(row["parameters"]), priority=row["priority"], array_id=row["array_id"],
        array_index=row["array_index"], written=row["written"],
    )  # fmt: skip
    job = Job(
        id=row["id"], state=State(row["state"]), epoch=row["epoch"], attempts=row["attempts"],
        waiting_for=waiting_for, cancelling=bool(row["cancelling"]), chunks=row["chunks"],
        chunks_done=row["chunks_done"], error=row["error"], story=tuple(json.loads(row["story"])),
    )  # fmt: skip
    facts = (
        "number",
        "submitted_at",
        "changed_at",
        "started_at",
        "finished_at",
        "device_seconds",
        "runner",
        "lease_until",
    )
    receipt = json.loads(row["receipt"]) if row["receipt"] is not None else None
    return StoredJob(asked=asked, job=job, receipt=receipt, **{name: row[name] for name in facts})
