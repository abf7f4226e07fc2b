"""The Python client and the user's commands against a service that is alive."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click
import httpx2
import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline import Client
from pipeline.cli import cli
from pipeline.engine.run import stream_on_device
from pipeline.errors import OutputError, ServiceError, ServiceRefused
from pipeline.service.http import api
from pipeline.service.http.users.tokens import Tokens, token_line
from pipeline.service.settings import ServiceSettings
from pipeline.stopping import Stopped
from tests import commands
from tests.images import read_image
from tests.pipeline.answers import run
from tests.pipeline.service.live import WAIT_S, live_service
from tests.pipeline.workloads.packages import BUILT_IN


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


def test_from_python(service, gate):
    gate.open.set()
    with Client() as client:
        job = client.submit("smooth", "in.npy", "out.npy", size=5)
        assert (job.wait(timeout_s=WAIT_S).state, job.error) == ("succeeded", None)
        assert job.receipt["job"] == job.id
        fetched = job.result(service.parent / "mine.npy")
        np.testing.assert_array_equal(read_image(fetched), uniform_filter(read_image(service / "in.npy"), 5))
        assert [event["message"] for event in job.log()][-2:] == ["publishing", "succeeded"]
        assert [each.id for each in client.jobs(state="succeeded")] == [job.id]
        assert client.workers()[0]["name"] == "cpu"
        assert repr(job) == f"<Job {job.id} succeeded: smooth in.npy → out.npy>"
        with pytest.raises(ServiceRefused, match="succeeded: there is nothing left to cancel"):
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


def test_an_address_may_begin_with_capitals(service):
    with Client(os.environ["MILLRACE_URL"].replace("http", "HTTP")) as client:
        assert client.workloads()


def test_messages_with_unusual_ends_of_lines(service):
    with Client() as client:
        job = client.submit("smooth", "a\u2028b\u2029c\x85d.npy", "out.npy")
        *_, last = [event for event in job.events(timeout_s=WAIT_S) if event.kind == "state"]
        assert last.data["message"].startswith("failed: ")
        assert "a\u2028b\u2029c\x85d.npy: no such file" in last.data["message"]


def test_a_cancellation_that_is_sent_again_stays_one(service, gate):
    with Client() as client:
        job = client.submit("smooth", "in.npy", "out.npy")
        assert gate.reached.wait(WAIT_S)
        job.cancel().cancel()
        gate.open.set()
        assert job.wait(timeout_s=WAIT_S).state == "cancelled"
        assert job.cancel().state == "cancelled"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_is_asked_for_this_machine(service, monkeypatch, host):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr("pipeline.client.connection.FIRST_PAUSE_S", 0.001)
    with Client(os.environ["MILLRACE_URL"].replace("127.0.0.1", host)) as client:
        assert client.workloads()
    with Client("http://[::1]:8765") as client:
        assert client._http._transport_for_url(httpx2.URL(client.url)) is client._http._transport
    with Client("http://gpu-node") as client:
        assert client._http._transport_for_url(httpx2.URL(client.url)) is not client._http._transport


def test_a_wrong_token_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.delenv("MILLRACE_TOKEN", raising=False)
    (tmp_path / "tokens").write_text(token_line("ada", "t"))
    with live_service(tmp_path, tokens=Tokens(tmp_path / "tokens")) as (url, _, _):
        for token, said in ((None, "send a token"), ("wrong", "the token is not known here")):
            with Client(url, token=token) as client, pytest.raises(ServiceRefused, match=f"{said}.*set MILLRACE_TOKEN"):
                client.workers()
        with Client(url, token="t") as client:
            assert client.workers()


def test_submit_and_wait(service, gate):
    gate.open.set()
    done = run("submit", "smooth", "in.npy", "out.npy", "--size", 5, "--wait", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["state"], found["parameters"]) == ("succeeded", {"size": "5"})
    assert run("status", found["id"]).output.splitlines()[1].split() == ["state", "succeeded"]
    header, line = run("jobs").output.splitlines()
    assert header.split("  ")[0] == "JOB"
    assert header.split() == ["JOB", "STATE", "PROGRESS", "AGE", "OWNER", "WORKLOAD", "INPUT", "→", "OUTPUT"]
    age = line[header.index("AGE") : header.index("OWNER")].split()
    assert (int(age[0]) < WAIT_S, age[1]) == (True, "s")
    assert line.split()[:4] == [found["id"], "succeeded", "100", "%"]
    assert line[header.index("OWNER") :].split() == ["local", "smooth", "in.npy", "→", "out.npy"]
    assert run("logs", found["id"], "--follow").output.splitlines()[-1].endswith("succeeded")
    assert json.loads(run("result", found["id"], "--receipt").output)["job"] == found["id"]
    target = service.parent / "fetched.npy"
    assert run("result", found["id"], target).output.strip() == str(target)
    np.testing.assert_array_equal(read_image(target), uniform_filter(read_image(service / "in.npy"), 5))
    assert "cpu" in run("workers").output


def test_limits_and_the_rest_of_a_submission(service, gate):
    gate.open.set()
    first = run("submit", "smooth", "in.npy", "a.npy").output.strip()
    asked = ("--time", "1.5h", "--memory", "2GiB", "--gpu-memory", "20GiB", "--gpus", 1, "--after-any", first)
    assert run("submit", "smooth", "in.npy", "b-{index}.npy", "--array", "0-1%1", *asked).exit_code == 0
    with Client() as client:
        (found, _) = client.jobs(limit=2)
        limits = {"time_s": 5400.0, "memory_bytes": 2 << 30, "gpu_memory_bytes": 20 << 30, "gpus": 1}
        assert (found.view["limits"], found.view["throttle"]) == (limits, 1)
        again = client.submit("smooth", "in.npy", "c.npy", limits={"time": 5400, "memory": 2 << 30}, after_any=[found])
        assert again.view["limits"] == limits | {"gpu_memory_bytes": None, "gpus": None}
        assert again.wait(timeout_s=WAIT_S).state == "succeeded"
        assert again.view["no_clobber"] is False
        with pytest.raises(ServiceRefused, match=r"c\.npy: exists, and --no-clobber keeps it"):
            client.submit("smooth", "in.npy", "c.npy", no_clobber=True)
        kept = run("submit", "smooth", "in.npy", "e-{index}.npy", "--array", "0-1", "--no-clobber").output.split()
        assert "(not replaced if it exists)" in run("status", kept[1]).output
        for wrong, said in (({"time": "soon"}, "'soon' is not a time"), ({"cores": 1}, "there is no 'cores'"),
                            ({"memory": 5}, "limits.memory_bytes: .* greater than")):  # fmt: skip
            with pytest.raises(ServiceRefused, match=said):
                client.submit("smooth", "in.npy", "d.npy", limits=wrong)
    refused = run("submit", "smooth", "in.npy", "d.npy", "--webhook", "http://127.0.0.1/").exception
    assert (
        str(refused)
        == "--webhook: 127.0.0.1:80 is not a host that the service may notify; its operator sets webhook_hosts"
    )
    said = dict(line.split(None, 1) for line in run("status", again.id).output.splitlines())
    assert said["limits"] == "90 min, 2.0 GiB of memory"
    assert re.fullmatch(r"[\d.]+ s", said["used"])
    estimate = r"reads \d+ KiB, writes \d+ KiB, [\d.]+ [KM]iB of buffers, about [\d.e-]+ s on this service"
    assert re.fullmatch(estimate, said["estimate"])


def test_the_list_is_kept_up_to_date(service, gate, monkeypatch):
    """To a pipe: a line for each job, and again once it has changed. On a terminal: the whole table."""
    first = run("submit", "smooth", "in.npy", "a.npy").output.strip()
    assert gate.reached.wait(WAIT_S)

    def finish():
        with Client() as client:
            client.job(first).wait(timeout_s=WAIT_S)

    rounds = iter([lambda: None, gate.open.set, finish])

    def pause(seconds):
        for each in rounds:
            each()
            return
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.cli.client.clock.sleep", pause)
    lines = run("jobs", "--watch").output.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == [first] * len(lines)
    assert (lines[0].split()[1], lines[-1].split()[1]) == ("running", "succeeded")
    assert len(set(lines)) == len(lines)
    refused = run("jobs", "--watch", "--json").exception
    assert str(refused).startswith("--watch prints lines for people")
    table = []
    monkeypatch.setattr("rich.live.Live.update", lambda self, text, refresh: table.append(text.plain))
    monkeypatch.setattr("pipeline.cli.client.is_terminal", lambda: True)
    run("jobs", "--watch")
    assert [line.split()[:2] for line in table[0].splitlines()] == [["JOB", "STATE"], [first, "succeeded"]]


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
    assert (late.exit_code, "it continues" in late.output) == (5, True)
    assert "running" in run("cancel", job).output
    gate.open.set()
    assert run("wait", job).exit_code == 4
    assert run("retry", job).exit_code == 0
    assert run("wait", job, "--quiet").exit_code == 0


def test_an_output_of_no_format_is_told_at_once(service):
    refused = run("submit", "smooth", "in.npy", "out.jpg", "--wait").exception
    assert isinstance(refused, ServiceRefused)
    assert refused.exit_code == 2
    assert str(refused).startswith("out.jpg: unsupported image format .jpg; end it with .tif, ")
    assert run("jobs").output == ""


def test_a_refused_submission_names_the_option(service):
    for options, said in (
        (["--size", "many"], "--size: "),
        (["--sigma", "1"], "--sigma belongs to --filter gaussian"),
        (["--memory", "5"], "--memory: must be greater than"),
        (["--time", "soon"], "--time: 'soon' is not a time"),
        (["--after", "first"], "--after: must be ids of jobs"),
    ):
        refused = run("submit", "smooth", "in.npy", "out.npy", *options).exception
        assert str(refused).startswith(said), refused


def test_an_array_of_jobs(service, gate):
    gate.open.set()
    done = run("submit", "smooth", "in.npy", "out-{index}.npy", "--array", "1-3", "--wait", "--json")
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert [each["output"] for each in found] == [f"out-{number}.npy" for number in (1, 2, 3)]
    assert len(run("jobs", "--array", found[0]["array"]).output.splitlines()) == 1 + 3
    assert len(json.loads(run("jobs", "--array", found[0]["array"], "--json", "--limit", 2).output)) == 2


def test_what_comes_after(service, gate):
    first = run("submit", "smooth", "in.npy", "a.npy").output.strip()
    second = run("submit", "smooth", "a.npy", "b.npy", "--after", first).output.strip()
    gate.open.set()
    assert run("wait", second, "--quiet").exit_code == 0
    assert (service / "b.npy").exists()


def test_who_waits_stays_through_an_outage(service, gate, monkeypatch):
    gate.open.set()
    with Client() as client:
        job, asked, stream = client.submit("smooth", "in.npy", "out.npy"), [], client.stream

        def after_two_failures(*args, **options):
            asked.append(args)
            if len(asked) <= 2:
                raise httpx2.ConnectError("restarting")
            return stream(*args, **options)

        monkeypatch.setattr(client, "stream", after_two_failures)
        assert job.wait(timeout_s=WAIT_S).state == "succeeded"
        assert len(asked) >= 3
        monkeypatch.setattr("pipeline.client.job.MOST_OUTAGE_S", 0.0)
        asked.clear()
        with pytest.raises(ServiceError, match="no service answers"):
            job.wait()


def test_a_job_that_says_nothing_is_not_waited_for_any_longer(service, gate, monkeypatch):
    """Neither a sign of life nor a broken connection ends the wait here, within the hour: the clock alone does."""
    monkeypatch.setattr("pipeline.service.http.api.HEARTBEAT_S", 3600.0)
    monkeypatch.setattr("pipeline.client.job.MOST_SILENCE_S", 3600.0)
    first = run("submit", "smooth", "in.npy", "a.npy").output.strip()
    second = run("submit", "smooth", "a.npy", "b.npy", "--after", first).output.strip()
    late = run("wait", second, "--timeout", 0.3)
    assert (late.exit_code, f"job {second} is queued after 0.3 s; it continues" in late.output) == (5, True)


def test_a_job_that_is_over_is_so_however_little_time_there_was(service, gate, monkeypatch):
    gate.open.set()
    job = run("submit", "smooth", "in.npy", "a.npy", "--wait", "--json").output
    done = run("wait", json.loads(job)["id"], json.loads(job)["id"], "--timeout", 0, "--json")
    assert (done.exit_code, [each["state"] for each in json.loads(done.output)]) == (0, ["succeeded"] * 2)
    with Client() as client:
        over = client.job(json.loads(job)["id"])
        assert [each.data["state"] for each in over.events(timeout_s=0) if each.kind == "progress"] == ["succeeded"]
        monkeypatch.setattr(client, "stream", lambda *args, **how: (_ for _ in ()).throw(httpx2.ReadTimeout("slow")))
        assert over.wait(timeout_s=0).state == "succeeded"


def millrace_process(*arguments, **options):
    command = [sys.executable, "-c", "from pipeline.cli import main; main()", *arguments]
    return commands.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def test_ctrl_c_leaves_the_job_running(foreground, service, gate, monkeypatch):
    waits, events = threading.Event(), api._events

    def noticed(*args):
        waits.set()
        return events(*args)

    monkeypatch.setattr(api, "_events", noticed)
    with millrace_process("submit", "smooth", "in.npy", "out.npy", "--wait", stdout=subprocess.PIPE) as process:
        assert gate.reached.wait(WAIT_S)
        with Client() as client:
            (job,) = client.jobs()
            assert waits.wait(WAIT_S)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=WAIT_S)
            assert process.returncode == 130
            assert job.id in said
            assert "stopped by SIGINT" in said
            assert job.refresh().state == "running"
            gate.open.set()
            assert job.wait(timeout_s=WAIT_S).state == "succeeded"


def test_a_reader_that_goes_away(service, gate):
    gate.open.set()
    job = run("submit", "smooth", "in.npy", "out.npy").output.strip()
    reading, writing = os.pipe()
    os.close(reading)
    with millrace_process("status", job, stdout=writing) as process:
        os.close(writing)
        assert process.communicate(timeout=WAIT_S)[1] == ""
    assert process.returncode == 141


def test_a_result_that_is_a_folder(service, gate):
    gate.open.set()
    job = run("submit", "smooth", "in.npy", "out.zarr", "--size", 5, "--wait", "--json")
    job = json.loads(job.output)["id"]
    (service / "out.zarr" / "link").symlink_to("/etc/passwd")
    target = service.parent / "mine.zarr"
    assert json.loads(run("result", job, target, "--json").output) == {"job": job, "path": str(target)}
    np.testing.assert_array_equal(read_image(target), uniform_filter(read_image(service / "in.npy"), 5))
    assert not (target / "link").exists()
    for place in (target, "/"):
        again = run("result", job, place)
        assert isinstance(again.exception, OutputError)
        assert "exists and is not a file" in str(again.exception)
    assert sorted(path.name for path in service.parent.glob("mine*")) == ["mine.zarr"]


def test_json_is_a_list_where_there_may_be_several(service, gate):
    gate.open.set()
    assert json.loads(run("jobs", "--json").output) == []
    first = json.loads(run("submit", "smooth", "in.npy", "a.npy", "--json").output)["id"]
    (second,) = json.loads(run("submit", "smooth", "in.npy", "{index}.npy", "--array", "1-1", "--json").output)
    assert [each["id"] for each in json.loads(run("jobs", "--json").output)] == [second["id"], first]
    both = json.loads(run("wait", first, second["id"], "--json", "--quiet").output)
    assert [each["state"] for each in both] == ["succeeded"] * 2
    assert json.loads(run("wait", first, "--json").output)["id"] == first
    lines = [json.loads(line)["message"] for line in run("logs", first, "--json").output.splitlines()]
    assert lines == ["queued", "planning", "running", "publishing", "succeeded"]
    assert json.loads(run("workers", "--json").output)[0]["name"] == "cpu"
    refused = run("cancel", first, second["id"], "--json")
    assert isinstance(refused.exception, ServiceRefused)


def test_a_result_disturbs_nothing_beside_it(service, gate):
    """Neither what a run has kept under OUTPUT.partial, nor a link, nor what is no file."""
    gate.open.set()
    job = json.loads(run("submit", "smooth", "in.npy", "out.npy", "--wait", "--json").output)["id"]
    failed = json.loads(run("submit", "smooth", "none.npy", "x.npy", "--wait", "--json").output)["id"]
    here = service.parent / "here"
    here.mkdir()
    (here / "mine.npy.partial").write_text("kept for --resume")
    (here / "other.npy").write_text("old")
    (here / "mine.npy").symlink_to("other.npy")
    assert isinstance(run("result", failed, here / "mine.npy").exception, ServiceRefused)
    assert run("result", job, here / "mine.npy").exit_code == 0
    assert (here / "mine.npy.partial").read_text() == "kept for --resume"
    assert (here / "mine.npy").is_symlink()
    assert (here / "other.npy").read_bytes() == (service / "out.npy").read_bytes()
    os.mkfifo(here / "pipe")
    for wrong, said in (
        ("pipe", "is not a file"),
        (".", "is not a file"),
        ("none/x", "No such file"),
        ("other.npy/x", "Not a"),
        ("x" * 300, "File name too long; choose another place"),
    ):
        refused = run("result", job, here / wrong).exception
        assert isinstance(refused, OutputError), refused
        assert said in str(refused)
    assert sorted(path.name for path in here.iterdir()) == ["mine.npy", "mine.npy.partial", "other.npy", "pipe"]


def test_what_cannot_be_sent_is_a_mistake(service):
    for options in (("out.npy", "--key", "ü"), ("out.npy", "--key", "a\nb"), ("\udcff.npy",)):
        refused = run("submit", "smooth", "in.npy", *options)
        assert isinstance(refused.exception, ServiceRefused), refused.exception
    assert isinstance(run("wait", "0123456789ab", "--timeout", "nan").exception, click.UsageError)


def test_of_several_jobs_those_that_can_be_are_cancelled(service, gate):
    first, second = (run("submit", "smooth", "in.npy", f"{name}.npy").output.strip() for name in "ab")
    assert gate.reached.wait(WAIT_S)
    unknown = run("cancel", second, "0123456789ab")
    assert "there is no job 0123456789ab" in str(unknown.exception)
    with Client() as client:
        assert client.job(second).state == "queued"  # before anything was done
        gate.open.set()
        assert client.job(first).wait(timeout_s=WAIT_S).state == "succeeded"
        client.job(second).wait(timeout_s=WAIT_S)
        gate.open.clear()
        gate.reached.clear()
        held = client.submit("smooth", "in.npy", "c.npy")
        assert gate.reached.wait(WAIT_S)
        waiting = client.submit("smooth", "in.npy", "d.npy")
        done = run("cancel", "--json", first, waiting.id, second)
        assert [(job["id"], job["state"]) for job in json.loads(done.output)] == [(waiting.id, "cancelled")]
        assert isinstance(done.exception, ServiceRefused)
        for job in (first, second):
            assert f"job {job} has succeeded: there is nothing left to cancel" in str(done.exception)
        assert run("cancel", first).output == ""
        gate.open.set()
        assert held.wait(timeout_s=WAIT_S).state == "succeeded"


def test_who_is_stopped_while_waiting_learns_how_to_wait_again(service, gate, millrace, monkeypatch):
    def stopped(*arguments, **options):
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr("pipeline.client.Job.wait", stopped)
    code, _, err = millrace("submit", "smooth", "in.npy", "out.npy", "--wait")
    with Client() as client:
        (job,) = client.jobs()
    assert (code, err) == (130, f"millrace: stopped by SIGINT; the submitted jobs continue: millrace wait {job.id}\n")
    gate.open.set()


def test_options_that_would_change_nothing_are_refused(millrace):
    code, _, err = millrace("submit", "smooth", "in.npy", "out.npy", "--timeout", "5")
    assert (code, err) == (2, "millrace: --timeout limits --wait: pass both, or neither\n")
    code, _, err = millrace("result", "0123456789ab", "here.npy", "--receipt")
    assert code == 2
    assert err.startswith("millrace: --receipt only prints the receipt; PATH here.npy is not used: ")


def test_no_result_is_written_to_a_file_named_like_standard_output(millrace):
    code, _, err = millrace("result", "0123456789ab", "-")
    assert (code, err) == (2, "millrace: PATH -: a result is not written to standard output; name a file\n")


def test_parameters_from_python_that_are_no_json(service, gate):
    gate.open.set()
    with Client() as client:
        for wrong in ({3}, b"3", [float("nan")]):
            with pytest.raises(ServiceRefused, match=r"parameters\.size: .*; give a number, a text or a list of them"):
                client.submit("smooth", "in.npy", "x.npy", size=wrong)
        job = client.submit("smooth", "in.npy", "x.npy", mode="constant", cval=float("nan"))
        assert job.view["parameters"]["cval"] == "nan"
        job.wait(timeout_s=WAIT_S)


def test_names_of_others_do_not_act_on_the_terminal(service, gate, monkeypatch):
    gate.open.set()
    job = json.loads(run("submit", "smooth", "in.npy", "two\nlines\x1b[31m.npy", "--wait", "--json").output)["id"]
    _, line = run("jobs").output.splitlines()
    assert line.endswith(r"in.npy → two\nlines\x1b[31m.npy")
    assert r"two\nlines\x1b[31m.npy" in run("status", job).output
    titles = []
    monkeypatch.setattr("pipeline.client.job.bar", lambda title: titles.append(title) or nullcontext())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Client() as client:
        client.job(job).wait(progress=True)
    assert titles == [r"two\nlines\x1b[31m.npy"]
    monkeypatch.chdir(service.parent)
    assert run("result", job).output == "two\\nlines\\x1b[31m.npy\n"
    assert json.loads(run("result", job, "--json").output)["path"] == "two\nlines\x1b[31m.npy"


def test_bash_completes_commands_workloads_and_options():
    """With the line that docs/service.md names, in a real bash."""
    script = """
        eval "$(_MILLRACE_COMPLETE=bash_source millrace)"
        ask() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _millrace_completion "$1"; echo "${COMPREPLY[@]}"
        }
        ask millrace su; ask millrace submit ""; ask millrace submit smooth --si; ask millrace jobs --state ru
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=WAIT_S,
        check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "submit",
        " ".join(BUILT_IN),
        "--size --sigma",
        "running",
    ]


def test_mistakes_are_one_line(service):
    submit = ("submit", "smooth", "in.npy", "x.npy")
    for command, said in (
        ((*submit, "--size", "many"), "got 'many'"), ((*submit, "--size", "0"), "size must lie in 1 … 1048576; got 0"),
        ((*submit, "--array", "x"), "array: must be FROM-TO, such as 0-99; got 'x'"),
        ((*submit, "--after", "x"), "must be ids of jobs"), (("status", "nonsense"), ""), (("cancel", "x"), ""),
        ((*submit, "--key", ""), "key '': an idempotency key"),
    ):  # fmt: skip
        refused = run(*command)
        assert isinstance(refused.exception, ServiceRefused)
        assert "\n" not in str(refused.exception)
        assert said in str(refused.exception)


def test_the_guide_names_every_key_and_command():
    guide = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    named = [f"`{key}`" for key in ServiceSettings.model_fields]
    commands = {name for name, section in cli.sections.items() if section == "Use a service"} - {"workers"}
    assert "jobs" in commands
    named += [f"`millrace {name} " for name in sorted(commands)]
    missing = [each for each in named if each not in guide and each.replace(" ", " [") not in guide]
    assert missing == []
