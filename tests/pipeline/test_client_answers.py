"""What the client makes of answers, of other programs', and of none: no service is alive here."""

from __future__ import annotations

import json
import re

import httpx2
import pytest

from pipeline import Client
from pipeline.api_models import JobView
from pipeline.client.answers import lines_of
from pipeline.errors import MillraceError, ServiceError, ServiceRefused
from tests.pipeline.answers import answering, job_view, run


def test_a_service_that_is_not_there(monkeypatch):
    monkeypatch.setattr("pipeline.client.connection.FIRST_PAUSE_S", 0.001)
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServiceError, match="no service answers"):
        client.job("0123456789ab")
    for wrong in ("gpu-node:8765", "ftp://gpu-node", "http://[::1", "http://gpu-node:port", "http://gpu-node:65537"):
        with pytest.raises(ServiceRefused, match="is not a service's URL"):
            Client(wrong)
    for wrong in ("tökn", " ", "two words", "line\n"):
        with pytest.raises(ServiceRefused, match="MILLRACE_TOKEN: is not a token"):
            Client("http://gpu-node", token=wrong)


@pytest.mark.parametrize(
    "url",
    [
        "http://ada:s3cr/t@gpu-node", "http://ada:s3cr@t@gpu-node:65537", "ftp://ada:s3cr@t@gpu-node",
        "ada:s3cr@t@gpu-node", "http://ada:s3cr t@gpu-node",
    ],
)  # fmt: skip
def test_no_message_shows_the_password_of_an_address_that_is_none(url):
    with pytest.raises(ServiceRefused, match=r"gpu-node(:65537)?: is not a service's URL") as caught:
        Client(url)
    assert "s3cr" not in str(caught.value)


def refusing(request):
    raise httpx2.ConnectError("Connection refused")


@pytest.mark.parametrize(
    "answer",
    [
        refusing, httpx2.Response(404), httpx2.Response(502), httpx2.Response(200, text="<html>"),
        httpx2.Response(308, headers={"location": "https://mill.example/"}),
    ],
)  # fmt: skip
def test_no_message_shows_the_password_of_an_address(monkeypatch, answer):
    answering(monkeypatch, answer)
    with (
        Client("http://ada:s3cret@gpu-node") as client,
        pytest.raises(MillraceError, match="http://gpu-node") as caught,
    ):
        client.workloads()
    assert "s3cret" not in str(caught.value)


def test_a_certificate_that_is_not_trusted_here_is_told_with_what_to_set(monkeypatch):
    def untrusted(request):
        raise httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")

    answering(monkeypatch, untrusted)
    with (
        Client("https://gpu-node") as client,
        pytest.raises(ServiceError, match="set MILLRACE_CA_FILE to the cert") as caught,
    ):
        client.workloads()
    assert "millrace serve" not in str(caught.value)


@pytest.mark.parametrize("timeout", [(), ("--timeout", "60")])
def test_a_wait_begins_while_the_service_starts_again(monkeypatch, timeout):
    monkeypatch.setattr("pipeline.cli.client.RETRY_S", 0.001)
    asked = []

    def answer(request):
        asked.append(request)
        if len(asked) <= 9:  # more than the client repeats a request
            raise httpx2.ConnectError("restarting")
        return httpx2.Response(200, json=job_view(state="succeeded"), headers={"content-type": "application/json"})

    answering(monkeypatch, answer)
    done = run("wait", "0123456789ab", *timeout)
    assert done.exit_code == 0
    assert done.output.count("no service answers (restarting)") == 1
    assert re.search(f"asking again for up to {'[56].' if timeout else '1[12].'} s\n", done.output)


def test_a_wait_for_a_service_that_stays_away_ends(monkeypatch):
    monkeypatch.setattr("pipeline.client.MOST_OUTAGE_S", 0.0)
    answering(monkeypatch, httpx2.Response(502))
    assert isinstance(run("wait", "0123456789ab").exception, ServiceError)


COMMANDS = [
    ("submit", "smooth", "in.npy", "out.npy"), ("jobs",), ("workers",),
    *((name, "0123456789ab") for name in ("status", "wait", "logs", "cancel", "retry", "result")),
    ("result", "0123456789ab", "--receipt"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "said", ["<html>", "null", "5", '["a"]', '[{"id": 5}]', '{"jobs": null, "next": null}', '{"jobs": [{}], "next": 1}']
)
def test_another_program_answers(monkeypatch, command, said):
    answering(monkeypatch, httpx2.Response(200, text=said))
    found = run(*command).exception
    assert isinstance(found, ServiceError), repr(found)
    assert "a Millrace service?" in str(found) or "is MILLRACE_URL that of a service?" in str(found)


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (httpx2.Response(404, json={"detail": "Not Found"}), ServiceRefused, "status 404 from http://127.0.0.1:8765/v1/w"),
        (httpx2.Response(404, json={"detail": [{"a": 1}]}), ServiceRefused, "is that a Millrace service?"),
        (httpx2.Response(502, text="<html>"), ServiceError, "status 502"),
        (
            httpx2.Response(308, headers={"location": "https://mill.example/"}), ServiceRefused,
            "redirects to https://mill.example/; set MILLRACE_URL to that address",
        ),
    ],
)  # fmt: skip
def test_what_stands_before_a_service_refuses(monkeypatch, answer, kind, said):
    monkeypatch.delenv("MILLRACE_URL", raising=False)
    answering(monkeypatch, answer)
    found = run("workers").exception
    assert isinstance(found, kind)
    assert said in str(found)


