"""Jobs on disk: SQLite with a write-ahead log, every commit synced before it is acknowledged.

The SQL stands in schema.sql and queries.sql. Each change of a job is one transaction: its row is read, the state
machine of `pipeline.service.jobs` decides, and the row is written under the epoch that was read.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from pipeline import metrics
from pipeline.config import format_bytes
from pipeline.errors import OutputError, ParameterError, StorageError, counted
from pipeline.service import jobs
from pipeline.service.database import Database
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
from pipeline.service.news import News
from pipeline.service.records import Ended, Facts, JobFilter, NewJob, StoredEvent, StoredJob, storable, stored
from pipeline.service.statements import migrate, sql, storing

__all__ = [
    "HALF_LIFE_S",
    "DependencyForgotten",
    "Facts",
    "JobFilter",
    "NewJob",
    "NoSuchJob",
    "OutputTaken",
    "Store",
    "StoredEvent",
    "StoredJob",
]

NO_FACTS = Facts()
ANY = JobFilter()
LEAST_ROOM_BYTES = 1 << 20  # on the disk: with less, no job is taken
HALF_LIFE_S = 24 * 3600.0  # of what an owner has used: what was yesterday counts half
PRUNED_AT_ONCE = 200  # nobody waits long for a writer
REQUEST_KEPT_S = 7 * 24 * 3600.0  # an idempotency key is remembered for so long


class NoSuchJob(ParameterError):
    """There is no job of that id."""


class DependencyForgotten(ParameterError):
    """A job cannot be tried again: what it comes after was over for so long that it has been forgotten."""


class OutputTaken(OutputError):
    """A job that is not over writes the same output."""


class Store:
    """The jobs of one state folder. Every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the database, and brings it to the newest version.

        Raises StorageError where that fails, and ParameterError where a newer Millrace wrote it.
        """
        self.path = path
        self.news = News()
        self._database = Database(path, {"halved": (2, _halved)})
        self._changed: set[str] = set()  # by the transaction that is under way
        self._ended: list[Ended] = []  # by the transaction that is under way
        with storing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._write() as connection:
                migrate(connection, path)
            self._file = _identity(path)

    def close(self) -> None:
        """No other thread may use the store any more."""
        self._database.close()

    # Accepting

    def accept(
        self,
        new: Sequence[NewJob],
        *,
        now: float,
        key: str | None = None,
        body_sha256: str = "",
        most_of_an_owner: int | None = None,
    ) -> list[str]:
        """Puts jobs on disk, all or none, and returns their ids in order.

        key              : an idempotency key; the same owner's same key and body give the ids given before
        most_of_an_owner : so many jobs of an owner may there be that are not over, with these

        Raises ParameterError where the key came with another body, an `after` names no job or these would be too many,
        OutputTaken where a job that is not over writes the same output, StorageError where no restart would find them.
        """
        self._check_is_there()
        with storing(self.path), self._write() as connection:
            if key is not None:
                found = connection.execute(sql("request"), {"owner": new[0].owner, "key": key}).fetchone()
                if found is not None:
                    if found["body_sha256"] != body_sha256:
                        raise ParameterError(f"Idempotency-Key {key}: was used for another job; use a new key")
                    return list(json.loads(found["jobs"]))
            if most_of_an_owner is not None:
                self._refuse_too_many(connection, new[0].owner, len(new), most_of_an_owner)
            befores = frozenset().union(*(each.after for each in new))
            states = {before: self._job(connection, before).job.state for before in befores}
            ids = [self._add(connection, each, states, now) for each in new]
            if key is not None:
                values = {"owner": new[0].owner, "key": key, "body_sha256": body_sha256, "jobs": json.dumps(ids)}
                connection.execute(sql("add_request"), {**values, "at": now})
            return ids

    def _refuse_too_many(self, connection: sqlite3.Connection, owner: str, count: int, most: int) -> None:
        waiting = int(connection.execute(sql("active_of_owner"), {"owner": owner}).fetchone()[0])
        if waiting + count > most:
            raise ParameterError(
                f"{owner} has {counted(waiting, 'unfinished job')}, of {most:,} allowed: wait for some, or cancel some"
            )

    def _add(self, connection: sqlite3.Connection, new: NewJob, states: Mapping[str, State], now: float) -> str:
        """`states`: of the jobs that it comes after, at least."""
        using = self._writer(connection, new)
        if using is not None:
            raise OutputTaken(f"{new.output}: job {using['id']} writes it; wait for it, or name another output")
        number = secrets.token_hex(6)
        ended = {after: states[after] for after in new.after}
        waiting = frozenset(after for after, state in ended.items() if state is not State.SUCCEEDED)
        job = submitted(number, after=waiting)
        values = {
            "id": job.id, "owner": new.owner, "workload": new.workload, "input": new.input, "output": new.output,
            "written": new.written, "parameters": json.dumps(new.parameters, allow_nan=False), "priority": new.priority,
            "array_id": new.array_id, "array_index": new.array_index, "state": job.state, "error": job.error,
            "story": json.dumps(job.story), "at": now,
        }  # fmt: skip
        connection.execute(sql("add_job"), values)
        held = [
            {"job": job.id, "after": after, "state": "succeeded" if state is State.SUCCEEDED else "waiting"}
            for after, state in ended.items()
        ]
        connection.executemany(sql("add_dependency"), held)
        self._note(connection, job.id, now, "state", str(job.state))
        for after, state in ended.items():
            if state in (State.FAILED, State.CANCELLED):
                self._apply(connection, job.id, DependencyFailed(after, state), now, Facts())
        return job.id

    def _writer(self, connection: sqlite3.Connection, asked: NewJob) -> sqlite3.Row | None:
        """The job, not over, that writes to the same place, whatever it calls it."""
        values = {"written": asked.written or asked.output}
        row: sqlite3.Row | None = connection.execute(sql("output_in_use"), values).fetchone()
        return row

    # Changing

    def apply(self, job: str, event: Event, *, now: float, facts: Facts = NO_FACTS) -> tuple[Job, tuple[Action, ...]]:
        """Takes an event to a job, and to those that wait for it; returns the job and what is to be done now.

        Raises NoSuchJob, and IllegalTransition where the event cannot happen.
        """
        with storing(self.path), self._write() as connection:
            if facts.device_seconds > 0:  # whether or not the event is heard
                values = {"id": job, "seconds": facts.device_seconds}
                owner = connection.execute(sql("add_device_seconds"), values).fetchone()
                if owner is not None:
                    connection.execute(sql("add_share"), {**values, "owner": owner["owner"], "at": now})
            return self._apply(connection, job, event, now, facts)

    def _apply(
        self, connection: sqlite3.Connection, number: str, event: Event, now: float, facts: Facts
    ) -> tuple[Job, tuple[Action, ...]]:
        """Of this job and of all that come after it, one by one: a chain of them may be of any length."""
        result = self._apply_alone(connection, number, event, now, facts)
        untold = deque((number, action) for action in result[1])
        while untold:
            ended, action = untold.popleft()
            if isinstance(action, TellDependents):
                told = action.event(ended)
                for row in connection.execute(sql("dependents"), {"after": ended}).fetchall():
                    _, actions = self._apply_alone(connection, row["job"], told, now, Facts())
                    untold.extend((row["job"], each) for each in actions)
        return result[0], tuple(action for action in result[1] if not isinstance(action, TellDependents))

    def _apply_alone(
        self, connection: sqlite3.Connection, number: str, event: Event, now: float, facts: Facts
    ) -> tuple[Job, tuple[Action, ...]]:
        before = self._job(connection, number)
        job, actions = handle(before.job, event)
        if job is before.job:
            return job, actions
        self._change(connection, before, job, now, facts)
        left = before.job.waiting_for - job.waiting_for
        for after in left if isinstance(event, DependencySucceeded) else ():
            connection.execute(sql("set_dependency"), {"job": number, "after": after, "state": "succeeded"})
        if job.state is not before.job.state:
            self._note(connection, number, now, "state", f"{job.state}: {job.error}" if job.error else str(job.state))
        return job, actions

    def _change(self, connection: sqlite3.Connection, before: StoredJob, job: Job, now: float, facts: Facts) -> None:
        held = job.state in ACTIVE
        started = before.started_at if before.job.state not in TERMINAL else None  # one that is tried again begins anew
        if started is None and job.state is State.PLANNING:
            started = now
        values = {
            "id": job.id, "read_epoch": before.job.epoch, "state": job.state, "epoch": job.epoch,
            "attempts": job.attempts, "cancelling": job.cancelling, "chunks": job.chunks,
            "chunks_done": job.chunks_done, "error": job.error and storable(job.error),
            "story": json.dumps(job.story), "at": now, "started_at": started,
            "finished_at": now if job.state in TERMINAL else None,
            "runner": (facts.runner or before.runner) if held else None,
            "lease_until": (facts.lease_until or before.lease_until) if held else None,
            "receipt": json.dumps(facts.receipt) if facts.receipt is not None else None,
        }  # fmt: skip
        self._changed.add(job.id)
        if connection.execute(sql("change_job"), values).rowcount != 1:
            raise StorageError(f"{self.path}: job {job.id} was changed by another process; is another server running?")
        if job.state in TERMINAL:
            lasted = None if started is None else max(now - started, 0.0)
            self._ended.append(Ended(before.asked.workload, job.state, lasted))

    def _note(self, connection: sqlite3.Connection, job: str, at: float, kind: str, message: str) -> None:
        connection.execute(sql("add_event"), {"job": job, "at": at, "kind": kind, "message": storable(message)})
        self._changed.add(job)

    def retry(self, job: str, *, now: float) -> tuple[Job, tuple[Action, ...]]:
        """Queues a failed or cancelled job again; it waits for what it comes after as that stands now.

        Raises OutputTaken where another job has meanwhile begun to write the output, and DependencyForgotten where
        nobody knows any more what it comes after.
        """
        with storing(self.path), self._write() as connection:
            asked = self._job(connection, job).asked
            using = self._writer(connection, asked)
            if using is not None and using["id"] != job:
                raise OutputTaken(f"{asked.output}: job {using['id']} writes it; wait for it, then retry")
            connection.execute(sql("reset_dependencies"), {"job": job})
            waiting = self._waiting_for(connection, job)
            result = self._apply(connection, job, jobs.RetryRequested(waiting), now, Facts())
            for after in sorted(waiting):
                try:
                    state = self._job(connection, after).job.state
                except NoSuchJob as error:
                    raise DependencyForgotten(
                        f"job {job} comes after job {after}, which is forgotten: submit it anew"
                    ) from error
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
            claimed = self._job(connection, found["id"])
        metrics.job_queue_wait.labels(claimed.asked.workload).observe(max(now - found["changed_at"], 0.0))
        return claimed

    def renew(self, runner: str, at_work: Sequence[str], *, now: float, lease_s: float) -> None:
        """The runner is at work on these jobs: they are its own for longer."""
        if not at_work:
            return
        values = {"runner": runner, "jobs": json.dumps(at_work), "until": now + lease_s}
        with storing(self.path), self._write() as connection:
            connection.execute(sql("renew_leases"), values)

    def lost(self, runner: str, *, now: float, others_too: bool) -> list[tuple[str, int]]:
        """Jobs, with their epochs, whose lease has ended; with `others_too` all that another runner holds: one that
        was killed, where only one may be alive."""
        query, values = ("leases_of_others", {"runner": runner}) if others_too else ("expired_leases", {"now": now})
        with storing(self.path), self._read() as connection:
            return [(row["id"], row["epoch"]) for row in connection.execute(sql(query), values)]

    def abandoned(self, job: str) -> bool:
        """Whether a job is cancelled and no run, of whichever job, is at work on its output."""
        with storing(self.path), self._read() as connection:
            found = self._job(connection, job)
            using = self._writer(connection, found.asked)
        return found.job.state is State.CANCELLED and (using is None or using["state"] not in ACTIVE)

    def lately_cancelled(self, within_s: float) -> list[str]:
        """Jobs that were cancelled so shortly before the last thing that happened to any."""
        with storing(self.path), self._read() as connection:
            return [row["id"] for row in connection.execute(sql("lately_cancelled"), {"within": within_s})]

    def log(self, job: str, message: str, *, now: float) -> None:
        """A line in the job's log."""
        with storing(self.path), self._write() as connection:
            self._note(connection, job, now, "log", message)

    def prune(self, *, now: float, keep_s: float = float("inf"), most: int = PRUNED_AT_ONCE) -> list[str]:
        """Forget jobs that have been over for so long, some at once, and what may no longer be asked for again.

        One that another, not yet over, comes after is kept. Returns the ids of those forgotten; outputs stay.
        """
        with storing(self.path), self._write() as connection:
            connection.execute(sql("forget_requests"), {"before": now - min(keep_s, REQUEST_KEPT_S)})
            rows = connection.execute(sql("prune_jobs"), {"before": now - keep_s, "most": most}).fetchall()
            return [row["id"] for row in rows]

    # Reading

    def job(self, job: str) -> StoredJob:
        """Raises NoSuchJob."""
        with storing(self.path), self._read() as connection:
            return self._job(connection, job)

    def _job(self, connection: sqlite3.Connection, job: str) -> StoredJob:
        row = connection.execute(sql("job"), {"id": job}).fetchone()
        if row is None:
            raise NoSuchJob(f"there is no job {job}")
        return stored(row, self._waiting_for(connection, job))

    def _waiting_for(self, connection: sqlite3.Connection, job: str) -> frozenset[str]:
        return frozenset(row["after"] for row in connection.execute(sql("waiting_for"), {"job": job}))

    def list_jobs(self, wanted: JobFilter = ANY, *, limit: int = 100) -> list[StoredJob]:
        """The newest first."""
        with storing(self.path), self._read() as connection:
            rows = connection.execute(sql("list_jobs"), asdict(wanted) | {"limit": limit}).fetchall()
        return [stored(row, frozenset()) for row in rows]

    def list_json(self, wanted: JobFilter, *, limit: int) -> tuple[str, int | None]:
        """`list_jobs` as a JSON list of what `JobView` has, made by SQLite; and `before` of the next page, if any."""
        with storing(self.path), self._read() as connection:
            page = connection.execute(sql("list_json"), asdict(wanted) | {"limit": limit}).fetchone()
            more = asdict(replace(wanted, before=page["last"])) | {"limit": 1}
            full = page["count"] == limit and connection.execute(sql("fitting"), more).fetchone() is not None
        return str(page["jobs"]), page["last"] if full else None

    def events(self, job: str, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """What happened to a job since the event of that number, in order."""
        with storing(self.path), self._read() as connection:
            rows = connection.execute(sql("events_of_job"), {"job": job, "after": after, "limit": limit}).fetchall()
        return [StoredEvent(**dict(row)) for row in rows]

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state."""
        with storing(self.path), self._read() as connection:
            rows = connection.execute(sql("count_by_state")).fetchall()
        return dict.fromkeys(State, 0) | {State(row["state"]): row["jobs"] for row in rows}

    def oldest_queued(self) -> float | None:
        """Since when the job waits that waits longest of those that could be run."""
        with storing(self.path), self._read() as connection:
            found: float | None = connection.execute(sql("oldest_queued")).fetchone()[0]
            return found

    def check(self) -> None:
        """StorageError where nothing can be written, or would be found after a restart.

        Only what is written shows whether the disk takes it: the version is, as it stands. That is little, and jobs
        take more.
        """
        self._check_is_there()
        with storing(self.path):
            room = os.statvfs(self.path.parent)
            left = room.f_bavail * room.f_frsize
        if left < LEAST_ROOM_BYTES:
            raise StorageError(f"{self.path.parent}: {format_bytes(left)} are left on the disk; make room")
        with storing(self.path), self._write() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            connection.execute(f"PRAGMA user_version = {version}")

    def _check_is_there(self) -> None:
        """StorageError where the file that is open here has another one, or none, under its name."""
        with storing(self.path):
            found = _identity(self.path) if self.path.exists() else None
        if found != self._file:
            what = "is gone" if found is None else "is another file"
            raise StorageError(
                f"{self.path}: {what} since the service opened it; put it back, or start the service anew"
            )

    def _read(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._database.reading()

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        with self._database.writing() as connection:
            self._ended, self._changed = [], set()
            yield connection
            ended, changed = self._ended, self._changed
        for each in ended:
            each.count()
        self.news.tell(changed)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _halved(amount: float | None, age_s: float | None) -> float | None:
    return None if amount is None or age_s is None else float(amount * 0.5 ** (max(age_s, 0.0) / HALF_LIFE_S))
