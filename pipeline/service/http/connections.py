"""Closes connections that do not complete a request in time: each holds a file descriptor."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# From the connection's start to a request's first byte, and from there to the last byte of its body.
# Answers may take any time.
REQUEST_S = 60.0


class TimedRequests(HttpToolsProtocol):
    """Uvicorn's protocol with these limits; its own covers only the time between requests."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        self._await_request()
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._stop_waiting()  # the connection may have been opened long before it is used
        self._await_request()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._stop_waiting()
        if self.cycle is not None and self.cycle.response_complete:  # answered before its body was in: that
            self._await_request()  # cancelled uvicorn's limit for the next request
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self._close)

    def _close(self) -> None:
        self._deadline = None
        if self._answering:  # further requests are not read meanwhile
            self._await_request()
        else:
            self.transport.close()

    @property
    def _answering(self) -> bool:
        """Whether a complete request is being answered."""
        latest = self.cycle
        return bool(self.pipeline) or (latest is not None and not (latest.more_body or latest.response_complete))

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
