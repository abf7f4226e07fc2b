"""Jobs on disk: what was accepted is there, whose turn it is, and that of two who change a job one is refused."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from pipeline.api_models import JobView, State
from pipeline.errors import OutputError, ParameterError, StorageError
from pipeline.service.http.views import job_view
from pipeline.service.jobs import (
    CancelRequested,
    Claimed,
    Computed,
    Discard,
    Failed,
    IllegalTransition,
    LeaseLost,
    Planned,
    Progressed,
    Published,
    Start,
    Stop,
    Stopped,
)
from pipeline.service.store import (
    DependencyForgotten,
    Facts,
    JobFilter,
    NewJob,
    NoSuchJob,
    OutputTaken,
    Store,
    Used,
    statements,
)
from pipeline.service.store.opened import HALF_LIFE_S

LEASE_S = 30.0


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "new" / "state" / "jobs.sqlite")
    yield opened
    opened.close()


def asked(output="/data/out.npy", **what):
    return NewJob(
        **{"owner": "ada", "workload": "smooth", "input": "/data/in.npy", "output": output, "parameters": {"size": "3"}}
        | what
    )


def accept(store, count=1, now=0.0, **what):
    return [
        store.accept([asked(f"/data/{now}-{number}-{sorted(what.items())}", **what)], now=now)[0]
        for number in range(count)
    ]


def claim(store, now=1.0, runner="r", cap=100):
    return store.claim(runner, now=now, lease_s=LEASE_S, owner_cap=cap)


def finish(store, job, now=2.0):
    store.apply(job, Planned(1, 5), now=now)
    store.apply(job, Computed(1), now=now)
    store.apply(job, Published(1), now=now, facts=Facts(receipt={"chunks": 5}))


def used(store, job, seconds, now):
    """An earlier run of it, to which nobody listens any more, had a device for so long."""
    store.apply(job, LeaseLost(0), now=now, facts=Facts(used=Used(device_seconds=seconds)))


def test_what_was_accepted_is_there_in_another_process(store):
    (job,) = store.accept([asked(priority=3)], now=5.0)
    assert re.fullmatch("[0-9a-f]{12}", job), "short enough to type"
    again = Store(store.path)
    found = again.job(job)
    assert (found.asked, found.job.state, found.submitted_at) == (asked(priority=3), State.QUEUED, 5.0)
    assert [(event.at, event.kind, event.message) for event in again.events(job)] == [(5.0, "state", "queued")]
    again.log(job, "hello", now=6.0)
    assert [(event.at, event.kind, event.message) for event in again.events(job)[1:]] == [(6.0, "log", "hello")]
    assert again.events(job, limit=1) == again.events(job)[:1]
    again.close()


def test_every_commit_is_synced(store):
    accept(store)
    with store._database.reading() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL


def test_all_of_an_array_or_nothing(store):
    with pytest.raises(OutputError, match=r"/data/b: job .* writes it"):
        store.accept([asked("/data/a"), asked("/data/b"), asked("/data/b")], now=0.0)
    assert store.list_jobs() == []


def test_the_same_key_and_body_give_the_same_job(store):
    (first,) = store.accept([asked()], now=0.0, key="k", body_sha256="b")
    assert store.accept([asked()], now=1.0, key="k", body_sha256="b") == [first]
    assert len(store.list_jobs()) == 1
    with pytest.raises(ParameterError, match="Idempotency-Key k"):
        store.accept([asked("/data/other")], now=1.0, key="k", body_sha256="c")
    (other,) = store.accept([asked("/data/other", owner="bob")], now=1.0, key="k", body_sha256="c")
    assert other != first


def test_keys_are_forgotten_in_the_end(store):
    store.accept([asked()], now=0.0, key="k", body_sha256="b")
    week = 7 * 24 * 3600.0
    store.prune(now=week)
    with pytest.raises(ParameterError, match="Idempotency-Key k"):
        store.accept([asked("/data/2")], now=week, key="k", body_sha256="c")
    store.prune(now=week + 1.0)
    assert len(store.accept([asked("/data/2")], now=week + 1.0, key="k", body_sha256="c")) == 1


def test_two_active_jobs_may_not_write_one_output(store):
    (job,) = store.accept([asked()], now=0.0)
    with pytest.raises(OutputError, match=f"/data/out.npy: job {job} writes it"):
        store.accept([asked(owner="bob")], now=0.0)
    store.apply(job, CancelRequested(), now=1.0)
    (second,) = store.accept([asked(owner="bob")], now=2.0)
    with pytest.raises(OutputError, match=f"job {second} writes it"):
        store.retry(job, now=3.0)


def test_priority_then_fair_share_then_order(store):
    first, second = accept(store, 2, owner="ada")
    (third,) = accept(store, owner="bob")
    (urgent,) = accept(store, owner="ada", priority=9)
    used(store, first, 100.0, now=0.0)
    used(store, third, 60.0, now=0.0)
    assert [claim(store).job.id for _ in range(4)] == [urgent, third, first, second]
    assert claim(store) is None


def test_what_was_used_long_ago_counts_less(store):
    (a,) = accept(store, owner="ada")
    (b,) = accept(store, owner="bob")
    used(store, a, 100.0, now=0.0)
    later = 2 * HALF_LIFE_S
    used(store, b, 26.0, now=later)
    assert claim(store, now=later).asked.owner == "ada"  # 25 left of 100
    assert store.job(a).device_seconds == 100.0


def test_an_owner_at_the_cap_waits(store):
    ours = accept(store, 3, owner="ada")
    (theirs,) = accept(store, owner="bob")
    assert [claim(store, cap=2).job.id for _ in range(3)] == [*ours[:2], theirs]
    assert claim(store, cap=2) is None
    store.apply(ours[0], Failed(1, "in.npy: truncated", transient=False), now=2.0)
    assert claim(store, cap=2).job.id == ours[2]


def test_a_run_to_its_end(store):
    (job,) = accept(store)
    claimed = claim(store, now=7.0)
    assert (claimed.job.state, claimed.job.epoch, claimed.runner, claimed.lease_until) == (State.PLANNING, 1, "r", 37.0)
    store.apply(job, Planned(1, 5), now=8.0)
    store.apply(job, Progressed(1, 3), now=9.0)
    assert store.job(job).job.chunks_done == 3
    store.apply(job, Computed(1), now=10.0)
    store.apply(job, Published(1), now=11.0, facts=Facts(receipt={"chunks": 5}))
    found = store.job(job)
    assert (found.job.state, found.started_at, found.finished_at) == (State.SUCCEEDED, 7.0, 11.0)
    assert (found.runner, found.lease_until) == (None, None)
    assert found.receipt == {"chunks": 5}
    assert [event.message for event in store.events(job)] == [
        "queued",
        "planning",
        "running",
        "publishing",
        "succeeded",
    ]
    assert [event.message for event in store.events(job, after=store.events(job)[2].number)] == [
        "publishing",
        "succeeded",
    ]


def test_a_job_starts_at_its_first_claim_since_it_was_submitted_or_retried(store):
    (job,) = accept(store)
    assert store.job(job).started_at is None
    claim(store, now=3.0)
    store.apply(job, LeaseLost(1), now=4.0)
    claim(store, now=5.0)
    store.apply(job, Failed(2, "in.npy: truncated", transient=False), now=6.0)
    assert (store.job(job).started_at, store.job(job).finished_at) == (3.0, 6.0)
    store.retry(job, now=7.0)
    assert (store.job(job).started_at, store.job(job).finished_at) == (None, None)
    assert claim(store, now=8.0).started_at == 8.0


def sample(name, **labels):
    return REGISTRY.get_sample_value(f"millrace_{name}", labels) or 0.0


def test_what_ends_and_what_waited_is_measured(store):
    """The wait since it could run, and the duration from its first claim; a clock set back gives none below zero."""

    def measured():
        return [
            sample("job_queue_wait_seconds_sum", workload="measured"),
            sample("job_duration_seconds_sum", workload="measured", outcome="failed"),
            sample("job_duration_seconds_count", workload="measured", outcome="failed"),
            sample("jobs_finished_total", workload="measured", outcome="failed"),
            sample("jobs_finished_total", workload="measured", outcome="cancelled"),
            sample("job_duration_seconds_count", workload="measured", outcome="cancelled"),
        ]

    before = measured()
    first, second = accept(store, 2, now=10.0, workload="measured")
    claim(store, now=14.0)
    store.apply(first, Failed(1, "in.npy: truncated", transient=False), now=20.0)
    store.apply(second, CancelRequested(), now=21.0)
    assert [after - each for after, each in zip(measured(), before, strict=True)] == [4.0, 6.0, 1, 1, 1, 0]
    store.retry(first, now=22.0)
    claim(store, now=15.0)
    store.apply(first, Failed(2, "in.npy: truncated", transient=False), now=12.0)
    assert [after - each for after, each in zip(measured(), before, strict=True)] == [4.0, 6.0, 2, 2, 1, 0]


def test_a_lost_lease_is_another_runners(store):
    (job,) = accept(store)
    claim(store, now=0.0, runner="old")
    assert store.lost("new", now=29.0, lease_s=LEASE_S, others_too=False) == []
    store.renew("old", [job], now=20.0, lease_s=LEASE_S)
    assert store.lost("new", now=40.0, lease_s=LEASE_S, others_too=False) == []
    assert store.lost("new", now=51.0, lease_s=LEASE_S, others_too=False) == [(job, 1)]
    assert store.lost("new", now=0.0, lease_s=LEASE_S, others_too=True) == [(job, 1)]
    assert store.lost("old", now=0.0, lease_s=LEASE_S, others_too=True) == []
    assert store.lost("old", now=20.0, lease_s=LEASE_S, others_too=False) == []
    assert store.lost("old", now=19.0, lease_s=LEASE_S, others_too=False) == [(job, 1)]  # the clock was set back
    store.apply(job, LeaseLost(1), now=51.0)
    assert claim(store, now=52.0, runner="new").job.epoch == 2
    # What the old runner still says is not heard: it cannot publish.
    store.apply(job, Published(1), now=53.0, facts=Facts(receipt={}))
    assert (store.job(job).job.state, store.job(job).receipt) == (State.PLANNING, None)


def test_a_change_keeps_other_processes_from_writing_from_the_moment_it_reads(store):
    """Otherwise two servers could read the same row, and the second would overwrite the first's change or fail."""
    other = sqlite3.connect(store.path, timeout=0.0, isolation_level=None)
    with store._write(0.0) as transaction:
        transaction.execute("count_by_state").fetchall()
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            other.execute("BEGIN IMMEDIATE")
    other.execute("BEGIN IMMEDIATE")
    store.renew("r", [], now=0.0, lease_s=LEASE_S)  # without jobs nothing is written
    other.close()


