"""Jobs that are cancelled, drained, killed or retried: what is kept, and what is removed."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from pipeline.api_models import State
from pipeline.engine.devices.device import CpuDevice
from pipeline.errors import ClusterError
from pipeline.service.jobs import CancelRequested, Computed, Planned
from pipeline.service.running import cleanup
from pipeline.service.store import NewJob
from tests.images import names_in, read_image, version
from tests.pipeline.service.running.runs import WAIT_S, expected, stopped_at


def test_a_cancelled_job_leaves_nothing(service, streams, data):
    there, go = stopped_at(streams, 3)
    runner = service.runner()
    job = service.submit()
    assert there.wait(WAIT_S)
    runner.act(job, service.store.apply(job, CancelRequested(), now=time.time())[1])
    go.set()
    assert service.wait(job).job.state is State.CANCELLED
    assert len(streams.chunks) < service.store.job(job).job.chunks
    end = time.monotonic() + WAIT_S
    while names_in(data) != ["in.npy"]:
        assert time.monotonic() < end, names_in(data)
        time.sleep(0.01)


@pytest.fixture
def removal(monkeypatch):
    """Holds whoever removes what a cancelled job has left, until told; (it is there, let it go)."""
    there, go, remove = threading.Event(), threading.Event(), cleanup.remove_leftovers

    def slow(output):
        there.set()
        assert go.wait(WAIT_S)
        remove(output)

    monkeypatch.setattr(cleanup, "remove_leftovers", slow)
    yield there, go
    go.set()


def test_a_retry_waits_until_what_the_cancelled_run_has_left_is_removed(service, streams, removal, data):
    (there, go), (removing, removed) = stopped_at(streams, 3), removal
    runner = service.runner(jobs_at_once=2)
    job = service.submit(output="out.zarr")
    assert there.wait(WAIT_S)
    runner.act(job, service.store.apply(job, CancelRequested(), now=time.time())[1])
    go.set()
    assert removing.wait(WAIT_S)
    began = len(streams.chunks)
    runner.act(job, service.store.retry(job, now=time.time())[1])
    service.wait(job, State.PLANNING)
    with runner._places._lock:
        retried = runner._places._runs[job]
    assert retried.epoch == 2
    assert len(streams.chunks) == began
    removed.set()
    done = service.wait(job)
    assert (done.job.state, done.job.epoch, done.receipt["resumed_chunks"]) == (State.SUCCEEDED, 2, 0)
    np.testing.assert_array_equal(read_image(data / "out.zarr"), expected(data))
    end = time.monotonic() + WAIT_S
    while runner.running:  # of neither run anything is left
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_late_removal_leaves_alone_what_another_run_works_on(service, streams, data):
    """The job was cancelled while it waited, and another one's run has its output when the removal comes."""
    there, go = stopped_at(streams, 3)
    service.store.accept([NewJob(owner="a", workload="smooth", input="x", output="out.npy", parameters={})], now=0.0)
    (first,) = (found.job.id for found in service.store.list_jobs())
    _, actions = service.store.apply(first, CancelRequested(), now=time.time())
    runner = service.runner()
    asked = NewJob(
        owner="b", workload="smooth", input="in.npy", output="./out.npy", written="out.npy", parameters={"size": "5"}
    )
    (second,) = service.store.accept([asked], now=time.time())
    runner.wake()
    assert there.wait(WAIT_S)
    left = names_in(data)
    runner.act(first, actions)
    assert names_in(data) == left
    go.set()
    assert service.wait(second).job.state is State.SUCCEEDED


def test_a_server_that_was_killed_while_it_removed_is_followed_by_one_that_does(service, data):
    (job,) = service.store.accept(
        [NewJob(owner="a", workload="smooth", input="in.npy", output="out.npy", parameters={})], now=time.time()
    )
    service.store.apply(job, CancelRequested(), now=time.time())  # and then the server was killed
    (data / "out.npy.ledger").mkdir()
    (data / "out.npy.ledger" / "job.json").write_text("{}")
    (data / "out.npy.partial").write_bytes(b"1")
    service.runner()
    assert names_in(data) == ["in.npy"]


def test_a_drain_keeps_chunks_and_the_next_server_goes_on(service, streams, data):
    there, go = stopped_at(streams, 6)
    runner = service.runner(jobs_at_once=1)
    job, waiting = service.submit(), service.submit("other.npy")
    assert there.wait(WAIT_S)
    threading.Timer(0.2, go.set).start()
    assert runner.drain(WAIT_S)
    assert service.store.job(job).job.state is State.QUEUED
    assert service.store.job(waiting).job.state is State.QUEUED
    before = set(streams.chunks)
    streams.chunks.clear()
    streams.on_chunk = lambda chunk: None
    service.runner()
    done = service.wait(job)
    assert done.receipt["resumed_chunks"] == len(before)
    np.testing.assert_array_equal(read_image(data / "out.npy"), expected(data))
    service.wait(waiting)


