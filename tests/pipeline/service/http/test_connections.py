"""Clients that do not finish their requests: they are not waited for; those that read a long answer are."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn

from pipeline.service import server
from pipeline.service.http import connections
from tests.pipeline.service.live import WAIT_S

DEADLINE_S = 0.5
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\n"


async def app(scope, receive, send):
    """Reads the body, except of GET, then answers it in two parts, the second long after the deadline where it is asked
    to be late."""
    message = await receive() if scope["method"] != "GET" else {"type": "http.request", "body": b"none"}
    body = message.get("body", b"")
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    if message["type"] == "http.disconnect":
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await asyncio.sleep(3 * DEADLINE_S if body == b"late" else 0)
    await send({"type": "http.response.body", "body": b"\r\n"})


@pytest.fixture
def connect(monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", DEADLINE_S)
    config = uvicorn.Config(
        app, port=0, log_level="critical", lifespan="off", http=connections.TimedRequests, timeout_keep_alive=3600
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
    assert made["http"] is connections.TimedRequests


@contextmanager
def _place():
    from pipeline.cluster.executor import Executor
    from pipeline.engine.devices.device import CpuDevice
    from pipeline.engine.run import stream_on_device

    yield Executor(device=CpuDevice(1), stream=stream_on_device)
