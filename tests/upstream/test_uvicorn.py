"""uvicorn: the protocol that the service gives a deadline, and the server's hooks."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AbstractContextManager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\n"


class Transport(asyncio.Transport):
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


class Watched(HttpToolsProtocol):
    said: list[str]

    def on_message_begin(self) -> None:
        self.said.append("begin")
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self.said.append("complete")
        super().on_message_complete()


def test_a_protocol_tells_where_its_requests_are() -> None:
    """`loop`, `cycle.more_body`, `cycle.response_complete` and `pipeline` decide whether a connection is late."""
    answer = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def talk() -> None:
        config = uvicorn.Config(app, lifespan="off", log_level="critical", http=Watched)
        config.load()
        protocol = Watched(config=config, server_state=ServerState(), app_state={})
        protocol.said = []
        protocol.connection_made(Transport())
        assert protocol.loop is asyncio.get_running_loop()
        assert isinstance(protocol.transport, Transport)
        assert protocol.cycle is None
        protocol.data_received(HEAD)
        first = protocol.cycle
        assert protocol.said == ["begin"]
        assert (first.more_body, first.response_complete) == (True, False)
        protocol.data_received(b"body")
        assert protocol.said == ["begin", "complete"]
        assert (first.more_body, first.response_complete) == (False, False)
        protocol.data_received(HEAD + b"body")
        assert len(protocol.pipeline) == 1  # waits for the first one's answer
        answer.set()
        await asyncio.gather(*protocol.tasks)
        assert first.response_complete
        await asyncio.gather(*protocol.tasks)
        assert not protocol.pipeline
        protocol.connection_lost(None)

    asyncio.run(talk())


def test_the_servers_hooks_are_those_that_the_service_overrides() -> None:
    assert list(inspect.signature(uvicorn.Server.startup).parameters) == ["self", "sockets"]
    assert inspect.iscoroutinefunction(uvicorn.Server.startup)
    assert list(inspect.signature(uvicorn.Server.on_tick).parameters) == ["self", "counter"]
    assert inspect.iscoroutinefunction(uvicorn.Server.on_tick)
    assert list(inspect.signature(uvicorn.Server.handle_exit).parameters) == ["self", "sig", "frame"]
    server = uvicorn.Server(uvicorn.Config("none:app"))
    assert server.should_exit is False
    assert isinstance(server.capture_signals(), AbstractContextManager)
