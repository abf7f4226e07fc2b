"""A running job's written chunks go into its ledger every few seconds, so that a stopped one can be resumed."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Self

from pipeline.engine.ledger import Entry, Ledger
from pipeline.engine.output import Output
from pipeline.errors import MillraceError
from pipeline.workloads.protocol import Chunk

# A job that ends sooner leaves no ledger and costs nothing.
INTERVAL_SECONDS = 10.0


class Checkpoints:
    """Between entering and leaving the context, a thread flushes the output and adds an entry every interval."""

    def __init__(
        self,
        ledger: Ledger,
        output: Output,
        device: str,
        interval_seconds: float | None = None,
        *,
        joined: threading.Lock | None = None,
    ) -> None:
        """joined : the ledger is another process's, which relies on it: the folder is never made here, and on leaving
        all that is written is entered, however short it took; where that fails, leaving raises what adding does.
        The lock is the workload's: an entry may hold notes of chunks that somebody else enters after it
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
        self._joined = joined
        self._unsaved: list[Entry] = []
        self.saved: list[Entry] = []
        self._failure: BaseException | None = None

    def note(self, chunk: Chunk) -> None:
        """The chunk is written; from any thread. Raises what has ended the thread that keeps the ledger."""
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
            with suppress(MillraceError):  # what stopped the job says more than a disk that is full a second time
                self._save()

    def _save_regularly(self) -> None:
        try:
            while not self._stopping.wait(self._interval_seconds):
                with suppress(MillraceError):  # the same disk fails the writers, who say so
                    self._save()
        except BaseException as error:
            self._failure = error

    def _save(self) -> None:
        """What fails to be entered is tried again with the next: a workload tells its notes only once."""
        with self._joined or nullcontext():
            with self._lock:
                written = sorted(self._written)
            if written:
                self._output.flush()
                entry = Entry(chunks=tuple(written), notes=self._output.take_notes(written), device=self._device)
                self._unsaved.append(entry)
                entered = set(written)
                with self._lock:  # for which every writer waits
                    self._written = [chunk for chunk in self._written if chunk not in entered]
            while self._unsaved:
                if not self._joined and not self._ledger.exists:
                    self._ledger.create()
                self._ledger.add(self._unsaved[0])
                self.saved.append(self._unsaved.pop(0))
