"""Browsers that are signed in. The cookie is a random secret, not the token; only hashes are stored."""

from __future__ import annotations

import secrets
import threading
import time

from pipeline.service.http.users.tokens import Token, digest_of
from pipeline.service.store import Store

COOKIE = "millrace_session"
SESSION_S = 30 * 86_400.0


class Sessions:
    """The open sessions. Requests are answered from memory; the store keeps sessions over restarts. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()  # what is read later must not be replaced by what was read earlier
        self._tokens = store.sessions(now=time.time())  # the token's digest and the expiry, by the cookie's digest

    def begin(self, token: Token) -> tuple[str, float]:
        """A new session of the token's user: the cookie, and the seconds that it stays valid."""
        secret, now = secrets.token_urlsafe(32), time.time()
        lasts = min(SESSION_S, (token.expires_at or float("inf")) - now)
        with self._lock:
            self._tokens = self._store.begin_session(
                digest_of(secret), token=token.digest, expires_at=now + lasts, now=now
            )
        return secret, lasts

    def token_of(self, cookie: str) -> str | None:
        """The digest of the token that this session was begun with; None if it is over. Does not block."""
        token, expires_at = self._tokens.get(digest_of(cookie), ("", 0.0))
        return token if time.time() < expires_at else None

    def end(self, cookie: str) -> None:
        """Signs out; harmless if the session is over."""
        with self._lock:
            self._tokens = self._store.end_session(digest_of(cookie), now=time.time())
