"""Webhooks: signed, tried again until they are answered, never sent where the operator has not allowed it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import httpx2
import pytest

from pipeline.api_models import JobView
from pipeline.errors import ParameterError
from pipeline.service.http.views import job_view
from pipeline.service.jobs import CancelRequested
from pipeline.service.reporting import webhooks
from pipeline.service.reporting.webhooks import Webhooks, check_webhook, read_secret
from pipeline.service.store import NewJob, Store

SECRET = b"of-these-tests-alone-0123456789"
URL = "https://hooks.example.org/millrace"


@pytest.fixture
def now(monkeypatch):
    """The wall clock, in a list."""
    found = [1_800_000_000.5]
    monkeypatch.setattr(webhooks.time, "time", lambda: found[0])
    return found


class Receiver:
    """Takes requests, and answers them in turn with these statuses; then with 204."""

    def __init__(self, *statuses):
        self.statuses, self.taken = list(statuses), []

    def __call__(self, request):
        self.taken.append(request)
        status = self.statuses.pop(0) if self.statuses else 204
        if isinstance(status, Exception):
            raise status
        return httpx2.Response(status, headers={"location": "http://169.254.169.254/"})


def ended(store, webhook=URL, at=1_800_000_000.0):
    new = NewJob(owner="ada", workload="smooth", input="in.npy", output="out.npy", parameters={}, webhook=webhook)
    (job,) = store.accept([new], now=at)
    store.apply(job, CancelRequested(), now=at)
    return job


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path / "jobs.sqlite")
    yield found
    found.close()


def deliver(store, receiver, is_allowed=lambda url: True):
    sender = Webhooks(store, SECRET, is_allowed, httpx2.MockTransport(receiver))
    with ThreadPoolExecutor(1) as pool:
        sender.deliver_due(pool)
    sender._http.close()


def test_an_ended_job_is_told_once_signed(store, now):
    job, receiver = ended(store), Receiver()
    deliver(store, receiver)
    deliver(store, receiver)
    (request,) = receiver.taken
    assert (request.method, str(request.url), request.headers["content-type"]) == ("POST", URL, "application/json")
    delivery, timestamp = request.headers["webhook-id"], request.headers["webhook-timestamp"]
    assert timestamp == "1800000000"
    signed = b".".join([delivery.encode(), timestamp.encode(), request.content])
    expected = base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
    assert request.headers["webhook-signature"] == f"v1,{expected}"
    said = json.loads(request.content)
    assert (said["type"], datetime.fromisoformat(said["timestamp"]).timestamp()) == ("job.cancelled", 1_800_000_000.0)
    assert JobView(**said["data"]) == job_view(store.job(job))
    assert "webhook" not in said["data"]


def test_the_signature_is_that_of_the_standards_own_example():
    """https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md"""
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    found = webhooks.signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, '{"test": 2432232314}')
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_what_is_not_answered_is_tried_again_later_and_survives_a_restart(store, now, tmp_path):
    ended(store)
    receiver = Receiver(500, 302, httpx2.ConnectError("refused"), httpx2.ReadTimeout("slow"), 404)
    pauses = []
    while receiver.statuses:
        deliver(store, receiver)
        due = store._database
        with due.reading() as connection:
            pauses.append(connection.execute("SELECT due FROM deliveries").fetchone()[0] - now[0])
        deliver(store, receiver)
        assert len(receiver.taken) == len(pauses), "not before it is due"
        now[0] += pauses[-1]
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0]
    again = Store(tmp_path / "jobs.sqlite")
    deliver(again, receiver)
    again.close()
    assert len(receiver.taken) == 6
    assert {str(request.url) for request in receiver.taken} == {URL}, "a redirection is not followed"
    assert len({request.headers["webhook-id"] for request in receiver.taken}) == 1
    assert len({request.headers["webhook-signature"] for request in receiver.taken}) == 6
    assert store.due_deliveries(now=now[0] + 1e9, most=9) == []


def test_a_receiver_that_stays_away_is_given_up(store, now, caplog):
    job, receiver = ended(store), Receiver(*[500] * 9)
    now[0] += webhooks.GIVE_UP_S + 1
    with caplog.at_level(logging.CRITICAL):
        deliver(store, receiver)
    assert store.due_deliveries(now=now[0] + 1e9, most=9) == []
    said = "the webhook at hooks.example.org was not notified: the answer was 500"
    assert store.events(job)[-1].message == said


def test_an_address_that_is_no_longer_allowed_is_not_told(store, now):
    ended(store)
    receiver = Receiver()
    deliver(store, receiver, is_allowed=lambda url: False)
    assert (receiver.taken, store.due_deliveries(now=now[0] + 1e9, most=9)) == ([], [])


def test_the_services_own_address_is_told_of_every_job(tmp_path, now):
    store = Store(tmp_path / "other.sqlite", webhook=URL)
    ended(store, webhook=None)
    ended(store, webhook="https://mine.example.org/")
    ended(store, webhook=URL)
    receiver = Receiver()
    deliver(store, receiver)
    store.close()
    assert sorted(str(request.url) for request in receiver.taken) == [URL] * 3 + ["https://mine.example.org/"]


HOSTS = ("hooks.example.org", "other.example.org:8443", "[::1]:9000")


@pytest.mark.parametrize(
    "url",
    [URL, "http://HOOKS.example.org/", "https://other.example.org:8443/a?b=c", "https://hooks.example.org:443/",
     "http://[::1]:9000/"],
)  # fmt: skip
def test_addresses_at_allowed_hosts(url):
    check_webhook(url, HOSTS)


@pytest.mark.parametrize(
    "url",
    [
        "https://169.254.169.254/latest", "http://localhost:8765/v1/jobs", "https://hooks.example.org:22/",
        "https://other.example.org/", "https://hooks.example.org.evil.org/", "https://evil.org/hooks.example.org",
        "https://hooks.example.org@evil.org/", "https://evil.org#@hooks.example.org/", "https://evil.org\\@hooks.example.org",
        "file:///etc/passwd", "gopher://hooks.example.org/", "//hooks.example.org/", "hooks.example.org", "", "https://",
        "https://hooks.example.org:99999/", "https://hooks.example.org/\r\nx: y", "https://hooks.example.org/a b",
        "https://[::1/", "https://hooks.example.org./", "http://[::1]/",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(url):
    with pytest.raises(ParameterError, match=r"^webhook: "):
        check_webhook(url, HOSTS)


def test_secrets(tmp_path):
    file = tmp_path / "secret"
    for text, expected in (("a" * 24 + "\n", b"a" * 24), ("whsec_" + base64.b64encode(SECRET).decode(), SECRET)):
        file.write_text(text)
        assert read_secret(file) == expected
    for content, said in ((b"short", "holds 5 bytes, and 24 or more are needed"), (b"\xff", "is not a text"),
                          (b"whsec_!", "not base64 after whsec_")):  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(ParameterError, match=said):
            read_secret(file)
    with pytest.raises(ParameterError, match="No such file"):
        read_secret(tmp_path / "absent")
