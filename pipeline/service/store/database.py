"""One SQLite file: connections with our settings, reads side by side, writes one at a time."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

BUSY_MS = 10_000
# After a checkpoint the write-ahead log is cut down to this.
LOG_BYTES = 16 << 20
# Of each connection. What another one writes empties it, so that more would seldom be of use.
CACHE_KIB = 512
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "foreign_keys = ON",
    f"busy_timeout = {BUSY_MS}",
    f"journal_size_limit = {LOG_BYTES}",
    f"cache_size = {-CACHE_KIB}",
)


class Database:
    """Connections to one file, lent to whichever thread asks: as many as are in use at once, however many threads come
    and go. Raises sqlite3.Error."""

    def __init__(self, path: Path, functions: Mapping[str, tuple[int, Callable[..., float | None]]]) -> None:
        """`functions`: deterministic ones for statements, by name, each with its number of arguments."""
        self._path = path
        self._functions = functions
        self._idle: list[sqlite3.Connection] = []
        # One writer at a time: SQLite would make the others wait by polling.
        self._writing = threading.Lock()

    def close(self) -> None:
        """No other thread may use it any more."""
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that nobody else uses meanwhile."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connected()
        try:
            yield connection
        finally:
            self._idle.append(connection)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing."""
        with self._writing, self.reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_MS / 1e3, check_same_thread=False, isolation_level=None, cached_statements=256
        )
        try:
            connection.row_factory = sqlite3.Row
            for name, (count, function) in self._functions.items():
                connection.create_function(name, count, function, deterministic=True)
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection
