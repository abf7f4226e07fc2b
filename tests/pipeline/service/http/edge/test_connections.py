"""Clients that do not finish their requests: they are not waited for; those that read a long answer are."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn

from pipeline.service import server
from pipeline.service.http.edge import connections
from tests.pipeline.service.live import WAIT_S

DEADLINE_S = 0.5
MIB = 1 << 20
PIECE = connections.PIECE_BYTES
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\n"


async def app(scope, receive, send):
    """Reads the body, except of GET, then answers it (its length, at /whole) in two parts, the second long after the
    deadline if the body is "late"."""
    message = await receive() if scope["method"] != "GET" else {"type": "http.request", "body": b"none"}
    body = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    if message["type"] == "http.disconnect":
        return
    if scope["path"] == "/whole":
        body = b"%04d" % (len(body) % 10_000)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await asyncio.sleep(3 * DEADLINE_S if body == b"late" else 0)
    await send({"type": "http.response.body", "body": b"\r\n"})


@pytest.fixture
def connect(monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", DEADLINE_S)
    config = uvicorn.Config(
        app, port=0, log_level="critical", lifespan="off", http=connections.BoundedRequests, timeout_keep_alive=3600
    )
    serving = uvicorn.Server(config)
    thread = threading.Thread(target=serving.run)
    thread.start()
    end = time.monotonic() + WAIT_S
    while not serving.started:
        assert time.monotonic() < end
        time.sleep(0.01)

    @contextmanager
    def connected():
        with socket.create_connection(serving.servers[0].sockets[0].getsockname()[:2], timeout=WAIT_S) as client:
            yield client

    yield connected
    serving.should_exit = True
    thread.join()


def answer(client):
    said = b""
    while not said.endswith(b"\r\n") or said.count(b"\r\n\r\n") == 0 or said.endswith(b"\r\n\r\n"):
        byte = client.recv(1)
        assert byte, said  # closed too early
        said += byte
    return said


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET / HT", HEAD[:-2], HEAD, HEAD + b"ab"])
def test_a_request_that_does_not_end_is_not_waited_for(connect, sent):
    with connect() as client:
        client.sendall(sent)
        assert client.recv(1) == b""


def test_a_byte_now_and_then_gains_no_time(connect):
    began = time.monotonic()
    with connect() as client:
        client.settimeout(DEADLINE_S / 5)
        client.sendall(b"GET / HTTP/1.1\r\nName: ")
        while time.monotonic() - began < WAIT_S:
            try:
                client.sendall(b"G")
                if client.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:  # closed while the byte was sent
                break
        assert DEADLINE_S / 2 < time.monotonic() - began < WAIT_S


@pytest.mark.parametrize("sent", [b"\r\n", b"G", HEAD])
def test_nor_is_a_second_request_of_a_connection(connect, sent):
    with connect() as client:
        client.sendall(HEAD + b"abcd")
        assert answer(client).endswith(b"abcd\r\n")
        client.sendall(sent)
        assert client.recv(1) == b""


def test_an_answer_may_take_longer(connect):
    with connect() as client:
        for _ in range(2):
            client.sendall(HEAD + b"late")
            assert answer(client).endswith(b"late\r\n")


def test_a_body_that_comes_after_its_answer_does_not_hold_the_connection(connect):
    with connect() as client:
        client.sendall(HEAD.replace(b"POST", b"GET"))
        assert answer(client).endswith(b"none\r\n")
        client.sendall(b"abcd")
        assert client.recv(1) == b""


@pytest.mark.parametrize("sent", [b"\r\n", HEAD[:-2], HEAD, HEAD + b"ab"])
def test_an_answer_is_not_cut_by_the_begin_of_another_request(connect, sent):
    with connect() as client:
        client.sendall(HEAD + b"late")
        client.recv(1)  # the answer has begun
        client.sendall(sent)
        assert answer(client).endswith(b"late\r\n")
        assert client.recv(1) == b""


def test_a_request_has_its_time_however_old_the_connection_is(connect):
    with connect() as client:
        for sent in (HEAD, b"abcd"):
            time.sleep(DEADLINE_S * 0.7)
            client.sendall(sent)
        assert answer(client).endswith(b"abcd\r\n")


LIMIT = connections.MOST_HEAD_BYTES


def all_of(client):
    said = b""
    while received := client.recv(1 << 16):
        said += received
    return said


def head_of(size, target=b"/"):
    """The head of a GET with so many bytes."""
    before, after = b"GET " + target + b" HTTP/1.1\r\nHost: here\r\nLong: ", b"\r\n\r\n"
    return before + b"x" * (size - len(before) - len(after)) + after


def assert_refused(said, status=b"431 Request Header Fields Too Large"):
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status + b"\r\n"), said
    assert b"\r\nconnection: close" in head.lower()
    assert b"\r\ncontent-type: application/problem+json" in head.lower()
    assert json.loads(body)["status"] == int(status[:3])


@pytest.mark.parametrize("excess", [0, 1, 1000, PIECE, 3 * LIMIT])
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_a_head_beyond_the_limit_is_refused(connect, excess, second):
    with connect() as client:
        if second:
            client.sendall(HEAD + b"abcd")
            assert answer(client).endswith(b"abcd\r\n")
        client.sendall(head_of(LIMIT + excess))
        if excess:
            assert_refused(all_of(client))
        else:
            assert answer(client).endswith(b"none\r\n")


ENDLESS = {
    "lines": (b"GET / HTTP/1.1\r\n", b"A: b\r\n"),
    "one line": (b"GET / HTTP/1.1\r\nA: ", b"b"),
    "name of a line": (b"GET / HTTP/1.1\r\n", b"A"),
    "target": (b"GET /", b"a"),
    "empty lines": (b"", b"\r\n"),
    "extension of a chunk": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1", b";a"),
    "trailers": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"A: b\r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_endless_head_is_refused_while_it_is_sent_and_takes_no_memory(connect, what):
    begin, repeated = ENDLESS[what]
    block = repeated * (MIB // len(repeated))
    with connect() as client:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        client.sendall(begin)
        for _ in range(24):
            client.sendall(block)  # read and discarded: neither does this block, nor is the answer lost by a reset
        assert_refused(all_of(client))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB; all of it is 24 MiB


def test_who_goes_on_sending_after_a_refusal_is_left(connect, monkeypatch):
    monkeypatch.setattr(connections, "LINGER_S", DEADLINE_S)
    with connect() as client:
        client.sendall(head_of(2 * LIMIT))
        assert_refused(all_of(client))
        for _ in range(10_000):  # each waits for a while, if the connection is still open
            try:
                client.sendall(bytes(1000))
            except ConnectionError:
                return
            select.select([], [], [], DEADLINE_S / 10)
    pytest.fail("the connection stays open")


@pytest.mark.parametrize("bad", [head_of(2 * LIMIT), b"\0\r\n\r\n"], ids=["large", "no HTTP"])
def test_a_refusal_comes_after_the_answers_to_earlier_requests(connect, bad):
    with connect() as client:
        client.sendall(HEAD + b"late" + HEAD + b"abcd" + bad)
        assert answer(client).endswith(b"late\r\n")
        assert answer(client).endswith(b"abcd\r\n")
        assert_refused(
            all_of(client), b"400 Bad Request" if bad[:1] == b"\0" else b"431 Request Header Fields Too Large"
        )


def test_large_bodies_and_many_requests_at_once_are_no_large_heads(connect):
    parts = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in [b"y" * 7] * 30_000)
    sent = {
        b"Content-Length: %d\r\n\r\n%s" % (3 * LIMIT, b"z" * 3 * LIMIT): b"z" * 3 * LIMIT,
        b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\nTrailer: a\r\n\r\n": b"y" * 210_000,
    }
    for request, body in sent.items():
        with connect() as client:
            client.sendall(b"POST /whole HTTP/1.1\r\n" + request)
            assert answer(client).endswith(b"\r\n\r\n%04d\r\n" % (len(body) % 10_000))
    with connect() as client:
        for _ in range(5):
            client.sendall(head_of(LIMIT // 3) * 2)
            assert [answer(client)[-6:] for _ in range(2)] == [b"none\r\n"] * 2


def test_an_upgrade_is_declined(connect):
    upgrade = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with connect() as client:
        client.sendall(upgrade + b"z" * 2 * LIMIT)
        said = all_of(client)
    assert said.startswith(b"HTTP/1.1 200 OK")
    assert said.endswith(b"\r\n\r\nnone\r\n")
    assert b"connection: close" in said


def test_the_service_is_served_so(tmp_path, monkeypatch):
    """Of the real command, as far as it goes before it serves."""
    made = {}

    def config(*_, **options):
        made.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(server.uvicorn, "Config", config)
    monkeypatch.setattr(server, "_open_workers", lambda _: _place())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    settings = server.ServiceSettings(state_dir=tmp_path / "state", data_roots=[tmp_path / "data"], port=0)
    with pytest.raises(KeyboardInterrupt):
        server.serve(settings)
    assert made["http"] is connections.BoundedRequests


@contextmanager
def _place():
    from pipeline.cluster.executor import Executor
    from pipeline.engine.devices.device import CpuDevice
    from pipeline.engine.run import stream_on_device

    yield Executor(device=CpuDevice(1), stream=stream_on_device)
