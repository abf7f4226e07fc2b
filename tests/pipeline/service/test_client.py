"""The Python client and the user's commands against a service that is alive."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from kernels.smoothing import box
from pipeline import Client
from pipeline.cli import cli
from pipeline.engine.run import stream_on_device
from pipeline.errors import ServiceError, ServiceRefused
from tests.images import read_image
from tests.pipeline.service.live import WAIT_S, live_service


class Gate:
    """Holds every job at its third chunk until opened."""

    def __init__(self):
        self.open, self.reached = threading.Event(), threading.Event()

    def stream(self, job, plan, ledger, events):
        def written(chunk):
            events.on_written(chunk)
            if chunk.index == 2:
                self.reached.set()
                assert self.open.wait(WAIT_S)

        return stream_on_device(job, plan, ledger, replace(events, on_written=written))


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def service(tmp_path, gate, monkeypatch):
    with live_service(tmp_path, stream=gate.stream) as (url, _, data):
        monkeypatch.setenv("MILLRACE_URL", url)
        monkeypatch.delenv("MILLRACE_TOKEN", raising=False)
        yield data
        gate.open.set()


def run(*args):
    return CliRunner().invoke(cli, [str(arg) for arg in args], standalone_mode=False)


def test_from_python(service, gate):
    gate.open.set()
    with Client() as client:
        job = client.submit("smooth", "in.npy", "out.npy", size=5)
        assert (job.wait(timeout_s=WAIT_S).state, job.error) == ("succeeded", None)
        assert job.receipt["job"] == job.id
        fetched = job.result(service.parent / "mine.npy")
        np.testing.assert_array_equal(read_image(fetched), box(read_image(service / "in.npy"), 5))
        assert [event["message"] for event in job.log()][-2:] == ["publishing", "succeeded"]
        assert [each.id for each in client.jobs(state="succeeded")] == [job.id]
        assert client.workers()[0]["name"] == "cpu"
        assert repr(job) == f"<Job {job.id} succeeded: smooth in.npy → out.npy>"
        with pytest.raises(ServiceRefused, match="succeeded: it cannot take that now"):
            job.cancel()
        with pytest.raises(ServiceRefused, match="there is no job nonsense"):
            client.job("nonsense")
        with pytest.raises(ServiceRefused, match="outside the service's data roots"):
            client.submit("smooth", "/etc/passwd", "x.npy")
        with pytest.raises(ServiceRefused, match=r"parameters\.colour: there is no such parameter"):
            client.submit("smooth", "in.npy", "x.npy", colour="red")


def test_a_job_can_be_cancelled_and_retried(service, gate):
    with Client() as client:
        job = client.submit("smooth", "in.npy", "out.npy")
        assert gate.reached.wait(WAIT_S)
        with pytest.raises(TimeoutError, match=f"job {job.id} is running after 0"):
            job.wait(timeout_s=0)
        assert job.cancel().view["cancelling"]
        gate.open.set()
        assert job.wait(timeout_s=WAIT_S).state == "cancelled"
        with pytest.raises(ServiceRefused, match="cancelled: there is no result"):
            _ = job.receipt
        assert job.retry().wait(timeout_s=WAIT_S).state == "succeeded"


def test_a_service_that_is_not_there(monkeypatch):
    monkeypatch.setattr("pipeline.client.FIRST_PAUSE_S", 0.001)
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServiceError, match="no service answers"):
        client.job("x")
    with pytest.raises(ServiceRefused, match="is no URL"):
        Client("gpu-node:8765")


def test_submit_and_wait(service, gate):
    gate.open.set()
    done = run("submit", "smooth", "in.npy", "out.npy", "--size", 5, "--wait", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["state"], found["parameters"]) == ("succeeded", {"size": "5"})
    assert run("status", found["id"]).output.splitlines()[1].split() == ["state", "succeeded"]
    assert f"{found['id']}  succeeded  smooth in.npy → out.npy" in run("jobs").output
    assert run("logs", found["id"], "--follow").output.splitlines()[-1].endswith("succeeded")
    assert json.loads(run("result", found["id"], "--receipt").output)["job"] == found["id"]
    target = service.parent / "fetched.npy"
    assert run("result", found["id"], target).output.strip() == str(target)
    np.testing.assert_array_equal(read_image(target), box(read_image(service / "in.npy"), 5))
    assert "cpu" in run("workers").output


def test_exit_codes(service, gate):
    gate.open.set()
    failed = run("submit", "smooth", "absent.npy", "out.npy", "--wait", "--quiet")
    assert failed.exit_code == 3
    job = run("submit", "smooth", "in.npy", "out2.npy").output.strip()
    assert run("wait", job, "--quiet").exit_code == 0
    gate.open.clear()
    gate.reached.clear()
    job = run("submit", "smooth", "in.npy", "out3.npy").output.strip()
    assert gate.reached.wait(WAIT_S)
    late = run("wait", job, "--timeout", 0)
    assert (late.exit_code, "it goes on" in late.output) == (5, True)
    assert "running" in run("cancel", job).output
    gate.open.set()
    assert run("wait", job).exit_code == 4
    assert run("retry", job).exit_code == 0
    assert run("wait", job, "--quiet").exit_code == 0


def test_an_array_of_jobs(service, gate):
    gate.open.set()
    done = run("submit", "smooth", "in.npy", "out-{index}.npy", "--array", "1-3", "--wait", "--json")
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert [each["output"] for each in found] == [f"out-{number}.npy" for number in (1, 2, 3)]
    assert len(run("jobs", "--array", found[0]["array"]).output.splitlines()) == 3
    assert len(json.loads(run("jobs", "--array", found[0]["array"], "--json", "--limit", 2).output)) == 2


def test_what_comes_after(service, gate):
    first = run("submit", "smooth", "in.npy", "a.npy").output.strip()
    second = run("submit", "smooth", "a.npy", "b.npy", "--after", first).output.strip()
    gate.open.set()
    assert run("wait", second, "--quiet").exit_code == 0
    assert (service / "b.npy").exists()


def test_mistakes_are_one_line(service):
    for command in (("submit", "smooth", "in.npy", "x.npy", "--size", "many"), ("status", "nonsense"), ("cancel", "x")):
        refused = run(*command)
        assert isinstance(refused.exception, ServiceRefused)
        assert "\n" not in str(refused.exception)
