"""A store and runners on it, for tests of what becomes of jobs."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pipeline.api_models import State
from pipeline.cluster.executor import Executor
from pipeline.engine import checkpoints
from pipeline.service.roots import DataRoots
from pipeline.service.running.runner import Limits, Runner
from pipeline.service.store import NewJob, Store
from tests.images import write_image
from tests.pipeline.service.running.runs import WAIT_S, Streams


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 0.05)
    folder = tmp_path / "data"
    folder.mkdir()
    write_image(folder / "in.npy", np.random.default_rng(1).integers(0, 65536, (900, 301)).astype(np.uint16), "YX")
    return folder


@pytest.fixture
def streams():
    return Streams()


@pytest.fixture
def service(data, streams, monkeypatch):
    """A store and runners on it, one after another."""
    monkeypatch.setattr(streams.device, "target_bytes", lambda job_bytes: 30_000)
    started = []

    class Service:
        store = Store(data.parent / "state" / "jobs.sqlite")

        def runner(self, *, has_workers=lambda: True, **limits):
            place = Executor(device=streams.device, stream=streams.stream)
            previews = data.parent / "previews"
            previews.mkdir(exist_ok=True)
            runner = Runner(
                self.store, place, DataRoots([data]), Limits(**limits), previews=previews, has_workers=has_workers
            )
            runner.start()
            started.append(runner)
            return runner

        def submit(self, output="out.npy", source="in.npy", size="5", **what):
            (job,) = self.submit_all([output], source, size, **what)
            return job

        def submit_all(self, outputs, source="in.npy", size="5", **what):
            """Jobs that are accepted together, as those of an array are."""
            asked = [
                NewJob(
                    owner="ada", workload="smooth", input=str(data / source), output=str(data / output),
                    parameters={"size": size}, **what,
                )
                for output in outputs
            ]  # fmt: skip
            jobs = self.store.accept(asked, now=time.time())
            if started:
                started[-1].wake()
            return jobs

        def wait(self, job, *states):
            end = time.monotonic() + WAIT_S
            wanted = states or (State.SUCCEEDED, State.FAILED, State.CANCELLED)
            while self.store.job(job).job.state not in wanted:
                assert time.monotonic() < end, self.store.job(job).job.story
                time.sleep(0.01)
            return self.store.job(job)

    yield Service()
    for runner in started:
        assert runner.drain(WAIT_S)
    Service.store.close()
