"""Answers that anyone may request, at any rate, without slowing the users' requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = ("/livez", "/readyz", "/metrics", "/metrics/targets")
KEEP_S = 1.0
# Before an answer is given again: even copies cost time, and a client at full speed waits for each.
PAUSE_S = 0.1


@dataclass
class _Answer:
    """An answer while it is made, and afterwards."""

    made: asyncio.Future[list[Message]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    at: float | None = None  # on the monotonic clock; None until it is made


class RecentAnswers:
    """ASGI middleware: the answer to a GET of `PATHS` is made once for all who request it within `KEEP_S`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._answers: dict[tuple[str, bool], _Answer] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        # Errors are pages for browsers; otherwise the answer does not depend on the request.
        for_people = any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
        key = scope["path"], for_people
        answer = self._answers.get(key)
        if answer is None or (answer.at is not None and time.monotonic() - answer.at > KEEP_S):
            answer = self._answers[key] = _Answer()
            await self._make(answer, key, scope, receive)
        elif answer.at is not None:
            await asyncio.sleep(PAUSE_S)
        for message in await asyncio.shield(answer.made):
            await send(dict(message))

    async def _make(self, answer: _Answer, key: tuple[str, bool], scope: Scope, receive: Receive) -> None:
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        try:
            await self._app(scope, receive, keep)
        except BaseException as error:
            del self._answers[key]
            if isinstance(error, Exception):
                answer.made.set_exception(error)
                return
            answer.made.cancel()
            raise
        answer.at = time.monotonic()
        answer.made.set_result(messages)
