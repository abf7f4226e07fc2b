"""A worker that stops is seen in every place that lists workers, and is replaced."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from fastapi.testclient import TestClient

from kernels.smoothing import gaussian_filter
from pipeline.api_models import State
from pipeline.cli.client import _worker_line
from pipeline.cluster.dask import hung_workers
from pipeline.cluster.dask.worker_processes import local_workers
from pipeline.cluster.dask.worker_start import cpu_workers
from pipeline.cluster.dask.worker_states import watched
from pipeline.cluster.executor import Executor
from pipeline.service import server
from pipeline.service.app import make_app
from pipeline.service.http.app_state import Service
from pipeline.service.roots import DataRoots
from pipeline.service.running.runner import Limits, Runner
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import NewJob, Store
from tests.images import read_image, write_image
from tests.pipeline.cluster.processes import wait_until
from tests.pipeline.scrapes import samples
from tests.pipeline.service.calls import Processes
from tests.pipeline.service.conftest import LOCAL

WAIT_S = 60.0
SIGMA = 25
FRESH = {"name": "cpu", "worker": "w-0", "heartbeat_age_s": 0.4}
SILENT = {"name": "cpu", "worker": "w-1", "heartbeat_age_s": 34.2}


@contextmanager
def service_with(folder, states, executor=None):
    """Its API's client, store and runner, which has not been started."""
    (folder / "data").mkdir()
    store, roots = Store(folder / "state" / "jobs.sqlite"), DataRoots([folder / "data"])
    runner = Runner(store, executor, roots, Limits(jobs_at_once=1, memory_bytes=2800 << 10))
    service = Service(
        settings=ServiceSettings(state_dir=folder / "state", data_roots=[folder / "data"]), store=store, runner=runner,
        roots=roots, previews=folder, processes=Processes(), workers=states,
        ready=lambda: server._missing(lambda: None, states, threading.Event()),
    )  # fmt: skip
    with TestClient(make_app(service), base_url=LOCAL) as http:
        yield SimpleNamespace(http=http, store=store, runner=runner)
    store.close()


@pytest.mark.slow
def test_a_stopped_worker_is_shown_and_replaced_and_the_job_has_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(hung_workers, "IDLE_S", math.inf)  # until its age has been seen
    with (
        local_workers(cpu_workers(2, 1)) as workers,
        watched(workers) as states,
        service_with(tmp_path, states, Executor(device=workers, stream=workers.stream)) as service,
    ):
        source, output = tmp_path / "data" / "in.npy", tmp_path / "data" / "out.npy"
        image = np.random.default_rng(1).integers(0, 65536, (1499, 1201, 3)).astype(np.uint16)
        write_image(source, image)
        asked = NewJob(
            owner="a", workload="smooth", input=str(source), output=str(output),
            parameters={"filter": "gaussian", "sigma": str(SIGMA), "truncate": 4.0},
        )  # fmt: skip
        [job] = service.store.accept([asked], now=time.time())
        processes = workers._on_each(list(workers.identities()), os.getpid)
        names = {address: worker["name"] for address, worker in workers.identities().items()}
        address, process = next(iter(processes.items()))
        before = samples(service.http.get("/metrics").text)
        service.runner.start()
        wait_until(lambda: (told := service.runner.under_way(job)) and told.chunks_done, "the first chunk")
        os.kill(process, signal.SIGSTOP)

        def ages():
            return {each["worker"]: each["heartbeat_age_s"] for each in service.http.get("/v1/workers").json()}

        wait_until(lambda: ages()[names[address]] > 6, "the worker's silence")
        other = next(name for name in names.values() if name != names[address])
        assert ages()[other] < 6
        told = samples(service.http.get("/metrics").text)
        assert told["millrace_worker_heartbeat_age_seconds", (("worker", names[address]),)] > 6
        assert told["millrace_worker_heartbeat_age_seconds", (("worker", other),)] < 6
        ready = service.http.get("/readyz")
        assert ready.status_code == 200
        assert ready.text.startswith(f"ok\n{names[address]}: last heartbeat ")
        assert service.store.job(job).job.state is State.RUNNING

        monkeypatch.setattr(hung_workers, "IDLE_S", 1.0)
        wait_until(lambda: service.store.job(job).job.state is State.SUCCEEDED, "the job's end")
        wait_until(lambda: len(workers.identities()) == 2, "the worker's return")
        assert not psutil.pid_exists(process)
        after = samples(service.http.get("/metrics").text)
        restarts = ("millrace_worker_restarts_total", ())
        assert after[restarts] == before[restarts] + 1
        wait_until(lambda: service.http.get("/readyz").text == "ok\n", "two workers with heartbeats")
        service.runner.drain(WAIT_S)
    np.testing.assert_array_equal(read_image(output), gaussian_filter(image, SIGMA, truncate=4.0, axes=(0, 1)))


@pytest.mark.parametrize(
    ("states", "code", "said"),
    [
        ([FRESH], 200, "ok\n"),
        ([FRESH, SILENT], 200, "ok\nw-1: last heartbeat 34 s ago\n"),
        ([SILENT], 503, "no worker sends heartbeats; w-1: last heartbeat 34 s ago"),
        ([], 503, "there is no worker"),
        ([{"name": "cpu", "worker": "service"}], 200, "ok\n"),  # jobs run in the service itself
    ],
)
def test_readiness_tells_silent_workers(tmp_path, states, code, said):
    with service_with(tmp_path, lambda: states) as service:
        answer = service.http.get("/readyz")
    assert answer.status_code == code
    assert (answer.text if code == 200 else answer.json()["detail"]) == said


def test_the_page_and_the_command_tell_silent_workers(tmp_path):
    with service_with(tmp_path, lambda: [FRESH, SILENT]) as service:
        page = service.http.get("/workers").text
        found = service.http.get("/v1/workers").json()
    assert page.count("No heartbeat for ") == 1
    assert "No heartbeat for 34 s" in page
    assert [_worker_line(each) for each in found] == ["cpu", "cpu    last heartbeat 34 s ago"]
