"""Jobs that are open in processes of their own: the same results, and files that end no server."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from pipeline.api_models import State
from pipeline.cluster.dask.worker_start import start_fork_server
from pipeline.cluster.executor import Executor
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import RunOptions, plan_job, run_job, stream_on_device, write_preview
from pipeline.errors import AuditError, InputError
from pipeline.service.jobs import CancelRequested
from pipeline.service.roots import DataRoots
from pipeline.service.running import job_process
from pipeline.service.running.job_process import JobProcesses, ProcessDied
from pipeline.service.running.places import PATIENCE_S
from pipeline.service.running.runner import Limits, Runner
from pipeline.service.store import NewJob, Store
from pipeline.workloads import JobSpec, workload_named
from pipeline.workloads.gang_protocols import SharedJob
from pipeline.workloads.protocol import HoldsInput, NeedsWorkspace, Notes, Previews, ReadsResult
from tests.images import write_image
from tests.pipeline.formats.kspace.raw_mri import HEAD, xml
from tests.pipeline.service.segments import in_segments

WAIT_S = 60.0
LIMIT_BYTES = 300 << 20


def nothing():
    pass


@pytest.fixture(scope="module")
def processes():
    start_fork_server()
    made = JobProcesses(LIMIT_BYTES)
    yield made
    made.close()


@pytest.fixture
def lease(processes):
    made = processes.lease(nothing)
    yield made
    made.release()


def spec_of(workload, source, output, **parameters):
    return JobSpec(
        workload=workload, input=source, output=output, parameters=workload_named(workload).Parameters(**parameters)
    )


def molecule(path, atoms=50):
    places = np.random.default_rng(1).uniform(-5, 5, (atoms, 3))
    path.write_text(
        "".join(f"ATOM {n + 1} C ALA {n + 1} {x:.3f} {y:.3f} {z:.3f} {(-1) ** n}.0 1.5\n"
                for n, (x, y, z) in enumerate(places))
    )  # fmt: skip
    return path


def raw_data(path):
    rng = np.random.default_rng(1)
    spokes, samples = 40, 32
    angles = np.pi * np.arange(spokes)[:, None, None] / spokes
    radii = np.linspace(-0.5, 0.5, samples, endpoint=False)[None, :, None]
    traj = radii * np.concatenate([np.cos(angles), np.sin(angles)], axis=2)
    kspace = rng.normal(size=(2, spokes, samples)) + 1j * rng.normal(size=(2, spokes, samples))
    np.savez(path, kspace=kspace.astype(np.complex64), traj=traj, matrix=[16, 16], units="cycles/pixel")
    return path


def image(path):
    return write_image(path, np.random.default_rng(1).integers(0, 65536, (200, 301)).astype(np.uint16), "YX") or path


OPTIONS = RunOptions(memory_bytes=64 << 20, chunk_bytes=None, resume=True, start_over=True, job="j")


@pytest.mark.parametrize(
    ("workload", "make", "source", "output", "parameters"),
    [
        ("smooth", image, "in.npy", "out.png", {"size": "5", "statistics": True}),
        ("smooth", image, "in.npy", "out.zarr", {"size": "5"}),
        ("coulomb", molecule, "in.pqr", "out.cube", {"spacing": "1"}),
        ("mri", raw_data, "in.npz", "out.nii.gz", {"iterations": 3}),
    ],
)
def test_a_job_in_a_process_gives_the_same_result(tmp_path, lease, workload, make, source, output, parameters):
    make(tmp_path / source)
    found = {}
    for where, open_job in (("here", None), ("there", lease.open)):
        (tmp_path / where).mkdir()
        spec = spec_of(workload, tmp_path / source, tmp_path / where / output, **parameters)
        planned = plan_job(spec, CpuDevice(1), OPTIONS, open_job)
        receipt = run_job(planned, OPTIONS, stream=in_segments)
        write_preview(planned.job, tmp_path / where / "preview.png")
        files = sorted(each for each in (tmp_path / where).rglob("*") if each.is_file() and "receipt" not in each.name)
        found[where] = [(str(each.relative_to(tmp_path / where)), each.read_bytes()) for each in files]
        assert (receipt["chunks"], receipt["audit"]["samples"] > 0) == (len(planned.plan.chunks), True)
    assert found["here"] == found["there"]


def test_a_job_in_a_process_can_do_what_it_can_here(tmp_path, lease):
    spec = spec_of("coulomb", molecule(tmp_path / "in.pqr"), tmp_path / "out.dx", spacing="1")
    here, there = workload_named("coulomb").open(spec), lease.open(spec)
    for kind in (HoldsInput, NeedsWorkspace, Notes, Previews, ReadsResult, SharedJob):
        assert isinstance(there, kind) == isinstance(here, kind)
    assert there.spec == spec
    assert there.summary == here.summary
    assert there.reduction == here.reduction
    assert there.reference() is there.reference()
    here.close()
    there.close()


def test_errors_come_back_as_they_are(tmp_path, lease):
    with pytest.raises(InputError, match="no such file"):
        lease.open(spec_of("smooth", tmp_path / "absent.npy", tmp_path / "out.npy"))
    job = lease.open(spec_of("smooth", image(tmp_path / "in.npy"), tmp_path / "out.npy"))
    reference = job.reference()
    with pytest.raises(AuditError) as error:
        reference.audit([0], np.array([1e9]))
    assert error.value.worst_error > 1e6
    with pytest.raises(AttributeError) as error:
        lease._process.ask("get", 0, "no_such_name")
    assert "Traceback" in error.value.__notes__[0]


# Poison


def acquisitions_of_nothing(path):
    floats = h5py.vlen_dtype(np.float32)
    kind = np.dtype([("head", HEAD), ("traj", floats), ("data", floats)])
    with h5py.File(path, "w") as file:
        group = file.create_group("dataset")
        group.create_dataset("data", (200_000_000,), kind, chunks=(1000,), maxshape=(None,), compression="gzip")
        header = xml((32, 24, 1), (320.0, 240.0, 5.0))
        group.create_dataset("xml", data=np.array([header], object), dtype=h5py.string_dtype("utf-8"))


def zeros(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, shape, dtype in (("kspace", (1, 60_000, 1000), "<c8"), ("traj", (4, 4, 2), "<f8")):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, {"descr": dtype, "fortran_order": False, "shape": shape})
                left = int(np.prod(shape)) * np.dtype(dtype).itemsize
                while left:
                    left -= member.write(bytes(min(left, 1 << 20)))


def many_lines(path):
    with path.open("wb") as file:
        file.truncate(LIMIT_BYTES)


@pytest.mark.parametrize(
    ("workload", "name", "make", "said"),
    [
        ("mri", "in.h5", acquisitions_of_nothing, "cannot hold"),
        ("mri", "in.npz", zeros, "memory"),
        ("coulomb", "in.pqr", many_lines, "takes more than 300 MiB of memory"),
    ],
)
def test_a_poison_file_fails_its_job_alone(tmp_path, lease, workload, name, make, said):
    make(tmp_path / name)
    output = tmp_path / ("out.nii" if workload == "mri" else "out.dx")
    parameters = {"spacing": "1"} if workload == "coulomb" else {}
    with pytest.raises(InputError, match=said) as error:
        lease.open(spec_of(workload, tmp_path / name, output, **parameters))
    assert str(tmp_path / name) in str(error.value)
    assert "\n" not in str(error.value)
    lease.open(spec_of("smooth", image(tmp_path / "in.npy"), tmp_path / "out.npy"))


def test_a_job_may_be_bounded_to_less_than_others(tmp_path, lease):
    many_lines(tmp_path / "in.pqr")
    spec = spec_of("coulomb", tmp_path / "in.pqr", tmp_path / "out.dx", spacing="1")
    for most_bytes, said in (
        (100 << 20, "more than 100 MiB of memory; check the file, or raise the job's memory"),
        (1 << 40, "more than 300 MiB of memory; check the file, or raise the service's memory"),
    ):
        with pytest.raises(InputError, match=said):
            lease.open(spec, most_bytes)
    lease.open(spec_of("smooth", image(tmp_path / "in.npy"), tmp_path / "out.npy"))


# Processes that die


def pid(lease):
    return lease._process._process.pid


def test_a_process_serves_one_job_after_another_and_is_replaced_once_it_has_grown(tmp_path, monkeypatch):
    start_fork_server()
    processes = JobProcesses(LIMIT_BYTES)
    try:
        first = processes.lease(nothing)
        first.open(spec_of("smooth", image(tmp_path / "in.npy"), tmp_path / "out.npy"))
        first.release()
        second = processes.lease(nothing)
        assert pid(second) == pid(first)
        monkeypatch.setattr(job_process._Process, "is_fresh", lambda process: False)
        second.release()
        monkeypatch.undo()
        third = processes.lease(nothing)
        assert pid(third) != pid(second)
    finally:
        processes.close()
    assert not Path(f"/proc/{pid(third)}").exists()


def test_a_process_that_dies_is_told_from_a_job_that_fails(tmp_path, processes):
    lease = processes.lease(nothing)
    job = lease.open(spec_of("smooth", image(tmp_path / "in.npy"), tmp_path / "out.npy"))
    os.kill(pid(lease), signal.SIGKILL)
    with pytest.raises(ProcessDied):
        _ = job.summary
    job.close()  # there is nothing left to close
    lease.release()
    processes.lease(nothing).release()


def test_a_job_is_stopped_while_it_is_opened(tmp_path, processes):
    class Stop(Exception):
        pass

    def check():
        raise Stop

    lease = processes.lease(check)
    os.kill(pid(lease), signal.SIGSTOP)  # as a file that takes hours to read
    with pytest.raises(Stop):
        lease.open(spec_of("smooth", image(tmp_path / "in.npy"), tmp_path / "out.npy"))
    lease.release()
    assert not Path(f"/proc/{pid(lease)}").exists()


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "state" / "jobs.sqlite")
    yield made
    made.close()


@pytest.fixture
def start(tmp_path, store):
    started = []

    def make(**options):
        executor = Executor(device=CpuDevice(1), stream=options.pop("stream", stream_on_device))
        crashed, at_once = options.pop("crashed", False), options.pop("jobs_at_once", 1)
        runner = Runner(store, executor, DataRoots([tmp_path]), Limits(jobs_at_once=at_once), **options)
        runner.start(crashed=crashed)
        started.append(runner)
        return runner

    yield make
    for runner in started:
        assert runner.drain(WAIT_S)


def submit(store, folder, output="out.npy", owner="ada"):
    asked = NewJob(
        owner=owner, workload="smooth", input=str(folder / "in.npy"), output=str(folder / output), parameters={}
    )
    return store.accept([asked], now=time.time())[0]


def wait(store, job):
    end = time.monotonic() + WAIT_S
    while (found := store.job(job)).job.state not in (State.SUCCEEDED, State.FAILED):
        assert time.monotonic() < end, found.job.story
        time.sleep(0.01)
    return found.job


class Deadly(JobProcesses):
    """Processes that die at one job."""

    leases = 0

    def lease(self, check):
        lease = super().lease(check)
        open_job = lease.open

        def open_or_die(spec, **how):
            if spec.output.name == "poison.npy":
                self.leases += 1
                os.kill(pid(lease), signal.SIGKILL)
            return open_job(spec, **how)

        lease.open = open_or_die
        return lease


def test_a_job_at_which_its_process_dies_three_times_fails_and_others_run(tmp_path, store, start):
    start_fork_server()
    image(tmp_path / "in.npy")
    poison, other = submit(store, tmp_path, "poison.npy"), submit(store, tmp_path)
    processes = Deadly(LIMIT_BYTES)
    try:
        start(processes=processes, stream=in_segments)
        assert wait(store, other).state is State.SUCCEEDED
        found = wait(store, poison)
    finally:
        processes.close()
    assert (found.state, found.deaths, processes.leases) == (State.FAILED, 3, 3)
    assert found.error.startswith("the process that reads the input died 3 times")
    assert "\n" not in found.error


def test_a_job_that_ends_three_servers_is_not_begun_again(tmp_path, store, start):
    image(tmp_path / "in.npy")
    job = submit(store, tmp_path)
    for crashed, deaths in ((True, 1), (False, 1), (True, 2), (False, 2), (False, 2), (True, 3)):
        assert store.claim("killed", now=time.time(), lease_s=30.0, owner_cap=9).job.id == job
        start(crashed=crashed, has_workers=lambda: False)
        found = store.job(job).job
        assert (found.deaths, found.attempts) == (deaths, 0), "one killed from outside is no job's fault"
    found = store.job(job).job
    assert found.state is State.FAILED
    assert found.error.startswith("the server died 3 times")


def test_a_suspect_is_alone_until_it_makes_progress(tmp_path, store, start, monkeypatch):
    """Otherwise its neighbour would be blamed for a third death too."""
    image(tmp_path / "in.npy")
    suspect = submit(store, tmp_path)
    for _ in range(2):
        store.claim("killed", now=time.time(), lease_s=30.0, owner_cap=9)
        start(crashed=True, has_workers=lambda: False)
    innocent = submit(store, tmp_path, "other.npy")
    begun, may_go_on = threading.Event(), threading.Event()

    def stream(job, plan, ledger, events):
        if job.spec.output.name != "other.npy":
            begun.set()
            assert may_go_on.wait(WAIT_S)
        return stream_on_device(job, plan, ledger, events)

    runner = start(stream=stream, jobs_at_once=2)
    assert begun.wait(WAIT_S)
    assert not runner._may_claim()
    assert store.job(innocent).job.state is State.QUEUED
    monkeypatch.setattr("pipeline.service.running.places.ALONE_S", 0.0)
    assert runner._may_claim(), "not for longer than that"
    assert wait(store, innocent).state is State.SUCCEEDED
    may_go_on.set()
    found = wait(store, suspect)
    assert (found.state, found.deaths) == (State.SUCCEEDED, 0)


class NeverThere:
    """Received in another process, it keeps that process busy for ages, with the interpreter's lock held."""

    def __reduce__(self):
        return re.fullmatch, ("(a+)+b", "a" * 60)


