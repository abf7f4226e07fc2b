"""Access checks before a request is processed: body size, content type, host and origin."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.errors import printable
from pipeline.service.http.problems import problem
from pipeline.service.http.users.proxies import Proxies
from pipeline.service.settings import LOOPBACKS

LOG = logging.getLogger("millrace.service")
MOST_BODY_BYTES = 1 << 20
_SAFE = ("GET", "HEAD", "OPTIONS")


class _HeadIsOut(Exception):
    """The headers, the whole answer to HEAD, have been sent."""


class Gate:
    """ASGI middleware: refuses bodies that are too large or not JSON, and requests made by pages of other sites.
    HEAD is answered as GET, without creating or sending the body."""

    def __init__(self, app: ASGIApp, *, loopback_alone: bool, proxies: Proxies) -> None:
        self._app = app
        self._proxies = proxies
        self._loopback_alone = loopback_alone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = self._proxies.received(scope)
        refusal = self._refusal(Request(scope))
        if refusal is not None:
            await problem(*refusal)(scope, receive, send)
            return
        taken, begun, head = 0, False, scope["method"] == "HEAD"

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MOST_BODY_BYTES:  # more than its headers announced
                raise HTTPException(413, _TOO_LARGE)
            return message

        async def guarded(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)
            if head:
                raise _HeadIsOut

        try:
            await self._app({**scope, "method": "GET"} if head else scope, counted, guarded)
        except _HeadIsOut:
            await send({"type": "http.response.body"})
        except RuntimeError as error:
            # Raised by Starlette and uvicorn if a file fails or shrinks while it is sent. Closing the connection tells
            # the reader.
            if not begun:
                raise
            LOG.error("%s: broken off: %s", printable(scope["path"]), printable(str(error.__cause__ or error)))

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        headers = request.headers
        if self._loopback_alone and _host(headers.get("host", "")) not in LOOPBACKS:
            # The name of another site may point here (DNS rebinding).
            return 421, "this service answers only under a loopback name, such as 127.0.0.1"
        if request.method in _SAFE:
            return None
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != headers.get("host"):
            return 403, f"the page at {origin} may not send requests to this service"
        if headers.get("sec-fetch-site") == "cross-site":
            return 403, "pages of other sites may not send requests to this service"
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return 400, "Content-Length is not a number"
        if int(length) > MOST_BODY_BYTES:
            return 413, _TOO_LARGE
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = int(length) > 0 or "transfer-encoding" in headers
        if has_body and kind != "application/json":
            return 415, "send JSON, with Content-Type: application/json"
        return None


# Answers are not taken for another file type, nor embedded in pages of other sites.
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_TOO_LARGE = f"a request's body may have {MOST_BODY_BYTES:,} bytes at most"


def _netloc(origin: str) -> str | None:
    """The host and port of an origin; None for `null`, of pages without one."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _host(value: str) -> str:
    """The host of a Host header, in lower case."""
    if value.startswith("["):
        return value[1:].partition("]")[0].lower()
    return (value.rpartition(":")[0] if ":" in value else value).lower()
