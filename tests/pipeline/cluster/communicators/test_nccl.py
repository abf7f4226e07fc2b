"""NCCL's ranks hold the contract too: over a stand-in for CuPy wherever tests run, over GPUs where there are any."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from pipeline.cluster.communicators.nccl import NcclCommunicator, _device_on_host, connect_nccl
from pipeline.cluster.communicators.solo import SoloCommunicator
from pipeline.errors import Aborted, ClusterError, CommunicatorError, DeadlineExceeded, DeviceUnavailable, RankLost
from tests.gpu_ranks import rank_gpus, rank_workers
from tests.pipeline.cluster.communicators import fake_cupy
from tests.pipeline.cluster.communicators.communicator_contract import (
    CommunicatorContract,
    SeveralRanksContract,
    numbers,
)
from tests.pipeline.cluster.communicators.process_ranks import InProcesses
from tests.pipeline.cluster.communicators.test_communicators import joined


@contextmanager
def joined_over(control, device):
    """NCCL over control communicators, each rank with its own device; dropped at the end, whatever has become of it."""

    def one(each):
        with device(each):
            return connect_nccl(each)

    with ThreadPoolExecutor(len(control)) as threads:
        ranks = list(threads.map(one, control, timeout=60))
    try:
        yield ranks
    finally:
        for each in ranks:
            each.abort()
        with ThreadPoolExecutor(len(ranks)) as threads:
            list(threads.map(lambda each: each.close(wait=False), ranks, timeout=60))


# Without a GPU


@contextmanager
def fake_device(communicator):
    fake_cupy.here.device = communicator.rank
    yield


class Faked:
    def on(self, communicator):
        return fake_device(communicator)

    def array(self, values):
        return fake_cupy.on_device(values)

    def back(self, array):
        assert isinstance(array, fake_cupy.GpuArray)
        return np.array(array)

    @contextmanager
    def communicators(self, size):
        with fake_cupy.fake_cupy(), joined(size) as control, joined_over(control, fake_device) as ranks:
            yield ranks


class TestStandIn(Faked, SeveralRanksContract):
    notices_mismatch = False
    sizes = (1, 3)


class TestHostArrays(SeveralRanksContract):
    """NumPy arrays take the tree, and nothing of CUDA is touched."""

    sizes = (2,)

    @contextmanager
    def communicators(self, size):
        with joined(size) as control:
            ranks = [NcclCommunicator(each) for each in control]
            yield ranks
            assert all(each._runtime is None for each in ranks)


class TestFirstArray(Faked):
    """NCCL starts with the first array that lies on a GPU; host arrays may come between."""

    def test_it_starts_by_itself(self):
        with fake_cupy.fake_cupy(), joined(2) as control, ThreadPoolExecutor(2) as threads:
            ranks = [NcclCommunicator(each) for each in control]

            def one(each):
                with fake_device(each):
                    ones = np.ones(3)
                    host = each.allreduce(ones)
                    assert each._nccl is None
                    device, again = each.allreduce_many([fake_cupy.on_device(ones), ones])
                    assert (type(host), type(device), type(again)) == (np.ndarray, fake_cupy.GpuArray, np.ndarray)
                    each.close()
                    return host.tolist(), device.tolist(), again.tolist()

            assert list(threads.map(one, ranks, timeout=20)) == [([2.0] * 3,) * 3] * 2


def test_two_ranks_with_one_gpu_are_refused():
    """Every rank finds it; one that tells it first ends the others' connections."""
    with fake_cupy.fake_cupy(), joined(3) as control, ThreadPoolExecutor(3) as threads:

        def one(each):
            fake_cupy.here.device = each.rank // 2
            with pytest.raises(ClusterError) as caught:
                connect_nccl(each)
            return str(caught.value)

        assert any("ranks 0 and 1 have the same GPU" in each for each in threads.map(one, control, timeout=20))


def test_ranks_with_different_host_ids_may_share_a_gpu(monkeypatch):
    monkeypatch.setattr("pipeline.cluster.communicators.nccl.device_uuid", fake_cupy.device_uuid)
    found = []
    for host in ("one", "another", "one"):
        monkeypatch.setenv("NCCL_HOSTID", host)
        found.append(_device_on_host(0))
    assert found[0] == found[2] != found[1]


