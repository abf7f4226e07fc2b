"""A server that is killed at random moments: what it acknowledged is done, once, and right. More by `scripts/soak`."""

from __future__ import annotations

import json
import signal
import socket
import time
from urllib.request import Request, urlopen

import pytest

from tests.pipeline.service.soak import server, soak, verdict

pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_no_acknowledged_job_is_lost_and_none_is_done_twice(tmp_path):
    tally = soak(tmp_path, port=free_port(), cycles=2, submits=4)
    assert tally.kills == 2
    assert len(tally.acknowledged) == len(tally.states) == 8
    assert verdict(tally) == []


def test_sigterm_ends_the_server_soon(tmp_path):
    (tmp_path / "data").mkdir()
    port = free_port()
    with server(tmp_path, port) as process:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as answer:
            assert answer.read() == b"ok\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - began < 20.0


def test_a_second_server_on_one_state_folder_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    with server(tmp_path, free_port()), pytest.raises(RuntimeError, match="exit code 2"), server(tmp_path, free_port()):
        pass


def test_a_real_worker_does_a_job(tmp_path):
    (tmp_path / "data").mkdir()
    port = free_port()
    body = {"workload": "smooth", "input": "absent.npy", "output": "out.npy"}
    with server(tmp_path, port):
        url = f"http://127.0.0.1:{port}/v1/jobs"
        request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=30) as answer:
            job = json.load(answer)["jobs"][0]["id"]
        end = time.monotonic() + 60
        while (found := json.load(urlopen(f"{url}/{job}", timeout=30)))["state"] not in ("failed", "succeeded"):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert (found["state"], "no such file" in found["error"]) == ("failed", True)
