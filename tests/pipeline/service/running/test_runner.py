"""Jobs from the store through the engine to their results, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.smoothing import box
from pipeline.api_models import JobLimits, State
from pipeline.cluster.executor import Executor
from pipeline.engine import checkpoints
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import stream_on_device
from pipeline.engine.stages import StageRecord
from pipeline.errors import (
    ClusterError,
    Crowded,
    InputError,
    LimitExceeded,
    OutOfDeviceMemory,
    OutputError,
    ParameterError,
    ServiceRefused,
    StorageError,
)
from pipeline.service.jobs import CancelRequested, Computed, Failed, Planned, Progressed, Published, Recut, Stopped
from pipeline.service.roots import DataRoots
from pipeline.service.running import cleanup, run
from pipeline.service.running import runner as runner_module
from pipeline.service.running.runner import Limits, Runner
from pipeline.service.store import Facts, NewJob, Store, Used
from tests.images import names_in, read_image, version, write_image

WAIT_S = 60.0
DAY_S = 86_400.0


class Streams:
    """The streams of a place: each call goes through `before`, and every chunk through `on_chunk`."""

    def __init__(self):
        self.device = CpuDevice(1)
        self.before = lambda: None
        self.on_chunk = lambda chunk: None
        self.chunks = []

    def stream(self, job, plan, ledger, events):
        self.before()

        def written(chunk):
            self.chunks.append((job.spec.output.name, chunk.index))
            events.on_written(chunk)
            self.on_chunk(chunk)

        from dataclasses import replace

        return stream_on_device(job, plan, ledger, replace(events, on_written=written))


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


def expected(data):
    return box(read_image(data / "in.npy"), 5)


def test_a_disk_that_is_full_for_a_while_does_not_use_up_the_queue(service, streams, monkeypatch):
    """After each failure that was no job's fault the next claim comes later, until one succeeds."""
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    monkeypatch.setattr("pipeline.service.running.caution.FIRST_PAUSE_S", 0.05)
    claims, full_for = [], 2

    def before():
        claims.append(time.monotonic())
        if len(claims) <= full_for:
            raise StorageError("the disk is full")

    streams.before = before
    jobs = [service.submit(f"{n}.npy") for n in range(4)]
    service.runner(jobs_at_once=1)
    assert all(service.wait(job).job.state is State.SUCCEEDED for job in jobs)
    pauses = np.diff(claims)
    assert all(pause >= 0.05 * 2**n for n, pause in enumerate(pauses[:full_for]))
    assert max(service.store.job(job).job.attempts for job in jobs) <= 3


@pytest.mark.parametrize(
    "error", [MemoryError("Unable to allocate 64.0 GiB"), OSError(errno.EMFILE, "Too many open files")]
)
def test_too_little_memory_or_files_for_a_while_is_no_jobs_fault(service, streams, monkeypatch, error):
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    monkeypatch.setattr("pipeline.service.running.caution.FIRST_PAUSE_S", 0.01)
    errors = iter([error])

    def before():
        for each in errors:
            raise each

    streams.before = before
    job = service.submit()
    service.runner()
    done = service.wait(job)
    assert (done.job.state, done.job.attempts) == (State.SUCCEEDED, 2)


def test_nothing_is_claimed_where_nothing_could_run(service, streams):
    has_workers = threading.Event()
    job = service.submit()
    service.runner(has_workers=has_workers.is_set)
    time.sleep(0.3)
    assert service.store.job(job).job.state is State.QUEUED
    has_workers.set()
    assert service.wait(job).job.attempts == 1


def test_a_job_to_its_result(service, data):
    service.runner()
    job = service.submit()
    done = service.wait(job)
    np.testing.assert_array_equal(read_image(data / "out.npy"), expected(data))
    assert (done.job.state, done.job.chunks_done) == (State.SUCCEEDED, done.job.chunks)
    assert done.receipt == json.loads((data / "out.npy.receipt.json").read_text())
    assert done.receipt["job"] == job
    assert [event.message for event in service.store.events(job)] == [
        "queued", "planning", "running", "publishing", "succeeded",
    ]  # fmt: skip
    assert 0 < done.device_seconds < WAIT_S
    preview, end = data.parent / "previews" / f"{job}.png", time.monotonic() + WAIT_S
    while not preview.exists():  # drawn last
        assert time.monotonic() < end
        time.sleep(0.01)
    assert preview.read_bytes().startswith(b"\x89PNG")