def test_changes_made_together_see_the_earlier_ones_and_all_count(store):
    a, other = accept(store, 2)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=0.0)
    assert {claim(store).job.id, claim(store).job.id} == {a, other}
    store.apply_all([(job, event, Facts()) for job in (a, other) for event in (Planned(1, 1), Computed(1))], now=2.0)
    ended = Facts(receipt={}, used=Used(device_seconds=2.0, read_bytes=3), run_seconds=2.0, memory_bytes=5)
    store.apply_all(
        [(a, Published(1), ended), (other, Published(1), ended), (b, Claimed(1), Facts(runner="r", lease_until=9.0))],
        now=3.0,
    )
    assert [store.job(job).job.state for job in (a, other, b)] == [State.SUCCEEDED, State.SUCCEEDED, State.PLANNING]
    messages = ["queued", "planning", "running", "publishing", "succeeded"]
    assert [each.message for each in store.events(other)] == messages
    (usage,) = store.usage(first=0)
    assert (usage.runs, usage.succeeded, usage.device_seconds, usage.read_bytes) == (2, 2, 4.0, 6)
    with store._database.reading() as connection:
        assert connection.execute("SELECT device_seconds FROM shares").fetchone()[0] == 4.0
    assert (store.job(a).used.memory_bytes, store.job(a).device_seconds) == (5, 2.0)


