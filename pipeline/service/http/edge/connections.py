"""Bounds the time and the size of requests: each connection holds a file descriptor and its request's head."""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pipeline.service.http.problems import problem

# From the connection's start to a request's first byte, and from there to the last byte of its body.
# Answers may take any time.
REQUEST_S = 60.0
# Of a request's target and headers; also of a chunked body's trailers, and of a chunk's extensions.
MOST_HEAD_BYTES = 64 << 10
# Parsed at a time: so much may come uncounted after another request's last byte.
PIECE_BYTES = 4 << 10
# How long what a refused client still sends is read: closing earlier would reset the connection, and lose the answer.
LINGER_S = 5.0


class BoundedRequests(HttpToolsProtocol):
    """Uvicorn's protocol with these limits; its own covers only the time between requests. Declines every upgrade."""

    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0  # received since the last head, part of a body, or message was complete
    _is_deaf = False  # what is received is discarded
    _refusal: tuple[int, str] | None = None  # to be sent after the answers to earlier requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._await_request()
        self._unset_keepalive_if_required()
        start = 0
        while start < len(data) and not (self._is_deaf or self.transport.is_closing()):
            room = MOST_HEAD_BYTES - self._head_bytes
            if room == 0:
                self._refuse(431, f"a request's head may have {MOST_HEAD_BYTES:,} bytes at most")
                return
            piece = data[start : start + min(room, PIECE_BYTES)]
            start += len(piece)
            self._head_bytes += len(piece)
            self._parse(piece)

    def _parse(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # answered as if it asked for none
            self._is_deaf = True  # where the next request begins is unknown
            self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(400, "the request is not HTTP")

    def _should_upgrade(self) -> bool:
        return False

    def on_message_begin(self) -> None:
        self._stop_waiting()  # the connection may have been opened long before it is used
        self._await_request()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._stop_waiting()
        if self.cycle is not None and self.cycle.response_complete:  # answered before its body was in: that
            self._await_request()  # cancelled uvicorn's limit for the next request
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None:
            self._refuse(*self._refusal)

    def _refuse(self, status: int, detail: str) -> None:
        """Answers what cannot be parsed further, after earlier requests, and closes the connection."""
        self._is_deaf, self._refusal = True, (status, detail)
        latest = self.cycle
        if self.transport.is_closing():
            return
        if self._answering:
            self.flow.pause_reading()
            return
        self._refusal = None
        self._stop_waiting()
        if latest is not None and not latest.response_complete:  # its body is broken off
            latest.disconnected = True
            latest.message_event.set()
            if latest.response_started:
                self.transport.close()
                return
        answer = problem(status, detail, {"Connection": "close"})
        headers = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
        self.transport.write(STATUS_LINE[status] + headers + b"\r\n" + bytes(answer.body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._unset_keepalive_if_required()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.close)

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
