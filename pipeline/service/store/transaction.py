"""Reads and transactions on the stored jobs.

Each change of a job is one transaction, which keeps other processes from writing: its row is read, the state machine of
`pipeline.service.jobs` decides, and the row is written.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pipeline.api_models import TERMINAL, State
from pipeline.errors import OutputError, ParameterError
from pipeline.service.jobs import ACTIVE, DependencyFailed, Event, Job, Outcome, TellDependents, handle, submitted
from pipeline.service.store.records import (
    NO_FACTS,
    Ended,
    Facts,
    NewJob,
    StoredJob,
    Usage,
    day_of,
    job_of,
    storable,
    stored,
)
from pipeline.service.store.statements import sql


class NoSuchJob(ParameterError):
    """There is no job with this id."""


class OutputTaken(OutputError):
    """An unfinished job writes the same output."""


class Reading:
    """Reads on a connection in exclusive use."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, **values: Any) -> sqlite3.Cursor:
        """Executes the statement with this name in queries.sql."""
        return self._connection.execute(sql(statement), values)

    def row(self, statement: str, **values: Any) -> sqlite3.Row | None:
        """The first row, if any."""
        found: sqlite3.Row | None = self.execute(statement, **values).fetchone()
        return found

    def job(self, job: str, groups: Sequence[str] | None = None) -> StoredJob:
        """Raises NoSuchJob; with `groups`, also for jobs of others."""
        row = self.rows([job]).get(job)
        if row is None or (groups is not None and row["owner_group"] not in groups):
            raise NoSuchJob(f"there is no job {job}")
        return stored(row, *self._waits(row))

    def rows(self, jobs: Sequence[str]) -> dict[str, sqlite3.Row]:
        """The rows of those of the jobs that are there, by id."""
        return {row["id"]: row for row in self.execute("jobs", ids=json.dumps(jobs))}

    def _waits(self, row: sqlite3.Row) -> tuple[frozenset[str], frozenset[str]]:
        return self.waiting_for(row["id"]) if row["waits"] else (frozenset(), frozenset())

    def waiting_for(self, job: str) -> tuple[frozenset[str], frozenset[str]]:
        """The dependencies that have not succeeded yet, and those that have not ended yet, whose endings do not
        matter."""
        rows = self.execute("waiting_for", job=job).fetchall()
        success, end = (frozenset(row["after"] for row in rows if row["any_end"] == kind) for kind in (0, 1))
        return success, end

    def writer(self, asked: NewJob) -> sqlite3.Row | None:
        """The unfinished job that writes the same output, if any."""
        return self.row("output_in_use", written=asked.written or asked.output)


