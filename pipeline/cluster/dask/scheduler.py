"""A Dask scheduler that may run for months: it keeps nothing of tasks that are over.

Ours loads this module as it starts (a `preload`); `dask scheduler --preload pipeline.cluster.dask.scheduler` loads it
into one that somebody else starts.
"""

from __future__ import annotations

from typing import Any

from dask.utils import key_split
from tornado.ioloop import PeriodicCallback

FORGET_MS = 60_000


def dask_setup(scheduler: Any) -> None:
    """Called by Dask as a scheduler starts."""
    scheduler.extensions["spans"] = _NoSpans()
    forget_keys(scheduler)


def forget_keys(server: Any) -> None:
    """Empty Dask's cache of names of tasks now and then: else it grows to a hundred thousand of them.

    server : a scheduler or a worker that starts
    """
    server.periodic_callbacks["millrace-forget-keys"] = PeriodicCallback(key_split.cache_clear, FORGET_MS)


class _NoSpans:
    """In the place of Dask's spans, which keep some kilobytes of every job's tasks for ever, for its dashboard."""

    def observe_tasks(self, *_: Any, **__: Any) -> dict[Any, Any]:
        """No task belongs to any span."""
        return {}

    def heartbeat(self, *_: Any) -> None:
        """What workers tell of spans is not kept."""
