"""Answers to everybody: made once a second, in the present state, however many ask."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from pipeline.service.http.edge import recent
from pipeline.service.http.edge.recent import PATHS, RecentAnswers

CLIENTS = 64


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(recent, "KEEP_S", 1.0)
    monkeypatch.setattr(recent.time, "monotonic", lambda: now[0])
    return now


class App:
    """Counts its answers, each of which waits until `CLIENTS` have asked."""

    def __init__(self):
        self.made, self.asked, self.fault = 0, 0, None

    async def __call__(self, scope, receive, send):
        while self.asked < CLIENTS:
            await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        self.made += 1
        await send({"type": "http.response.start", "status": 503, "headers": [(b"number", b"%d" % self.made)]})
        await send({"type": "http.response.body", "body": b"part, ", "more_body": True})
        await send({"type": "http.response.body", "body": f"{scope['path']} {self.made}".encode()})


async def request(served, app, path="/readyz", method="GET", **headers):
    async def counted(scope, receive, send):
        app.asked += 1
        await served(scope, receive, send)

    transport = httpx2.ASGITransport(counted)
    async with httpx2.AsyncClient(transport=transport, base_url="http://here", headers=headers) as client:
        answer = await client.request(method, path)
        assert answer.headers["number"] == answer.text.rpartition(" ")[2]
        return answer.status_code, answer.text


def all_at_once(served, app, **what):
    async def every():
        asking = (request(served, app, **what) for _ in range(CLIENTS))
        return await asyncio.gather(*asking, return_exceptions=True)

    return asyncio.run(every())


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_is_made_once_for_all_who_ask_within_a_second(clock, path):
    app = App()
    served = RecentAnswers(app)
    assert all_at_once(served, app, path=path) == [(503, f"part, {path} 1")] * CLIENTS
    clock[0] += 0.99
    assert asyncio.run(request(served, app, path=path)) == (503, f"part, {path} 1")
    clock[0] += 0.02
    assert all_at_once(served, app, path=path) == [(503, f"part, {path} 2")] * CLIENTS


def test_what_takes_long_to_make_is_given_longer(clock, monkeypatch):
    monkeypatch.setattr(recent, "KEEP_TIMES", 100.0)
    app = App()
    app.asked = CLIENTS

    takes = [0.0]

    async def slow(*arguments):
        clock[0] += takes[0]
        await app(*arguments)

    served = RecentAnswers(slow)
    for takes[0], kept in ((0.04, 4.0), (0.005, 1.0), (7.0, 5.0)):
        clock[0] += 100.0
        asyncio.run(request(served, app))
        made = app.made
        clock[0] += kept - 0.01
        asyncio.run(request(served, app))
        assert app.made == made
        clock[0] += 0.02
        asyncio.run(request(served, app))
        assert app.made == made + 1


def test_copies_have_a_rate_and_nobody_waits_long(clock, monkeypatch):
    app, pauses = App(), []
    app.asked = CLIENTS
    monkeypatch.setattr(recent, "COPIES_A_SECOND", 64.0)
    monkeypatch.setattr(recent, "MOST_PAUSE_S", 0.25)
    sleep = asyncio.sleep

    async def noted(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(recent.asyncio, "sleep", noted)
    served = RecentAnswers(app)
    for _ in range(21):
        asyncio.run(request(served, app))
    turns = [min(number / 64, 0.25) for number in range(20)]
    assert pauses == turns  # none for whoever has the answer made
    clock[0] += 0.5
    asyncio.run(request(served, app))
    assert pauses == [*turns, 0.0]


def test_browsers_and_others_do_not_get_each_others_answers(clock):
    app = App()
    app.asked = CLIENTS
    served = RecentAnswers(app)
    texts = [asyncio.run(request(served, app, accept=accept))[1] for accept in ("*/*", "text/html", "*/*", "text/html")]
    assert [text[-1] for text in texts] == ["1", "2", "1", "2"]


@pytest.mark.parametrize("what", [{"path": "/v1/jobs"}, {"method": "POST"}, {"path": "/readyz/"}])
def test_other_requests_are_answered_one_by_one(clock, what):
    app = App()
    assert {text[-2:].strip() for _, text in all_at_once(RecentAnswers(app), app, **what)} == {
        str(number)[-2:] for number in range(1, CLIENTS + 1)
    }


def test_an_error_comes_to_all_who_wait_and_is_not_kept(clock):
    app = App()
    app.fault = ValueError("no")
    served = RecentAnswers(app)
    assert [str(error) for error in all_at_once(served, app)] == ["no"] * CLIENTS
    app.fault = None
    assert asyncio.run(request(served, app)) == (503, "part, /readyz 1")


def test_the_store_is_read_once_however_often_metrics_are_scraped(world, monkeypatch):
    monkeypatch.setattr(recent, "KEEP_S", 60.0)
    reads, counts = [], world.store.counts
    monkeypatch.setattr(world.store, "counts", lambda: reads.append(1) or counts())
    with world.http() as client:
        first = client.get("/metrics")
        assert {client.get("/metrics").content for _ in range(20)} == {first.content}
        assert client.head("/metrics").headers == first.headers
        assert client.get("/metrics", headers={"host": "elsewhere"}).status_code == 421
    assert len(reads) == 1
