"""What a service of months must not gather: of jobs that are over nothing is left, in no process."""

from __future__ import annotations

import gc
import logging
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
SETTLE_S = 130.0  # asyncio keeps a cancelled timer until its time has come, and Dask's wait for up to 90 s
JOBS = 12
KEPT = 5  # of what Dask remembers of the past, where a service allows itself a few hundred entries


def objects():
    """How many there are of each type; weak references come and go by the hundred."""
    gc.collect()
    found = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    del found["weakref.ReferenceType"]
    return found


def log_records():
    return sum(isinstance(each, logging.LogRecord) for each in gc.get_objects())


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


def test_nothing_is_left_of_jobs_that_are_over(tmp_path, short_logs):
    with (
        worker_processes.local_workers(cpu_workers(1, 1)) as workers,
        live_service(tmp_path, stream=workers.stream) as (url, _, data),
        Client(url) as client,
    ):
        write_image(data / "small.npy", np.ones((40, 40), np.uint8), "YX")
        (scheduler,) = (each for each in Scheduler._instances if each.status.name == "running")

        def run_jobs(label):
            jobs = [client.submit("smooth", "small.npy", f"{label}-{n}.npy") for n in range(JOBS)]
            assert [job.wait(timeout_s=WAIT_S).state for job in jobs] == ["succeeded"] * JOBS
            end = time.monotonic() + WAIT_S
            while scheduler.tasks or workers._records:  # workers are still told that the last one is over
                assert time.monotonic() < end, (dict(scheduler.tasks), workers._records)
                time.sleep(0.01)
            return objects(), sum(workers._connection.client.run(log_records).values())

        run_jobs("warm")
        before, logged_before = run_jobs("early")
        _, logged_after = run_jobs("late")

        def grown_since():
            now = objects()
            return {kind: now[kind] - count for kind, count in before.items() if now[kind] - count >= JOBS // 2}

        grown, end = grown_since(), time.monotonic() + SETTLE_S
        while grown and time.monotonic() < end:  # a timer of each job, or of each connection, has yet to run out
            time.sleep(3)  # counting takes half a second of a core
            grown = grown_since()
        assert not {kind for kind in grown if kind.startswith(("distributed.", "dask.", "pipeline.", "fastapi."))}
        assert sum(grown.values()) < 10 * JOBS, grown  # a few tuples and lists come and go
        assert logged_after <= logged_before
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
