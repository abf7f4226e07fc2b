"""A running job's written chunks go into its ledger every few seconds, so that a stopped one can be resumed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from pipeline.engine.ledger import Entry, Ledger
from pipeline.errors import MillraceError
from pipeline.workloads.base import Chunk, Workload

# A job that ends sooner leaves no ledger and costs nothing.
INTERVAL_SECONDS = 10.0


class Checkpoints:
    """Between entering and leaving the context, a thread flushes the output and adds an entry every interval."""

    def __init__(
        self,
        ledger: Ledger,
        workload: Workload,
        device: str,
        interval_seconds: float | None = None,
        *,
        joins: bool = False,
    ) -> None:
        """joins : the ledger is another process's, which relies on it: the folder is never made here, and on leaving
        all that is written is entered, however short it took; where that fails, leaving raises what adding does
        """
        self._ledger = ledger
        self._workload = workload
        self._device = device
        self._interval_seconds = INTERVAL_SECONDS if interval_seconds is None else interval_seconds
        self._written: list[int] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._save_regularly, name="checkpoints", daemon=True)
        self._began = 0.0
        self._joins = joins

    def note(self, chunk: Chunk) -> None:
        """The chunk is written; from any thread."""
        with self._lock:
            self._written.append(chunk.index)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        if self._joins and error is None:
            self._save()
        elif self._joins or time.monotonic() - self._began >= self._interval_seconds:
            with suppress(MillraceError):  # what stopped the job says more than a disk that is full a second time
                self._save()

    def _save_regularly(self) -> None:
        while not self._stopping.wait(self._interval_seconds):
            with suppress(MillraceError):  # the same disk fails the writers, who say so
                self._save()

    def _save(self) -> None:
        with self._lock:
            written, self._written = sorted(self._written), []
        if not written:
            return
        try:
            if not self._joins and not self._ledger.exists:
                self._ledger.create()
            self._workload.flush()
            self._ledger.add(Entry(chunks=tuple(written), notes=self._workload.audit_notes(), device=self._device))
        except BaseException:
            with self._lock:
                self._written += written  # for the next try
            raise
