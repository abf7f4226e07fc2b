"""Backups of a service at work, what `restore` takes, keeps and refuses, and how a server ended."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from pipeline.errors import OutputError, ParameterError, StorageError
from pipeline.service.settings import JOBS
from pipeline.service.store import NewJob, Store, state_folder
from pipeline.service.store.state_folder import CRASH, back_up, noting_crashes, restore, sole_server
from tests import commands
from tests.images import names_in


@pytest.fixture
def state(tmp_path):
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def accept(store, output, now=1.0):
    new = NewJob(owner="ada", group="mri", workload="smooth", input="in", output=output, parameters={})
    return store.accept([new], now=now)[0]


def outputs(path):
    store = Store(path)
    try:
        return {each.asked.output for each in store.list_jobs(limit=10_000)}
    finally:
        store.close()


def test_a_backup_holds_all_that_was_acknowledged_before_it(state, tmp_path):
    """While another thread submits: nothing that came before is missing, and nothing is half there."""
    store, stop, acknowledged = Store(state / JOBS), threading.Event(), []

    def submit():
        while not stop.is_set():
            accept(store, f"{len(acknowledged)}.npy")
            acknowledged.append(f"{len(acknowledged)}.npy")

    thread = threading.Thread(target=submit)
    thread.start()
    try:
        for number in range(5):
            before = set(acknowledged)
            back_up(state, tmp_path / f"{number}.sqlite")
            after = {*acknowledged, f"{len(acknowledged)}.npy"}
            held = outputs(tmp_path / f"{number}.sqlite")
            assert before <= held <= after | {f"{len(acknowledged)}.npy"}
    finally:
        stop.set()
        thread.join()
        store.close()
    assert acknowledged
    assert (tmp_path / "0.sqlite").stat().st_mode & 0o777 == 0o600
    assert not [name for name in names_in(tmp_path) if "partial" in name]


def test_there_and_back(state, tmp_path):
    store = Store(state / JOBS)
    job = accept(store, "kept.npy")
    store.set_cap("owner", "ada", "running", 3, now=1.0)
    store.hold("all", "", by="root", now=1.0)
    store.begin_session("d" * 64, token="t" * 64, expires_at=9e9, now=1.0)
    with store._write(86_400.0) as transaction:
        transaction.account("ada", "mri", gpu_seconds=5.0)
    back_up(state, tmp_path / "backup")
    accept(store, "later.npy")
    store.close()
    aside = restore(state, tmp_path / "backup")
    assert outputs(aside) == {"kept.npy", "later.npy"}
    assert aside.name.startswith(f"{JOBS}.before-2")
    store = Store(state / JOBS)
    assert [each.job.id for each in store.list_jobs()] == [job]
    rules = store.rules(now=1.0)
    assert (rules.cap("owner", "ada", "running"), [each.kind for each in rules.holds]) == (3.0, ["all"])
    assert store.usage(first=0)[0].gpu_seconds == 5.0
    assert store.sessions(now=0.0) == {}, "one may have been ended since"
    store.close()
    assert outputs(tmp_path / "backup") == {"kept.npy"}, "the backup is as it was"


def test_a_backup_of_a_killed_service_has_what_is_only_in_its_log(state, tmp_path):
    store = Store(state / JOBS)
    accept(store, "a.npy")
    for suffix in ("", "-wal"):
        (tmp_path / f"{JOBS}{suffix}").write_bytes((state / f"{JOBS}{suffix}").read_bytes())
    store.close()
    back_up(tmp_path, tmp_path / "backup")
    assert outputs(tmp_path / "backup") == {"a.npy"}


def test_restoring_into_an_empty_folder(state, tmp_path):
    store = Store(tmp_path / "x.sqlite")
    accept(store, "a.npy")
    store.close()
    assert restore(tmp_path / "made" / "later", tmp_path / "x.sqlite") is None
    assert outputs(tmp_path / "made" / "later" / JOBS) == {"a.npy"}


def test_not_while_a_server_runs(state, tmp_path):
    Store(state / JOBS).close()
    back_up(state, tmp_path / "backup")
    with sole_server(state), pytest.raises(ParameterError, match="another server is using it; stop that, or"):
        restore(state, tmp_path / "backup")
    restore(state, tmp_path / "backup")


def test_a_damaged_database_is_replaced_and_kept(state, tmp_path):
    store = Store(state / JOBS)
    accept(store, "a.npy")
    back_up(state, tmp_path / "backup")
    store.close()
    (state / JOBS).write_bytes(b"damaged" * 1000)
    (state / f"{JOBS}-wal").write_bytes(b"log")
    with pytest.raises(StorageError, match="file is not a database"):
        back_up(state, tmp_path / "other")
    aside = restore(state, tmp_path / "backup")
    assert outputs(state / JOBS) == {"a.npy"}
    assert aside.read_bytes().startswith(b"damaged")
    assert aside.with_name(f"{aside.name}-wal").read_bytes() == b"log"
    assert sorted(names_in(tmp_path)) == ["backup", "state"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"), (b"", "is not a backup"), (b"text" * 500, "file is not a database"),
        ("CREATE TABLE jobs (a TEXT)", "is not a backup"),
        ("CREATE TABLE jobs (a TEXT); PRAGMA user_version = 4", "is a database of another program; name another"),
        ("PRAGMA user_version = 99", "was written by a newer Millrace (version 99); use that one, or name another"),
    ],
)  # fmt: skip
def test_what_is_no_backup_changes_nothing(state, tmp_path, content, said):
    store = Store(state / JOBS)
    accept(store, "a.npy")
    store.close()
    file = tmp_path / "file"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        with closing(sqlite3.connect(file)) as connection:
            connection.executescript(content)
    before = names_in(state)
    with pytest.raises((ParameterError, StorageError)) as caught:
        restore(state, file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert outputs(state / JOBS) == {"a.npy"}
    assert set(names_in(state)) - {"lock"} == set(before)


def test_a_killed_restore_leaves_a_database(state, tmp_path, monkeypatch):
    """At each of its steps."""
    store = Store(state / JOBS)
    accept(store, "kept.npy")
    back_up(state, tmp_path / "backup")
    accept(store, "later.npy")
    store.close()
    steps, real = [], state_folder._sync

    class Killed(BaseException):
        pass

    def die_at(number):
        def sync(path):
            steps.append(path.name)
            if len(steps) == number:
                raise Killed
            real(path)

        monkeypatch.setattr(state_folder, "_sync", sync)

    for number in (1, 2, 3, 4):
        steps.clear()
        die_at(number)
        with pytest.raises(Killed):
            restore(state, tmp_path / "backup")
        assert outputs(state / JOBS) == ({"kept.npy"} if number == 4 else {"kept.npy", "later.npy"})


def test_backups_replace_no_file_and_name_what_is_missing(state, tmp_path):
    with pytest.raises(ParameterError, match=f"holds no {JOBS}"):
        back_up(state, tmp_path / "backup")
    Store(state / JOBS).close()
    (tmp_path / "there").write_text("mine")
    with pytest.raises(OutputError, match="is there already; name another file"):
        back_up(state, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(StorageError, match="No such file or directory; choose another"):
        back_up(state, tmp_path / "none" / "backup")
    assert sorted(names_in(tmp_path)) == ["state", "there"]


def test_the_commands(state, tmp_path, millrace, monkeypatch):
    monkeypatch.delenv("MILLRACE_CONFIG", raising=False)
    monkeypatch.setenv("MILLRACE_STATE_DIR", str(state))
    store = Store(state / JOBS)
    accept(store, "a.npy")
    assert millrace("backup", tmp_path / "b") == (0, "", "")
    store.close()
    code, out, _ = millrace("restore", tmp_path / "b")
    assert code == 0
    assert out.startswith(f"restored; what was there before is {state / JOBS}.before-")
    (tmp_path / "other.toml").write_text(f"state_dir = {json.dumps(str(tmp_path / 'other'))}\nport = 1\n")
    monkeypatch.delenv("MILLRACE_STATE_DIR")
    assert millrace("restore", tmp_path / "b", "--config", tmp_path / "other.toml")[:2] == (0, "restored\n")
    assert outputs(tmp_path / "other" / JOBS) == {"a.npy"}
    code, out, said = millrace("backup", tmp_path / "b", "--state-dir", state)
    assert (code, out, said) == (2, "", f"millrace: {tmp_path / 'b'}: is there already; name another file\n")


SERVER = """
import os, signal, sys
from pathlib import Path
from pipeline.service.store.state_folder import noting_crashes
with noting_crashes(Path(sys.argv[1])) as crash:
    print(crash)
    sys.stdout.flush()
    if sys.argv[2]:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


