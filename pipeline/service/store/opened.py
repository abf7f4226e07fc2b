"""The open database of a state folder: transactions, and whether it is still there and has room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config import format_bytes
from pipeline.errors import StorageError
from pipeline.service.store.database import Database
from pipeline.service.store.job_events import JobEvents
from pipeline.service.store.limits import Rules
from pipeline.service.store.statements import migrate, storing
from pipeline.service.store.transaction import Reading, Transaction

LEAST_ROOM_BYTES = 1 << 20  # on the disk: with less, no job is accepted
HALF_LIFE_S = 24 * 3600.0  # of an owner's past use: yesterday's counts half


class OpenStore:
    """What every part of a `Store` uses. Thread-safe."""

    def __init__(self, path: Path, *, quota_days: int = 30, webhook: str | None = None) -> None:
        """Opens or creates the database, and brings it to the newest version.

        quota_days : the period of quotas
        webhook    : a URL to notify of every job that ends, besides the job's own

        Raises StorageError if that fails, ParameterError if a newer Millrace wrote it.
        """
        self.path = path
        self._webhook = webhook
        self._quota_days = quota_days
        self.job_events = JobEvents()
        self._database = Database(path, {"halved": (2, _halved)})
        try:
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._database.writing() as connection:
                    migrate(connection, path)
                self._file = _identity(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Call this once no other thread uses the store."""
        self._database.close()

    def check(self) -> None:
        """StorageError if the disk cannot be written, or a restart would not find the database.

        Only a write shows that the disk is writable, so this writes the unchanged version. Jobs need more room.
        """
        self._check_is_there()
        self._check_room()
        with storing(self.path), self._database.writing() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            connection.execute(f"PRAGMA user_version = {version}")

    def _rules(self, reading: Reading, now: float) -> Rules:
        return Rules(reading, now=now, days=self._quota_days)

    def _check_is_there(self) -> None:
        """StorageError if the name of the open database now leads to another file, or none."""
        with storing(self.path):
            found = _identity(self.path) if self.path.exists() else None
        if found != self._file:
            what = "is gone" if found is None else "is another file"
            raise StorageError(f"{self.path}: {what} since the service opened it; put it back, or restart the service")

    def _check_room(self) -> None:
        """StorageError if running jobs could soon be unable to record their progress."""
        with storing(self.path):
            room = os.statvfs(self.path.parent)
        left = room.f_bavail * room.f_frsize
        if left < LEAST_ROOM_BYTES:
            raise StorageError(f"{self.path.parent}: {format_bytes(left)} are left on the disk; make room")

    @contextmanager
    def _read(self) -> Iterator[Reading]:
        with storing(self.path), self._database.reading() as connection:
            yield Reading(connection)

    @contextmanager
    def _write(self, now: float) -> Iterator[Transaction]:
        """One transaction; once it is on disk, listeners of the changed jobs are woken."""
        with storing(self.path), self._database.writing() as connection:
            transaction = Transaction(connection, now, self._webhook)
            yield transaction
            transaction.finish()
        for each in transaction.ended:
            each.count()
        for usage in transaction.used:
            usage.count()
        self.job_events.notify(transaction.changed)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _halved(amount: float | None, age_s: float | None) -> float | None:
    return None if amount is None or age_s is None else float(amount * 0.5 ** (max(age_s, 0.0) / HALF_LIFE_S))
