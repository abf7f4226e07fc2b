"""The store's SQL: statements by name from queries.sql, database versions from schema.sql, and SQLite's errors."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from pipeline.errors import ParameterError, StorageError, too_many_files

_FOLDER = Path(__file__).parent
_NAMED = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)
_PART = re.compile(r"\{(\w+)\}")
_TABLE = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
_VERSION = re.compile(r"^-- version (\d+)\n", re.MULTILINE)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@cache
def _queries() -> Mapping[str, str]:
    parts = _NAMED.split((_FOLDER / "queries.sql").read_text(encoding="utf-8"))
    named = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {
        name: _PART.sub(lambda part: _COMMENT.sub("", named[part[1]]).strip().rstrip(";"), text)
        for name, text in named.items()
    }


def sql(name: str) -> str:
    """The statement with this name in queries.sql."""
    return _queries()[name]


def migrate(connection: sqlite3.Connection, path: Path, way_out: str = "choose another state_dir") -> None:
    """Bring a database to the newest version, in the caller's transaction. ParameterError if a newer Millrace or
    another program created it; `way_out`: what to do then."""
    steps = _versions()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > max(steps):
        raise ParameterError(f"{path}: was written by a newer Millrace (version {version}); use that one, or {way_out}")
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    ours = {name for step in range(1, version + 1) for name in _TABLE.findall(steps[step])}
    if not tables >= ours or (tables and not ours):
        raise ParameterError(f"{path}: is a database of another program; {way_out}")
    for step in range(version + 1, max(steps) + 1):
        for statement in _statements(steps[step]):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {step}")


def _versions() -> Mapping[int, str]:
    """The script that leads to each version."""
    parts = _VERSION.split((_FOLDER / "schema.sql").read_text(encoding="utf-8"))
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))


def _statements(script: str) -> Iterator[str]:
    """Splits a script: `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Translates errors of SQLite and the disk to StorageError."""
    try:
        yield
    except sqlite3.Error as error:
        damaged = getattr(error, "sqlite_errorcode", None) in _DAMAGED
        way_out = "restore a backup" if damaged else "check the disk and the folder's permissions"
        raise StorageError(f"{path}: {error}; {way_out}") from error
    except OSError as error:
        way_out = too_many_files(error) or "choose another state_dir"
        raise StorageError(f"{path}: {error.strerror}; {way_out}") from error