class Slow(JobProcesses):
    """Processes that open jobs whose outputs are called endless… without end, and those called late… once they may."""

    def __init__(self):
        super().__init__(LIMIT_BYTES)
        self.stopped = {}

    def lease(self, check):
        lease = super().lease(check)
        open_job = lease.open

        def open_slowly(spec, **how):
            if spec.output.name.startswith("late"):
                os.kill(pid(lease), signal.SIGSTOP)
                self.stopped[spec.output.name] = pid(lease)
            return open_job(NeverThere() if spec.output.name.startswith("endless") else spec, **how)

        lease.open = open_slowly
        return lease


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr("pipeline.service.running.runner.POLL_S", 0.01)
    monkeypatch.setattr("pipeline.service.running.run.PLACE_S", 0.01)
    start_fork_server()
    made = Slow()
    yield made
    made.close()


def until(there):
    end = time.monotonic() + WAIT_S
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def begun_earlier(runner, job):
    """The run of a job, which has been planned for a while."""
    until(lambda: job in runner._places._runs)
    run = runner._places._runs[job]
    run.started -= PATIENCE_S + 1
    return run


def test_files_that_are_planned_without_end_hold_up_nobody_else(tmp_path, store, start, slow):
    image(tmp_path / "in.npy")
    first, second = (submit(store, tmp_path, f"endless-{n}.npy", owner="eve") for n in range(2))
    other = submit(store, tmp_path)
    runner = start(processes=slow, stream=in_segments)
    begun_earlier(runner, first)
    assert wait(store, other).state is State.SUCCEEDED
    assert store.job(first).job.state is State.PLANNING
    assert store.job(second).job.state is State.QUEUED, "its owner has as many slow jobs as may run at once"
    slow_process = runner._places._runs[first]._lease._process._process
    assert slow_process.exitcode is None
    runner._places._runs[first].planning_s = 0.0
    found = wait(store, first)
    assert found.state is State.FAILED
    assert found.attempts == 1
    assert found.error.startswith(f"{tmp_path / 'in.npy'}: opening it and planning the job take more than ")
    assert "\n" not in found.error
    assert slow_process.exitcode == -signal.SIGKILL
    until(lambda: store.job(second).job.state is State.PLANNING)
    store.apply(second, CancelRequested(), now=time.time())
    runner._places._runs[second].stopping.set()
    until(lambda: store.job(second).job.state is State.CANCELLED)


