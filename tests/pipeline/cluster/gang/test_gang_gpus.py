"""Gangs of workers with a GPU each, or with one together: NCCL by itself, kill -9 in every phase, event loops that
answer, memory that comes back."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from pipeline.cluster.communicators.nccl import NcclCommunicator
from pipeline.cluster.dask.worker_processes import local_workers
from pipeline.cluster.gang.gang import run_gang
from tests.gpu_ranks import rank_gpus, rank_workers, share_a_gpu
from tests.pipeline.cluster.gang import gang_functions
from tests.pipeline.cluster.gang.test_gang import PHASES, RECOVERY_SECONDS, SHARDS, kill_once, watched
from tests.pipeline.cluster.processes import wait_until

pytestmark = pytest.mark.multi_gpu

# MILLRACE_GANG_KILLS=60 is the long form: 20 in each phase.
KILLS = int(os.environ.get("MILLRACE_GANG_KILLS", "6"))
LEAK_BYTES = 64 << 20
# NCCL's start takes so long: a kill may come at any moment of it.
INIT_SECONDS = 0.5


@pytest.fixture(scope="module")
def gpus():
    with local_workers(rank_workers(rank_gpus()[:4])) as workers:
        yield workers


@pytest.fixture(scope="module")
def expected():
    return gang_functions.alone(gang_functions.summed, SHARDS)


def sums(rounds):
    """Rounds and elements of all-reduces. Ranks that share a GPU talk over sockets: less of both."""
    return (rounds // 5, 1 << 20) if share_a_gpu() else (rounds, 16 << 20)


def all_there(gpus):
    wait_until(lambda: len(gpus.last_heard()) == len(gpus._profiles), "a nanny's restart")


def test_gpus_give_the_bits_of_one_cpu(gpus, expected):
    """The first time, CUDA, CuPy and NCCL are loaded while the event loops are watched."""
    found = []
    age, answer = watched(gpus, lambda: found.append(run_gang(gpus, gang_functions.summed_on_gpus, SHARDS, None, 0, 3)))
    for result in found:
        assert set(result.values) == {expected}
        assert (result.epoch, result.lost) == (1, ())
    print(f"cold: heartbeat age at most {age:.2f} s, answers within {answer:.2f} s; {found[-1].seconds:.2f} s warm")


def test_event_loops_answer_during_init_and_collectives(gpus):
    all_there(gpus)
    run_gang(gpus, gang_functions.summed_on_gpus, SHARDS, None, 0, 3)
    age, answer = watched(gpus, lambda: run_gang(gpus, gang_functions.summed_on_gpus, SHARDS, None, 1, *sums(2000)))
    print(f"heartbeat age at most {age:.2f} s, answers within {answer:.2f} s")
    assert age < 1.0
    assert answer < 1.0


def killable(workers, folder, phase):
    transport = gang_functions.marking_nccl(folder) if phase == "init" else None
    return run_gang(workers, gang_functions.summed_on_gpus, SHARDS, folder, 3, *sums(300), transport=transport)


def test_kill_9_in_every_phase_leaves_the_same_bits(gpus, expected, tmp_path):
    rng = random.Random(int(os.environ.get("MILLRACE_GANG_SEED", "23")))
    recoveries, in_time, besides = [], 0, 0
    for number in range(KILLS):
        all_there(gpus)
        folder = tmp_path / str(number)
        folder.mkdir()
        phase = PHASES[number % len(PHASES)]
        killed = kill_once(gpus, folder, phase, rng, killable, INIT_SECONDS if phase == "init" else 0.1)
        result = killed["result"]
        assert set(result.values) == {expected}
        assert not list(folder.glob("spoilt*")), "a sum was confirmed, and wrong"
        in_time += result.epoch > 1
        besides += max(0, len(result.lost) - 1)
        recoveries.append(killed["seconds"])
        print(f"{phase}: {killed['seconds']:.3f} s, epoch {result.epoch}, lost {len(result.lost)}", flush=True)
    recoveries.sort()
    print(
        f"{KILLS} kills, {in_time} before the gang's end: {recoveries[KILLS // 2]:.3f} s from kill to result (median), "
        f"{recoveries[int(0.99 * (KILLS - 1))]:.3f} s (99th percentile), {recoveries[-1]:.3f} s (slowest); "
        f"{besides} processes ended besides the killed"
    )
    assert recoveries[int(0.99 * (KILLS - 1))] < RECOVERY_SECONDS


@pytest.mark.alone
def test_rebuilding_gives_the_memory_back(gpus):
    all_there(gpus)
    rebuilds = int(os.environ.get("MILLRACE_GANG_REBUILDS", "20" if share_a_gpu() else "100"))
    lost = run_gang(gpus, gang_functions.lost_by_rebuilding, 2, rebuilds).values
    print(f"bytes of device memory lost in {rebuilds} rebuilds: {lost}")
    assert max(lost) < LEAK_BYTES


def test_host_arrays_need_no_nccl(gpus, expected):
    all_there(gpus)
    assert set(run_gang(gpus, gang_functions.summed, SHARDS).values) == {expected}
    assert not any(run_gang(gpus, started_nccl, 2).values)


def started_nccl(member):
    assert isinstance(member.communicator, NcclCommunicator)
    member.communicator.allreduce(np.ones(3))
    return member.communicator._nccl is not None
