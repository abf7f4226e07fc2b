"""The contract, held by the rank that is alone, by threads and by TCP; and what only TCP can get wrong."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import metrics
from pipeline.cluster.communicators.base import BUCKETED_BYTES, COLLECTIVE_SECONDS, Deadline
from pipeline.cluster.communicators.deterministic import fixed_tree_sum
from pipeline.cluster.communicators.in_process import in_process
from pipeline.cluster.communicators.peers import Membership, listen
from pipeline.cluster.communicators.solo import SoloCommunicator
from pipeline.cluster.communicators.tcp import connect_tcp
from pipeline.cluster.dask import worker_start
from pipeline.errors import Aborted, ClusterError, CommunicatorError, DeadlineExceeded, RankLost
from tests.pipeline.cluster.communicators.communicator_contract import (
    CommunicatorContract,
    SeveralRanksContract,
    fixed_tree_sum_alone,
    numbers,
)
from tests.pipeline.cluster.communicators.process_ranks import InProcesses, endless_rank

HOST = "127.0.0.1"
SECRET = b"s" * 32


class TestSolo(CommunicatorContract):
    sizes = (1,)

    @contextmanager
    def communicators(self, size):
        yield [SoloCommunicator()]


class TestInProcess(SeveralRanksContract):
    @contextmanager
    def communicators(self, size):
        yield in_process(size)


class TestTcp(SeveralRanksContract):
    @contextmanager
    def communicators(self, size):
        with joined(size) as communicators:
            yield communicators


@pytest.mark.slow
class TestTcpInProcesses(InProcesses, SeveralRanksContract):
    @staticmethod
    def transport(control):
        return control

    @staticmethod
    def worker_specs(size):
        return worker_start.cpu_workers(size, 1)


@contextmanager
def listening(size):
    listeners = [listen(HOST) for _ in range(size)]
    try:
        yield listeners, tuple(listener.getsockname()[:2] for listener in listeners)
    finally:
        for listener in listeners:
            listener.close()


def member(rank, endpoints, secret=SECRET, epoch=1):
    return Membership(rank=rank, epoch=epoch, endpoints=endpoints, secret=secret)


@contextmanager
def joined(size, **options):
    """Ranks over loopback, connected; closed at once at the end, since some may have failed."""
    with listening(size) as (listeners, endpoints), ThreadPoolExecutor(size) as threads:
        calls = [
            threads.submit(connect_tcp, listeners[rank], member(rank, endpoints), **options) for rank in range(size)
        ]
        communicators = [call.result(20) for call in calls]
    try:
        yield communicators
    finally:
        for each in communicators:
            each.abort()
        for each in communicators:
            each.close()


def reduced(communicator, arrays):
    return communicator.allreduce(arrays[communicator.rank])


def test_threads_and_tcp_give_the_same_bits():
    for size in (2, 3, 5, 7):
        arrays = [numbers("f4", (1009,), rank) for rank in range(size)]
        with joined(size) as over_tcp, ThreadPoolExecutor(size) as threads:
            found = [
                list(threads.map(reduced, ranks, [arrays] * size, timeout=20)) for ranks in (over_tcp, in_process(size))
            ]
        expected = fixed_tree_sum_alone(arrays).tobytes()
        assert {each.tobytes() for way in found for each in way} == {expected}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shards=st.integers(1, 33), dtype=st.sampled_from(["f2", "f4", "f8", "c8", "c16", "i4"]))
def test_the_deterministic_sum_knows_neither_ranks_nor_their_order(data, shards, dtype):
    """Any number of ranks, any holders, any order of arrival: the bits of a tree over the shards."""
    partials = [numbers(dtype, (17,), shard) for shard in range(shards)]
    with np.errstate(all="ignore"):
        expected = fixed_tree_sum_alone(partials)
    size = data.draw(st.integers(1, min(shards, 5)))
    extra = data.draw(st.lists(st.integers(0, size - 1), min_size=shards - size, max_size=shards - size))
    holders = data.draw(st.permutations([*range(size), *extra]))
    arrival = data.draw(st.permutations(range(size)))
    ranks = in_process(size)

    def one(rank):
        mine = {shard: partials[shard] for shard in range(shards) if holders[shard] == rank}
        return fixed_tree_sum(ranks[rank], mine, holders)

    with ThreadPoolExecutor(size) as threads:
        for call in [threads.submit(one, rank) for rank in arrival]:
            assert call.result(20).tobytes() == expected.tobytes()


def test_partials_of_the_wrong_shards_are_refused():
    with pytest.raises(ValueError, match=r"must hold the shards \[0, 1\], it has \[1\]"):
        fixed_tree_sum(SoloCommunicator(), {1: np.ones(2)}, [0, 0])
    with pytest.raises(ValueError, match="alike"):
        fixed_tree_sum(SoloCommunicator(), {0: np.ones(2), 1: np.ones(3)}, [0, 0])


def test_small_arrays_share_a_collective(monkeypatch):
    sent = []
    monkeypatch.setattr(SoloCommunicator, "_allreduce", lambda self, array, op, out, deadline: sent.append(array))
    SoloCommunicator().allreduce_many([np.ones(n % 7, "f4" if n % 2 else "i4") for n in range(100)])
    even, odd = (sum(n % 7 for n in range(first, 100, 2)) for first in (0, 1))
    assert [(array.dtype.str[1:], array.size) for array in sent] == [("i4", even), ("f4", odd)]
    sent.clear()
    large = np.ones(BUCKETED_BYTES, "u1")
    SoloCommunicator().allreduce_many([large, large[1:], large])
    assert [array.size for array in sent] == [BUCKETED_BYTES, BUCKETED_BYTES, BUCKETED_BYTES - 1]


def test_metrics_count_what_went_through():
    def value(counter, label):
        return counter.labels(label)._value.get()

    before = value(metrics.collective_bytes, "allreduce"), value(metrics.communicator_aborts, "rank_lost")
    with joined(2) as (first, second), ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda each: each.allreduce(np.ones(1000)), (first, second), timeout=20))
        assert value(metrics.collective_bytes, "allreduce") == before[0] + 16_000
        assert value(metrics.collective_seconds, "allreduce") > 0
        second._peers.abort()
        with pytest.raises(RankLost, match="rank 1 is gone"):
            first.barrier()
    assert value(metrics.communicator_aborts, "rank_lost") == before[1] + 1
    SoloCommunicator(epoch=7)
    assert metrics.communicator_epoch._value.get() == 7


# Joining


def test_strangers_are_turned_away():
    """One that says nothing, one that talks nonsense, and one of another secret; the ranks still meet."""
    with listening(2) as (listeners, endpoints), ThreadPoolExecutor(3) as threads:
        silent = socket.create_connection(endpoints[0])
        rude = socket.create_connection(endpoints[0])
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        other_listener = listen(HOST)
        wrong = threads.submit(connect_tcp, other_listener, member(1, endpoints, b"x" * 32))
        first = threads.submit(connect_tcp, listeners[0], member(0, endpoints))
        with pytest.raises(CommunicatorError, match="does not know the secret of epoch 1"):
            wrong.result(20)
        second = threads.submit(connect_tcp, listeners[1], member(1, endpoints))
        ranks = [first.result(20), second.result(20)]
        for found in threads.map(lambda each: each.allreduce(np.ones(3)), ranks, timeout=20):
            np.testing.assert_array_equal(found, np.full(3, 2.0))
        for each in (silent, rude, other_listener):
            each.close()
        list(threads.map(lambda each: each.close(), ranks, timeout=20))


def test_a_stranger_that_knows_the_words_but_not_the_secret_is_turned_away():
    """It says hello as rank 1 does, is answered, and proves nothing; the true rank 1 is admitted after it."""
    with listening(2) as (listeners, endpoints), ThreadPoolExecutor(2) as threads:
        first = threads.submit(connect_tcp, listeners[0], member(0, endpoints))
        with socket.create_connection(endpoints[0], timeout=20) as stranger, stranger.makefile("rb") as answers:
            stranger.sendall(struct.pack("<8sI32s", b"millrank", 1, bytes(32)))
            assert len(answers.read(32 + 32)) == 64
            stranger.sendall(bytes(32))
            assert answers.read() == b"", "the connection is to be closed"
        second = threads.submit(connect_tcp, listeners[1], member(1, endpoints))
        ranks = [first.result(20), second.result(20)]
        list(threads.map(lambda each: each.close(), ranks, timeout=20))


def test_another_epoch_is_turned_away():
    with listening(2) as (listeners, endpoints), ThreadPoolExecutor(2) as threads:
        late = threads.submit(connect_tcp, listeners[1], member(1, endpoints, epoch=1))
        now = threads.submit(connect_tcp, listeners[0], member(0, endpoints, epoch=2), connect_s=0.5)
        with pytest.raises(CommunicatorError, match="does not know the secret of epoch 1"):
            late.result(20)
        with pytest.raises(DeadlineExceeded, match=r"the connection of rank 1 did not come within 0\.5 s"):
            now.result(20)


def test_joining_ends_when_it_is_given_up():
    with listening(3) as (listeners, endpoints), ThreadPoolExecutor(1) as threads:
        given_up = threading.Event()
        call = threads.submit(connect_tcp, listeners[0], member(0, endpoints), given_up=given_up)
        given_up.set()
        with pytest.raises(Aborted):
            call.result(5)


def test_a_host_that_does_not_answer_holds_up_nobody():
    """Its queue of connections is full, so that the kernel leaves further ones unanswered."""
    with socket.socket() as deaf, listening(1) as (listeners, (here,)):
        deaf.bind((HOST, 0))
        deaf.listen(0)
        endpoints = (deaf.getsockname(), here)
        with socket.create_connection(endpoints[0]), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(endpoints[0])
            with pytest.raises(DeadlineExceeded, match=r"did not come within 0\.2 s"):
                connect_tcp(listeners[0], member(1, endpoints), connect_s=0.2)
            given_up = threading.Event()
            threading.Timer(0.1, given_up.set).start()
            started = time.monotonic()
            with pytest.raises(Aborted):
                connect_tcp(listeners[0], member(1, endpoints), given_up=given_up)
            assert time.monotonic() - started < 3


def test_a_host_that_is_not_ours_is_one_line():
    with pytest.raises(ClusterError, match=r"cannot listen on 192\.0\.2\.1 for a gang's other ranks"):
        listen("192.0.2.1")


def test_a_rank_that_no_longer_listens_is_lost():
    with listening(2) as (listeners, endpoints):
        listeners[0].close()
        with pytest.raises(RankLost, match="rank 0 is gone"):
            connect_tcp(listeners[1], member(1, endpoints))


# Processes that die


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_ends_the_collective_of_the_others_at_once(victim):
    """kill -9 at a random moment of an endless run of all-reduces: the kernel tells the others."""
    worker_start.start_fork_server()
    context = multiprocessing.get_context(worker_start.METHOD)
    rng = random.Random(victim)
    with listening(4) as (listeners, endpoints):
        pipes = [context.Pipe() for _ in range(4)]
        ranks = [
            context.Process(target=endless_rank, args=(listeners[rank], member(rank, endpoints), pipes[rank][1]))
            for rank in range(4)
        ]
        try:
            for each in ranks:
                each.start()
            for mine, _ in pipes:
                assert mine.poll(100)
                assert mine.recv() == "joined"
            deadline = Deadline(rng.uniform(0, 0.2))  # the moment of death is the test's subject, not its clock
            while deadline.left_s:
                pass
            os.kill(ranks[victim].pid, signal.SIGKILL)
            started = time.monotonic()
            for rank, (mine, _) in enumerate(pipes):
                if rank != victim:
                    assert mine.poll(COLLECTIVE_SECONDS / 4)
                    assert mine.recv() in ("RankLost", "Aborted")
            assert time.monotonic() - started < COLLECTIVE_SECONDS / 4
        finally:
            for each in ranks:
                each.kill()
                each.join()
