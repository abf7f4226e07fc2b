"""Answers that anyone may request, at any rate, without slowing the users' requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATHS = ("/livez", "/readyz", "/metrics", "/metrics/targets")
# An answer is given for at least so long, and for so many times as long as it took to make: submissions wait for that.
KEEP_S, KEEP_TIMES, MOST_KEEP_S = 1.0, 100.0, 5.0
# Even copies cost time, and a client at full speed waits for each: so many a second go to all clients together, unless
# one would wait longer than this.
COPIES_A_SECOND, MOST_PAUSE_S = 50.0, 0.5


@dataclass
class _Answer:
    """An answer while it is made, and afterwards."""

    made: asyncio.Future[list[Message]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    until: float | None = None  # on the monotonic clock; None until it is made


class RecentAnswers:
    """ASGI middleware: the answer to a GET of `PATHS` is made once for all who request it meanwhile."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._answers: dict[tuple[str, bool], _Answer] = {}
        self._next_copy_at = 0.0  # on the monotonic clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        # Errors are pages for browsers; otherwise the answer does not depend on the request.
        for_people = any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])
        key = scope["path"], for_people
        answer = self._answers.get(key)
        if answer is None or (answer.until is not None and time.monotonic() > answer.until):
            answer = self._answers[key] = _Answer()
            await self._make(answer, key, scope, receive)
        elif answer.until is not None:
            await asyncio.sleep(self._pause_s())
        for message in await asyncio.shield(answer.made):
            await send(dict(message))

    def _pause_s(self) -> float:
        """How long the next copy waits for its turn."""
        now = time.monotonic()
        turn = min(max(self._next_copy_at, now), now + MOST_PAUSE_S)
        self._next_copy_at = turn + 1 / COPIES_A_SECOND
        return turn - now

    async def _make(self, answer: _Answer, key: tuple[str, bool], scope: Scope, receive: Receive) -> None:
        messages: list[Message] = []
        began = time.monotonic()

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
        now = time.monotonic()
        answer.until = now + max(KEEP_S, min(KEEP_TIMES * (now - began), MOST_KEEP_S))
        answer.made.set_result(messages)