def test_jobs_that_were_accepted_before_it_started(service, data):
    jobs = [service.submit(f"out{number}.npy") for number in range(5)]
    service.runner()
    assert [service.wait(job).job.state for job in jobs] == [State.SUCCEEDED] * 5


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"source": "absent.npy"}, "absent.npy: no such file"),
        ({"source": "../secret.npy"}, "outside the service's data roots"),
        ({"output": "../out.npy"}, "outside the service's data roots"),
        ({"size": "0"}, "size: "),
        ({"output": "out.docx"}, "out.docx"),
    ],
)
def test_the_users_mistake_fails_the_job_at_once(service, data, what, said):
    (data.parent / "secret.npy").write_bytes(b"secret")
    service.runner()
    done = service.wait(service.submit(**what))
    assert (done.job.state, done.job.attempts) == (State.FAILED, 1)
    assert said in done.job.error
    assert names_in(data) == ["in.npy"]


@pytest.mark.parametrize(
    ("workload", "parameter"),
    [("coulomb", "trajectory"), ("mri", "field_map"), ("mri", "density"), ("mri", "basis"), ("mri", "sorting")],
)
def test_a_file_among_the_parameters_that_has_become_a_link_is_not_followed(service, data, workload, parameter):
    (data.parent / "secret.npy").write_bytes(b"secret")
    (data / "further.npy").symlink_to(data.parent / "secret.npy")
    service.runner()
    further = {parameter: str(data / "further.npy")}
    asked = NewJob(owner="ada", workload=workload, input="in", output="out.npy", parameters=further)
    done = service.wait(*service.store.accept([asked], now=time.time()))
    assert done.job.state is State.FAILED
    assert "further.npy: is outside the service's data roots" in done.job.error


def test_a_failure_of_ours_is_tried_again_and_finished_chunks_are_kept(service, streams, data):
    failures = iter([True, True])

    def fail(chunk):
        if len(streams.chunks) % 9 == 8 and next(failures, False):
            end = time.monotonic() + WAIT_S
            while not list(data.glob("*.ledger/chunks-*")) and time.monotonic() < end:
                time.sleep(0.005)
            raise ClusterError("the scheduler no longer answers")

    streams.on_chunk = fail
    service.runner()
    done = service.wait(service.submit())
    assert (done.job.state, done.job.attempts) == (State.SUCCEEDED, 3)
    assert done.receipt["resumed_chunks"] > 0
    np.testing.assert_array_equal(read_image(data / "out.npy"), expected(data))
    assert names_in(data) == ["in.npy", "out.npy", "out.npy.receipt.json"]


def test_a_job_whose_chunks_do_not_fit_the_device_tells_of_the_smaller_ones(service, streams, data, monkeypatch):
    """Its first chunks are written, then the device has no more room for such: what is told counts from nothing."""
    monkeypatch.setattr(run, "PROGRESS_S", 0.0)
    told, apply, process = [], service.store.apply, CpuDevice.process
    largest = 0

    def heard(job, event, **rest):
        after, actions = apply(job, event, **rest)
        told.append((event, after.chunks, after.chunks_done))
        return after, actions

    def shrinking(device, workload, chunk, slot, record):
        nonlocal largest
        largest = max(largest, chunk.input_bytes)
        if chunk.input_bytes > largest * 3 // 4 and len(streams.chunks) >= 8:
            raise OutOfDeviceMemory("no room to compute")
        process(device, workload, chunk, slot, record)

    monkeypatch.setattr(service.store, "apply", heard)
    monkeypatch.setattr(CpuDevice, "process", shrinking)
    service.runner()
    done = service.wait(service.submit())
    assert done.job.state is State.SUCCEEDED, done.job.error
    assert done.receipt["halvings"] == 1
    assert done.job.chunks == done.job.chunks_done == done.receipt["chunks"]
    cut = next(place for place, (event, *_) in enumerate(told) if isinstance(event, Recut))
    before, after = told[:cut], told[cut:]
    assert max(event.chunks_done for event, *_ in before if isinstance(event, Progressed)) >= 8
    assert after[0][1:] == (done.receipt["chunks"], 0)
    progress = [event.chunks_done for event, *_ in after if isinstance(event, Progressed)]
    assert sorted(progress) == list(range(1, done.receipt["chunks"] + 1))


