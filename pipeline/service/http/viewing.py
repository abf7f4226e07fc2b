"""How many pictures of files are drawn at the same time, how many requests wait for that, and who looked at what."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.exceptions import HTTPException

AT_ONCE, MOST_WAITING, MOST_OF_A_USER = 2, 32, 8
# A user who looks at a file again within this time is not noted again, nor are older ones than the last so many.
NOTED_S, MOST_NOTED = 3600.0, 10_000


class Viewing:
    """State of the requests for pictures; used on the event loop alone."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_ONCE)
        self._of_users: Counter[str] = Counter()
        self._noted: OrderedDict[tuple[str, Path], float] = OrderedDict()

    @asynccontextmanager
    async def turn(self, user: str) -> AsyncIterator[None]:
        """Waits for a turn. HTTPException 429 if the user has too many requests, 503 if all together do."""
        if self._of_users[user] >= MOST_OF_A_USER:
            detail = f"{MOST_OF_A_USER} pictures of {user} are waiting already; ask again in a second"
            raise HTTPException(429, detail, {"Retry-After": "1"})
        if self._of_users.total() >= AT_ONCE + MOST_WAITING:
            raise HTTPException(503, "too many pictures are being drawn; ask again in a second", {"Retry-After": "1"})
        self._of_users[user] += 1
        try:
            async with self._free:
                yield
        finally:
            self._of_users[user] -= 1
            if not self._of_users[user]:
                del self._of_users[user]

    def is_news(self, user: str, path: Path) -> bool:
        """Whether this is to be noted: the user has not looked at that file lately."""
        now, last = time.monotonic(), self._noted.pop((user, path), None)
        is_news = last is None or now - last > NOTED_S
        self._noted[user, path] = now if last is None or is_news else last
        if len(self._noted) > MOST_NOTED:
            self._noted.popitem(last=False)
        return is_news
