"""Keeps a Dask scheduler that runs for months from leaking memory.

Our scheduler loads this module as it starts (a `preload`); for another one, use
`dask scheduler --preload pipeline.cluster.dask.scheduler`.
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
    """Clear Dask's cache of task names regularly: it would grow to a hundred thousand entries.

    server : a scheduler or worker that is starting
    """
    server.periodic_callbacks["millrace-forget-keys"] = PeriodicCallback(key_split.cache_clear, FORGET_MS)


class _NoSpans:
    """Replaces Dask's spans, which leak a few kilobytes per job for the dashboard."""

    def observe_tasks(self, *_: Any, **__: Any) -> dict[Any, Any]:
        """No task belongs to any span."""
        return {}

    def heartbeat(self, *_: Any) -> None:
        """Ignores the workers' spans."""