def test_what_comes_after_waits_and_fails_with_it(store):
    (a,) = accept(store)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=0.0)
    (c,) = store.accept([asked("/data/c", after=frozenset({b}))], now=0.0)
    assert claim(store).job.id == a
    assert claim(store) is None
    store.apply(a, Failed(1, "in.npy: truncated", transient=False), now=2.0)
    assert [store.job(job).job.state for job in (b, c)] == [State.FAILED, State.FAILED]
    assert store.job(c).job.error == f"job {b}, which it comes after, failed"
    store.retry(a, now=3.0)
    queued, _ = store.retry(b, now=3.0)
    assert store.job(b).job == queued
    assert queued.waiting_for == {a}
    assert claim(store).job.epoch == 2
    store.apply(a, Planned(2, 1), now=4.0)
    store.apply(a, Computed(2), now=4.0)
    store.apply(a, Published(2), now=4.0)
    assert store.job(b).job.claimable
    store.retry(c, now=5.0)
    assert claim(store).job.id == b
    assert claim(store) is None  # c waits for b


def test_a_retry_fails_at_once_where_what_it_comes_after_has_failed(store):
    (a,) = accept(store)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=0.0)
    store.apply(a, CancelRequested(), now=1.0)
    job, _ = store.retry(b, now=2.0)
    assert (job.state, job.error) == (State.FAILED, f"job {a}, which it comes after, was cancelled")
    (c,) = store.accept([asked("/data/c", after=frozenset({a}))], now=3.0)
    assert (store.job(c).job.state, store.job(c).job.error) == (State.FAILED, job.error)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_job_cancelled_while_it_waited_runs_after_a_retry_once_the_other_has_succeeded(store, forgotten):
    (a,) = accept(store)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=0.0)
    store.apply(b, CancelRequested(), now=5.0)
    claim(store)
    finish(store, a, now=2.0)
    assert store.job(b).job.state is State.CANCELLED
    assert store.prune(now=10.0, keep_s=6.0 if forgotten else 9.0) == [a] * forgotten
    job, _ = store.retry(b, now=11.0)
    assert (job.state, job.error) == (State.QUEUED, None)
    assert claim(store).job.id == b


