"""What a cancelled job has left beside its output: removed by one thread at a time, and never from under a run."""

from __future__ import annotations

import threading
from pathlib import Path

from pipeline.engine.ledger import remove_leftovers
from pipeline.service.roots import DataRoots
from pipeline.service.store import Store


class Leftovers:
    """Partial outputs and ledgers that nobody will go on with."""

    def __init__(self, store: Store, roots: DataRoots) -> None:
        self._store = store
        self._roots = roots
        self._being_removed: set[Path] = set()
        self._removed = threading.Condition()

    def remove(self, job: str) -> None:
        """Those of a cancelled job, unless by now a retry or another job goes on with them, or may."""
        output = self._roots.writable(self._store.job(job).asked.output)
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
        """For a run that is to write there: since its claim nobody begins to remove anything."""
        with self._removed:
            self._removed.wait_for(lambda: output not in self._being_removed)
