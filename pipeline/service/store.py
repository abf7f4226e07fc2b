"""Jobs on disk: SQLite with a write-ahead log, every commit synced before it is acknowledged.

The SQL stands in schema.sql and queries.sql. Each change of a job is one transaction: its row is read, the state
machine of `pipeline.service.jobs` decides, and the row is written under the epoch that was read.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import OutputError, ParameterError, StorageError
from pipeline.service import jobs
from pipeline.service.jobs import (
    ACTIVE,
    TERMINAL,
    Action,
    Claimed,
    DependencyFailed,
    DependencySucceeded,
    Event,
    Job,
    State,
    TellDependents,
    handle,
    submitted,
)
from pipeline.service.statements import migrate, sql, storing

HALF_LIFE_S = 24 * 3600.0  # of what an owner has used: what was yesterday counts half
REQUEST_KEPT_S = 7 * 24 * 3600.0  # an idempotency key is remembered for so long
BUSY_MS = 10_000


class NoSuchJob(ParameterError):
    """There is no job of that id."""


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """What a user submits. `after`: ids of jobs that have to succeed first."""

    owner: str
    workload: str
    input: str
    output: str
    parameters: Mapping[str, Any]
    priority: int = 0
    after: frozenset[str] = frozenset()
    array_id: str | None = None
    array_index: int | None = None


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
class StoredEvent:
    number: int
    at: float
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What comes with an event, besides the event: who claims and until when, and the receipt of a result."""

    runner: str | None = None
    lease_until: float | None = None
    receipt: Mapping[str, Any] | None = None