def test_a_job_cancelled_while_it_waited_stays_cancelled(store):
    (a,) = accept(store)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=0.0)
    store.apply(b, CancelRequested(), now=1.0)
    claim(store)
    store.apply(a, Failed(1, "in.npy: truncated", transient=False), now=2.0)
    assert (store.job(b).job.state, store.job(b).job.error) == (State.CANCELLED, None)


def test_of_several_dependencies_that_fail_the_cause_is_named(store):
    """Found by a search with random seeds."""
    (a,) = accept(store)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=0.0)
    (c,) = store.accept([asked("/data/c", after=frozenset({a, b}))], now=0.0)
    store.apply(a, CancelRequested(), now=1.0)
    assert store.job(c).job.error == f"job {a}, which it comes after, was cancelled"


def test_a_retry_after_a_job_that_is_forgotten_says_so_and_changes_nothing(store):
    (a,) = accept(store)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=0.0)
    store.apply(a, CancelRequested(), now=1.0)
    store.retry(b, now=3.0)  # and it fails at once
    assert store.prune(now=10.0, keep_s=8.0) == [a]
    before = store.job(b), store.events(b)
    for _ in range(2):
        with pytest.raises(DependencyForgotten, match=f"job {b} comes after job {a}, which is forgotten: submit it"):
            store.retry(b, now=11.0)
    assert (store.job(b), store.events(b)) == before


def test_after_a_job_that_is_in_nothing_waits(store):
    (a,) = accept(store)
    claim(store)
    finish(store, a)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=3.0)
    assert store.job(b).job.claimable
    with pytest.raises(ParameterError, match="there is no job nonsense"):
        store.accept([asked("/data/c", after=frozenset({"nonsense"}))], now=3.0)


def test_actions_come_back(store):
    (job,) = accept(store)
    claim(store)
    _, actions = store.apply(job, CancelRequested(), now=2.0)
    assert actions == (Stop(1),)
    with pytest.raises(IllegalTransition):
        store.retry(job, now=2.0)
    assert Start(1) not in actions
    assert store.apply(job, Stopped(1), now=3.0)[1] == (Discard(),)


