"""One SQLite file: connections with our settings, concurrent reads, one writer at a time."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

BUSY_MS = 10_000
# The write-ahead log is truncated to this after a checkpoint.
LOG_BYTES = 16 << 20
# Cache of each connection. Another connection's write empties it, so more would rarely help.
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
    """A pool of connections to one file for any thread: only as many as are in use at once. Raises sqlite3.Error."""

    def __init__(self, path: Path, functions: Mapping[str, tuple[int, Callable[..., float | None]]]) -> None:
        """`functions`: deterministic SQL functions by name, each with its number of arguments."""
        self._path = path
        self._functions = functions
        self._idle: list[sqlite3.Connection] = []
        # SQLite would let other writers wait by polling.
        self._writing = threading.Lock()

    def close(self) -> None:
        """Call this once no other thread uses it."""
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for exclusive use."""
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
        """One transaction, rolled back if the block raises."""
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