def test_what_a_stopped_job_keeps_is_not_taken_for_that_of_one_cancelled_before(service, streams, data):
    """Both write to one place, and the next server removes what the cancelled one may have left."""
    earlier = service.submit()
    service.store.apply(earlier, CancelRequested(), now=time.time())
    there, go = stopped_at(streams, 6)
    runner = service.runner(jobs_at_once=1)
    job = service.submit()
    assert there.wait(WAIT_S)
    threading.Timer(0.2, go.set).start()
    assert runner.drain(WAIT_S)
    before = set(streams.chunks)
    streams.on_chunk = lambda chunk: None
    service.runner()
    assert service.wait(job).receipt["resumed_chunks"] == len(before)


def test_what_a_failed_job_keeps_outlives_one_that_is_cancelled_as_it_waits(service, streams, data, monkeypatch):
    monkeypatch.setattr("pipeline.service.running.caution.FIRST_PAUSE_S", 0.01)

    def fail(chunk):
        if chunk.index < 6:
            return
        end = time.monotonic() + WAIT_S
        while not list(data.glob("*.ledger/chunks-*")) and time.monotonic() < end:
            time.sleep(0.005)
        raise ClusterError("the scheduler no longer answers")

    streams.on_chunk = fail
    runner = service.runner(jobs_at_once=1)
    job = service.submit()
    assert service.wait(job).job.state is State.FAILED
    kept = names_in(data)
    assert runner.drain(WAIT_S)
    later = service.submit()
    _, actions = service.store.apply(later, CancelRequested(), now=time.time())
    runner.act(later, actions)
    assert names_in(data) == kept
    service.store.retry(job, now=time.time())
    _, actions = service.store.apply(job, CancelRequested(), now=time.time())
    runner.act(job, actions)  # its own, that goes
    assert names_in(data) == ["in.npy"]


def test_a_job_that_is_being_claimed_as_the_drain_begins_is_stopped_too(service, streams, monkeypatch):
    there, go, claimed, claim = threading.Event(), threading.Event(), [], service.store.claim

    def slow(*args, **how):
        found = claim(*args, **how)
        claimed.append(found.job.id)
        there.set()
        assert go.wait(WAIT_S)
        return found

    first, second = service.submit(), service.submit("other.npy")
    monkeypatch.setattr(service.store, "claim", slow)
    runner = service.runner(jobs_at_once=2)
    join = runner._dispatcher.join
    monkeypatch.setattr(runner._dispatcher, "join", lambda timeout: (go.set(), join(timeout)))
    assert there.wait(WAIT_S)
    assert runner.drain(WAIT_S)
    assert (claimed, runner.running, streams.chunks) == ([first], 0, [])
    assert [service.store.job(job).job.state for job in (first, second)] == [State.QUEUED] * 2


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_result_published_just_before_the_kill_is_not_made_again(service, streams, data, cancelled):
    job = service.submit(no_clobber=True)
    dead = service.store.claim("dead", now=time.time(), lease_s=1e6, owner_cap=9)
    assert dead.job.id == job
    from pipeline.engine.run import RunOptions, plan_job, run_job
    from pipeline.workloads import JobSpec, workloads

    parameters = workloads()["smooth"].Parameters(size="5")
    spec = JobSpec(workload="smooth", input=data / "in.npy", output=data / "out.npy", parameters=parameters)
    options = RunOptions(memory_bytes=1 << 26, job=job)
    run_job(plan_job(spec, CpuDevice(1), options), options)
    receipt = json.loads((data / "out.npy.receipt.json").read_text())
    made = version(data / "out.npy")
    if cancelled:  # too late for it, as where the server lives on
        service.store.apply(job, Planned(1, receipt["chunks"]), now=time.time())
        service.store.apply(job, Computed(1), now=time.time())
        service.store.apply(job, CancelRequested(), now=time.time())
    service.runner()
    done = service.wait(job)
    assert (done.job.state, done.job.epoch, done.receipt) == (State.SUCCEEDED, 1 if cancelled else 2, receipt)
    assert version(data / "out.npy") == made
    assert streams.chunks == []


def test_a_run_that_lost_its_job_does_not_publish(service, streams, data):
    there, go = stopped_at(streams, 3)
    service.runner(jobs_at_once=1)  # else it might be the one that claims the job again
    job = service.submit()
    assert there.wait(WAIT_S)
    from pipeline.service.jobs import LeaseLost

    service.store.apply(job, LeaseLost(1), now=time.time())
    claimed = service.store.claim("another", now=time.time(), lease_s=1e6, owner_cap=9)
    assert claimed.job.epoch == 2
    go.set()
    end = time.monotonic() + WAIT_S
    while any(thread.name == f"job-{job}" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not (data / "out.npy").exists()
    assert (service.store.job(job).job.state, service.store.job(job).job.epoch) == (State.PLANNING, 2)
