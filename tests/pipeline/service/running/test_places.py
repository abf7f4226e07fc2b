"""Which jobs run at the same time, and which wait or give up their place."""

from __future__ import annotations

import threading
import time

import numpy as np

from pipeline.api_models import State
from pipeline.errors import Crowded
from pipeline.service.running import runner as runner_module
from tests.images import read_image
from tests.pipeline.service.running.runs import WAIT_S, expected, ledger_has_chunks, stopped_at


def test_nothing_is_claimed_where_nothing_could_run(service, streams):
    has_workers = threading.Event()
    job = service.submit()
    service.runner(has_workers=has_workers.is_set)
    time.sleep(0.3)
    assert service.store.job(job).job.state is State.QUEUED
    has_workers.set()
    assert service.wait(job).job.attempts == 1


def test_a_job_that_crowds_another_goes_on_once_that_has_ended(service, streams, data):
    (there, go), crowds = stopped_at(streams, 3), iter([True])
    runner = service.runner(jobs_at_once=2)
    first = service.submit("a.npy")
    assert there.wait(WAIT_S)

    def crowded():
        if next(crowds, False):
            raise Crowded("makes room for another job")

    streams.before = crowded
    second = service.submit("b.npy")
    end = time.monotonic() + WAIT_S
    while service.store.events(second)[-1].message != "queued" or service.store.job(second).job.epoch == 0:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert runner._places._to_be_alone == {first}
    assert not runner._may_claim()
    go.set()
    assert [service.wait(job).job.state for job in (first, second)] == [State.SUCCEEDED] * 2
    found = service.store.job(second)
    assert (found.job.attempts, found.job.epoch) == (1, 2)


def test_an_operators_job_takes_the_place_of_the_least_urgent_one(service, streams, data, monkeypatch):
    """Nothing is lost: the preempted job goes on from its chunks. It is left alone in its first minute."""
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    go, at_work = threading.Event(), threading.Semaphore(0)

    def hold(chunk):
        if chunk.index == 5:
            ledger_has_chunks(data)
            at_work.release()
        if chunk.index >= 5 and not go.is_set():
            time.sleep(0.02)

    streams.on_chunk = hold
    runner = service.runner(jobs_at_once=1)
    low = service.submit("low.npy", priority=-5)
    assert at_work.acquire(timeout=WAIT_S)
    equal = service.submit("equal.npy", priority=0)
    urgent = service.submit("urgent.npy", priority=7)
    for _ in range(20):
        runner._preempt(time.time())
    assert service.store.job(low).job.state is State.RUNNING, "it has just begun"
    monkeypatch.setattr(runner_module, "LEAST_RUN_S", 0.0)
    end = time.monotonic() + WAIT_S
    while service.store.job(low).job.preemptions == 0:
        assert time.monotonic() < end
        time.sleep(0.01)
    monkeypatch.setattr(runner_module, "LEAST_RUN_S", 60.0)
    go.set()
    ends = {name: service.wait(job).finished_at for name, job in (("urgent", urgent), ("equal", equal), ("low", low))}
    assert ends["urgent"] < ends["equal"] < ends["low"]
    done = service.store.job(low)
    assert (done.job.state, done.job.preemptions, done.job.attempts) == (State.SUCCEEDED, 1, 1)
    assert done.receipt["resumed_chunks"] > 0
    assert any("preempted by a job of priority 7" in event.message for event in service.store.events(low))
    np.testing.assert_array_equal(read_image(data / "low.npy"), expected(data))


def test_users_jobs_do_not_preempt_each_other(service, streams, monkeypatch):
    monkeypatch.setattr(runner_module, "LEAST_RUN_S", 0.0)
    there, go = stopped_at(streams, 3)
    runner = service.runner(jobs_at_once=1)
    low = service.submit("low.npy", priority=-5)
    assert there.wait(WAIT_S)
    service.submit("usual.npy", priority=0)
    runner._preempt(time.time())
    assert not runner._places._runs[low].preempted.is_set()
    go.set()
    assert service.wait(low).job.preemptions == 0


def test_of_a_throttled_array_so_many_run_at_once(service, streams):
    running, most, lock = set(), [0], threading.Lock()

    def count():
        with lock:
            running.add(threading.get_ident())
            most[0] = max(most[0], len(running))
        time.sleep(0.02)
        with lock:
            running.discard(threading.get_ident())

    streams.before = count
    jobs = service.submit_all([f"{n}.npy" for n in range(6)], array_id="a", throttle=2)
    service.runner(jobs_at_once=4)
    assert [service.wait(job).job.state for job in jobs] == [State.SUCCEEDED] * 6
    assert most[0] <= 2


def no_threads_for_jobs(monkeypatch, times):
    """So many times none can be started."""
    left, start = iter(range(times)), threading.Thread.start

    def fails(thread):
        if thread.name.startswith("job-") and next(left, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)


def test_a_job_whose_thread_cannot_start_is_claimed_again(service, data, monkeypatch):
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    no_threads_for_jobs(monkeypatch, 5)  # more often than a job may fail
    service.runner(jobs_at_once=1)
    done = service.wait(service.submit())
    assert (done.job.state, done.job.epoch, done.job.attempts) == (State.SUCCEEDED, 6, 1)
    np.testing.assert_array_equal(read_image(data / "out.npy"), expected(data))


def test_where_no_thread_can_start_claims_do_not_follow_at_once(service, monkeypatch):
    monkeypatch.setattr(runner_module, "POLL_S", 2 * WAIT_S)
    no_threads_for_jobs(monkeypatch, 1_000_000)
    runner = service.runner()
    job = service.submit()
    end = time.monotonic() + WAIT_S
    while (job_now := service.store.job(job).job).epoch == 0 or job_now.state is not State.QUEUED:
        assert time.monotonic() < end
        runner.wake()
    assert runner.drain(WAIT_S)
    assert (service.store.job(job).job.epoch, runner.running) == (1, 0)


def test_no_more_at_once_than_allowed(service, streams):
    at_once, most, lock = [0], [0], threading.Lock()
    gate = threading.Semaphore(0)

    def enter():
        with lock:
            at_once[0] += 1
            most[0] = max(most)
            most.append(at_once[0])
        assert gate.acquire(timeout=WAIT_S)
        with lock:
            at_once[0] -= 1

    streams.before = enter
    service.runner(jobs_at_once=3)
    jobs = [service.submit(f"out{number}.npy") for number in range(7)]
    for _ in jobs:
        gate.release()
    assert all(service.wait(job).job.state is State.SUCCEEDED for job in jobs)
    assert 1 <= max(most) <= 3
