"""Connections that bring no whole request in time are closed: each holds one of the files that the service may open."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# From the connection's begin to a request's first byte, and from that to the last byte of its body.
# Answers may take any time.
REQUEST_S = 60.0


class TimedRequests(HttpToolsProtocol):
    """Uvicorn's protocol, which by itself has a limit for the time between requests alone."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        self._await_request()
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._stop_waiting()  # a connection may have been opened long before it is needed
        self._await_request()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._stop_waiting()
        if self.cycle is not None and self.cycle.response_complete:  # answered before its body was in: that ended
            self._await_request()  # uvicorn's own limit for the next request
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._close)

    def _close(self) -> None:
        self._deadline = None
        if self._answering:  # what follows the request is not read meanwhile
            self._await_request()
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        """Whether a whole request's answer is under way."""
        latest = self.cycle
        return bool(self.pipeline) or (latest is not None and not (latest.more_body or latest.response_complete))

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