def test_without_nccl_it_is_said_how_to_get_it():
    with (
        fake_cupy.fake_cupy(available=False),
        pytest.raises(DeviceUnavailable, match="NCCL is not installed; pip install"),
    ):
        connect_nccl(SoloCommunicator())


def faked(size):
    return Faked().communicators(size)


def test_a_lost_rank_ends_init():
    """One rank is gone before NCCL has heard of it: NCCL would wait, its connection tells."""
    with fake_cupy.fake_cupy(), joined(2) as control, ThreadPoolExecutor(2) as threads:

        def one(each):
            fake_cupy.here.device = each.rank
            if each.rank == 0:
                with pytest.raises((RankLost, Aborted)):
                    connect_nccl(each)
                return time.monotonic()
            each.allgather(np.array([*bytes(15), 1], np.uint8))
            each.broadcast(np.zeros(128, np.uint8))
            threading.Event().wait(0.1)
            each._peers.close()
            return time.monotonic()

        survivor, victim = threads.map(one, control, timeout=20)
        assert survivor - victim < 1


def test_a_lost_rank_ends_a_collective_and_nccl_is_aborted_first():
    with faked(2) as ranks:
        with fake_device(ranks[0]):
            nccl = ranks[0]._nccl
            killer = threading.Timer(0.1, ranks[1]._control._peers.close)
            killer.start()
            with pytest.raises(RankLost, match="rank 1 is gone"):
                ranks[0].allreduce(fake_cupy.on_device(np.ones(4)))
            assert nccl.aborted
            assert ranks[0]._nccl is None
            killer.join()
        with pytest.raises(Aborted):
            ranks[0].check()


def test_a_rank_that_dies_before_it_confirms_spoils_what_was_summed():
    """A sum is there, and was it right? Only if every rank was alive when all had it."""
    with faked(3) as ranks, ThreadPoolExecutor(3) as threads:

        def one(each):
            with fake_device(each):
                each.allreduce(fake_cupy.on_device(np.ones(4)))
                if each.rank == 1:
                    each.barrier()  # it has the sum, and dies before it hears that all have
                    each._control._peers.close()
                    return
                with pytest.raises((RankLost, Aborted)):
                    each.confirm()

        list(threads.map(one, ranks, timeout=20))


def test_who_has_given_up_confirms_nothing():
    with fake_cupy.fake_cupy(), joined(1) as control:
        each = NcclCommunicator(control[0])
        each.confirm()
        each.abort()
        with pytest.raises(Aborted):
            each.confirm()


def test_what_was_summed_with_every_rank_alive_is_confirmed():
    with faked(3) as ranks, ThreadPoolExecutor(3) as threads:

        def one(each):
            with fake_device(each):
                each.confirm()
                found = each.allreduce(fake_cupy.on_device(np.ones(4)))
                each.confirm()
                return found.tolist()

        assert list(threads.map(one, ranks, timeout=20)) == [[3.0] * 4] * 3


def test_an_error_of_nccl_is_told_as_the_lost_rank_behind_it():
    with faked(2) as ranks, fake_device(ranks[0]):
        ranks[0]._nccl.error = fake_cupy.NcclError("remote process exited")
        killer = threading.Timer(0.2, ranks[1]._control._peers.close)
        killer.start()
        with pytest.raises(RankLost):
            ranks[0].allreduce(fake_cupy.on_device(np.ones(4)))
        killer.join()


def test_an_error_with_every_rank_alive_is_itself():
    with faked(2) as ranks, fake_device(ranks[0]):
        ranks[0]._nccl.error = fake_cupy.NcclError("internal error")
        with pytest.raises(CommunicatorError, match="rank 0 of 2, cuda:0: internal error"):
            ranks[0].allreduce(fake_cupy.on_device(np.ones(4)))