def test_a_server_that_crashed_is_told_from_one_that_was_killed(tmp_path):
    found = []
    for end in ("SIGKILL", "SIGSEGV", "SIGABRT", "", "SIGKILL", "SIGTERM", ""):
        command = [sys.executable, "-c", SERVER, tmp_path, end]
        ended = commands.run(command, check=False, stdout=subprocess.PIPE, text=True)
        assert ended.returncode == -getattr(signal, end, 0)
        found.append(ended.stdout.strip())
    assert found == [
        "None", "None", f"Fatal Python error: Segmentation fault; see {tmp_path / 'crash.log.1'}",
        f"Fatal Python error: Aborted; see {tmp_path / 'crash.log.1'}", "None", "None", "None",
    ]  # fmt: skip
    assert names_in(tmp_path) == ["crash.log.1"]
    assert "in <module>" in (tmp_path / "crash.log.1").read_text(), "where it was"


@pytest.mark.parametrize(
    ("before", "now", "crash"),
    [
        ("boot 3", "boot 3", None), ("boot 3", "boot 4", "out of memory"), ("boot 3", "other 4", None),
        ("", "boot 4", None), ("boot 3", "", None),
    ],
)  # fmt: skip
def test_a_server_that_ended_as_memory_ran_out_crashed(tmp_path, monkeypatch, before, now, crash):
    (tmp_path / CRASH).write_text(f"{before}\n")
    monkeypatch.setattr(state_folder, "_memory_kills", lambda: now)
    with noting_crashes(tmp_path) as found:
        assert found == crash
        assert (tmp_path / CRASH).read_text().rstrip() == now
    assert names_in(tmp_path) == []


def test_a_server_is_not_blamed_for_what_the_system_killed_long_before_its_end(tmp_path, monkeypatch):
    """Else every kill from outside would count against its jobs once memory had run out somewhere."""
    monkeypatch.setattr(state_folder, "NOTE_S", 0.01)
    kills = ["boot 3"]
    monkeypatch.setattr(state_folder, "_memory_kills", lambda: kills[-1])
    with noting_crashes(tmp_path):
        kills.append("boot 14")
        end = time.monotonic() + 60
        while not (tmp_path / CRASH).read_text().startswith("boot 14 "):
            assert time.monotonic() < end
            time.sleep(0.01)
        text = (tmp_path / CRASH).read_text()
    (tmp_path / CRASH).write_text(text)  # as a kill leaves it
    with noting_crashes(tmp_path) as found:
        assert found is None
    (tmp_path / CRASH).write_text(text)
    kills.append("boot 15")
    with noting_crashes(tmp_path) as found:
        assert found == "out of memory"


def test_the_system_counts_what_it_kills_for_memory():
    boot, kills = state_folder._memory_kills().split()
    assert boot
    assert int(kills) >= 0