def test_a_job_that_is_planned_slowly_runs_once_there_is_a_place_again(tmp_path, store, start, slow):
    image(tmp_path / "in.npy")
    go, at_work = threading.Event(), []

    def stream(job, plan, ledger, events):
        at_work.append(job.spec.output.name)
        assert go.wait(WAIT_S)
        record = in_segments(job, plan, ledger, events)
        at_work.append(job.spec.output.name)
        return record

    late, other = submit(store, tmp_path, "late.npy"), submit(store, tmp_path, owner="bob")
    third = submit(store, tmp_path, "third.npy", owner="bob")
    runner = start(processes=slow, stream=stream)
    run = begun_earlier(runner, late)
    until(lambda: at_work == ["out.npy"])
    os.kill(slow.stopped["late.npy"], signal.SIGCONT)
    until(lambda: any("waits for a place" in event.message for event in store.events(late)))
    assert store.job(late).job.state is State.PLANNING
    assert not runner._may_claim()
    before = run.started
    go.set()
    assert [wait(store, job).state for job in (late, other, third)] == [State.SUCCEEDED] * 3
    assert at_work == ["out.npy"] * 2 + ["late.npy"] * 2 + ["third.npy"] * 2, "one at a time, the one that waited first"
    assert run.started > before, "the wait is not its time"