def test_those_who_listen_to_a_job_hear_of_each_change(store, monkeypatch):
    heard = []
    monkeypatch.setattr(store.job_events, "notify", heard.append)
    (a,) = accept(store)
    (b,) = store.accept([asked("/data/b", after=frozenset({a}))], now=0.0)
    store.log(a, "hello", now=1.0)
    claim(store)
    store.apply(a, Planned(1, 5), now=2.0)
    store.apply(a, Progressed(1, 3), now=3.0)
    store.apply(a, Progressed(0, 4), now=4.0)  # of an earlier run
    store.apply(a, Failed(1, "in.npy: truncated", transient=False), now=5.0)
    with pytest.raises(IllegalTransition):
        store.apply(a, CancelRequested(), now=6.0)
    assert heard == [{a}, {b}, {a}, {a}, {a}, {a}, set(), {a, b}]


def test_lists_and_counts(store):
    jobs = [*accept(store, 3), *accept(store, 2, owner="bob", workload="coulomb", array_id="x")]
    assert [found.job.id for found in store.list_jobs(limit=2)] == [jobs[4], jobs[3]]
    page = store.list_jobs(limit=2)
    assert [found.job.id for found in store.list_jobs(JobFilter(before=page[-1].number), limit=2)] == [jobs[2], jobs[1]]
    assert len(store.list_jobs(JobFilter(owner="bob", workload="coulomb", array_id="x", state="queued"))) == 2
    assert store.list_jobs(JobFilter(state="failed")) == []
    store.apply(jobs[0], CancelRequested(), now=1.0)
    assert store.counts() == dict.fromkeys(State, 0) | {State.QUEUED: 4, State.CANCELLED: 1}
    assert store.oldest_queued() == 0.0


def test_many_threads_at_once(store):
    errors = []

    def submit(owner):
        try:
            for number in range(25):
                (job,) = store.accept([asked(f"/data/{owner}-{number}", owner=owner)], now=0.0)
                store.log(job, "hello", now=0.0)
                store.list_jobs(limit=3)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=submit, args=(f"owner{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.counts()[State.QUEUED] == 200
    claimed = [claim(store) for _ in range(200)]
    assert len({found.job.id for found in claimed}) == 200


def _is_open(path):
    return path in (each.resolve() for each in Path("/proc/self/fd").iterdir())


def test_a_newer_database_and_a_damaged_one_are_refused(tmp_path):
    path = tmp_path / "jobs.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ParameterError, match=r"jobs\.sqlite: was written by a newer Millrace") as newer:
        Store(path)
    assert not _is_open(path), newer  # whose frames would hold it
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match=r"jobs\.sqlite: file is not a database; restore a backup") as damaged:
        Store(path)
    assert not _is_open(path), damaged


