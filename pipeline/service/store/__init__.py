"""Jobs on disk: SQLite with a write-ahead log, every commit synced before it is acknowledged.

The SQL is in schema.sql and queries.sql.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline import metrics
from pipeline.api_models import TERMINAL, EventView, State
from pipeline.errors import ParameterError
from pipeline.service.jobs import ACTIVE, Claimed, DependencyFailed, Event, Outcome, RetryRequested
from pipeline.service.store.limits import NOT_TOGETHER, HoldKind, Rules, Subject
from pipeline.service.store.opened import OpenStore
from pipeline.service.store.records import NO_FACTS, Delivery, Facts, JobFilter, NewJob, StoredJob, Usage, Used, stored
from pipeline.service.store.transaction import NoSuchJob, OutputTaken, Reading, Transaction

# Besides what is defined here.
__all__ = ["Delivery", "Facts", "JobFilter", "NewJob", "NoSuchJob", "OutputTaken", "StoredJob", "Usage", "Used"]

ANY = JobFilter()
PRUNED_AT_ONCE = 200  # keeps transactions short
SESSIONS_OF_A_TOKEN = 100
MOST_COMPANY = 1024  # of jobs that run together
# The numbers of the jobs of an array follow each other.
MOST_OF_AN_ARRAY = 10_000
REQUEST_KEPT_S = 7 * 24 * 3600.0  # how long an idempotency key is remembered


class DependencyForgotten(ParameterError):
    """A job cannot be retried: a job that it depends on has been forgotten."""


class Store(OpenStore):
    """The jobs of one state folder. Thread-safe."""

    # Accepting

    def accept(
        self,
        new: Sequence[NewJob],
        *,
        now: float,
        key: str | None = None,
        body_sha256: str = "",
        most_of_an_owner: int | None = None,
        groups: Sequence[str] | None = None,
    ) -> list[str]:
        """Puts jobs on disk, all or none, and returns their ids in order.

        key              : an idempotency key; the same owner, key and body return the same ids
        most_of_an_owner : limit on the owner's unfinished jobs, these included
        groups           : the owner's groups: those of jobs that these may come after; None: any

        Raises ParameterError if the key came with another body, an `after` is unknown or these are too many,
        OutputTaken if an unfinished job writes the same output, StorageError if the database was moved or the disk is
        nearly full.
        """
        self._check_is_there()
        with self._write(now) as transaction:
            owner = new[0].owner
            if key is not None:
                found = transaction.row("request", owner=owner, key=key)
                if found is not None:
                    if found["body_sha256"] != body_sha256:
                        raise ParameterError(f"Idempotency-Key {key}: was used for another job; use a new key")
                    return list(json.loads(found["jobs"]))
            self._check_room()
            rules = self._rules(transaction, now)
            rules.refuse_over_quota(owner, new[0].group)
            rules.refuse_too_many(owner, new[0].group, len(new), most_of_an_owner)
            befores = frozenset().union(*(each.after | each.after_any for each in new))
            states = {before: transaction.job(before, groups).job.state for before in befores}
            ids = [transaction.add(each, states) for each in new]
            if key is not None:
                jobs = json.dumps(ids)
                transaction.execute("add_request", owner=owner, key=key, body_sha256=body_sha256, jobs=jobs, at=now)
            return ids

    def has_request(self, owner: str, key: str) -> bool:
        """Whether jobs were accepted under this idempotency key."""
        with self._read() as reading:
            return reading.row("request", owner=owner, key=key) is not None

    # Changing

    def apply(self, job: str, event: Event, *, now: float, facts: Facts = NO_FACTS) -> Outcome:
        """Applies an event to a job and to those that wait for it; returns the job and the actions to do.

        Raises NoSuchJob, and IllegalTransition if the event cannot happen.
        """
        return self.apply_all([(job, event, facts)], now=now)[0]

    def apply_all(self, changes: Sequence[tuple[str, Event, Facts]], *, now: float) -> list[Outcome]:
        """As `apply`, for several events in one transaction."""
        with self._write(now) as transaction:
            transaction.ahead = transaction.rows([job for job, _, _ in changes])
            return [_applied(transaction, job, event, facts) for job, event, facts in changes]

    def retry(self, job: str, *, now: float) -> Outcome:
        """Queues a failed or cancelled job again; it waits for its dependencies as they are now.

        Raises OutputTaken if another job writes the output by now, and DependencyForgotten if a dependency has been
        forgotten.
        """
        with self._write(now) as transaction:
            asked = transaction.job(job).asked
            using = transaction.writer(asked)
            if using is not None and using["id"] != job:
                writer = f"job {using['id']}" if using["owner_group"] == asked.group else "a job of another group"
                raise OutputTaken(f"{asked.output}: {writer} writes it; wait for it, then retry")
            waiting, waiting_for_end = transaction.waiting_for(job)
            result = transaction.apply(job, RetryRequested(waiting, waiting_for_end))
            for after in sorted(waiting):
                try:
                    state = transaction.job(after).job.state
                except NoSuchJob as error:
                    raise DependencyForgotten(
                        f"job {job} comes after job {after}, which is forgotten: submit it again as a new job"
                    ) from error
                if state in TERMINAL:
                    result = transaction.apply(job, DependencyFailed(after, state))
            return result

    def claim(
        self,
        runner: str,
        *,
        now: float,
        lease_s: float,
        owner_cap: int,
        but: Collection[str] = (),
        together: Mapping[str, int] = NOT_TOGETHER,
    ) -> StoredJob | None:
        """Claims the next job for this runner until its lease ends; None if there is none.

        owner_cap : maximum number of one owner's active jobs, unless an operator has set another
        but       : owners whose jobs wait
        together  : by owner, how many active jobs run together with another one: they do not count
        """
        with self._write(now) as transaction:
            found = self._claimable(transaction, now, owner_cap, but, together)
            if found is None:
                return None
            facts = Facts(runner=runner, lease_until=now + lease_s)
            transaction.apply(found["id"], Claimed(found["epoch"] + 1), facts)
            claimed = transaction.job(found["id"])
        metrics.job_queue_wait.labels(claimed.asked.workload).observe(max(now - found["changed_at"], 0.0))
        return claimed

    def company(self, job: str, *, most: int) -> list[StoredJob]:
        """Queued jobs of the same array, with the same parameters and limits, that may run together with this one: the
        next ones, none of which has been claimed before."""
        with self._read() as reading:
            return [stored(row, frozenset(), frozenset()) for row in _company(reading, job, most)]

    def claim_company(
        self, job: str, wanted: Sequence[StoredJob], runner: str, *, now: float, lease_s: float
    ) -> list[StoredJob]:
        """Claims those of these jobs that are still company of an active job, as many as may run."""
        facts, claimed = Facts(runner=runner, lease_until=now + lease_s), []
        with self._write(now) as transaction:
            asked, rules = transaction.job(job).asked, self._rules(transaction, now)
            blocked = rules.blocked(sys.maxsize)
            if blocked is None or asked.owner in blocked.owners or asked.group in blocked.groups:
                return []
            room = rules.room(asked.owner, asked.group)
            transaction.ahead = {row["id"]: row for row in _company(transaction, job, MOST_COMPANY)}
            still = [each for each in wanted if each.job.id in transaction.ahead]
            for each in still[: int(min(room, MOST_COMPANY))]:
                after, _ = transaction.apply(each.job.id, Claimed(1), facts)
                claimed.append(
                    replace(
                        each, job=after, changed_at=now, started_at=now, runner=runner, lease_until=facts.lease_until
                    )
                )
        waits = metrics.job_queue_wait.labels(asked.workload)
        for each in still[: len(claimed)]:
            waits.observe(max(now - each.changed_at, 0.0))
        return claimed

    def most_urgent(
        self, *, now: float, owner_cap: int, but: Collection[str] = (), together: Mapping[str, int] = NOT_TOGETHER
    ) -> int | None:
        """The priority of the job that `claim` would give; None if there is none."""
        with self._read() as reading:
            found = self._claimable(reading, now, owner_cap, but, together)
            return None if found is None else int(found["priority"])

    def _claimable(
        self, reading: Reading, now: float, owner_cap: int, but: Collection[str], together: Mapping[str, int]
    ) -> sqlite3.Row | None:
        blocked = self._rules(reading, now).blocked(owner_cap, together)
        if blocked is None:
            return None
        owners, groups = json.dumps([*blocked.owners, *but]), json.dumps(blocked.groups)
        return reading.row("claimable", blocked_owners=owners, blocked_groups=groups, now=now)

    def note_estimate(self, job: str, estimate: Mapping[str, Any], work: int, *, now: float) -> None:
        """Notes what the job will take by its plan."""
        with self._write(now) as transaction:
            transaction.execute("note_estimate", id=job, work=work, estimate=json.dumps(estimate))
            transaction.changed.add(job)

    def renew(self, runner: str, at_work: Sequence[str], *, now: float, lease_s: float) -> None:
        """Extends the leases of the jobs that the runner is working on."""
        if not at_work:
            return
        with self._write(now) as transaction:
            transaction.execute("renew_leases", runner=runner, jobs=json.dumps(at_work), until=now + lease_s)

    def lost(self, runner: str, *, now: float, lease_s: float, others_too: bool) -> list[tuple[str, int]]:
        """Jobs, with their epochs, whose lease has ended, or was given before the clock was set back; with `others_too`
        all that another runner holds, which was killed if only one may be alive."""
        with self._read() as reading:
            statement = "leases_of_others" if others_too else "expired_leases"
            return [
                (row["id"], row["epoch"]) for row in reading.execute(statement, runner=runner, now=now, lease=lease_s)
            ]

    def abandoned(self, job: str) -> bool:
        """Whether a job is cancelled and its partial output is of no use: no run works on it, and no later job that
        waits again after a kill, or failed and may be retried, would continue it."""
        with self._read() as reading:
            found = reading.job(job)
            if found.job.state is not State.CANCELLED:
                return False
            using = reading.writer(found.asked)
            if using is not None and using["state"] in ACTIVE:
                return False
            written = found.asked.written or found.asked.output
            return reading.row("kept_for_another", job=job, written=written) is None

    def lately_cancelled(self, within_s: float) -> list[str]:
        """Jobs that were cancelled at most `within_s` before the newest event."""
        with self._read() as reading:
            return [row["id"] for row in reading.execute("lately_cancelled", within=within_s)]

    def newest_event(self) -> float | None:
        """When the last event was written, by the clock of then; None before the first."""
        with self._read() as reading:
            row = reading.row("newest_event")
            return None if row is None else float(row["at"])

    def log(self, job: str, message: str, *, now: float) -> None:
        """Adds a line to the job's log."""
        with self._write(now) as transaction:
            transaction.note(job, "log", message)

    def due_deliveries(self, *, now: float, most: int) -> list[Delivery]:
        """Notifications to send now, the longest due first."""
        with self._read() as reading:
            return [Delivery(**dict(row)) for row in reading.execute("due_deliveries", now=now, most=most)]

    def put_off_delivery(self, delivery: str, *, due: float) -> None:
        """A try has failed; the next one is at `due`."""
        with self._write(due) as transaction:
            transaction.execute("put_off_delivery", id=delivery, due=due)

    def forget_delivery(self, delivery: str) -> None:
        """It was delivered, or is given up."""
        with self._write(0.0) as transaction:
            transaction.execute("forget_delivery", id=delivery)

    def prune(self, *, now: float, keep_s: float = float("inf"), most: int = PRUNED_AT_ONCE) -> list[str]:
        """Forgets some jobs that were over `keep_s` ago, and old idempotency keys.

        Jobs that an unfinished job depends on are kept. Returns the ids of those forgotten; outputs stay.
        """
        with self._write(now) as transaction:
            transaction.execute("forget_requests", before=now - min(keep_s, REQUEST_KEPT_S))
            rows = transaction.execute("prune_jobs", before=now - keep_s, most=most).fetchall()
            return [row["id"] for row in rows]

    # What operators do

    def hold(self, kind: HoldKind, name: str, *, by: str, now: float) -> None:
        """Lets the queued jobs of an owner, a group or everybody ("all", "") wait until `release`."""
        with self._write(now) as transaction:
            transaction.execute("hold", kind=kind, name=name, held_by=by, at=now)

    def release(self, kind: HoldKind, name: str, *, now: float) -> None:
        """Ends a hold; harmless without one."""
        with self._write(now) as transaction:
            transaction.execute("release", kind=kind, name=name)

    def hold_jobs(self, jobs: Sequence[str], held: bool, *, by: str, now: float) -> None:
        """Holds jobs, or releases them. One that runs goes on. Raises NoSuchJob, and then changes none."""
        with self._write(now) as transaction:
            for job in jobs:
                transaction.job(job)
                if transaction.execute("hold_job", id=job, held=held).rowcount:
                    transaction.note(job, "log", f"{'held' if held else 'released'} by {by}")

    def unfinished(self, *, owner: str | None = None, group: str | None = None, limit: int) -> list[str]:
        """Unfinished jobs of an owner, a group or everybody that are not being cancelled, the newest first."""
        with self._read() as reading:
            return [row["id"] for row in reading.execute("unfinished", owner=owner, group=group, limit=limit)]

    def set_cap(self, kind: Subject, name: str, what: str, value: float, *, now: float) -> None:
        """Sets a limit, in force from the next submission and claim on."""
        with self._write(now) as transaction:
            transaction.execute("set_cap", kind=kind, name=name, what=what, value=value)

    def remove_cap(self, kind: Subject, name: str, what: str, *, now: float) -> None:
        """Removes a limit; harmless without one."""
        with self._write(now) as transaction:
            transaction.execute("remove_cap", kind=kind, name=name, what=what)

    def rules(self, *, now: float) -> Rules:
        """The holds and caps."""
        with self._read() as reading:
            return self._rules(reading, now)

    def usage(
        self, *, first: int, until: int | None = None, groups: Sequence[str] | None = None, daily: bool = False
    ) -> list[Usage]:
        """The accounts from day `first` to before day `until`, by owner and group.

        groups : only of these; None: all
        daily  : each day by itself
        """
        with self._read() as reading:
            rows = [dict(row) for row in reading.execute("usage_days", first=first, until=until)]
        found: dict[tuple[int, str, str], Usage] = {}
        for row in rows:
            entry = Usage(group=row.pop("owner_group"), **row)
            if groups is None or entry.group in groups:
                key = entry.day or 0 if daily else 0, entry.owner, entry.group
                entry = entry if daily else replace(entry, day=None)
                found[key] = found[key] + entry if key in found else entry
        return [found[key] for key in sorted(found)]

    # Sessions of browsers: the token's digest and the expiry, by the cookie's digest

    def begin_session(self, digest: str, *, token: str, expires_at: float, now: float) -> dict[str, tuple[str, float]]:
        """Adds a session; those of the same token that are too many end. Returns all."""
        with self._write(now) as transaction:
            transaction.execute("add_session", digest=digest, token=token, expires_at=expires_at)
            transaction.execute("forget_sessions", now=now, token=token, most=SESSIONS_OF_A_TOKEN)
        return self.sessions(now=now)

    def end_session(self, digest: str, *, now: float) -> dict[str, tuple[str, float]]:
        """Ends a session, if it is there, and returns the others."""
        with self._write(now) as transaction:
            transaction.execute("end_session", digest=digest)
        return self.sessions(now=now)

    def sessions(self, *, now: float) -> dict[str, tuple[str, float]]:
        """The sessions that have not expired."""
        with self._read() as reading:
            rows = reading.execute("sessions", now=now).fetchall()
        return {row["digest"]: (row["token"], row["expires_at"]) for row in rows}

    # Reading

    def job(self, job: str) -> StoredJob:
        """Raises NoSuchJob."""
        with self._read() as reading:
            return reading.job(job)

    def jobs_json(self, jobs: Sequence[str]) -> str:
        """A JSON list of the `JobView` of these jobs, in the order of submission, built by SQLite."""
        with self._read() as reading:
            return str(reading.execute("jobs_json", ids=json.dumps(jobs)).fetchone()[0])

    def list_jobs(self, wanted: JobFilter = ANY, *, limit: int = 100) -> list[StoredJob]:
        """The newest first."""
        with self._read() as reading:
            rows = reading.execute("list_jobs", **wanted.values(), limit=limit).fetchall()
        return [stored(row, frozenset(), frozenset()) for row in rows]

    def list_json(self, wanted: JobFilter, *, limit: int) -> tuple[str, int | None]:
        """`list_jobs` as a JSON list of `JobView`, built by SQLite; and `before` of the next page, if any."""
        with self._read() as reading:
            page = reading.execute("list_json", **wanted.values(), limit=limit).fetchone()
            more = replace(wanted, before=page["last"]).values()
            full = page["count"] == limit and reading.row("fitting", **more, limit=1) is not None
        return str(page["jobs"]), page["last"] if full else None

    def events(self, job: str, *, after: int = 0, limit: int = 1000) -> list[EventView]:
        """Events of a job after the one numbered `after`, in order."""
        with self._read() as reading:
            rows = reading.execute("events_of_job", job=job, after=after, limit=limit).fetchall()
        return [EventView(**dict(row)) for row in rows]

    def counts(self, groups: Sequence[str] | None = None) -> dict[State, int]:
        """The number of jobs in each state; `groups`: only of these."""
        with self._read() as reading:
            if groups is None:
                rows = reading.execute("count_by_state").fetchall()
            else:
                rows = reading.execute("count_by_state_in_groups", groups=json.dumps(groups)).fetchall()
        return dict.fromkeys(State, 0) | {State(row["state"]): row["jobs"] for row in rows}

    def oldest_queued(self) -> float | None:
        """When the longest-waiting job that could run began to wait; None if there is none."""
        with self._read() as reading:
            found: float | None = reading.execute("oldest_queued").fetchone()[0]
            return found


def _applied(transaction: Transaction, job: str, event: Event, facts: Facts) -> Outcome:
    if facts.used is not None:  # even if the event is ignored
        whose = transaction.row(
            "add_use", id=job, seconds=facts.used.device_seconds, run_seconds=facts.run_seconds,
            memory_bytes=facts.memory_bytes, gpu_memory_bytes=facts.gpu_memory_bytes,
        )  # fmt: skip
        if whose is not None:
            transaction.account(whose["owner"], whose["owner_group"], runs=1, **vars(facts.used))
    return transaction.apply(job, event, facts)


def _company(reading: Reading, job: str, most: int) -> list[sqlite3.Row]:
    return reading.execute("company", id=job, within=MOST_OF_AN_ARRAY, most=most).fetchall()