class Transaction(Reading):
    """Changes made together; `changed`, `ended` and `used` are for those to notify once they are on disk."""

    def __init__(self, connection: sqlite3.Connection, now: float, webhook: str | None) -> None:
        """webhook : a URL to notify of every job that ends"""
        super().__init__(connection)
        self._webhook = webhook
        self._now = now
        self.changed: set[str] = set()  # ids of jobs
        self.ended: list[Ended] = []
        self.used: list[Usage] = []
        self.ahead: dict[str, sqlite3.Row] = {}  # rows of jobs read before their first change, by id
        self._turns: Counter[str | None] = Counter()  # taken by added jobs, by array
        self._events: list[Mapping[str, Any]] = []
        self._accounts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # by owner and group

    def finish(self) -> None:
        """Writes the events and accounts of all changes."""
        self._connection.executemany(sql("add_event"), self._events)
        for (owner, group), amounts in self._accounts.items():
            usage = Usage(day=day_of(self._now), owner=owner, group=group, **amounts)
            self.execute("add_usage", **vars(usage))
            self.used.append(usage)
            if usage.runs:
                self.execute("add_share", owner=owner, seconds=usage.device_seconds, at=self._now)

    def add(self, new: NewJob, states: Mapping[str, State]) -> str:
        """Adds a job and returns its id. `states`: of its dependencies, at least."""
        using = self.writer(new)
        if using is not None:
            writer = f"job {using['id']}" if using["owner_group"] == new.group else "a job of another group"
            raise OutputTaken(f"{new.output}: {writer} writes it; wait for it, or name another output")
        befores = {after: states[after] for after in sorted(new.after)}
        job = submitted(secrets.token_hex(6))
        values = {
            "id": job.id, "owner": new.owner, "group": new.group, "workload": new.workload, "input": new.input,
            "output": new.output, "written": new.written, "parameters": json.dumps(new.parameters, allow_nan=False),
            "priority": new.priority, "array_id": new.array_id, "array_index": new.array_index, "state": job.state,
            "story": json.dumps(job.story), "at": self._now, "throttle": new.throttle,
            "parked": self._is_parked(new),
            "limits": new.limits.model_dump_json(), "webhook": new.webhook, "no_clobber": new.no_clobber,
        }  # fmt: skip
        self.execute("add_job", **values)
        held = [
            {
                "job": job.id,
                "after": after,
                "state": "succeeded" if states[after] in met else "waiting",
                "any_end": any_end,
            }
            for any_end, afters, met in ((0, new.after, (State.SUCCEEDED,)), (1, new.after_any - new.after, TERMINAL))
            for after in sorted(afters)
        ]
        self._connection.executemany(sql("add_dependency"), held)
        self.note(job.id, "state", str(job.state))
        for after, state in befores.items():
            if state in (State.FAILED, State.CANCELLED):
                self.apply(job.id, DependencyFailed(after, state))
        return job.id

    def apply(self, job: str, event: Event, facts: Facts = NO_FACTS) -> Outcome:
        """Applies an event to this job, then iteratively to its dependents: their chain may have any length.

        Returns the job and the actions to do.
        """
        after, actions = self._apply_alone(job, event, facts)
        untold = deque((job, action) for action in actions)
        while untold:
            ended, action = untold.popleft()
            if isinstance(action, TellDependents):
                told = action.event(ended)
                for row in self.execute("dependents", after=ended).fetchall():
                    _, following = self._apply_alone(row["job"], told, NO_FACTS)
                    untold.extend((row["job"], each) for each in following)
                met = "dependency_succeeded" if action.state is State.SUCCEEDED else "dependency_ended"
                self.execute(met, after=ended)
        return after, tuple(action for action in actions if not isinstance(action, TellDependents))

    def _apply_alone(self, number: str, event: Event, facts: Facts) -> Outcome:
        row = self.ahead.pop(number, None) or self.rows([number]).get(number)
        if row is None:
            raise NoSuchJob(f"there is no job {number}")
        before = job_of(row, *self._waits(row))
        job, actions = handle(before, event)
        if job is before:
            return job, actions
        self._change(row, before, job, facts)
        if job.state is not before.state:
            self.note(number, "state", f"{job.state}: {job.error}" if job.error else str(job.state))
        return job, actions

    def _change(self, row: sqlite3.Row, before: Job, job: Job, facts: Facts) -> None:
        now, held = self._now, job.state in ACTIVE
        started = row["started_at"] if before.state not in TERMINAL else None  # a retried job starts again
        if started is None and job.state is State.PLANNING:
            started = now
        values = {
            "id": job.id, "state": job.state, "epoch": job.epoch, "attempts": job.attempts, "deaths": job.deaths,
            "preemptions": job.preemptions, "cancelling": job.cancelling, "chunks": job.chunks,
            "chunks_done": job.chunks_done, "error": job.error and storable(job.error),
            "story": json.dumps(job.story), "at": now, "started_at": started,
            "finished_at": now if job.state in TERMINAL else None,
            "runner": (facts.runner or row["runner"]) if held else None,
            "lease_until": (facts.lease_until or row["lease_until"]) if held else None,
            "receipt": json.dumps(facts.receipt) if facts.receipt is not None else None,
            "again": before.state in TERMINAL,
        }  # fmt: skip
        self.changed.add(job.id)
        self.execute("change_job", **values)
        if facts.estimate is not None:
            self.execute("note_estimate", id=job.id, work=facts.work, estimate=json.dumps(facts.estimate))
        if job.state is State.SUCCEEDED:
            self.execute("add_rate", id=job.id)
        if row["throttle"] is not None:
            self._pass_turns(row["array_id"], row["throttle"], before, job)
        if job.state in TERMINAL:
            self._tell_webhooks(row["webhook"], job.id)
            lasted = None if started is None else max(now - started, 0.0)
            self.ended.append(Ended(row["workload"], job.state, lasted))
            self.account(row["owner"], row["owner_group"], **{job.state.value: 1})

    def _is_parked(self, new: NewJob) -> bool:
        """Whether the new job has to wait until others of its array have ended."""
        if new.throttle is None or self._turns[new.array_id] == new.throttle:
            return new.throttle is not None
        self._turns[new.array_id] += 1
        return False

    def _pass_turns(self, array_id: str, throttle: int, before: Job, job: Job) -> None:
        """A job of a throttled array has changed: if it has ended, the next one may run; if it is queued again, it
        needs a turn."""
        if job.state in TERMINAL and before.state not in TERMINAL:
            if self.row("park", id=job.id, parked=0) is None:  # it had a turn
                self.changed |= {row["id"] for row in self.execute("unpark_next", array_id=array_id, at=self._now)}
        elif before.state in TERMINAL and job.state not in TERMINAL:
            taken = self.execute("turns_taken", array_id=array_id, id=job.id, most=throttle).fetchone()[0]
            self.execute("park", id=job.id, parked=int(taken >= throttle))

    def account(self, owner: str, group: str, **amounts: float) -> None:
        """Adds to today's account of an owner and a group; device-seconds of runs also to the owner's share."""
        self._accounts[owner, group].update(amounts)

    def _tell_webhooks(self, webhook: str | None, job: str) -> None:
        for url in dict.fromkeys(filter(None, (self._webhook, webhook))):
            stamp = datetime.fromtimestamp(self._now, UTC).isoformat(timespec="seconds")
            delivery = f"msg_{secrets.token_hex(12)}"
            self.execute("add_delivery", id=delivery, job=job, url=url, stamp=stamp, at=self._now)

    def note(self, job: str, kind: str, message: str) -> None:
        """Adds an event of the job."""
        self._events.append({"job": job, "at": self._now, "kind": kind, "message": storable(message)})
        self.changed.add(job)