@pytest.mark.parametrize(("table", "version"), [("jobs", 0), ("other", 0), ("jobs", 1), ("other", 4)])
def test_another_programs_database_is_left_alone(tmp_path, table, version):
    path = tmp_path / "jobs.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE {table} (what TEXT)")
        connection.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(ParameterError, match=r"jobs\.sqlite: is a database of another program; choose another"):
        Store(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [(table,)]
    connection.close()


def test_what_a_backups_tool_adds_to_the_database_is_no_fault(tmp_path):
    Store(tmp_path / "jobs.sqlite").close()
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        connection.execute("CREATE TABLE _backup (at REAL)")
    connection.close()
    Store(tmp_path / "jobs.sqlite").close()


def test_an_older_database_is_brought_up_to_date(tmp_path, monkeypatch):
    """With a job whose parameters Python took for JSON and SQLite does not, which no list could show."""
    newest = statements._versions()
    monkeypatch.setattr(statements, "_versions", lambda: {step: newest[step] for step in (1, 2, 3)})
    path = tmp_path / "jobs.sqlite"
    Store(path).close()
    with sqlite3.connect(path) as connection:
        for number, parameters in enumerate(('{"cval": NaN, "a": -Infinity}', '{"size": "Infinity"}')):
            connection.execute(
                "INSERT INTO jobs (id, owner, workload, input, output, parameters, priority, state, epoch, attempts,"
                " cancelling, chunks_done, story, submitted_at, changed_at)"
                " VALUES (?, 'ada', 'smooth', 'in.npy', ?, ?, 0, 'queued', 0, 0, 0, 0, '[]', 1.0, 1.0)",
                (f"j{number}", f"{number}.npy", parameters),
            )
        connection.executemany("INSERT INTO dependencies VALUES ('j0', ?, 'waiting')", [("j1",), ("gone",)])
        connection.execute("UPDATE jobs SET state = 'succeeded' WHERE id = 'j1'")
    connection.close()
    monkeypatch.undo()
    store = Store(path)
    assert store.job("j0").job.waiting_for == {"gone"}
    listed = json.loads(store.list_json(JobFilter(), limit=9)[0])
    assert [job["parameters"] for job in listed] == [{"size": "Infinity"}, {"cval": "nan", "a": "-inf"}]
    with pytest.raises(OutputTaken, match="job j0 writes it"):
        store.accept([asked("0.npy")], now=2.0)
    store.close()


def test_two_names_of_one_file_are_not_written_at_once(store):
    (job,) = store.accept([asked("out.npy", written="/data/out.npy")], now=0.0)
    for name in ("./out.npy", "/data/out.npy", "link/out.npy"):
        with pytest.raises(OutputTaken, match=f"{name}: job {job} writes it"):
            store.accept([asked(name, written="/data/out.npy")], now=0.0)
    store.apply(job, CancelRequested(), now=1.0)
    (other,) = store.accept([asked("./out.npy", written="/data/out.npy")], now=2.0)
    with pytest.raises(OutputTaken, match=f"out.npy: job {other} writes it"):
        store.retry(job, now=3.0)


def test_a_partial_output_belongs_to_the_file_whatever_its_name(store):
    """A cancelled job leaves it alone once another, by another name of the file, may continue it."""
    (job,) = store.accept([asked("link/out.npy", written="/data/out.npy")], now=0.0)
    assert not store.abandoned(job)
    store.apply(job, CancelRequested(), now=1.0)
    assert store.abandoned(job)
    (other,) = store.accept([asked("out.npy", written="/data/out.npy")], now=2.0)
    assert store.abandoned(job)
    claim(store, now=3.0)
    assert not store.abandoned(job)
    store.apply(other, LeaseLost(1), now=4.0)
    assert not store.abandoned(job)
    claim(store, now=5.0)
    store.apply(other, Failed(2, "in.npy: truncated", transient=False), now=6.0)
    assert not store.abandoned(job)
    finished = store.accept([asked("/data/out.npy")], now=7.0)[0]
    claim(store, now=8.0)
    finish(store, finished, now=9.0)
    store.retry(other, now=10.0)
    store.apply(other, CancelRequested(), now=11.0)
    assert store.abandoned(other)


def test_jobs_cancelled_shortly_before_the_last_event_are_named(store):
    early, late, failed = accept(store, 3)
    store.apply(early, CancelRequested(), now=10.0)
    store.apply(late, CancelRequested(), now=20.0)
    store.retry(early, now=20.5)
    store.apply(early, CancelRequested(), now=21.0)
    claim(store, now=30.0)
    store.apply(failed, Failed(1, "in.npy: truncated", transient=False), now=31.0)
    assert store.lately_cancelled(10.0) == [early]
    assert sorted(store.lately_cancelled(11.0)) == sorted([early, late])


def test_a_chain_of_any_length_ends_with_its_first(store):
    (job,) = first = store.accept([asked("/data/0")], now=0.0)
    for number in range(1, 1500):
        (job,) = store.accept([asked(f"/data/{number}", after=frozenset({job}))], now=0.0)
    store.apply(first[0], CancelRequested(), now=1.0)
    assert store.counts()[State.FAILED] == 1499
    assert store.job(job).job.error.endswith("which it comes after, failed")


def test_a_reason_with_bytes_that_are_no_text_is_kept(store):
    """A file's name may hold any."""
    (job,) = accept(store)
    claim(store)
    store.apply(job, Failed(1, "/data/\udcff.npy: is no image", transient=False), now=2.0)
    assert store.job(job).job.error == r"/data/\udcff.npy: is no image"
    assert store.events(job)[-1].message == r"failed: /data/\udcff.npy: is no image"


def test_a_full_disk_is_noticed_before_a_job_comes(store):
    accept(store)
    store.check()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.path.with_name("jobs.sqlite-wal").stat().st_size, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"jobs\.sqlite"):
            store.check()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.check()


