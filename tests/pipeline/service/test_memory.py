"""What a service of months must not gather: of jobs that are over nothing is left, in no process."""

from __future__ import annotations

import gc
import time
from collections import Counter

import numpy as np
import pytest
from dask.utils import key_split
from distributed import Scheduler

from pipeline.client import Client
from pipeline.cluster.dask import scheduler as scheduler_setup
from pipeline.cluster.dask import worker_processes
from pipeline.cluster.dask.worker_start import cpu_workers
from pipeline.service.server import _settle
from pipeline.service.store import Store
from tests.images import write_image
from tests.pipeline.service.live import live_service

WAIT_S = 120.0
JOBS = 16  # between two counts
ROUNDS = 8  # asyncio drops a loop's cancelled timers when there are more than a hundred
KEPT = 5  # of what Dask remembers of the past, where a service allows itself a few hundred entries


def objects(place="here"):
    """How many there are of each type; weak references come and go by the hundred."""
    for _ in range(3):  # each stops tracking tuples whose items the one before has stopped tracking
        gc.collect()
    found = Counter((place, f"{type(each).__module__}.{type(each).__qualname__}") for each in gc.get_objects())
    del found[place, "weakref.ReferenceType"]
    return found


def names_of_tasks():
    return key_split.cache_info().currsize


@pytest.fixture
def short_logs(monkeypatch):
    for name in (
        "distributed.admin.log-length",
        "distributed.admin.low-level-log-length",
        "distributed.diagnostics.computations.max-history",
    ):
        assert worker_processes._CONFIG[name] <= 100
        monkeypatch.setitem(worker_processes._CONFIG, name, KEPT)
    monkeypatch.setattr(scheduler_setup, "FORGET_MS", 50)


@pytest.mark.slow
def test_nothing_is_left_of_jobs_that_are_over(tmp_path, short_logs):
    with (
        worker_processes.local_workers(cpu_workers(1, 1)) as workers,
        live_service(tmp_path, stream=workers.stream) as (url, _, data),
        Client(url) as client,
    ):
        write_image(data / "small.npy", np.ones((40, 40), np.uint8), "YX")
        (scheduler,) = (each for each in Scheduler._instances if each.status.name == "running")

        def count_after_jobs(label):
            jobs = [client.submit("smooth", "small.npy", f"{label}-{n}.npy") for n in range(JOBS)]
            assert [job.wait(timeout_s=WAIT_S).state for job in jobs] == ["succeeded"] * JOBS
            del jobs
            end = time.monotonic() + WAIT_S
            while scheduler.tasks or workers._records:  # workers are still told that the last one is over
                assert time.monotonic() < end, (dict(scheduler.tasks), workers._records)
                time.sleep(0.01)
            (in_worker,) = workers._connection.client.run(objects, "in the worker").values()
            return objects() + in_worker

        # What is kept of each job grows in every round. Connections, timers and caches grow in some.
        before = count_after_jobs("warm")
        grows = set(before)
        for number in range(ROUNDS):
            after = count_after_jobs(number)
            grows = {kind for kind in grows if after[kind] - before[kind] >= JOBS // 2}
            if not grows:
                break
            before = after
        assert not grows, grows
        assert not scheduler.task_groups
        end = time.monotonic() + WAIT_S
        while names_of_tasks() > KEPT:
            assert time.monotonic() < end, (dict(scheduler.tasks), workers._records)
            time.sleep(0.05)
        assert len(scheduler.task_prefixes) < KEPT


def test_what_a_service_holds_from_its_start_is_not_looked_at_again():
    try:
        _settle()
        kept = gc.get_freeze_count()
        assert kept > 10 * len(gc.get_objects())
    finally:
        gc.unfreeze()


def test_connections_of_many_threads_keep_little(tmp_path):
    store = Store(tmp_path / "jobs.sqlite")
    with store._database.reading() as one, store._database.reading() as another:
        for connection in (one, another):
            assert connection.execute("PRAGMA cache_size").fetchone()[0] == -512  # KiB
    store.close()
