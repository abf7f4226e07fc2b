"""What Prometheus finds at a service and at its workers, while jobs run on a real cluster of this machine."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from urllib.request import urlopen

import msgpack
import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, generate_latest

from pipeline.api_models import State
from pipeline.cluster.dask.worker_processes import local_workers
from pipeline.cluster.dask.worker_start import cpu_workers
from pipeline.cluster.dask.worker_states import RESTARTS as RESTARTS_VARIABLE
from pipeline.cluster.dask.worker_states import dask_setup, watched, worker_states
from pipeline.cluster.executor import Executor
from pipeline.engine.devices.device import CpuDevice
from pipeline.errors import ClusterError, StorageError
from pipeline.metrics.table import TABLE
from pipeline.service.app import make_app
from pipeline.service.http.app_state import Service
from pipeline.service.http.scrape import begin_job_counts, exposition, target_groups
from pipeline.service.jobs import CancelRequested, Failed
from pipeline.service.roots import DataRoots
from pipeline.service.running.runner import Limits, Runner
from pipeline.service.settings import ServiceSettings
from pipeline.service.store import NewJob, Store
from pipeline.workloads import workloads
from tests.images import write_image
from tests.pipeline.scrapes import families, samples, scraped
from tests.pipeline.service.calls import Processes
from tests.pipeline.service.conftest import LOCAL

WAIT_S = 150.0
SHAPE = (900, 301)
# Told by GPUs, by ranks that talk to each other and by reconstructions, which this cluster has not.
ELSEWHERE = (
    "millrace_gpu_",
    "millrace_usage_gpu_",
    "millrace_audit_entries_",
    "millrace_collective_",
    "millrace_communicator_",
    "millrace_solver_",
)
RESTARTS = ("millrace_worker_restarts_total", ())


def wait_for(condition, story=lambda: None):
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end, story()
        time.sleep(0.05)
    return found


class World:
    """A service on a cluster of one worker; its runner has not been started."""

    def __init__(self, folder, workers, states):
        self.data = folder / "data"
        self.data.mkdir()
        write_image(self.data / "in.npy", np.random.default_rng(1).integers(0, 65536, SHAPE).astype(np.uint16), "YX")
        self.store, roots = Store(folder / "state" / "jobs.sqlite"), DataRoots([self.data])
        self.runner = Runner(self.store, Executor(device=workers, stream=workers.stream), roots, Limits(jobs_at_once=1))
        service = Service(
            settings=ServiceSettings(state_dir=folder / "state", data_roots=[self.data]), store=self.store,
            runner=self.runner, roots=roots, previews=folder, processes=Processes(), workers=states, ready=lambda: None,
        )  # fmt: skip
        self.http = TestClient(make_app(service), base_url=LOCAL)
        self.workers = workers
        [self.worker_pid] = workers._on_each(list(workers.identities()), os.getpid).values()

    def submit(self, name, output, after=()):
        [job] = self.store.accept([new_job(self.data / name, self.data / output, after)], now=time.time())
        return job

    def ended(self, job):
        over = (State.SUCCEEDED, State.FAILED)
        return wait_for(lambda: (found := self.store.job(job)).job.state in over and found, lambda: self.store.job(job))

    def served(self):
        return self.http.get("/metrics").text

    def targets(self):
        return self.http.get("/metrics/targets").json()


def new_job(source, output, after=()):
    return NewJob(
        owner="a", workload="smooth", input=str(source), output=str(output), parameters={"size": "5"},
        after=frozenset(after),
    )  # fmt: skip


@pytest.fixture
def world(tmp_path):
    with local_workers(cpu_workers(1, 1)) as workers, watched(workers) as states:
        made = World(tmp_path, workers, states)
        yield made
        made.runner.drain(WAIT_S)
        made.store.close()


def grown(before, after):
    """Names of counters and histograms of which a sample has grown."""
    names = {name for (name, labels), value in after.items() if value > before.get((name, labels), 0.0)}
    return {row.name for row in TABLE if row.kind != "gauge" and {row.name, f"{row.name}_count"} & names}


def test_a_run_moves_every_metric_of_the_service_and_its_worker(world):
    """Jobs that succeed, fail, are cancelled and wait, and a worker that is killed: each is told where it happened."""
    before = samples(world.served())
    [target] = world.targets()
    assert target["labels"] == {"worker": "millrace-0", "device": "cpu"}
    [address] = target["targets"]
    assert address.startswith("127.0.0.1:")
    worker_before = scraped(address)
    assert not grown({}, worker_before)

    good, lost = world.submit("in.npy", "out.npy"), world.submit("absent.npy", "none.npy")
    world.store.apply(world.submit("in.npy", "never.npy", after=[good]), CancelRequested(), now=time.time())
    waiting = samples(world.served())
    assert waiting["millrace_jobs", (("state", "queued"),)] == 2
    assert waiting["millrace_jobs", (("state", "cancelled"),)] == 1
    assert waiting["millrace_queue_oldest_age_seconds", ()] > 0
    world.runner.start()
    receipt = world.ended(good).receipt
    assert world.ended(lost).job.state is State.FAILED
    after, worker = samples(world.served()), scraped(address)
    check_jobs(before, after)
    check_work(worker, receipt)
    assert not [name for name in grown(before, after) if name.startswith(("millrace_stage_", "millrace_pipeline_"))]
    by = {"service": grown(before, after), "worker": grown(worker_before, worker)}
    check_gathering(world)

    # Its nanny starts another worker: the same name at another address.
    os.kill(world.worker_pid, signal.SIGKILL)
    [again] = wait_for(lambda: [each for each in world.targets() if each["targets"] != [address]])
    assert again["labels"] == target["labels"]
    assert not grown({}, scraped(again["targets"][0]))
    final = world.served()
    assert samples(final)[RESTARTS] == before[RESTARTS] + 1
    assert samples(final)["millrace_workers", ()] == 1

    by["service and worker"] = by["service"] | by["worker"] | {RESTARTS[0]}
    for row in TABLE:
        if row.kind != "gauge" and not row.name.startswith(ELSEWHERE):
            assert row.name in by[row.served]
    check_families(final, again["targets"][0])


def check_jobs(before, after):
    """One succeeded, one failed, one was cancelled before it began."""

    def more(name, **labels):
        key = (f"millrace_{name}", tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    for outcome in ("succeeded", "failed", "cancelled"):
        assert more("jobs_finished_total", workload="smooth", outcome=outcome) == 1
    assert more("job_duration_seconds_count", workload="smooth", outcome="succeeded") == 1
    assert more("job_queue_wait_seconds_count", workload="smooth") == 2
    assert more("errors_total", kind="InputError") == 1
    assert after["millrace_queue_oldest_age_seconds", ()] == 0
    assert 0 <= after["millrace_audit_error_ratio", (("workload", "smooth"),)] <= 1


def check_work(worker, receipt):
    """What the worker counted is what the receipt tells."""
    label = ("workload", "smooth")
    assert worker["millrace_chunks_total", (("outcome", "written"), label)] == receipt["chunks"]
    assert worker["millrace_work_total", (("unit", "pixels"), label)] == SHAPE[0] * SHAPE[1]
    assert worker["millrace_output_bytes_total", (label,)] == 2 * SHAPE[0] * SHAPE[1]
    assert worker["millrace_pipeline_wall_seconds_total", ()] > 0
    for stage, told in receipt["stages"].items():
        seconds = worker["millrace_stage_seconds_total", (("stage", stage),)]
        assert seconds == pytest.approx(told["seconds"], abs=1e-3)
        assert seconds <= worker["millrace_stage_lane_seconds_total", (("stage", stage),)]
        assert worker["millrace_stage_bytes_total", (("stage", stage),)] == told["bytes"]


def check_gathering(world):
    """A command whose workers nobody finds counts what they do itself, for whoever asks at its --metrics-port."""
    before = samples(world.served())
    world.workers.gathers_metrics = True
    receipt = world.ended(world.submit("in.npy", "again.npy")).receipt
    world.workers.gathers_metrics = False
    after = samples(world.served())

    def more(name, **labels):
        key = (f"millrace_{name}", tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    assert more("stage_bytes_total", stage="write") == receipt["stages"]["write"]["bytes"] > 0
    assert more("chunks_total", workload="smooth", outcome="written") == receipt["chunks"]
    assert more("work_total", workload="smooth", unit="pixels") == SHAPE[0] * SHAPE[1]
    assert more("pipeline_wall_seconds_total") > 0


def check_families(served, address):
    """The service serves just what stands in the table, and a worker all that is a worker's."""
    found = families(served)
    with urlopen(f"http://{address}/metrics", timeout=WAIT_S) as response:
        of_worker = families(response.read().decode())
    assert found.keys() == {row.name.removesuffix("_total") for row in TABLE}
    for row in TABLE:
        family = found[row.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (row.kind, row.help)
        assert all(set(sample.labels) - {"le"} == set(row.labels) for sample in family.samples)
        assert "worker" not in row.served or row.name.removesuffix("_total") in of_worker or not family.samples


def test_the_state_of_a_worker_is_what_its_heartbeat_tells():
    gpu = {
        "uuid": "GPU-1", "memory_used_bytes": 5, "memory_total_bytes": 80, "utilization_ratio": 0.75,
        "power_watts": 300.0, "temperature_celsius": 51.0, "pcie_rx_bytes": 1.0,
    }  # fmt: skip
    device = {"name": "cuda:0", "model": "H", "uuid": "GPU-1"}
    heard = {"cpu": 250.0, "memory": 7, "millrace": {"device": device, "gpus": [gpu], "host": "h"}}
    known = {}
    workers = {
        "tls://[::1]:5": {"name": "w-1", "host": "::1", "services": {"dashboard": 81}, "metrics": heard},
        "tcp://b:5": {"name": "tcp://b:5", "host": "b", "services": {}, "metrics": {}},  # somebody else's Dask worker
    }
    silent_s = {"tls://[::1]:5": 0.0, "tcp://b:5": 34.21}
    told, other = worker_states(workers, known, silent_s)
    assert told == {
        **device, "worker": "w-1", "host": "h", "metrics_address": "[::1]:81", "cores_busy": 2.5, "load": 0.75,
        "memory_used_bytes": 5, "memory_total_bytes": 80, "power_watts": 300.0, "temperature_celsius": 51.0,
        "process_memory_bytes": 7, "heartbeat_age_s": 0.0,
    }  # fmt: skip
    assert (other["name"], other["metrics_address"], other["load"]) == ("tcp://b:5", None, None)
    assert other["heartbeat_age_s"] == 34.2
    [group] = target_groups([told, other])
    assert group.model_dump() == {"targets": ["[::1]:81"], "labels": {"worker": "w-1", "device": "GPU-1"}}
    # Back after its death, before it has opened its device.
    workers["tls://[::1]:5"]["metrics"] = {"cpu": 0.0, "memory": 3, "millrace": {"device": {}, "gpus": [], "host": "h"}}
    assert worker_states(workers, known, silent_s)[0]["uuid"] == "GPU-1"


def test_where_jobs_run_in_the_service_it_is_the_worker():
    with watched(CpuDevice(2)) as states:
        [state] = states()
    assert (state["name"], state["threads"], state["metrics_address"]) == ("cpu", 2, None)
    assert 0 < state["memory_used_bytes"] < state["memory_total_bytes"]
    assert 0 <= state["load"] <= 1
    assert target_groups([state]) == []


def test_no_worker_is_there_where_no_scheduler_answers():
    def silent():
        raise ClusterError("the scheduler no longer answers")

    with watched(SimpleNamespace(identities=silent, devices={})) as states:
        assert states() == []


def test_a_scrape_outlives_the_store(tmp_path):
    def broken():
        raise StorageError("the disk is full")

    found = samples(exposition(SimpleNamespace(counts=broken), list).decode())
    assert found["millrace_workers", ()] == 0
    assert found["millrace_errors_total", (("kind", "StorageError"),)] >= 1
    assert not [name for name, _ in found if name == "millrace_jobs"]


def test_every_end_of_a_job_stands_there_before_the_first():
    """What first appears as 1 is no increase to Prometheus: the first failed job would raise no alarm."""
    begin_job_counts()
    found = samples(generate_latest(REGISTRY).decode())
    for workload in workloads():
        for outcome in ("succeeded", "failed", "cancelled"):
            assert ("millrace_jobs_finished_total", (("outcome", outcome), ("workload", workload))) in found


def test_what_waits_for_another_job_is_not_late(tmp_path):
    """The wait begins when nothing is left to wait for, also after a retry; so does a retried job's duration."""
    store = Store(tmp_path / "jobs.sqlite")
    [first] = store.accept([new_job("in", "out")], now=0.0)
    store.accept([new_job("in", "late", after=[first])], now=0.0)
    assert store.oldest_queued() == 0.0
    waits = ("millrace_job_queue_wait_seconds_sum", (("workload", "smooth"),))
    lasted = ("millrace_job_duration_seconds_sum", (("outcome", "failed"), ("workload", "smooth")))
    found = samples(exposition(store, list).decode())
    before, lasted_before = found.get(waits, 0.0), found.get(lasted, 0.0)
    claimed = store.claim("r", now=40.0, lease_s=1.0, owner_cap=1)
    assert claimed.job.id == first
    assert samples(exposition(store, list).decode())[waits] == before + 40.0
    assert store.oldest_queued() is None
    store.apply(first, Failed(claimed.job.epoch, "no", transient=False), now=50.0)
    store.retry(first, now=1000.0)
    assert store.oldest_queued() == 1000.0
    again = store.claim("r", now=1003.0, lease_s=1.0, owner_cap=1)
    store.apply(first, Failed(again.job.epoch, "no", transient=False), now=1005.0)
    after = samples(exposition(store, list).decode())
    assert after[waits] == before + 43.0
    assert after[lasted] == 10.0 + 2.0 + lasted_before
    store.close()


def test_a_worker_tells_its_restarts_and_its_device(monkeypatch):
    """What Dask calls as a worker of `millrace worker` starts anew for the second time."""
    monkeypatch.setenv(RESTARTS_VARIABLE, "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # no UUID: it is known once the device is open
    before = samples(generate_latest(REGISTRY).decode())
    worker = SimpleNamespace(metrics={}, periodic_callbacks={})
    dask_setup(worker)
    after = samples(generate_latest(REGISTRY).decode())
    assert after[RESTARTS] == before[RESTARTS] + 2
    assert after["millrace_communicator_aborts_total", (("reason", "rank_lost"),)] >= 0
    workloads_told = {dict(labels)["workload"] for name, labels in after if name == "millrace_chunks_total"}
    assert workloads_told >= set(workloads())
    [heartbeat] = worker.metrics.values()
    told = heartbeat(worker)
    assert told["gpus"] == []
    assert told["host_memory_bytes"] > 0
    assert msgpack.loads(msgpack.dumps(told)) == told
