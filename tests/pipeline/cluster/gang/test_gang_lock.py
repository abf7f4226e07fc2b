"""One gang at a time on a set of workers: of one process, and of several at the same scheduler."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import dask
import pytest
from distributed import Semaphore

from pipeline.cluster.dask import worker_processes
from pipeline.cluster.dask.worker_processes import workers_of
from pipeline.cluster.gang import member
from pipeline.cluster.gang.gang import GangLimits, run_gang
from pipeline.errors import ClusterError
from tests import commands
from tests.pipeline.cluster.dask.thread_workers import ThreadWorkers
from tests.pipeline.cluster.gang import gang_functions
from tests.pipeline.cluster.processes import running, running_scheduler, wait_until

pytestmark = pytest.mark.slow

LEASE_S = 2.0
CONFIG = "distributed.scheduler.locks"
LEASES = {"lease-timeout": f"{LEASE_S}s", "lease-validation-interval": "100ms"}

IMPORTS = """
import sys
from pipeline.cluster.dask.worker_processes import workers_of
from pipeline.cluster.gang.gang import run_gang
from tests.pipeline.cluster.gang import gang_functions
"""
# What another service does: it has the turn until it is told to end, or runs gangs.
HOLDS = """
with workers_of(sys.argv[1], "cpu", 1) as workers, workers.lock(None, lambda: None):
    print("held", flush=True)
    sys.stdin.read()
"""
RUNS = """
with workers_of(sys.argv[1], "cpu", 1) as workers:
    print("here", flush=True)
    for _ in range(20):
        run_gang(workers, gang_functions.place, 2)
"""
STAYS = """
with workers_of(sys.argv[1], "cpu", 1) as workers:
    print("here", flush=True)
    run_gang(workers, gang_functions.stays, 2, sys.argv[2])
"""


class Enough(Exception):
    pass


def test_gangs_of_one_process_take_turns():
    workers = ThreadWorkers(2)
    inside, free = threading.Event(), threading.Event()

    def waits(each):
        inside.set()
        free.wait(20)

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(run_gang, workers, waits, 2)
        assert inside.wait(20)
        with pytest.raises(ClusterError, match="another gang runs on the workers of threads-"):
            run_gang(workers, gang_functions.place, 2, limits=GangLimits(lock_s=0.1))
        # Whoever comes out of turn hears it from the worker itself.
        with pytest.raises(ClusterError, match="already takes part in a gang"):
            member.introduce("another", 1, next(iter(workers.last_heard())), "127.0.0.1")
        free.set()
        first.result(20)
    assert len(run_gang(workers, gang_functions.place, 2).values) == 2


@contextmanager
def cluster(folder):
    """A scheduler's process, its address, and its workers as this process has them."""
    environment = {f"{CONFIG}.{name}".replace(".", "__").replace("-", "_").upper(): LEASES[name] for name in LEASES}
    with pytest.MonkeyPatch.context() as patch, dask.config.set({f"{CONFIG}.{name}": LEASES[name] for name in LEASES}):
        for name, value in environment.items():
            patch.setenv(f"DASK_{name}", value)
        patch.setattr(worker_processes, "CONNECT_SECONDS", 60.0)  # a busy machine starts workers slowly
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))  # where the workers find the gangs' functions
        with (
            running_scheduler(folder) as (process, address),
            running("worker", address, "--device", "cpu", "--workers", 2, cwd=folder),
            workers_of(address, "cpu", 1) as workers,
        ):
            wait_until(lambda: len(workers.last_heard()) == 2, "the workers' start")
            yield process, address, workers


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster")) as (_, address, workers):
        yield address, workers


@contextmanager
def another(code, *arguments):
    """Another process at the same scheduler, which has said its word."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with commands.Popen([sys.executable, "-c", IMPORTS + code, *arguments], **pipes) as process:
        try:
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def waiting_gang(workers):
    """A gang that has looked several times whether its turn has come."""
    looks = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as threads:
        gang = threads.submit(run_gang, workers, gang_functions.place, 2, check=looks.release)
        for _ in range(4):
            assert looks.acquire(timeout=20)
        assert not gang.done()
        yield gang


def test_gangs_of_two_processes_take_turns(clustered):
    address, workers = clustered
    with another(RUNS, address) as process:
        for _ in range(20):
            assert len(run_gang(workers, gang_functions.place, 2).values) == 2
        assert process.wait(60) == 0


def test_a_turn_is_waited_for(clustered):
    address, workers = clustered
    with another(HOLDS, address) as process, waiting_gang(workers) as gang:
        process.stdin.close()
        assert len(gang.result(60).values) == 2


def test_a_turn_is_given_back_at_its_end(clustered):
    """One that is not would end with its lease."""
    _, workers = clustered
    turns, began = 20, time.monotonic()
    for _ in range(turns):
        with workers.lock(None, lambda: None):
            pass
    assert time.monotonic() - began < turns * LEASE_S / 2


def test_a_turn_outlasts_its_lease_and_has_an_end(clustered):
    address, workers = clustered
    limits = GangLimits(lock_s=2.5 * LEASE_S)
    with another(HOLDS, address), pytest.raises(ClusterError, match=f"on the workers of {address} and has not ended"):
        run_gang(workers, gang_functions.place, 2, limits=limits)


def test_who_waits_for_a_turn_and_is_no_longer_wanted_ends(clustered):
    address, workers = clustered
    moments = []

    def check():
        moments.append(time.monotonic())
        if len(moments) == 4:
            raise Enough

    with another(HOLDS, address), pytest.raises(Enough):
        run_gang(workers, gang_functions.place, 2, check=check)
    assert moments[-1] - moments[0] < 3.0, "it is to be asked several times a second"
    wait_until(lambda: not renewed(), "the end of its renewals")


def test_the_turn_of_a_killed_process_is_taken_over(clustered):
    address, workers = clustered
    with another(HOLDS, address) as process, waiting_gang(workers) as gang:
        process.kill()
        assert len(gang.result(60).values) == 2


def test_gangs_that_meet_end_in_an_error_of_the_second(clustered, tmp_path):
    """A process that stood still for longer than its lease: its own gang comes to its end all the same."""
    address, workers = clustered
    with another(STAYS, address, str(tmp_path)) as process:
        wait_until(lambda: len(list(tmp_path.glob("inside.*"))) == 2, "the first gang")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ClusterError, match="already takes part in a gang"):
            run_gang(workers, gang_functions.place, 2)
        process.send_signal(signal.SIGCONT)
        (tmp_path / "free").touch()
        assert process.wait(60) == 0


def test_nothing_is_renewed_after_a_turn(clustered):
    _, workers = clustered
    with workers.lock(None, lambda: None):
        wait_until(renewed, "its renewals")
    wait_until(lambda: not renewed(), "their end")


def renewed():
    """The locks at schedulers that this process would renew. (Of a weak proxy to what is gone, `isinstance` raises.)"""
    return [each for each in gc.get_objects() if type(each) is Semaphore and each.refresh_callback.is_running()]


def test_without_a_scheduler_waiting_ends_and_a_turn_too(tmp_path):
    with cluster(tmp_path) as (scheduler, address, workers), another(HOLDS, address) as process:
        with waiting_gang(workers) as gang:
            scheduler.kill()
            with pytest.raises(ClusterError, match=f"the scheduler {address} no longer answers: see its log"):
                gang.result(20)
        process.stdin.close()
        assert process.wait(30) == 0
