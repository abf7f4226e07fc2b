"""A connection to a Dask scheduler that survives the scheduler's restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from distributed import Client, Future
from distributed.client import ClosedClientError

from pipeline.errors import ClusterError

# A client that has lost its scheduler closes itself within its connection timeout, unless another server has taken the
# scheduler's port and keeps it waiting.
GIVE_UP_S = 30.0


class Connection:
    """A Dask client that is replaced after it has lost its scheduler.

    Dask's client tries to reconnect only within its connection timeout; then it closes for good.
    """

    def __init__(self, connect: Callable[[], Client], where: str) -> None:
        """Raises as `connect`; `where` names the cluster in messages."""
        self._connect = connect
        self._where = where
        self._connecting = threading.Lock()
        self._ended = False
        self._lost_at: float | None = None
        self._client = connect()

    @property
    def client(self) -> Client:
        """A client that is connected as far as is known. ClusterError if `connect` fails."""
        with self._connecting:
            if self._is_given_up() and not self._ended:
                self._client, lost = self._connect_again(), self._client
                _dismiss(lost)
            if self._client.status != "running":
                raise scheduler_lost(self._where)
            return self._client

    def _is_given_up(self) -> bool:
        if self._client.status == "running":
            self._lost_at = None
            return False
        self._lost_at = self._lost_at or time.monotonic()
        return self._client.status == "closed" or time.monotonic() - self._lost_at > GIVE_UP_S

    def _connect_again(self) -> Client:
        try:
            client = self._connect()
        except Exception as error:  # another server may answer there now
            raise scheduler_lost(self._where) from error
        if self._ended:
            client.close()
        return client

    def close(self) -> None:
        """Close the client for good."""
        self._ended = True
        with suppress(OSError):  # the scheduler may be gone
            self._client.close()


def _dismiss(client: Client) -> None:
    with suppress(Exception):  # it may be in any state
        client.close(timeout=1)
    with suppress(Exception):
        client._loop_runner.stop()  # a client that closed itself leaves its thread running


def submit(client: Client, where: str, function: Callable[..., Any], *args: Any, **how: Any) -> Future:
    """As `Client.submit`; ClusterError if the client has lost its scheduler."""
    with _closed_is_lost(where):
        return client.submit(function, *args, **how)


def listen(client: Client, where: str, topic: str, hear: Callable[[Any], None]) -> None:
    """As `Client.subscribe_topic`; ClusterError if the client has lost its scheduler."""
    with _closed_is_lost(where):
        client.subscribe_topic(topic, hear)


@contextmanager
def _closed_is_lost(where: str) -> Iterator[None]:
    try:
        yield
    except ClosedClientError as error:
        raise scheduler_lost(where) from error


def scheduler_lost(where: str) -> ClusterError:
    """The error for a scheduler that does not answer."""
    return ClusterError(f"{where} no longer answers: see its log, and start it again")