@pytest.fixture
def impatient(monkeypatch):
    """Steps after planning may stand still for half a second; failures are tried again at once."""
    monkeypatch.setattr("pipeline.service.running.run.IDLE_STEP_S", 0.5)
    monkeypatch.setattr("pipeline.service.running.caution.FIRST_PAUSE_S", 0.01)


def test_a_step_after_planning_that_hangs_is_tried_again_and_keeps_the_chunks(tmp_path, store, start, slow, impatient):
    """Here the audit, as if the output's file system did not answer."""
    image(tmp_path / "in.npy")
    job, resumed = submit(store, tmp_path), []

    def stream(planned, plan, ledger, events):
        resumed.append(len(plan.chunks) < len(planned.plan.chunks))
        record = in_segments(planned, plan, ledger, events)
        os.kill(pid(runner._places._runs[job]._lease), signal.SIGSTOP)
        return record

    runner = start(processes=slow, stream=stream)
    found = wait(store, job)
    # The second run has nothing to stream.
    assert (found.state, found.attempts, resumed) == (State.SUCCEEDED, 2, [False])
    lines = [event.message for event in store.events(job)]
    hung = [line for line in lines if "opening, checking or publishing it takes more than" in line]
    assert len(hung) == 1
    assert f"{tmp_path / 'out.npy'}: " in hung[0]
    assert "\n" not in hung[0]