def test_no_job_is_taken_where_there_is_little_room(store, monkeypatch):
    (job,) = store.accept([asked()], now=0.0, key="k", body_sha256="b")
    full = SimpleNamespace(f_bavail=256, f_frsize=4096)
    monkeypatch.setattr("pipeline.service.store.opened.os.statvfs", lambda _: full)
    store.check()
    full.f_bavail -= 1
    for attempt in (store.check, lambda: accept(store, now=1.0)):
        with pytest.raises(StorageError, match=r"1020 KiB are left on the disk; make room"):
            attempt()
    assert store.accept([asked()], now=1.0, key="k", body_sha256="b") == [job]
    assert [found.job.id for found in store.list_jobs(limit=5)] == [job]


@pytest.mark.parametrize("replaced", [False, True])
def test_no_job_is_taken_that_a_restart_would_not_find(store, tmp_path, replaced):
    accept(store)
    folder = store.path.parent
    kept = folder.rename(tmp_path / "kept")
    if replaced:
        Store(store.path).close()
    for attempt in (store.check, lambda: accept(store, now=1.0)):
        with pytest.raises(StorageError, match="another file since" if replaced else "is gone since"):
            attempt()
    shutil.rmtree(folder, ignore_errors=True)
    kept.rename(folder)
    store.check()
    accept(store, now=1.0)


def test_threads_that_come_and_go_leave_no_connections(store):
    accept(store)
    for _ in range(50):
        thread = threading.Thread(target=store.counts)
        thread.start()
        thread.join()
    assert len(store._database._idle) == 1


def test_the_log_of_many_commits_stays_small(store):
    (job,) = accept(store)
    for number in range(300):
        store.log(job, "x" * 50_000, now=float(number))
    assert store.path.with_name("jobs.sqlite-wal").stat().st_size < 8 << 20


def test_jobs_that_were_over_long_ago_are_forgotten(store):
    old, new, needed, queued = accept(store, 4)
    (waiting,) = store.accept([asked("/data/waiting", after=frozenset({needed}))], now=0.0)
    for job, now in ((old, 2.0), (new, 50.0), (needed, 3.0)):
        claim(store)
        finish(store, job, now=now)
    store.accept([asked("/data/key")], now=4.0, key="k", body_sha256="b")
    assert store.prune(now=5.0, keep_s=0.0) == [old]
    assert store.prune(now=5.0, keep_s=0.0) == []
    assert store.events(old) == []
    with pytest.raises(NoSuchJob, match=old):
        store.job(old)
    assert {found.job.id for found in store.list_jobs()} >= {new, needed, queued, waiting}
    assert store.accept([asked("/data/other")], now=6.0, key="k", body_sha256="c")  # the key went with its time
    store.apply(waiting, CancelRequested(), now=7.0)
    assert store.prune(now=5.0, keep_s=0.0) == [needed]
    store.retry(waiting, now=8.0)  # what it came after had succeeded
    assert store.job(waiting).job.claimable


def steps_of(store, do):
    """How many instructions of its own SQLite needs."""
    steps = 0

    def count():
        nonlocal steps
        steps += 1

    with store._database.reading() as connection:  # the one that everything here uses
        connection.set_progress_handler(count, 1)
    do()
    with store._database.reading() as connection:
        connection.set_progress_handler(None, 1)
    return steps