def ledger_has_chunks(data):
    end = time.monotonic() + WAIT_S
    while not list(data.glob("*.ledger/chunks-*")):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_job_beyond_its_time_fails_and_the_next_one_goes_on(service, streams, data, monkeypatch):
    later = [0.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))

    def hold(chunk):
        if chunk.index == 8:
            ledger_has_chunks(data)
            later[0] = 3 * 3600.0

    streams.on_chunk = hold
    job = service.submit(limits=JobLimits(time_s=7200.0))
    service.runner()
    done = service.wait(job)
    assert (done.job.state, done.job.attempts) == (State.FAILED, 1)
    assert re.fullmatch(
        r"ran for 3(\.\d+)? h, and may run for 2 h: submit it again with a larger --time, or retry it; "
        "its finished chunks are kept", done.job.error,
    )  # fmt: skip
    assert done.used.seconds > 0
    streams.on_chunk = lambda chunk: None
    later[0] = 0.0
    again = service.wait(service.submit(limits=JobLimits(time_s=7200.0)))
    assert (again.job.state, again.receipt["resumed_chunks"] > 0) == (State.SUCCEEDED, True)
    np.testing.assert_array_equal(read_image(data / "out.npy"), expected(data))


def test_the_time_of_earlier_runs_counts_too(service, streams, monkeypatch):
    job = service.submit(limits=JobLimits(time_s=100.0))
    store = service.store
    claimed = store.claim("killed", now=time.time(), lease_s=1.0, owner_cap=9)
    store.apply(job, Stopped(claimed.job.epoch), now=time.time(), facts=Facts(used=Used(), run_seconds=101.0))
    service.runner()
    assert service.wait(job).job.error.startswith("ran for 101 s, and may run for 100 s")
    streams.before = lambda: None
    service.store.retry(job, now=time.time())
    assert store.job(job).used.seconds < 60, "a retry has all of its time"


def test_what_is_taken_is_held_against_what_was_estimated(service, streams, data, monkeypatch):
    stream = streams.stream

    def noting(job, plan, ledger, events):
        for taken in ((5 << 20, None), (9 << 20, 7), (None, 3)):
            events.on_memory(*taken)
        return stream(job, plan, ledger, events)

    streams.stream = noting
    runner = service.runner()
    done = service.wait(service.submit("a.npy"))
    assert done.estimate.seconds is None, "there is no earlier job"
    assert (done.used.memory_bytes, done.used.gpu_memory_bytes) == (9 << 20, 7)
    assert done.estimate.chunks == done.job.chunks
    assert done.estimate.written_bytes == done.receipt["written_bytes"]
    assert done.estimate.read_bytes == done.receipt["read_bytes"]
    assert done.estimate.memory_bytes == done.receipt["ring_bytes"]
    again = service.wait(service.submit("b.npy"))
    assert again.estimate.seconds == pytest.approx(done.used.seconds, rel=1e-6)
    # A waiting job is planned for its estimate, once.
    waiting = service.submit("c.npy", after=frozenset({service.submit("d.npy", after=frozenset({again.job.id}))}))
    runner.estimate(service.store.job(waiting))
    assert service.store.job(waiting).estimate.chunks == done.job.chunks
    assert service.wait(waiting).job.state is State.SUCCEEDED


def test_an_estimate_that_cannot_be_made(service, data, monkeypatch):
    runner = service.runner(has_workers=lambda: False)
    absent = service.submit(source="absent.npy")
    with pytest.raises(InputError, match=r"absent\.npy: no such file"):
        runner.estimate(service.store.job(absent))
    assert service.store.job(absent).estimate is None
    with runner._estimating, pytest.raises(ServiceRefused, match="another job is being planned"):
        runner.estimate(service.store.job(absent))


@pytest.mark.parametrize(
    ("error", "limits", "said"),
    [
        (LimitExceeded("took too much"), JobLimits(), "took too much"),
        (OutOfDeviceMemory("no room"), JobLimits(gpu_memory_bytes=3 << 30),
         "needs more than the 3.0 GiB of GPU memory that it may take: submit it again with a larger --gpu-memory"),
    ],
)  # fmt: skip
def test_a_job_beyond_its_memory_is_not_tried_again(service, streams, error, limits, said):
    def fail():
        raise error

    streams.before = fail
    service.runner()
    done = service.wait(service.submit(limits=limits))
    assert (done.job.state, done.job.attempts) == (State.FAILED, 1)
    assert said in done.job.error


