"""Enters a running job's written chunks in its ledger every few seconds, so that it can be resumed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from pipeline.engine.ledger import Entry, Ledger
from pipeline.engine.output import Output
from pipeline.errors import MillraceError
from pipeline.workloads.protocol import Chunk

# A shorter job leaves no ledger.
INTERVAL_SECONDS = 10.0


class Checkpoints:
    """In its context, a thread flushes the output and adds an entry to the ledger every interval."""

    def __init__(
        self,
        ledger: Ledger,
        output: Output,
        device: str,
        interval_seconds: float | None = None,
        *,
        joined: bool = False,
        has_iterates: bool = False,
    ) -> None:
        """joined : the ledger belongs to another process, which relies on it: it is never created here, and all written
        chunks are entered at the end, however short the run; an error of that is raised.
        has_iterates : chunks may have saved their iterates, which an entry replaces
        """
        self._ledger = ledger
        self._output = output
        self._device = device
        self._interval_seconds = INTERVAL_SECONDS if interval_seconds is None else interval_seconds
        self._written: list[int] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._save_regularly, name="checkpoints", daemon=True)
        self._began = 0.0
        self._joined, self._has_iterates = joined, has_iterates
        self._unsaved: list[Entry] = []
        self.saved: list[Entry] = []
        self._failure: BaseException | None = None

    def note(self, chunk: Chunk) -> None:
        """Record a written chunk; from any thread. Raises the error that ended the ledger's thread, if any."""
        if self._failure is not None:
            raise self._failure
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
        if self._joined and error is None:
            self._save()
        elif self._joined or time.monotonic() - self._began >= self._interval_seconds:
            with suppress(MillraceError):  # the error that stopped the job says more
                self._save()

    def _save_regularly(self) -> None:
        try:
            while not self._stopping.wait(self._interval_seconds):
                with suppress(MillraceError):  # the writers report the same disk error
                    self._save()
        except BaseException as error:
            self._failure = error

    def _save(self) -> None:
        """Entries that cannot be added are kept for the next try: the output returns its notes only once."""
        with self._lock:
            written = sorted(self._written)
        if written:
            self._output.flush()
            entry = Entry(chunks=tuple(written), notes=self._output.take_notes(written), device=self._device)
            self._unsaved.append(entry)
            entered = set(written)
            with self._lock:  # every writer waits for it
                self._written = [chunk for chunk in self._written if chunk not in entered]
        while self._unsaved:
            if not self._joined:
                self._ledger.create_once()
            self._ledger.add(self._unsaved[0])
            if self._has_iterates:
                self._ledger.drop_iterates(self._unsaved[0].chunks)
            self.saved.append(self._unsaved.pop(0))
