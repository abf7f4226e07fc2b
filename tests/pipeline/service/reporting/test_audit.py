"""The audit log: whole lines, in order, of bounded size; a request never waits for it, and no token is in it."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from contextlib import closing
from functools import partial

import pytest
from prometheus_client import REGISTRY

from pipeline.errors import ParameterError
from pipeline.service import server
from pipeline.service.http.users.tokens import Tokens, new_token, token_line
from pipeline.service.reporting import audit as audit_module
from pipeline.service.reporting.audit import MOST_REFUSALS_A_SECOND, MOST_WAITING, AuditLog
from pipeline.service.roots import DataRoots
from pipeline.service.settings import ServiceSettings
from tests.images import names_in
from tests.pipeline.service.calls import JOB

WAIT_S = 60.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
def opened(path):
    return partial(AuditLog, path, most_bytes=1 << 20, files=4)


def entries(*paths):
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def lost():
    return REGISTRY.get_sample_value("millrace_audit_entries_lost_total")


def test_entries_are_appended_in_order_over_restarts(opened, path):
    for number in range(3):
        with closing(opened()) as log:
            for part in range(50):
                log.note("count", who="ada", source="192.0.2.1", number=50 * number + part, nothing=None)
    found = entries(path)
    assert [entry.pop("number") for entry in found] == list(range(150))
    assert all(entry.pop("at").endswith("+00:00") for entry in found)
    assert found == [{"what": "count", "who": "ada", "from": "192.0.2.1"}] * 150
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_entry_is_in_the_file_at_once_and_soon_on_disk(opened, path, monkeypatch):
    synced = threading.Event()
    monkeypatch.setattr(audit_module, "SYNC_S", 0.01)
    monkeypatch.setattr(audit_module.os, "fsync", lambda _: synced.set())
    with closing(opened()) as log:
        log.note("one", who=None, source="")
        assert synced.wait(WAIT_S)
        assert [entry["what"] for entry in entries(path)] == ["one"]


def test_files_are_rotated_and_only_so_many_are_kept(path):
    most = 1000
    with closing(AuditLog(path, most_bytes=most, files=3)) as log:
        for number in range(100):
            log.note("count", who="ada", source="192.0.2.1", number=number)
    files = [path.with_name(f"{path.name}.2"), path.with_name(f"{path.name}.1"), path]
    assert names_in(path.parent) == sorted(file.name for file in files)
    assert all(0 < file.stat().st_size <= most for file in files)
    numbers = [entry["number"] for entry in entries(*files)]
    assert numbers == list(range(100 - len(numbers), 100))
    assert len(numbers) > 15


def test_one_file_alone_begins_again(path):
    with closing(AuditLog(path, most_bytes=500, files=1)) as log:
        for number in range(50):
            log.note("count", who="ada", source="", number=number)
    assert names_in(path.parent) == [path.name]
    assert entries(path)[-1]["number"] == 49


def test_a_file_that_was_moved_away_is_begun_anew(opened, path):
    with closing(opened()) as log:
        log.note("first", who=None, source="")
        _wait(lambda: path.stat().st_size > 0)
        path.rename(path.with_name("archived"))
        log.note("second", who=None, source="")
    assert [entry["what"] for entry in entries(path.with_name("archived"), path)] == ["first", "second"]


def _wait(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_disk_loses_entries_and_counts_them(opened, path, monkeypatch, caplog):
    write, full, before = os.write, threading.Event(), lost()

    def limited(descriptor, data):
        if full.is_set():
            if len(data) < 100:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data[:50])  # what was left
        return write(descriptor, data)

    monkeypatch.setattr(audit_module.os, "write", limited)
    with closing(opened()) as log:
        log.note("kept", who=None, source="")
        _wait(lambda: path.stat().st_size > 0)
        full.set()
        log.note("short", who=None, source="")
        log.note("long", who="x" * 200, source="")
        _wait(lambda: lost() - before == 2)
        full.clear()
        log.note("again", who=None, source="")
    found = entries(path)
    assert [entry["what"] for entry in found] == ["kept", "entries lost", "again"]
    assert found[1]["count"] == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"audit_log {path}: No space left on device; entries are lost until this is fixed"
    ]


def test_a_request_never_waits_for_the_disk(opened, monkeypatch):
    write, hung, let_go, before = os.write, threading.Event(), threading.Event(), lost()

    def waiting(descriptor, data):
        hung.set()
        assert let_go.wait(WAIT_S)
        return write(descriptor, data)

    monkeypatch.setattr(audit_module.os, "write", waiting)
    with closing(opened()) as log:
        log.note("first", who=None, source="")
        assert hung.wait(WAIT_S)
        for _ in range(MOST_WAITING + 5):  # would hang here
            log.note("more", who=None, source="")
        assert lost() - before == 5
        let_go.set()


def test_what_anyone_can_cause_is_bounded(opened, path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(audit_module.time, "monotonic", lambda: now)
    with closing(opened()) as log:
        for _ in range(MOST_REFUSALS_A_SECOND + 7):
            log.note_refusal("sign-in refused", who=None, source="198.51.100.1")
        now = 101.0
        log.note_refusal("sign-in refused", who=None, source="198.51.100.2")
    found = entries(path)
    assert len(found) == MOST_REFUSALS_A_SECOND + 1
    assert [entry.get("unlisted_before") for entry in found] == [None] * MOST_REFUSALS_A_SECOND + [7]


def test_what_cannot_be_written_is_refused_at_the_start(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "audit.jsonl"):
        with pytest.raises(ParameterError, match=f"audit_log {path}: .*; choose another"):
            AuditLog(path, most_bytes=1 << 20, files=2)
    (tmp_path / "data").mkdir()
    settings = ServiceSettings(data_roots=[tmp_path / "data"], audit_log=tmp_path / "data" / "audit.jsonl")
    with (
        pytest.raises(ParameterError, match="jobs may write there; choose a file outside the data roots"),
        server._audited(settings, DataRoots([tmp_path / "data"])),
    ):
        pass


def test_the_state_folders_log_is_closed_to_jobs(tmp_path):
    """Even if the state folder lies under a data root."""
    (tmp_path / "state").mkdir()
    roots = DataRoots([tmp_path], but=tmp_path / "state")
    for name in ("audit.jsonl", "audit.jsonl.3", "jobs.sqlite.before-20261126T000000"):
        assert not roots.holds(tmp_path / "state" / name)
    assert roots.holds(tmp_path / "state" / "mine.npy")


PEOPLE = {"ada": "user", "bob": "user", "eve": "viewer", "root": "operator"}


class TestRequests:
    @pytest.fixture
    def tokens(self, tmp_path):
        made = {name: new_token() for name in PEOPLE}
        lines = [token_line(name, made[name], role) for name, role in PEOPLE.items()]
        (tmp_path / "tokens").write_text("\n".join(lines))
        return made

    @pytest.fixture
    def client(self, world, tokens, tmp_path, opened):
        world.audit = opened()
        return world.http(Tokens(tmp_path / "tokens"), peer="198.51.100.9")

    def noted(self, world, path):
        world.audit.close()
        found = entries(path)
        for entry in found:
            del entry["at"]
        return found

    def test_who_did_what_from_where(self, world, client, tokens, path):
        def as_(name):
            return {"Authorization": f"Bearer {tokens[name]}"}

        job = client.post("/v1/jobs", json=JOB, headers=as_("ada")).json()["jobs"][0]["id"]
        client.post(f"/v1/jobs/{job}/cancel", headers=as_("ada"))
        client.post(f"/v1/jobs/{job}/retry", headers=as_("root"))
        client.post("/v1/admin/hold", json={"owner": "ada"}, headers=as_("root"))
        client.post("/v1/admin/release", json={"owner": "ada"}, headers=as_("root"))
        client.post("/v1/admin/cancel", json={"owner": "ada"}, headers=as_("root"))
        client.post("/v1/admin/caps", json={"kind": "group", "what": "jobs", "value": 3}, headers=as_("root"))
        client.get(f"/v1/jobs/{job}", headers=as_("ada"))
        ada = {"who": "ada", "from": "198.51.100.9", "by": "token"}
        root = ada | {"who": "root"}
        submitted = {
            "what": "submit", "job": job, "jobs": 1, "group": "", "workload": "smooth", "input": "in.npy",
            "output": "out.npy",
        }  # fmt: skip
        assert self.noted(world, path) == [
            ada | submitted,
            ada | {"what": "cancel", "job": job, "owner": "ada"},
            root | {"what": "retry", "job": job, "owner": "ada"},
            root | {"what": "hold", "owner": "ada"},
            root | {"what": "release", "owner": "ada"},
            root | {"what": "cancel", "owner": "ada", "jobs": [job]},
            root | {"what": "cap", "kind": "group", "name": "", "cap": "jobs", "value": 3.0},
        ]

    def test_sign_ins_and_what_was_refused(self, world, client, tokens, path):
        assert client.post("/login", json={"token": tokens["ada"]}).status_code == 204
        client.post("/logout")
        wrong = new_token()
        client.post("/login", json={"token": wrong})
        client.get("/v1/jobs", headers={"Authorization": f"Bearer {wrong}"})
        client.get(f"/v1/jobs/{wrong}?token={wrong}", headers={"Authorization": "Bearer x"})
        client.get("/v1/jobs")  # without a token: nobody tries to sign in
        client.post("/v1/jobs", json=JOB, headers={"Authorization": f"Bearer {tokens['eve']}"})
        client.get("/v1/admin/queue", headers={"Authorization": f"Bearer {tokens['bob']}"})
        found = self.noted(world, path)
        said = [(each["what"], each["who"], each.get("request")) for each in found]
        assert said == [
            ("sign in", "ada", None),
            ("sign out", "ada", None),
            ("sign-in refused", None, "POST /login"),
            ("sign-in refused", None, "GET /v1/jobs"),
            ("sign-in refused", None, "GET /v1/jobs/mr_…"),
            ("refused", "eve", "POST /v1/jobs"),
            ("refused", "bob", "GET /v1/admin/queue"),
        ]
        assert found[-1]["why"] == "bob is not an operator; ask one"
        assert {each["from"] for each in found} == {"198.51.100.9"}

    def test_no_token_is_in_it(self, world, client, tokens, path):
        for name, token in tokens.items():
            headers = {"Authorization": f"Bearer {token}"}
            client.post("/v1/jobs", json=JOB | {"output": f"{token}.npy", "input": token}, headers=headers)
            client.post("/login", json={"token": token})
            client.post("/login", json={"token": f"{token}x"})
            client.get(f"/v1/jobs/{token}", headers=headers)
            client.post("/v1/jobs", json=JOB | {"group": "nobodys", "output": name}, headers=headers)
        world.audit.close()
        text = path.read_text()
        assert text.count("sign in") >= 4
        for token in tokens.values():
            assert token not in text
            assert token[3:] not in text

    def test_behind_a_proxy_both_addresses_are_there(self, world, tokens, tmp_path, opened, path):
        world.audit = opened()
        client = world.http(Tokens(tmp_path / "tokens"), peer="10.0.0.1", trusted_proxies="10.0.0.1")
        headers = {"Authorization": f"Bearer {tokens['ada']}", "X-Forwarded-For": "203.0.113.5, 198.51.100.2"}
        client.post("/v1/jobs", json=JOB, headers=headers)
        (entry,) = self.noted(world, path)
        assert (entry["from"], entry["through"]) == ("198.51.100.2", "10.0.0.1")

    def test_a_full_disk_refuses_no_request(self, world, client, tokens, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(audit_module.os, "write", full)
        answer = client.post("/v1/jobs", json=JOB, headers={"Authorization": f"Bearer {tokens['ada']}"})
        world.audit.close()
        assert answer.status_code == 201
