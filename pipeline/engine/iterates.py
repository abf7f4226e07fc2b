"""Saves the state of a chunk's iterations in the ledger every few seconds, so that a killed run goes on there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from pipeline.engine.ledger import Ledger
from pipeline.errors import MillraceError

INTERVAL_SECONDS = 5.0
# Saving a large state may take seconds: it takes at most this share of the time.
_SHARE = 0.05


class Iterates:
    """A job's `IterateStore`; see `pipeline.workloads.protocol`."""

    def __init__(self, ledger: Ledger, *, joined: bool = False) -> None:
        """joined : the ledger belongs to another process and is never created here."""
        self._ledger, self._joined = ledger, joined
        self._next: dict[int, float] = {}  # by chunk, of the monotonic clock

    def saved(self, chunk: int) -> Mapping[str, NDArray[Any]] | None:
        self._next[chunk] = time.monotonic() + INTERVAL_SECONDS
        return self._ledger.iterate(chunk)

    def due(self, chunk: int) -> bool:
        return time.monotonic() >= self._next.get(chunk, 0.0)

    def save(self, chunk: int, state: Mapping[str, Any]) -> None:
        """A full disk does not end the iterations: the writers report it."""
        began = time.monotonic()
        try:
            if not self._joined:
                self._ledger.create_once()
            self._ledger.save_iterate(chunk, state)
        except MillraceError:
            self._next[chunk] = began + 10 * INTERVAL_SECONDS
            return
        ended = time.monotonic()
        self._next[chunk] = ended + max(INTERVAL_SECONDS, (ended - began) / _SHARE)