def test_an_error_in_the_midst_of_a_collective_ends_it():
    with faked(2) as ranks, fake_device(ranks[0]):
        failing = threading.Timer(0.1, lambda: setattr(ranks[0]._nccl, "error", fake_cupy.NcclError("unhandled")))
        failing.start()
        with pytest.raises(CommunicatorError, match="unhandled"):
            ranks[0].allreduce(fake_cupy.on_device(np.ones(4)))
        failing.join()


def test_checking_tells_of_an_error_of_nccl():
    with faked(1) as (alone,):
        nccl = alone._nccl
        nccl.error = fake_cupy.NcclError("internal error")
        with pytest.raises(CommunicatorError, match="internal error"):
            alone.check()
        assert nccl.aborted


def test_a_rank_that_closes_after_the_others_are_gone_aborts():
    with faked(2) as ranks:
        nccl = ranks[0]._nccl
        ranks[1]._control._peers.close()
        ranks[0].close()
        assert nccl.aborted


def test_unknown_codes_are_errors():
    with faked(1) as (alone,):
        alone._nccl.error = KeyError(8)
        with pytest.raises(CommunicatorError, match="the code 8, which CuPy does not know"):
            alone.allreduce(fake_cupy.on_device(np.ones(4)))


def test_a_failed_device_is_noticed():
    def failed():
        raise fake_cupy.CUDARuntimeError(700)

    with faked(1) as (alone,):
        assert not alone.device_lost
        alone._runtime.memGetInfo = failed
        alone._runtime.eventQuery = lambda ptr: 700
        with pytest.raises(CommunicatorError, match="cudaError 700"):
            alone.allreduce(fake_cupy.on_device(np.ones(4)))
        assert alone.device_lost


def test_a_deadline_ends_a_collective():
    said = r"allreduce over NCCL did not come within 0\.2 s"
    with faked(2) as ranks, fake_device(ranks[0]), pytest.raises(DeadlineExceeded, match=said):
        ranks[0].allreduce(fake_cupy.on_device(np.ones(4)), timeout_s=0.2)


def test_an_array_of_another_device_is_refused():
    with faked(1) as (alone,):
        fake_cupy.here.device = 3
        with pytest.raises(ValueError, match="the array is on cuda:3, this rank's device is cuda:0"):
            alone.allreduce(fake_cupy.on_device(np.ones(4)))
        fake_cupy.here.device = 0


# On GPUs


class OnGpus:
    notices_mismatch = False

    def on(self, communicator):
        import cupy

        return cupy.cuda.Device(0)

    def array(self, values):
        import cupy

        return cupy.asarray(values)

    def back(self, array):
        return array.get()


@pytest.mark.gpu
class TestOneGpu(OnGpus, CommunicatorContract):
    sizes = (1,)

    @contextmanager
    def communicators(self, size):
        with joined(size) as control, joined_over(control, self.on) as ranks:
            yield ranks


@pytest.mark.multi_gpu
class TestTwoRanks(OnGpus, InProcesses, SeveralRanksContract):
    transport = staticmethod(connect_nccl)

    @staticmethod
    def worker_specs(size):
        return rank_workers(rank_gpus()[:size])


@pytest.mark.gpu
def test_the_callers_stream_comes_first():
    """An array that is still being computed on another stream is taken when it is done."""
    import cupy

    with TestOneGpu().communicators(1) as (alone,):
        stream = cupy.cuda.Stream(non_blocking=True)
        values = cupy.asarray(numbers("f8", (1 << 22,), 0))
        with stream:
            doubled = values
            for _ in range(200):
                doubled = doubled + values
            found = alone.allreduce(doubled)
        assert alone._stream.ptr not in (0, stream.ptr)
        cupy.testing.assert_array_equal(found, doubled)


@pytest.mark.gpu
def test_a_gpu_alone_needs_no_nccl():
    import cupy

    values = numbers("c8", (1009,), 0)
    alone = SoloCommunicator()
    for found in (alone.allreduce(cupy.asarray(values)), alone.reduce(cupy.asarray(values))):
        np.testing.assert_array_equal(found.get(), values)
    np.testing.assert_array_equal(alone.allgather(cupy.asarray(values)).get(), values[None])
