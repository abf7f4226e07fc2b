"""Databases of every version that there was, with jobs in every state, are brought to the newest one and go on."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.api_models import State
from pipeline.service.jobs import CancelRequested
from pipeline.service.store import JobFilter, NewJob, OutputTaken, Store, statements

FOLDER = Path(__file__).parent / "schemas"
VERSIONS = sorted(int(path.stem) for path in FOLDER.iterdir())
ACTIVE = ("queued", "planning", "running", "publishing")
PARAMETERS = {"size": "3", "axes": ["y", "x"]}


def columns(connection, table):
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def insert(connection, table, **values):
    """A row with those of the values that the table of this version has."""
    known = {name: value for name, value in values.items() if name in columns(connection, table)}
    marks = ", ".join("?" * len(known))
    connection.execute(f"INSERT INTO {table} ({', '.join(known)}) VALUES ({marks})", list(known.values()))


@pytest.fixture(params=VERSIONS)
def old(request, tmp_path):
    """The path of a database of one version, with a job in each state."""
    path = tmp_path / "jobs.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FOLDER / f"{request.param}.sql").read_text())
        for number, state in enumerate(State, 1):
            is_over = state not in ACTIVE
            insert(
                connection, "jobs", number=number, id=f"{number:012x}", owner="ada", workload="smooth", input="in.npy",
                output=f"{state}.npy", written=f"/data/{state}.npy", parameters=json.dumps(PARAMETERS), priority=-1,
                state=state, epoch=0 if state == "queued" else 2, attempts=1, cancelling=0, chunks=8, chunks_done=3,
                error="no" if state == "failed" else None, story='["submitted → queued"]', submitted_at=10.0 + number,
                changed_at=20.0, started_at=15.0, finished_at=20.0 if is_over else None, device_seconds=2.5,
                runner=None if is_over or state == "queued" else "host-1", lease_until=30.0,
                receipt='{"chunks": 8}' if state == "succeeded" else None, deaths=0,
            )  # fmt: skip
        succeeded = f"{[*State].index(State.SUCCEEDED) + 1:012x}"
        insert(
            connection,
            "dependencies",
            job="000000000001",
            after=succeeded,
            state="waiting" if request.param < 6 else "succeeded",
        )
        insert(connection, "requests", owner="ada", key="k", body_sha256="b", jobs='["000000000001"]', at=10.0)
        insert(connection, "events", number=7, job="000000000001", at=10.0, kind="state", message="queued")
        insert(connection, "shares", owner="ada", device_seconds=2.5, at=20.0)
        connection.commit()
    return path


def schema(path):
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
        tables = {row[1]: columns(connection, row[1]) for row in rows if row[0] == "table"}
        return {(kind, name, table, sql and _bare(sql)) for kind, name, table, sql in rows if kind == "index"}, tables


def _bare(sql):
    return "".join(line.partition("--")[0] for line in sql.splitlines()).replace(" ", "")


def test_every_version_is_here():
    newest = max(statements._versions())
    assert set(range(1, newest)) <= set(VERSIONS), "put the newest released schema into schemas/"
    for version in VERSIONS:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript((FOLDER / f"{version}.sql").read_text())
            assert connection.execute("PRAGMA user_version").fetchone() == (version,)


def test_an_old_database_becomes_what_a_new_one_is(old, tmp_path):
    Store(old).close()
    Store(tmp_path / "new.sqlite").close()
    assert schema(old) == schema(tmp_path / "new.sqlite")
    with closing(sqlite3.connect(old)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_nothing_is_lost_and_jobs_go_on(old):
    store = Store(old)
    found = {stored.job.state: stored for stored in store.list_jobs()}
    assert set(found) == set(State)
    for number, state in enumerate(State, 1):
        stored = store.job(f"{number:012x}")
        assert (stored.number, stored.job.state, stored.asked.owner, stored.asked.group) == (number, state, "ada", "")
        assert (stored.asked.parameters, stored.asked.priority, stored.held) == (PARAMETERS, -1, False)
        assert stored.asked.no_clobber is False
        assert (stored.job.chunks, stored.job.chunks_done, stored.job.deaths) == (8, 3, 0)
        assert (stored.submitted_at, stored.started_at, stored.device_seconds) == (10.0 + number, 15.0, 2.5)
    assert store.job(found[State.SUCCEEDED].job.id).receipt == {"chunks": 8}
    assert found[State.FAILED].job.error == "no"
    assert [event.message for event in store.events("000000000001")] == ["queued"]
    assert len(json.loads(store.list_json(JobFilter(groups=("",)), limit=99)[0])) == len(State)
    assert store.usage(first=0) == []

    written = found[State.RUNNING].asked.written  # None before version 4
    new = NewJob(
        owner="ada", workload="smooth", input="in.npy", output="running.npy", parameters={}, written=written
    )  # fmt: skip
    with pytest.raises(OutputTaken):
        store.accept([new], now=100.0)
    assert store.accept([new], now=100.0, key="k", body_sha256="b") == ["000000000001"]
    assert {job for job, _ in store.lost("me", now=25.0, lease_s=30.0, others_too=True)} == {
        found[State(state)].job.id for state in ACTIVE[1:]
    }
    claimed = store.claim("me", now=100.0, lease_s=30.0, owner_cap=99)
    assert claimed.job.id == "000000000001"
    store.apply(claimed.job.id, CancelRequested(), now=101.0)
    store.retry(found[State.FAILED].job.id, now=102.0)
    store.close()


def test_a_database_that_cannot_be_brought_up_stays_as_it_was(old, monkeypatch):
    """A full disk, or a kill, in the middle of it."""
    with closing(sqlite3.connect(old)) as connection:
        before = list(connection.iterdump())
    steps = statements._versions()
    newest = max(steps)
    broken = {**steps, newest + 1: "CREATE TABLE more (a TEXT);\nINSERT INTO nowhere VALUES (1);\n"}
    monkeypatch.setattr(statements, "_versions", lambda: broken)
    with pytest.raises(Exception, match="nowhere"):
        Store(old)
    with closing(sqlite3.connect(old)) as connection:
        assert list(connection.iterdump()) == before
