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

from kernels.smoothing import uniform_filter
from pipeline.api_models import JobLimits, State
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.stages import StageRecord
from pipeline.errors import (
    ClusterError,
    InputError,
    LimitExceeded,
    OutOfDeviceMemory,
    OutputError,
    ParameterError,
    ServiceRefused,
    StorageError,
)
from pipeline.service.jobs import Computed, Failed, Planned, Progressed, Published, Recut, Stopped
from pipeline.service.roots import DataRoots
from pipeline.service.running import run
from pipeline.service.running import runner as runner_module
from pipeline.service.running.runner import Runner
from pipeline.service.store import Facts, NewJob, Used
from pipeline.workloads.smoothing import SmoothingJob
from tests.images import names_in, read_image, write_image
from tests.pipeline.service.running.runs import WAIT_S, expected, ledger_has_chunks

DAY_S = 86_400.0


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


def test_a_warning_of_the_receipt_is_in_the_log(service, monkeypatch):
    """As that of MRI iterations that have not converged."""
    monkeypatch.setattr(SmoothingJob, "_definition", {"not_converged": "more iterations are needed"})
    job = service.submit()
    service.runner()
    service.wait(job)
    assert "warning: more iterations are needed" in [event.message for event in service.store.events(job)]


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
    np.testing.assert_array_equal(read_image(data / "out.npy"), uniform_filter(read_image(data / "in.npy"), 9))
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