STREAMED = "0123456789ab"


def streaming(monkeypatch, sent):
    """Clients see a job that is running, and of its events these bytes."""
    view = job_view(id=STREAMED)

    def answer(request):
        is_stream = request.url.path.endswith("/events")
        return httpx2.Response(200, content=sent) if is_stream else httpx2.Response(200, json=view)

    answering(monkeypatch, answer)


def test_streams_that_end_early_are_no_reason_to_wait_longer(monkeypatch):
    """A proxy may end them."""
    streaming(monkeypatch, b"")
    assert run("wait", STREAMED, "--timeout", "0.2").exception.code == 5


@pytest.mark.parametrize("sent", ["id: x\ndata: {}", "data: {", "data: 5", "data: null"])
def test_what_is_no_event_is_no_outage(monkeypatch, sent):
    """Another program sends it, and would go on to."""
    streaming(monkeypatch, f"event: state\n{sent}\n\n".encode())
    monkeypatch.setattr("pipeline.client.job.MOST_OUTAGE_S", 0.0)
    with pytest.raises(ServiceError, match=r"^malformed event .* is that a Millrace service\?"):
        list(Client().job(STREAMED).events())


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("at_once", [1, 2, 7, 1000])
def test_lines_of_a_stream_end_as_its_specification_says(end, at_once):
    lines = ["data: a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e", "", "", ": ä €", "event: state", ""]
    sent = "".join(line + end for line in lines).encode() + b"data: {"
    pieces = [sent[start : start + at_once] for start in range(0, len(sent), at_once)]
    assert list(lines_of(pieces)) == lines


def test_a_service_that_goes_as_the_job_ends_is_not_asked_again(monkeypatch):
    view = job_view()
    answers = iter([view, "", view | {"state": "succeeded"}])

    def answer(request):
        found = next(answers, None)
        if found is None:
            raise httpx2.ConnectError("Connection refused")
        return httpx2.Response(200, text=found) if found == "" else httpx2.Response(200, json=found)

    answering(monkeypatch, answer)
    assert run("wait", view["id"], "--quiet").exit_code == 0


@pytest.mark.parametrize(
    ("before", "after", "is_done"),
    [
        ("failed", "running", True), ("cancelled", "queued", True), ("failed", "succeeded", True),
        ("failed", "failed", False),  # another job writes its output
        ("running", "running", False), ("succeeded", "succeeded", False),  # there was nothing to retry
    ],
)  # fmt: skip
def test_a_retry_whose_answer_was_lost_is_found_done(monkeypatch, before, after, is_done):
    view = job_view(state=before)
    sent = []

    def answer(request):
        if request.method == "GET":
            return httpx2.Response(200, json=view | {"state": after if sent else before})
        sent.append(request)
        if len(sent) == 1:
            raise httpx2.ReadError("Connection reset by peer")
        problem = {"content-type": "application/problem+json"}
        return httpx2.Response(409, content=json.dumps({"detail": "it cannot take that now"}), headers=problem)

    answering(monkeypatch, answer)
    found = run("retry", view["id"])
    assert len(sent) == 2
    if is_done:
        assert (found.exit_code, found.output.split()[:2]) == (0, [view["id"], after])
    else:
        assert isinstance(found.exception, ServiceRefused)


def test_a_retry_that_is_refused_at_once_stays_refused(monkeypatch):
    """The service did not act on it, whatever another client has made of the job meanwhile."""
    view = job_view()
    states = iter(["failed", "running"])

    def answer(request):
        if request.method == "GET":
            return httpx2.Response(200, json=view | {"state": next(states)})
        return httpx2.Response(409, json={"detail": "no"}, headers={"content-type": "application/problem+json"})

    answering(monkeypatch, answer)
    assert isinstance(run("retry", view["id"]).exception, ServiceRefused)


def test_a_newer_service_may_answer_with_further_fields(monkeypatch):
    answering(monkeypatch, httpx2.Response(200, json=job_view(colour="red")))
    with Client() as client:
        assert client.job("0123456789ab").state == "running"


@pytest.mark.parametrize("field", JobView.model_fields)
def test_an_answer_without_a_field_of_a_job_is_another_programs(monkeypatch, field):
    view = job_view()
    del view[field]
    answering(monkeypatch, httpx2.Response(200, json=view))
    with Client() as client, pytest.raises(ServiceError, match="is MILLRACE_URL that of a service"):
        client.job("0123456789ab")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ALL_PROXY", "socks5://127.0.0.1:9"), ("HTTP_PROXY", "foo://x"), ("SSL_CERT_FILE", "/none")],
)
def test_a_wrong_environment_is_named(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ServiceRefused, match=f"the environment is wrong .* correct or unset .*{variable}"):
        Client("http://127.0.0.1:9")


def test_a_host_that_can_have_no_such_name():
    with Client(f"http://{'a' * 70}.org") as client, pytest.raises(ServiceRefused, match="is not a host name"):
        client.workers()
