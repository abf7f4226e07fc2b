"""The audit log: who did what, from where. JSON lines, only ever appended to, in files of a bounded size.

A thread of its own writes: no request waits for the disk. An entry is in the file at once, so that it survives a kill,
and on disk a second later, so that a power cut costs at most that second. If the disk is full, entries are lost and
counted; a line in the log states their number once it can be written again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline import metrics
from pipeline.errors import ParameterError

LOG = logging.getLogger("millrace.service")
SYNC_S = 1.0
MOST_WAITING = 10_000  # entries, while the disk does not keep up
# Limit for refused requests, which anyone can send at any rate.
MOST_REFUSALS_A_SECOND = 10
_TOKEN = re.compile(r"mr_[A-Za-z0-9_-]{8,}")
_END = None


class AuditLog:
    """One file and its predecessors FILE.1 (the newest), FILE.2 and so on. Thread-safe."""

    def __init__(self, path: Path, *, most_bytes: int, files: int) -> None:
        """most_bytes : of each file
        files      : how many are kept, with the one that is written

        Raises ParameterError if it cannot be written.
        """
        self._path = path
        self._most_bytes = most_bytes
        self._files = files
        self._entries: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._lost = 0
        self._refusals: tuple[int, int] = (0, 0)  # the second, and how many were in it
        self._unlisted = 0
        self._is_failing = False
        try:
            self._file = self._opened()
        except OSError as error:
            raise ParameterError(f"audit_log {path}: {error.strerror}; choose another") from error
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    def note(self, what: str, *, who: str | None, source: str, **facts: Any) -> None:
        """Adds an entry; returns at once. What looks like a token is left out."""
        entry = {"at": _now(), "what": what, "who": who, "from": source}
        said = json.dumps(entry | {name: value for name, value in facts.items() if value is not None})
        self._put(_TOKEN.sub("mr_…", said).encode("utf-8", "backslashreplace") + b"\n")

    def note_refusal(self, what: str, *, who: str | None, source: str, **facts: Any) -> None:
        """As `note`, for what anyone may make happen: of too many in a second, only the number is kept."""
        with self._lock:
            second = int(time.monotonic())
            count = self._refusals[1] + 1 if self._refusals[0] == second else 1
            self._refusals = second, count
            if count > MOST_REFUSALS_A_SECOND:
                self._unlisted += 1
                return
            unlisted, self._unlisted = self._unlisted, 0
        self.note(what, who=who, source=source, **facts, unlisted_before=unlisted or None)

    def close(self) -> None:
        """Writes what is waiting."""
        self._entries.put(_END)
        self._thread.join()
        os.close(self._file)

    def _put(self, entry: bytes) -> None:
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._count_lost(1)

    def _count_lost(self, count: int) -> None:
        metrics.audit_entries_lost.inc(count)
        with self._lock:
            self._lost += count

    # The thread

    def _write_all(self) -> None:
        synced, is_dirty, is_over = time.monotonic(), False, False
        while not is_over:
            with suppress(queue.Empty):
                batch = [self._entries.get(timeout=SYNC_S if is_dirty else None)]
                with suppress(queue.Empty):
                    while True:
                        batch.append(self._entries.get_nowait())
                is_over = _END in batch
                is_dirty |= self._write([each for each in batch if each is not _END])
            if is_dirty and (is_over or time.monotonic() - synced >= SYNC_S):
                with suppress(OSError):  # the next write reports it
                    os.fsync(self._file)
                synced, is_dirty = time.monotonic(), False

    def _write(self, entries: Sequence[bytes]) -> bool:
        """Whether something was written."""
        for number, entry in enumerate(entries):
            try:
                self._make_ready(len(entry))
                with self._lock:
                    lost = self._lost
                if lost:
                    self._append(json.dumps({"at": _now(), "what": "entries lost", "count": lost}).encode() + b"\n")
                    with self._lock:
                        self._lost -= lost
                self._append(entry)
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    LOG.error("audit_log %s: %s; entries are lost until this is fixed", self._path, error.strerror)
                    self._is_failing = True
                self._count_lost(len(entries) - number)
                return number > 0
        return bool(entries)

    def _append(self, line: bytes) -> None:
        """The whole line or nothing of it."""
        size = os.fstat(self._file).st_size
        written = os.write(self._file, line)
        if written < len(line):  # the disk became full
            os.ftruncate(self._file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _make_ready(self, count: int) -> None:
        """Begins another file if this one is full, or was moved away by another program."""
        found = os.fstat(self._file)
        if found.st_size > 0 and found.st_size + count > self._most_bytes:
            os.fsync(self._file)
            for number in range(self._files - 1, 0, -1):
                earlier = self._numbered(number - 1)
                if earlier.exists():
                    earlier.replace(self._numbered(number))
            if self._files == 1:
                self._path.unlink(missing_ok=True)
        elif _identity(self._path) == (found.st_dev, found.st_ino):
            return
        opened = self._opened()
        os.close(self._file)
        self._file = opened

    def _numbered(self, number: int) -> Path:
        return self._path if number == 0 else self._path.with_name(f"{self._path.name}.{number}")

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
