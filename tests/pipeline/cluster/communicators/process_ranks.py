"""Ranks in worker processes for the communicators' contract: each test's functions are sent to them."""

from __future__ import annotations

import traceback
from contextlib import ExitStack, closing, contextmanager, suppress
from operator import attrgetter, methodcaller

import numpy as np

from pipeline.cluster.communicators.peers import Membership, listen
from pipeline.cluster.communicators.tcp import connect_tcp
from pipeline.cluster.dask.worker_processes import local_workers
from pipeline.errors import CommunicatorError
from tests.pipeline.cluster.communicators.communicator_contract import ANSWER_SECONDS

HOST = "127.0.0.1"
JOIN_SECONDS = 60


class InProcesses:
    """A contract's ranks, each in a process. Subclasses set `worker_specs`, and `transport` over TCP's communicator."""

    sizes = (2,)

    @classmethod
    def setup_class(cls):
        cls._open = ExitStack()
        cls.workers = cls._open.enter_context(local_workers(cls.worker_specs(max(cls.sizes))))

    @classmethod
    def teardown_class(cls):
        cls._open.close()

    @contextmanager
    def communicators(self, size):
        client = self.workers._connection.client
        ranks = [ProcessRank(client, address) for address in sorted(self.workers.last_heard())[:size]]
        endpoints = tuple(call.result(ANSWER_SECONDS) for call in [each.submit(_listen) for each in ranks])
        members = [Membership(rank=rank, epoch=1, endpoints=endpoints, secret=b"s" * 32) for rank in range(size)]
        try:
            joining = [each.submit(_join, member, self.transport) for each, member in zip(ranks, members, strict=True)]
            for call in joining:
                call.result(JOIN_SECONDS)
            yield ranks
        finally:
            for call in [each.submit(_leave) for each in ranks]:
                call.result(ANSWER_SECONDS)

    def one_a_process(self, communicators):
        return communicators

    def together(self, communicators, function):
        calls = [each.submit(_outcome, function) for each in communicators]
        return [call.result(ANSWER_SECONDS) for call in calls]


class ProcessRank:
    """A rank's communicator in its process."""

    def __init__(self, client, address):
        self._client = client
        self._address = address

    def submit(self, function, *arguments):
        """Begin a call in the process; two may be under way."""
        return self._client.submit(function, *arguments, workers=[self._address], pure=False)

    def abort(self, reason="requested"):
        self._ask(methodcaller("abort", reason))

    rank = property(lambda self: self._ask(attrgetter("rank")))
    size = property(lambda self: self._ask(attrgetter("size")))
    epoch = property(lambda self: self._ask(attrgetter("epoch")))
    aborted = property(lambda self: self._ask(attrgetter("aborted")))

    def _ask(self, function):
        return self.submit(_asked, function).result(ANSWER_SECONDS)


# In a rank's process: its listener, its communicator over TCP, and the one made from that.

_held = {}


def _listen():
    _held["listener"] = listen(HOST)
    return _held["listener"].getsockname()[:2]


def _join(member, transport):
    with closing(_held["listener"]) as listener:
        _held["control"] = connect_tcp(listener, member)
    _held["communicator"] = transport(_held["control"])


def _leave():
    for name in ("communicator", "control"):
        if name in _held:
            _held[name].abort()
            with suppress(CommunicatorError):
                _held[name].close(wait=False)
    _held.clear()


def _asked(function):
    return function(_held["communicator"])


def _outcome(function):
    """What the function returns or raises."""
    try:
        return _asked(function)
    except Exception as error:
        error.add_note(traceback.format_exc())  # which does not travel
        return error


# Processes that die


def endless_rank(listener, membership, ready):
    """Collectives without end, until something goes wrong; then says what."""
    mine = np.full(400_001, membership.rank + 1.0)
    try:
        with connect_tcp(listener, membership, connect_s=100.0) as communicator:
            ready.send("joined")
            expected = sum(range(communicator.size + 1))
            while True:
                total = communicator.allreduce(mine)
                assert total.min() == total.max() == expected
    except CommunicatorError as error:
        ready.send(type(error).__name__)
