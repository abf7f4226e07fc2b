"""Removes what a cancelled job left beside its output: one thread at a time for each output, never during a run."""

from __future__ import annotations

import threading
from pathlib import Path

from pipeline.engine.ledger import remove_leftovers
from pipeline.service.roots import DataRoots
from pipeline.service.store import Store


class Cleanup:
    """Removes partial outputs and ledgers that no job will continue."""

    def __init__(self, store: Store, roots: DataRoots) -> None:
        self._store = store
        self._roots = roots
        self._being_removed: set[Path] = set()
        self._removed = threading.Condition()

    def remove(self, job: str) -> None:
        """Removes those of a cancelled job, unless a retry or another job continues them, or may."""
        asked = self._store.job(job).asked
        output = self._roots.of(asked.group).writable(asked.output)
        with self._removed:
            self._removed.wait_for(lambda: output not in self._being_removed)
            self._being_removed.add(output)
        try:
            if self._store.abandoned(job):
                remove_leftovers(output)
        finally:
            with self._removed:
                self._being_removed.remove(output)
                self._removed.notify_all()

    def wait_until_removed(self, output: Path) -> None:
        """Called by a run before it writes there: once its job is claimed, no further removal begins."""
        with self._removed:
            self._removed.wait_for(lambda: output not in self._being_removed)
