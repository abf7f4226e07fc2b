"""What operators do over HTTP and by commands: hold, release, drain, cancel, caps; and who sees which accounts."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import REGISTRY

from pipeline.api_models import State
from pipeline.cli import admin as admin_commands
from pipeline.client import Client
from pipeline.engine.run import stream_on_device
from pipeline.errors import ServiceRefused
from pipeline.service.http import admin as admin_routes
from pipeline.service.http.users.tokens import Tokens, token_line
from pipeline.service.jobs import LeaseLost
from pipeline.service.store import Facts, Used
from tests.images import write_image
from tests.pipeline.service.calls import JOB, assert_problem, succeed
from tests.pipeline.service.live import WAIT_S, live_service

PEOPLE = {"ada": ("user", ["mri"]), "bob": ("user", ["eeg"]), "eve": ("viewer", ["mri"]), "root": ("operator", [])}


@pytest.fixture
def people(tmp_path):
    lines = [token_line(name, name, role, groups) for name, (role, groups) in PEOPLE.items()]
    (tmp_path / "tokens").write_text("\n".join(lines))
    return Tokens(tmp_path / "tokens")


@pytest.fixture
def client(world, people):
    return world.http(people)


def as_(name):
    return {"Authorization": f"Bearer {name}"}


def accepted(client, name, output):
    response = client.post("/v1/jobs", json=JOB | {"output": output}, headers=as_(name))
    assert response.status_code == 201, response.text
    return response.json()["jobs"][0]["id"]


def admin(client, route, **body):
    return client.post(f"/v1/admin/{route}", json=body, headers=as_("root"))


@pytest.mark.parametrize("name", ["ada", "eve"])
def test_only_operators_may(world, client, name):
    job = accepted(client, "ada", "a.npy")
    for what in ("hold", "release", "cancel"):
        answer = client.post(f"/v1/admin/{what}", json={"jobs": [job]}, headers=as_(name))
        assert_problem(answer, 403, f"{name} is not an operator; ask one")
    cap = {"kind": "owner", "what": "running", "value": 9}
    assert client.post("/v1/admin/caps", json=cap, headers=as_(name)).status_code == 403
    for path in ("queue", "caps"):
        assert client.get(f"/v1/admin/{path}", headers=as_(name)).status_code == 403
        assert client.get(f"/v1/admin/{path}").status_code == 401
    assert (world.store.job(job).held, world.store.rules(now=0.0).caps) == (False, [])


def test_holding_and_releasing(world, client):
    jobs = [accepted(client, "ada", f"{n}.npy") for n in range(2)]
    assert admin(client, "hold", jobs=jobs[:1]).json() == {"holds": [], "running": 0, "queued": 2}
    assert [client.get(f"/v1/jobs/{job}", headers=as_("ada")).json()["held"] for job in jobs] == [True, False]
    assert "held</span>" in client.get(f"/jobs/{jobs[0]}", headers=as_("ada")).text
    woken = world.runner.woken
    assert admin(client, "release", jobs=jobs[:1]).status_code == 200
    assert world.runner.woken == woken + 1
    assert not world.store.job(jobs[0]).held
    for body, kind, name in (
        ({"owner": "ada"}, "owner", "ada"),
        ({"group": "mri"}, "group", "mri"),
        ({"group": ""}, "group", ""),
        ({"everything": True}, "all", ""),
    ):
        held = admin(client, "hold", **body).json()["holds"]
        assert [(each["kind"], each["name"], each["held_by"]) for each in held] == [(kind, name, "root")]
        waits = "Queued jobs wait: an operator holds them." in client.get("/", headers=as_("ada")).text
        assert waits == (body != {"group": ""})
        assert admin(client, "release", **body).json()["holds"] == []


@pytest.mark.parametrize(
    "body",
    [
        {}, {"jobs": []}, {"owner": "ada", "everything": True}, {"owner": "a", "group": "b"},
        {"jobs": ["0" * 12], "group": ""},
    ],
)  # fmt: skip
def test_a_target_is_one(client, body):
    assert_problem(admin(client, "hold", **body), 422, "name jobs, an owner, a group, or everything")


@pytest.mark.parametrize(
    ("body", "gone"),
    [({"owner": "ada"}, "a0 a1 a2"), ({"group": "eeg"}, "b0 b1 b2"), ({"everything": True}, "a0 a1 a2 b0 b1 b2")],
)
def test_anybodys_jobs_are_cancelled(world, client, monkeypatch, body, gone):
    monkeypatch.setattr(admin_routes, "MOST_JOBS", 2)
    jobs = {f"{name[0]}{n}": accepted(client, name, f"{name}{n}.npy") for name in ("ada", "bob") for n in range(3)}
    answers = [admin(client, "cancel", **body).json()]
    while answers[-1]["more"]:
        answers.append(admin(client, "cancel", **body).json())
    assert len(answers) == -(-len(gone.split()) // 2)
    cancelled = {name for name, job in jobs.items() if world.store.job(job).job.state is State.CANCELLED}
    assert cancelled == set(gone.split())
    assert sorted(job for answer in answers for job in answer["jobs"]) == sorted(jobs[name] for name in gone.split())
    assert "cancelled by root" in [event.message for event in world.store.events(jobs[gone.split()[0]])]


def test_a_job_that_has_ended_does_not_keep_others_from_being_cancelled(world, client):
    over, waiting = accepted(client, "ada", "1.npy"), accepted(client, "ada", "2.npy")
    succeed(world.store, over)
    assert admin(client, "cancel", jobs=[over, waiting]).status_code == 200
    assert [world.store.job(job).job.state for job in (over, waiting)] == ["succeeded", "cancelled"]
    assert_problem(admin(client, "cancel", jobs=["0" * 12]), 404, "there is no job")


def test_caps_are_set_shown_and_removed(client):
    assert admin(client, "caps", kind="owner", name="ada", what="unfinished", value=1).status_code == 200
    found = admin(client, "caps", kind="group", what="gpu_hours", value=0.5).json()
    assert found == [
        {"kind": "group", "name": "", "what": "gpu_hours", "value": 0.5},
        {"kind": "owner", "name": "ada", "what": "unfinished", "value": 1.0},
    ]
    accepted(client, "ada", "1.npy")
    refused = client.post("/v1/jobs", json=JOB | {"output": "2.npy"}, headers=as_("ada"))
    assert_problem(refused, 422, "ada has 1 unfinished job, of 1 allowed")
    assert len(admin(client, "caps", kind="owner", name="ada", what="unfinished", value=None).json()) == 1
    accepted(client, "ada", "2.npy")
    for wrong in ({"value": 0}, {"value": -1}, {"value": 1e19}, {"what": "magic"}, {"kind": "all"}, {"name": "a b"}):
        body = {"kind": "owner", "name": "ada", "what": "running", "value": 1} | wrong
        assert admin(client, "caps", **body).status_code == 422


def test_everybody_sees_the_accounts_of_their_groups(world, client):
    for name in ("ada", "bob"):
        job = accepted(client, name, f"{name}.npy")
        used = Used(device_seconds=4.0, gpu_seconds=2.0, read_bytes=10, written_bytes=3)
        succeed(world.store, job)
        world.store.apply(job, LeaseLost(0), now=86_400.0 * 20_000, facts=Facts(used=used))
    ran = {"device_seconds": 4.0, "gpu_seconds": 2.0, "read_bytes": 10, "written_bytes": 3, "runs": 1}
    ended = {"succeeded": 0, "failed": 0, "cancelled": 0}  # they ended long before, by the clock of the test

    def rows(name, **params):
        answer = client.get("/v1/usage", params={"since": "2024-10-04", **params}, headers=as_(name))
        assert answer.status_code == 200, answer.text
        return answer.json()

    ada = {"day": None, "owner": "ada", "group": "mri"} | ran | ended
    bob = {"day": None, "owner": "bob", "group": "eeg"} | ran | ended
    assert rows("ada") == rows("eve") == [ada]
    assert rows("bob") == [bob]
    assert rows("root") == [ada, bob]
    assert rows("ada", daily="true") == [ada | {"day": "2024-10-04"}]
    assert rows("root", until="2024-10-04") == rows("root", since="2024-10-05") == []
    assert client.get("/v1/usage", headers=as_("ada")).json() == [], "by default the days of quotas"
    assert rows("ada", since="1970-01-01", daily="true")[0]["day"] == "1970-01-01"
    assert client.get("/v1/usage").status_code == 401
    for wrong in ("yesterday", "0", "2026-02-30", "20260230"):
        refused = client.get("/v1/usage", params={"since": wrong}, headers=as_("ada"))
        assert_problem(refused, 422, "since: must be a ")


def test_accounts_are_metrics_by_group(world, client):
    def value(name, **labels):
        return REGISTRY.get_sample_value(f"millrace_usage_{name}_total", {"group": "mri"} | labels) or 0.0

    names = (
        ("device_seconds", {}), ("gpu_seconds", {}), ("bytes", {"direction": "read"}),
        ("bytes", {"direction": "written"}), ("jobs", {"outcome": "succeeded"}), ("jobs", {"outcome": "cancelled"}),
    )  # fmt: skip
    before = [value(name, **labels) for name, labels in names]
    done, cancelled = accepted(client, "ada", "1.npy"), accepted(client, "ada", "2.npy")
    succeed(world.store, done)
    used = Used(device_seconds=4.0, gpu_seconds=2.0, read_bytes=10, written_bytes=3)
    world.store.apply(done, LeaseLost(0), now=1.0, facts=Facts(used=used))
    admin(client, "cancel", jobs=[cancelled])
    after = [value(name, **labels) for name, labels in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4.0, 2.0, 10, 3, 1, 1]


def gated():
    """A stream that waits until it is let through, and what lets it."""
    gate = SimpleNamespace(open=threading.Event(), entered=threading.Event())

    def stream(*arguments):
        gate.entered.set()
        assert gate.open.wait(WAIT_S)
        return stream_on_device(*arguments)

    gate.stream = stream
    return gate


@pytest.mark.parametrize("option", ["--user", "--group"])
@pytest.mark.parametrize("command", [("hold",), ("caps", "--running", "1")])
def test_a_command_refuses_an_impossible_name(millrace, command, option):
    code, _, err = millrace("admin", *command, option, "a b")
    assert (code, err) == (2, f"millrace: {option} 'a b': a name has up to 64 letters, digits and . _ @ -\n")


def test_the_commands_of_operators(tmp_path, people, millrace, monkeypatch):
    gate = gated()
    monkeypatch.setattr(admin_commands, "POLL_S", 0.02)
    with live_service(tmp_path, tokens=people, stream=gate.stream) as (url, _, data):
        write_image(data / "in.npy", np.ones((40, 40), np.uint16), "YX")
        monkeypatch.setenv("MILLRACE_URL", url)
        monkeypatch.setenv("MILLRACE_TOKEN", "root")
        with Client(url, token="ada") as ada:
            running = ada.submit("smooth", "in.npy", "1.npy")
            assert gate.entered.wait(WAIT_S)
            code, out, _ = millrace("admin", "drain", "--timeout", "0.1")
            assert code == 5
            assert out.startswith("1 running, 0 queued\nheld: everything, by root since 20")
            waiting = ada.submit("smooth", "in.npy", "2.npy")
            threading.Timer(0.1, gate.open.set).start()
            code, out, _ = millrace("admin", "drain", "--json")
            assert (code, json.loads(out)["running"], json.loads(out)["queued"]) == (0, 0, 1)
            assert (running.refresh().state, waiting.refresh().state) == ("succeeded", "queued")

            code, out, _ = millrace("admin", "hold", waiting.id)
            assert code == 0
            assert millrace("admin", "release", "--all")[:2] == (0, "0 running, 1 queued\n")
            assert "state       queued (held)" in millrace("status", waiting.id)[1]
            assert millrace("admin", "hold", "--user", "ada")[1].splitlines()[1].startswith("held: user ada, by root")
            assert millrace("admin", "hold", "--group", "mri")[1].splitlines()[1].startswith("held: group mri, by root")
            for arguments in (("--user", "ada"), ("--group", "mri"), (waiting.id,)):
                assert millrace("admin", "release", *arguments)[0] == 0
            assert waiting.wait(timeout_s=WAIT_S).state == "succeeded"

            assert millrace(
                "admin", "caps", "--user", "ada", "--unfinished", "1", "--bytes", "10TiB", "--gpu-hours", "0.5"
            )[1] == ("user ada: bytes 10.0 TiB\nuser ada: gpu-hours 0.5\nuser ada: unfinished 1\n")
            assert millrace("admin", "caps", "--group", "", "--running", "7")[1].startswith("each group: running 7\n")
            assert millrace("admin", "caps", "--user", "ada", "--bytes", "none", "--unfinished", "none")[0] == 0
            assert json.loads(millrace("admin", "caps", "--json")[1])[1] == {
                "kind": "owner", "name": "ada", "what": "gpu_hours", "value": 0.5,
            }  # fmt: skip
            millrace("admin", "hold", "--all")
            jobs = [ada.submit("smooth", "in.npy", f"more-{n}.npy") for n in range(3)]
            code, out, _ = millrace("admin", "cancel", "--user", "ada")
            assert sorted(out.split("\n")[:-1]) == sorted(f"{job.id}  cancelled" for job in jobs)
            assert json.loads(millrace("admin", "cancel", "--user", "ada", "--json")[1]) == []

            code, out, _ = millrace("usage", "--json")
            (row,) = json.loads(out)
            assert (row["owner"], row["group"], row["runs"], row["succeeded"], row["cancelled"]) == (
                "ada",
                "mri",
                2,
                2,
                3,
            )
            assert row["device_seconds"] > 0.1
            assert row["gpu_seconds"] == 0.0
            assert row["read_bytes"] >= 2 * 3200
            assert row["written_bytes"] == 2 * 3200
            assert "ada (mri)  0.00 GPU-hours" in millrace("usage", "--daily", "--since", "2020-01-01")[1]
            monkeypatch.setenv("MILLRACE_TOKEN", "bob")
            assert millrace("usage")[:2] == (0, "")
            code, _, said = millrace("admin", "hold", "--all")
            assert (code, said) == (2, "millrace: bob is not an operator; ask one\n")
            code, _, said = millrace("usage", "--since", "yesterday")
            assert (code, said) == (2, "millrace: --since: must be a date such as 2026-11-01\n")
            with pytest.raises(ServiceRefused, match="there is no job"), Client(url, token="bob") as bob:
                bob.job(running.id)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("hold",), "name jobs, or one of --user, --group and --all"),
        (("release", "0123456789ab", "--all"), "name jobs, or one of"),
        (("cancel", "--user", "ada", "--group", ""), "name jobs, or one of"),
        (("caps", "--user", "ada", "--group", "mri", "--running", "1"), "--user and --group: give one of them"),
        (("caps", "--running", "many"), "'many' is neither a number above 0 nor none"),
        (("caps", "--running", "-1"), "Invalid value for '--running': '-1' is neither a number above 0 nor none"),
        (("caps", "--jobs", "inf"), "'inf' is neither a number above 0 nor none"),
        (("caps", "--bytes", "lots"), "'lots' is not an amount of memory"),
    ],
)
def test_mistakes_are_one_line_before_any_request(millrace, monkeypatch, arguments, said):
    monkeypatch.setenv("MILLRACE_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    code, out, error = millrace("admin", *arguments)
    assert (code, out, len(error.splitlines())) == (2, "", 1)
    assert said in error
    assert time.monotonic() - began < 30