def test_a_limit_on_memory_bounds_the_ring(service, streams, data, monkeypatch):
    monkeypatch.setattr(streams.device, "target_bytes", lambda job_bytes: 1 << 40)
    big, asked = [], run.Run.options.fget
    monkeypatch.setattr(run.Run, "options", property(lambda each: big.append(asked(each)) or big[-1]))
    service.runner(memory_bytes=4 << 30, jobs_at_once=2, planning_s=700.0)
    for limit, ring in ((None, 2 << 30), (1 << 30, 1 << 29), (16 << 30, 2 << 30)):
        done = service.wait(service.submit(f"{limit}.npy", limits=JobLimits(memory_bytes=limit, gpus=1)))
        assert done.job.state is State.SUCCEEDED
        bounds = big[-1].bounds
        assert (big[-1].memory_bytes, bounds.memory_bytes, bounds.workers, bounds.opening_s) == (ring, limit, 1, 700.0)


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
    assert runner._to_be_alone == {first}
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
    assert not runner._runs[low].preempted.is_set()
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


def stopped_at(streams, count):
    """Holds the job at the chunk of this number until told; returns (it is there, let it go)."""
    there, go = threading.Event(), threading.Event()

    def hold(chunk):
        if chunk.index >= count and not there.is_set():
            there.set()
            assert go.wait(WAIT_S)

    streams.on_chunk = hold
    return there, go


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
    with runner._lock:
        retried = runner._runs[job]
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


def test_what_another_job_left_is_no_hindrance(service, streams, data):
    """The first is given up after its last attempt, and its chunks are kept; the second writes the same output."""
    streams.before = lambda: None

    def fail(chunk):
        end = time.monotonic() + WAIT_S
        while not list(data.glob("*.ledger/chunks-*")) and time.monotonic() < end:
            time.sleep(0.005)
        raise ClusterError("the scheduler no longer answers")

    streams.on_chunk = fail
    service.runner()
    first = service.wait(service.submit())
    assert (first.job.state, first.job.attempts) == (State.FAILED, 3)
    assert "out.npy.ledger" in names_in(data)
    streams.on_chunk = lambda chunk: None
    second = service.wait(service.submit(size="9"))
    assert (second.job.state, second.job.attempts, second.job.error) == (State.SUCCEEDED, 1, None)
    np.testing.assert_array_equal(read_image(data / "out.npy"), box(read_image(data / "in.npy"), 9))
    assert names_in(data) == ["in.npy", "out.npy", "out.npy.receipt.json"]


@pytest.fixture
def full_disk(service, monkeypatch):
    """Of the state: while this event is set, no change of a job can be stored. `tried`: the events that came then."""
    monkeypatch.setattr(runner_module, "POLL_S", 0.02)
    apply, full = service.store.apply, threading.Event()
    full.tried = []

    def fail_while_full(job, event, **rest):
        if full.is_set():
            full.tried.append(event)
            raise StorageError("jobs.sqlite: database or disk is full")
        return apply(job, event, **rest)

    monkeypatch.setattr(service.store, "apply", fail_while_full)
    return full


def wait_until_tried(full_disk, kind, times=2):
    end = time.monotonic() + WAIT_S
    while sum(isinstance(event, kind) for event in full_disk.tried) < times:
        assert time.monotonic() < end, full_disk.tried
        time.sleep(0.005)


@pytest.mark.parametrize("kind", [Planned, Computed, Published, Failed])
def test_a_job_whose_end_comes_while_the_disk_is_full_is_not_run_again(
    service, streams, data, full_disk, monkeypatch, kind
):
    told = Runner._tell

    def tell(self, job, event, facts=None):
        if isinstance(event, kind) and not full_disk.tried:
            full_disk.set()
        return told(self, job, event, facts)

    monkeypatch.setattr(Runner, "_tell", tell)
    service.runner()
    job = service.submit(source="none.npy" if kind is Failed else "in.npy")
    wait_until_tried(full_disk, kind)
    full_disk.clear()
    done = service.wait(job)
    assert (done.job.state, done.job.epoch) == (State.FAILED if kind is Failed else State.SUCCEEDED, 1)
    chunks = [chunk for _, chunk in streams.chunks]
    assert len(chunks) == len(set(chunks))
    if kind is not Failed:
        assert done.receipt == json.loads((data / "out.npy.receipt.json").read_text())