def test_a_step_that_computes_is_not_idle_but_may_not_take_for_ever(tmp_path, processes):
    class Stop(Exception):
        pass

    seen = []

    def check(took_s, idle_s):
        seen.append((took_s, idle_s))
        if took_s > 1.5:
            raise Stop

    lease = processes.lease(nothing)
    lease.settle(check)
    with pytest.raises(Stop):
        lease.call(re.fullmatch, "(a+)+b", "a" * 60, most_bytes=1 << 20)
    assert not Path(f"/proc/{pid(lease)}").exists()
    assert len(seen) > 3
    assert all(idle_s <= took_s for took_s, idle_s in seen)
    assert min(idle_s for _, idle_s in seen[1:]) == 0.0
    lease.release()


def test_previews_are_drawn_in_the_jobs_process_and_cost_no_job(tmp_path, store, start, slow, impatient):
    image(tmp_path / "in.npy")
    drawn, hung = submit(store, tmp_path), submit(store, tmp_path, "hung.npy")
    told = slow.lease

    def lease(check):
        made = told(check)
        call = made.call

        def stopped_first(function, path, *arguments, **how):
            if path.name == "hung.npy":
                os.kill(pid(made), signal.SIGSTOP)
            return call(function, path, *arguments, **how)

        made.call = stopped_first
        return made

    slow.lease = lease
    start(processes=slow, stream=in_segments, previews=tmp_path)
    assert [wait(store, job).state for job in (drawn, hung)] == [State.SUCCEEDED] * 2
    until(lambda: any(event.message.startswith("no preview: ") for event in store.events(hung)))
    assert (tmp_path / f"{drawn}.png").is_file()
    assert not (tmp_path / f"{hung}.png").exists()


def test_two_threads_may_end_a_process_while_a_third_waits_for_its_answer(monkeypatch):
    start_fork_server()
    process = job_process._Process(LIMIT_BYTES)
    connection, closing = process._connection, threading.Lock()

    def close():
        assert closing.acquire(blocking=False), "by two at once"
        time.sleep(0.05)
        type(connection).close(connection)
        closing.release()

    monkeypatch.setattr(connection, "close", close)
    os.kill(process._process.pid, signal.SIGSTOP)  # it does not answer
    with ThreadPoolExecutor(3) as pool:
        asked = pool.submit(process.ask, "is_fresh")
        for each in [pool.submit(process.end) for _ in range(2)]:
            each.result(WAIT_S)
        with pytest.raises(ProcessDied):
            asked.result(WAIT_S)
    assert connection.closed


def test_a_process_that_has_grown_is_not_fresh():
    """As it is asked in the process itself."""
    grown = job_process._Server(None, 64 << 20, job_process._allocated_bytes())
    assert grown.is_fresh()
    # Far more than what other tests leave behind and what a collection of garbage may give back meanwhile.
    kept = np.empty(1 << 30, np.uint8)
    assert not grown.is_fresh()
    del kept