def test_neither_jobs_that_are_over_nor_jobs_that_wait_make_others_slow(store):
    def work(number):
        at = 10.0 + number
        yield store.accept([asked(f"/data/{at}", owner="bob")], now=at, key=f"{at}", most_of_an_owner=1_000_000)
        yield claim(store, now=at)
        yield store.prune(now=at, keep_s=at)
        yield store.oldest_queued()
        yield store.list_jobs(JobFilter(state="publishing"))
        yield store.list_jobs(JobFilter(owner="nobody"))
        yield store.list_jobs(JobFilter(array_id="none"))
        yield store.apply(cancelled, CancelRequested(), now=at)
        yield store.abandoned(cancelled)

    def steps_of_each(number):
        each = work(number)
        return [steps_of(store, lambda: next(each)) for _ in range(9)]

    with store._database.reading() as connection:  # only to be quicker
        connection.execute("PRAGMA synchronous = OFF")
    accept(store, 2, now=1.0)
    (cancelled,) = accept(store, now=1.25)
    few = steps_of_each(1)
    (cancelled,) = accept(store, now=1.5)
    with store._database.writing() as connection:
        for number in range(3000):
            for state in ("queued", "failed"):
                connection.execute(
                    "INSERT INTO jobs (id, owner, workload, input, output, parameters, priority, state, epoch,"
                    " attempts, cancelling, chunks_done, story, submitted_at, changed_at, finished_at) VALUES"
                    " (:id, :owner, 'smooth', '', :id, '{}', 0, :state, 0, 0, 0, 0, '[]', 5, 5, :finished_at)",
                    {
                        "id": f"{state}-{number}", "owner": "ada" if state == "queued" else "bob", "state": state,
                        "finished_at": None if state == "queued" else 5.0,
                    },
                )  # fmt: skip
            connection.execute("INSERT INTO requests VALUES ('ada', ?, '', '[]', 5)", [f"old-{number}"])
    many = steps_of_each(2)
    assert all(later < 2 * earlier + 100 for earlier, later in zip(few, many, strict=True)), (few, many)


def test_a_few_are_forgotten_at_once(store):
    for job in accept(store, 5):
        store.apply(job, CancelRequested(), now=1.0)
    assert [len(store.prune(now=2.0, keep_s=0.0, most=2)) for _ in range(4)] == [2, 2, 1, 0]


def test_a_request_sent_again_is_answered_though_there_is_no_room(store):
    (job,) = store.accept([asked()], now=0.0, key="k", body_sha256="b", most_of_an_owner=1)
    assert store.accept([asked()], now=1.0, key="k", body_sha256="b", most_of_an_owner=1) == [job]
    with pytest.raises(ParameterError, match="ada has 1 unfinished job, of 1 allowed"):
        store.accept([asked("/data/2")], now=1.0, most_of_an_owner=1)
    assert len(store.accept([asked("/data/2", owner="bob")], now=1.0, most_of_an_owner=1)) == 1


def test_an_owner_may_have_so_many_unfinished_jobs_and_no_more(store):
    array = [asked(f"/data/{number}") for number in range(4)]
    with pytest.raises(ParameterError, match="array: 4 jobs are more than the 3 that an owner may have"):
        store.accept(array, now=0.0, most_of_an_owner=3)
    jobs = store.accept(array[:3], now=0.0, most_of_an_owner=3)
    with pytest.raises(ParameterError, match="ada has 3 unfinished jobs, of 3 allowed"):
        store.accept(array[3:], now=0.0, most_of_an_owner=3)
    store.apply(jobs[0], CancelRequested(), now=1.0)
    assert len(store.accept(array[3:], now=2.0, most_of_an_owner=3)) == 1


def test_parameters_are_json_that_others_read_too(store):
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.accept([asked(parameters={"cval": float("nan")})], now=0.0)
    assert store.list_jobs() == []


def test_a_list_in_json_is_what_a_job_shows(store):
    accept(store, 7, array_id="abc", array_index=3, priority=-2)
    for _ in range(3):
        job = claim(store).job.id
        store.apply(job, Planned(1, 4), now=1.7654321)
        store.apply(job, Failed(1, 'out "of" café\n', transient=False), now=2.5)
        used(store, job, 1.25, now=3.0)
    text, following = store.list_json(JobFilter(), limit=5)
    expected = [job_view(found) for found in store.list_jobs(limit=5)]
    assert [JobView(**found) for found in json.loads(text)] == expected
    assert JobView.model_fields.keys() == json.loads(text)[0].keys()
    assert following == expected[-1].number
    text, following = store.list_json(JobFilter(before=following, state="queued"), limit=5)
    assert [found["number"] for found in json.loads(text)] == []
    assert following is None
    assert store.list_json(JobFilter(owner="nobody"), limit=1) == ("[]", None)