def test_an_input_that_is_replaced_while_it_is_read_fails_its_job(service, streams, data):
    other = data / "other.npy"
    write_image(other, np.zeros((900, 301), np.uint16), "YX")

    def replace_once(chunk):
        if other.exists():
            other.replace(data / "in.npy")

    streams.on_chunk = replace_once
    service.runner()
    done = service.wait(service.submit())
    assert (done.job.state, done.job.attempts, done.receipt) == (State.FAILED, 1, None)
    assert done.job.error == f"{data / 'in.npy'}: changed while it was read; nothing was published; run again"
    assert names_in(data) == ["in.npy"]


@pytest.mark.parametrize("made_by", ["the start", "the end"])
def test_an_output_that_others_made_meanwhile_is_kept(service, streams, data, made_by):
    job = service.submit(no_clobber=True)
    if made_by == "the start":
        (data / "out.npy").write_bytes(b"older")
    streams.on_chunk = lambda chunk: (data / "out.npy").write_bytes(b"older")
    service.runner()
    done = service.wait(job)
    assert (done.job.state, done.job.attempts, done.receipt) == (State.FAILED, 1, None)
    said = "exists, and --no-clobber keeps it; choose another name, or remove it"
    assert done.job.error == f"{data / 'out.npy'}: {said}"
    assert (data / "out.npy").read_bytes() == b"older"
    assert names_in(data) == ["in.npy", "out.npy"]
    assert bool(streams.chunks) == (made_by == "the end")


def test_a_full_disk_of_the_state_does_not_stop_a_job_that_makes_progress(service, streams, full_disk, monkeypatch):
    monkeypatch.setattr(run, "PROGRESS_S", 0.0)

    def fill(chunk):
        if not full_disk.tried:
            full_disk.set()

    streams.on_chunk = fill
    service.runner()
    job = service.submit()
    wait_until_tried(full_disk, Progressed)
    wait_until_tried(full_disk, Computed)
    full_disk.clear()
    done = service.wait(job)
    assert (done.job.state, done.job.epoch) == (State.SUCCEEDED, 1)
    assert done.job.chunks_done == done.job.chunks == len(streams.chunks)


def test_after_a_restart_too_a_published_job_is_not_run_again(service, streams, full_disk, monkeypatch):
    told = Runner._tell

    def tell(self, job, event, facts=None):
        if isinstance(event, Published):
            full_disk.set()
        return told(self, job, event, facts)

    monkeypatch.setattr(Runner, "_tell", tell)
    first = service.runner()
    job = service.submit()
    wait_until_tried(full_disk, Published)
    assert first.drain(WAIT_S)  # the disk is still full
    monkeypatch.setattr(Runner, "_tell", told)
    full_disk.clear()
    service.runner()
    done = service.wait(job)
    assert (done.job.state, done.job.epoch, done.job.deaths) == (State.SUCCEEDED, 1, 0)
    assert len(streams.chunks) == done.job.chunks
    assert done.receipt["job"] == job


def test_a_clock_that_is_set_back_keeps_no_job_waiting(service, monkeypatch):
    """A run that ended without a word is taken up again when its lease ends, whatever the wall clock says then."""
    monkeypatch.setattr(runner_module, "LEASE_S", 0.3)
    monkeypatch.setattr(runner_module, "POLL_S", 0.05)
    apply, failures, wall, set_back_s = service.store.apply, iter([True]), time.time, [0.0]
    monkeypatch.setattr(runner_module.time, "time", lambda: wall() - set_back_s[0])

    def fail_once(job, event, **rest):
        if isinstance(event, Published) and next(failures, False):
            set_back_s[0] = 3600.0
            raise ClusterError("something else than the store")
        return apply(job, event, **rest)

    monkeypatch.setattr(service.store, "apply", fail_once)
    service.runner()
    done = service.wait(service.submit())
    assert (done.job.state, done.job.epoch, done.job.attempts) == (State.SUCCEEDED, 2, 1)


def test_jobs_that_were_over_long_ago_are_forgotten_and_their_outputs_stay(service, data, monkeypatch):
    monkeypatch.setattr(runner_module, "PRUNE_S", 0.1)
    monkeypatch.setattr(runner_module, "POLL_S", 0.05)
    started = service.runner(keep_s=1.0)
    job = service.submit()
    service.wait(job)
    end = time.monotonic() + WAIT_S
    while service.store.list_jobs() or (data.parent / "previews" / f"{job}.png").exists():
        assert time.monotonic() < end
        started.wake()
        time.sleep(0.05)
    np.testing.assert_array_equal(read_image(data / "out.npy"), expected(data))