class Store:
    """The jobs of one state folder. Every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the database, and brings it to the newest version.

        Raises StorageError where that fails, and ParameterError where a newer Millrace wrote it.
        """
        self.path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        # One writer at a time: SQLite would make the others wait by polling.
        self._writing = threading.Lock()
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._write() as connection:
                migrate(connection, path)

    def close(self) -> None:
        """No other thread may use the store any more."""
        for connection in self._connections:
            connection.close()

    # Accepting

    def accept(self, new: Sequence[NewJob], *, now: float, key: str | None = None, body_sha256: str = "") -> list[str]:
        """Puts jobs on disk, all or none, and returns their ids in order.

        key : an idempotency key; the same owner's same key and body give the ids given before

        Raises ParameterError where the key came with another body or an `after` names no job, OutputError where a job
        that is not over writes the same output.
        """
        with storing(self.path), self._write() as connection:
            if key is not None:
                found = connection.execute(sql("request"), {"owner": new[0].owner, "key": key}).fetchone()
                if found is not None:
                    if found["body_sha256"] != body_sha256:
                        raise ParameterError(f"Idempotency-Key {key}: was used for another job; use a new key")
                    return list(json.loads(found["jobs"]))
            ids = [self._add(connection, each, now) for each in new]
            if key is not None:
                values = {"owner": new[0].owner, "key": key, "body_sha256": body_sha256, "jobs": json.dumps(ids)}
                connection.execute(sql("add_request"), {**values, "at": now})
                connection.execute(sql("forget_requests"), {"before": now - REQUEST_KEPT_S})
            return ids

    def _add(self, connection: sqlite3.Connection, new: NewJob, now: float) -> str:
        using = connection.execute(sql("output_in_use"), {"output": new.output}).fetchone()
        if using is not None:
            raise OutputError(f"{new.output}: job {using['id']} writes it; wait for it, or name another output")
        number = secrets.token_hex(6)
        ended = {after: self.job(after, connection).job.state for after in new.after}
        waiting = frozenset(after for after, state in ended.items() if state is not State.SUCCEEDED)
        job = submitted(number, after=waiting)
        values = {
            "id": job.id, "owner": new.owner, "workload": new.workload, "input": new.input, "output": new.output,
            "parameters": json.dumps(new.parameters), "priority": new.priority, "array_id": new.array_id,
            "array_index": new.array_index, "state": job.state, "error": job.error, "story": json.dumps(job.story),
            "at": now,
        }  # fmt: skip
        connection.execute(sql("add_job"), values)
        for after, state in ended.items():
            held = "succeeded" if state is State.SUCCEEDED else "waiting"
            connection.execute(sql("add_dependency"), {"job": job.id, "after": after, "state": held})
        _note(connection, job.id, now, "state", str(job.state))
        for after, state in ended.items():
            if state in (State.FAILED, State.CANCELLED):
                self._apply(connection, job.id, DependencyFailed(after, state), now, Facts())
        return job.id

    # Changing

    def apply(self, job: str, event: Event, *, now: float, facts: Facts = Facts()) -> tuple[Job, tuple[Action, ...]]:
        """Takes an event to a job, and to those that wait for it; returns the job and what is to be done now.

        Raises NoSuchJob, and IllegalTransition where the event cannot happen.
        """
        with storing(self.path), self._write() as connection:
            return self._apply(connection, job, event, now, facts)

    def _apply(
        self, connection: sqlite3.Connection, number: str, event: Event, now: float, facts: Facts
    ) -> tuple[Job, tuple[Action, ...]]:
        before = self.job(number, connection)
        job, actions = handle(before.job, event)
        if job is before.job:
            return job, actions
        self._change(connection, before, job, now, facts)
        left = before.job.waiting_for - job.waiting_for
        for after in left if isinstance(event, DependencySucceeded) else ():
            connection.execute(sql("set_dependency"), {"job": number, "after": after, "state": "succeeded"})
        if job.state is not before.job.state:
            _note(connection, number, now, "state", f"{job.state}: {job.error}" if job.error else str(job.state))
        for action in actions:
            if isinstance(action, TellDependents):
                self._tell_dependents(connection, number, action.state, now)
        return job, tuple(action for action in actions if not isinstance(action, TellDependents))

    def _tell_dependents(self, connection: sqlite3.Connection, number: str, state: State, now: float) -> None:
        event = DependencySucceeded(number) if state is State.SUCCEEDED else DependencyFailed(number, state)
        for row in connection.execute(sql("dependents"), {"after": number}).fetchall():
            self._apply(connection, row["job"], event, now, Facts())

    def _change(self, connection: sqlite3.Connection, before: StoredJob, job: Job, now: float, facts: Facts) -> None:
        held = job.state in ACTIVE
        started = before.started_at if before.started_at is not None or job.state is not State.PLANNING else now
        values = {
            "id": job.id, "read_epoch": before.job.epoch, "state": job.state, "epoch": job.epoch,
            "attempts": job.attempts, "cancelling": job.cancelling, "chunks": job.chunks,
            "chunks_done": job.chunks_done, "error": job.error, "story": json.dumps(job.story), "at": now,
            "started_at": started,
            "finished_at": now if job.state in TERMINAL else None,
            "runner": (facts.runner or before.runner) if held else None,
            "lease_until": (facts.lease_until or before.lease_until) if held else None,
            "receipt": json.dumps(facts.receipt) if facts.receipt is not None else None,
        }  # fmt: skip
        if connection.execute(sql("change_job"), values).rowcount != 1:
            raise StorageError(f"{self.path}: job {job.id} was changed by another process; is another server running?")

    def retry(self, job: str, *, now: float) -> tuple[Job, tuple[Action, ...]]:
        """Queues a failed or cancelled job again; it waits for what it comes after as that stands now.

        Raises OutputError where another job has meanwhile begun to write the output.
        """
        with storing(self.path), self._write() as connection:
            output = self.job(job, connection).asked.output
            using = connection.execute(sql("output_in_use"), {"output": output}).fetchone()
            if using is not None and using["id"] != job:
                raise OutputError(f"{output}: job {using['id']} writes it; wait for it, then retry")
            connection.execute(sql("reset_dependencies"), {"job": job})
            waiting = self._waiting_for(connection, job)
            result = self._apply(connection, job, jobs.RetryRequested(waiting), now, Facts())
            for after in sorted(waiting):
                state = self.job(after, connection).job.state
                if state in TERMINAL:
                    result = self._apply(connection, job, DependencyFailed(after, state), now, Facts())
            return result

    def claim(self, runner: str, *, now: float, lease_s: float, owner_cap: int) -> StoredJob | None:
        """The job whose turn it is, now this runner's until its lease ends; None where there is none.

        owner_cap : of one owner's jobs at most so many are active at once
        """
        with storing(self.path), self._write() as connection:
            found = connection.execute(sql("claimable"), {"cap": owner_cap, "now": now}).fetchone()
            if found is None:
                return None
            facts = Facts(runner=runner, lease_until=now + lease_s)
            self._apply(connection, found["id"], Claimed(found["epoch"] + 1), now, facts)
            return self.job(found["id"], connection)

    def renew(self, runner: str, *, now: float, lease_s: float) -> None:
        """The runner is alive: all that it holds is its own for longer."""
        with storing(self.path), self._write() as connection:
            connection.execute(sql("renew_leases"), {"runner": runner, "until": now + lease_s})

    def lost(self, runner: str, *, now: float, others_too: bool) -> list[tuple[str, int]]:
        """Jobs, with their epochs, whose lease has ended; with `others_too` all that another runner holds: one that
        was killed, where only one may be alive."""
        with storing(self.path):
            query, values = ("leases_of_others", {"runner": runner}) if others_too else ("expired_leases", {"now": now})
            return [(row["id"], row["epoch"]) for row in self._read().execute(sql(query), values)]

    def used(self, job: str, owner: str, seconds: float, *, now: float) -> None:
        """A job has kept a device busy for so long."""
        with storing(self.path), self._write() as connection:
            connection.execute(sql("add_device_seconds"), {"id": job, "seconds": seconds})
            connection.execute(sql("add_share"), {"owner": owner, "seconds": seconds, "at": now})

    def log(self, job: str, message: str, *, now: float) -> None:
        """A line in the job's log."""
        with storing(self.path), self._write() as connection:
            _note(connection, job, now, "log", message)

    # Reading

    def job(self, job: str, connection: sqlite3.Connection | None = None) -> StoredJob:
        """NoSuchJob where there is none of that id."""
        with storing(self.path):
            source = connection or self._read()
            row = source.execute(sql("job"), {"id": job}).fetchone()
            if row is None:
                raise NoSuchJob(f"there is no job {job}")
            return _stored(row, self._waiting_for(source, job))

    def _waiting_for(self, connection: sqlite3.Connection, job: str) -> frozenset[str]:
        return frozenset(row["after"] for row in connection.execute(sql("waiting_for"), {"job": job}))

    def list_jobs(
        self,
        *,
        state: str | None = None,
        owner: str | None = None,
        workload: str | None = None,
        array_id: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[StoredJob]:
        """The newest first. `before`: only those with smaller numbers, for the next page."""
        values = {
            "state": state, "owner": owner, "workload": workload, "array_id": array_id, "before": before,
            "limit": limit,
        }  # fmt: skip
        with storing(self.path):
            rows = self._read().execute(sql("list_jobs"), values).fetchall()
        return [_stored(row, frozenset()) for row in rows]

    def events(self, job: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """What happened to a job since the event of that number, in order."""
        with storing(self.path):
            rows = self._read().execute(sql("events_of_job"), {"job": job, "after": after, "limit": limit}).fetchall()
        return [StoredEvent(**dict(row)) for row in rows]

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state."""
        with storing(self.path):
            rows = self._read().execute(sql("count_by_state")).fetchall()
        return dict.fromkeys(State, 0) | {State(row["state"]): row["jobs"] for row in rows}

    def active_of(self, owner: str) -> int:
        """Jobs of an owner that are not over."""
        with storing(self.path):
            return int(self._read().execute(sql("active_of_owner"), {"owner": owner}).fetchone()[0])

    def oldest_queued(self) -> float | None:
        """Since when the job waits that waits longest."""
        with storing(self.path):
            found: float | None = self._read().execute(sql("oldest_queued")).fetchone()[0]
            return found

    def check(self) -> None:
        """StorageError where nothing can be written."""
        with storing(self.path), self._write() as connection:
            connection.execute("PRAGMA user_version").fetchone()

    # Connections

    def _read(self) -> sqlite3.Connection:
        """This thread's connection."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(
                self.path, timeout=BUSY_MS / 1e3, check_same_thread=False, isolation_level=None
            )
            connection.row_factory = sqlite3.Row
            connection.create_function("halved", 2, _halved, deterministic=True)
            for pragma in (
                "journal_mode = WAL",
                "synchronous = FULL",
                "foreign_keys = ON",
                f"busy_timeout = {BUSY_MS}",
            ):
                connection.execute(f"PRAGMA {pragma}")
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        with self._writing:
            connection = self._read()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()


def _stored(row: sqlite3.Row, waiting_for: frozenset[str]) -> StoredJob:
    asked = NewJob(
        owner=row["owner"], workload=row["workload"], input=row["input"], output=row["output"],
        parameters=json.loads(row["parameters"]), priority=row["priority"], array_id=row["array_id"],
        array_index=row["array_index"],
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


def _note(connection: sqlite3.Connection, job: str, at: float, kind: str, message: str) -> None:
    connection.execute(sql("add_event"), {"job": job, "at": at, "kind": kind, "message": message})


def _halved(amount: float | None, age_s: float | None) -> float | None:
    return None if amount is None or age_s is None else float(amount * 0.5 ** (max(age_s, 0.0) / HALF_LIFE_S))