def test_a_clock_far_off_at_start_makes_no_job_forgotten(service, monkeypatch, caplog):
    job = service.submit()
    first = service.runner()
    service.wait(job)
    assert first.drain(WAIT_S)
    monkeypatch.setattr(runner_module, "PRUNE_S", 0.0)
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    wall, looked, believes = time.time, threading.Semaphore(0), runner_module.ClockCheck.is_believed
    monkeypatch.setattr(runner_module.time, "time", lambda: wall() + 200 * DAY_S)

    def is_believed(*clocks):
        looked.release()
        return believes(*clocks)

    monkeypatch.setattr(runner_module.ClockCheck, "is_believed", is_believed)
    service.runner(keep_s=90 * DAY_S)
    second = service.submit(output="second.npy")
    assert service.wait(second).job.state is State.SUCCEEDED
    for _ in range(3):  # also after events of this clock
        assert looked.acquire(timeout=WAIT_S)
    assert {each.job.id for each in service.store.list_jobs()} == {job, second}
    assert "the clock is 200 days from the newest event" in caplog.text


def test_a_clock_is_doubted_for_a_day(caplog):
    off, at_start = 200 * DAY_S, 1_700_000_000.0
    clock = runner_module.ClockCheck(at_start, tick=50.0)
    assert clock.is_believed(at_start + 7 * DAY_S, 50.0)
    assert not clock.is_believed(at_start + off, 60.0)
    assert clock.is_believed(at_start + 7 * DAY_S + 20.0, 70.0)  # it was set right
    assert not clock.is_believed(at_start - off, 80.0)
    assert not clock.is_believed(at_start - off + DAY_S - 1.0, 80.0 + DAY_S - 1.0)
    assert clock.is_believed(at_start - off + DAY_S, 80.0 + DAY_S)
    assert clock.is_believed(at_start - off + 2 * DAY_S, 80.0 + 2 * DAY_S)  # it is what is expected now
    assert len(caplog.records) == 2


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


class TestDataRoots:
    def test_files_under_them(self, tmp_path):
        roots = DataRoots([tmp_path])
        assert roots.readable("a/b.npy") == roots.readable(str(tmp_path / "a" / "b.npy")) == tmp_path / "a" / "b.npy"
        assert roots.writable(str(tmp_path / "x" / ".." / "b.npy")) == tmp_path / "b.npy"

    @pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "link/x", "", " ", "a\0b"])
    def test_everything_else_is_refused(self, tmp_path, name):
        root = tmp_path / "root"
        root.mkdir()
        (root / "link").symlink_to(tmp_path)
        roots = DataRoots([root])
        with pytest.raises(InputError, match="outside the service's data roots"):
            roots.readable(name)
        with pytest.raises(OutputError, match="outside the service's data roots"):
            roots.writable(name)

    def test_the_root_itself_is_no_output(self, tmp_path):
        with pytest.raises(OutputError, match="is one of the service's data roots"):
            DataRoots([tmp_path]).writable(".")
        assert DataRoots([tmp_path]).readable(".") == tmp_path

    def test_a_root_whose_name_is_no_text(self, tmp_path):
        root = tmp_path / "\udcff"
        root.mkdir()
        with pytest.raises(ParameterError, match=r"data_roots: the name '.*\\udcff' is not UTF-8"):
            DataRoots([root])

    def test_roots_that_are_none(self, tmp_path):
        with pytest.raises(ParameterError, match="at least one folder"):
            DataRoots([])
        with pytest.raises(ParameterError, match="cannot be used as a folder"):
            DataRoots([Path(tmp_path / "absent")])


class SlowCount(run.Run):
    """A run whose count is read some time before it is written."""

    @property
    def _written(self):
        found = vars(self).get("count", 0)
        time.sleep(0.005)
        return found

    @_written.setter
    def _written(self, count):
        vars(self)["count"] = count


def test_chunks_that_several_threads_write_are_all_counted(monkeypatch):
    monkeypatch.setattr(run, "PROGRESS_S", 60.0)  # so that only the first is told
    told = []
    counted = SlowCount(
        claimed=SimpleNamespace(job=SimpleNamespace(epoch=1)), executor=None, roots=None, cleanup=None, memory_bytes=0,
        tell=told.append, log=print,
    )  # fmt: skip
    counted.begin(StageRecord())
    threads = [
        threading.Thread(target=lambda: [counted._count(SimpleNamespace(index=n)) for n in range(10)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted._written == 40
    assert [event.chunks_done for event in told] == [1]
