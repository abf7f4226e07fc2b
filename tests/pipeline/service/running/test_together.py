"""Small images of one array that run together: each job keeps its own life."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.api_models import TERMINAL, JobLimits, State
from pipeline.cluster.executor import Executor
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import stream_on_device
from pipeline.errors import ClusterError, InputError, LimitExceeded
from pipeline.service.jobs import CancelRequested
from pipeline.service.roots import DataRoots
from pipeline.service.running import together
from pipeline.service.running.runner import Limits, Runner
from pipeline.service.running.together import FIRST_COMPANY, Sizes, draw_late_preview
from pipeline.service.store import NewJob, Store
from pipeline.storage.confinement import confine
from tests.images import names_in, read_image, version, write_image
from tests.pipeline.service.calls import Processes

WAIT_S = 60.0
SHAPE = (31, 29)


class Service:
    """A store, and runners on it, one after another. `runs`: how many files each run had."""

    def __init__(self, folder):
        self.data = folder / "data"
        self.data.mkdir()
        self.store = Store(folder / "state" / "jobs.sqlite")
        self.device = CpuDevice(1)
        self.before = lambda: None
        self.runs = []
        self.runners = []
        self.images = {}

    def image(self, number, shape=SHAPE):
        image = np.random.default_rng(number).integers(0, 65536, shape).astype(np.uint16)
        write_image(self.data / f"{number}.tif", image, "YX")
        self.images[number] = image

    def stream(self, job, plan, ledger, events):
        self.runs.append(job.job.summary.shape[0] if len(job.job.summary.shape) == 3 else 1)
        self.before()
        return stream_on_device(job, plan, ledger, events)

    def array(self, count, *, owner="ada", array_id="a1", **what):
        """Jobs of an array, accepted before a runner starts. Their ids."""
        asked = [
            NewJob(
                owner=owner, workload="smooth", input=str(self.data / f"{number}.tif"),
                output=str(self.data / f"{array_id}-{number}.tif"), parameters={"size": "5"}, array_id=array_id,
                array_index=number, **what,
            )
            for number in range(count)
        ]  # fmt: skip
        return self.store.accept(asked, now=time.time())

    def start(self, **limits):
        executor = Executor(device=self.device, stream=self.stream)
        runner = Runner(self.store, executor, DataRoots([self.data]), Limits(**{"jobs_at_once": 1, **limits}))
        runner.start()
        self.runners.append(runner)
        return runner

    def wait(self, jobs, *states):
        end = time.monotonic() + WAIT_S
        while any(self.store.job(job).job.state not in (states or TERMINAL) for job in jobs):
            assert time.monotonic() < end, [self.store.job(job).job.story for job in jobs]
            time.sleep(0.01)
        return [self.store.job(job) for job in jobs]

    def check(self, stored):
        """The result and the receipt of a job that succeeded."""
        number, output = stored.asked.array_index, Path(stored.asked.output)
        assert stored.job.state is State.SUCCEEDED, stored.job.error
        np.testing.assert_array_equal(read_image(output), uniform_filter(self.images[number], 5))
        receipt = json.loads(output.with_name(f"{output.name}.receipt.json").read_text())
        assert receipt == stored.receipt
        source = (self.data / f"{number}.tif").read_bytes()
        assert receipt["job"] == stored.job.id
        assert receipt["input"]["sha256"] == hashlib.sha256(source).hexdigest()
        assert receipt["input"]["path"] == str(self.data / f"{number}.tif")
        assert receipt["output"] == str(output)
        assert receipt["image"]["shape"] == list(self.images[number].shape)
        assert stored.job.chunks == stored.job.chunks_done == receipt["chunks"]


@pytest.fixture
def service(tmp_path):
    made = Service(tmp_path)
    yield made
    for runner in made.runners:
        assert runner.drain(WAIT_S)
    made.store.close()


def names(service):
    return [name for name in names_in(service.data) if name.startswith("a1-")]


def test_each_job_has_its_own_record_result_and_receipt(service):
    for number in range(20):
        service.image(number)
    jobs = service.array(20)
    service.start()
    done = service.wait(jobs)
    for each in done:
        service.check(each)
    assert service.runs == [FIRST_COMPANY, 4]
    assert {each.receipt.get("together") for each in done} == {FIRST_COMPANY, 4}
    assert [event.message for event in service.store.events(jobs[3])] == [
        "queued", "planning", "running", "publishing", "succeeded",
    ]  # fmt: skip
    assert not [name for name in names_in(service.data) if name.startswith(".millrace")]
    work = [each.estimate.read_bytes for each in done]
    assert min(work) >= SHAPE[0] * SHAPE[1] * 2
    assert 0 < sum(each.device_seconds for each in done) < WAIT_S
    (usage,) = service.store.usage(first=0)
    assert (usage.succeeded, usage.runs) == (20, 20)
    assert usage.read_bytes >= 19 * SHAPE[0] * SHAPE[1] * 2


def test_damaged_missing_and_other_files_run_alone_and_fail_alone(service):
    for number in range(8):
        service.image(number)
    (service.data / "2.tif").unlink()
    (service.data / "3.tif").write_bytes(b"II*\0" + b"\xff" * 30)
    service.image(5, (17, 13))  # of another kind
    os.truncate(service.data / "6.tif", 600)
    jobs = service.array(8)
    service.start()
    done = service.wait(jobs)
    for number in (0, 1, 4, 5, 7):
        service.check(done[number])
    for number in (2, 3, 6):
        assert done[number].job.state is State.FAILED
        assert f"{number}.tif" in done[number].job.error
        assert done[number].job.attempts == 1
    assert service.runs[0] == 4
    assert names(service) == sorted(
        name for number in (0, 1, 4, 5, 7) for name in (f"a1-{number}.tif", f"a1-{number}.tif.receipt.json")
    )


def test_an_output_that_is_the_input_by_another_name_fails_alone(service):
    for number in range(5):
        service.image(number)
    before = (service.data / "1.tif").read_bytes()
    (service.data / "a1-1.tif").hardlink_to(service.data / "1.tif")
    (service.data / "a1-2.tif.receipt.json").mkdir()
    (service.data / "a1-3.tif").write_bytes(b"an older result")
    jobs = service.array(5)
    service.start()
    done = service.wait(jobs)
    for number in (0, 3, 4):
        service.check(done[number])
    assert "the input itself" in done[1].job.error
    assert "is a folder where the receipt belongs" in done[2].job.error
    assert (service.data / "1.tif").read_bytes() == before
    assert service.runs[0] == 3


def test_a_file_that_changes_while_they_run_fails_alone(service):
    for number in range(4):
        service.image(number)

    def change():
        service.before = lambda: None
        service.image(2, (41, 7))

    service.before = change
    jobs = service.array(4)
    service.start()
    for each in service.wait(jobs):
        service.check(each)
    assert service.runs == [4, 1]


@pytest.mark.parametrize(
    "error", [ClusterError("lost"), InputError("damaged"), LimitExceeded("too long"), ZeroDivisionError()]
)
def test_if_they_fail_together_each_runs_alone(service, error, monkeypatch):
    monkeypatch.setattr("pipeline.service.running.caution.FIRST_PAUSE_S", 0.01)
    for number in range(3):
        service.image(number)

    def fail():
        service.before = lambda: None
        raise error

    service.before = fail
    jobs = service.array(3)
    service.start()
    for each in service.wait(jobs):
        service.check(each)
        assert each.job.attempts == 1
        assert each.job.deaths == 0
        assert "together" not in each.receipt
    assert service.runs == [3, 1, 1, 1]
    assert any("run one by one now" in event.message for event in service.store.events(jobs[0]))


def cancel(service, runner, job):
    _, actions = service.store.apply(job, CancelRequested(), now=time.time())
    runner.act(job, actions)


def test_a_cancelled_job_is_left_out(service):
    for number in range(4):
        service.image(number)
    here, on = threading.Event(), threading.Event()

    def wait():
        here.set()
        assert on.wait(WAIT_S)

    service.before = wait
    jobs = service.array(4)
    runner = service.start()
    assert here.wait(WAIT_S)
    cancel(service, runner, jobs[0])
    cancel(service, runner, jobs[2])
    on.set()
    done = service.wait(jobs)
    assert [each.job.state.value for each in done] == ["cancelled", "succeeded", "cancelled", "succeeded"]
    service.check(done[1])
    assert names(service) == ["a1-1.tif", "a1-1.tif.receipt.json", "a1-3.tif", "a1-3.tif.receipt.json"]


def test_if_all_are_cancelled_the_run_stops(service):
    for number in range(3):
        service.image(number)
    jobs = service.array(3)
    runner = None
    here = threading.Event()
    service.before = lambda: here.wait(WAIT_S)
    runner = service.start()
    service.wait(jobs, State.RUNNING)
    for job in jobs:
        cancel(service, runner, job)
    here.set()
    assert {each.job.state for each in service.wait(jobs)} == {State.CANCELLED}
    assert names(service) == []


def test_a_drain_queues_them_again_and_the_next_server_runs_them(service):
    for number in range(3):
        service.image(number)
    jobs = service.array(3)
    runner = service.start()

    def drain():
        service.before = lambda: None
        runner._draining.set()
        runner._stop_all()

    service.before = drain
    service.wait(jobs, State.RUNNING, State.QUEUED, State.SUCCEEDED)
    assert runner.drain(WAIT_S)
    assert {service.store.job(job).job.state for job in jobs} == {State.QUEUED}
    service.start()
    for each in service.wait(jobs):
        service.check(each)


def test_a_throttle_and_caps_bound_how_many_run_together(service):
    for number in range(12):
        service.image(number)
    jobs = service.array(12, throttle=3)
    service.start()
    for each in service.wait(jobs):
        service.check(each)
    assert max(service.runs) <= 3
    service.runs.clear()
    service.store.set_cap("owner", "ada", "running", 5, now=time.time())
    jobs = service.array(12, array_id="a2")
    service.runners[0].wake()
    service.wait(jobs)
    assert max(service.runs) == 5
    service.runs.clear()
    service.store.set_cap("owner", "ada", "jobs", 28, now=time.time())
    jobs = service.array(12, array_id="a3")
    service.runners[0].wake()
    service.wait(jobs[:4])
    assert max(service.runs) == 4
    assert {each.job.state for each in service.wait(jobs[4:], State.QUEUED)} == {State.QUEUED}


def test_jobs_that_run_together_are_one_for_the_default_limit_of_an_owner(service):
    jobs, how = service.array(8), {"now": time.time(), "lease_s": 30.0}
    assert service.store.claim("one", owner_cap=2, **how).job.id == jobs[0]
    company = service.store.company(jobs[0], most=5)
    claimed = service.store.claim_company(jobs[0], company, "one", **how)
    assert claimed == [service.store.job(each) for each in jobs[1:6]]
    assert service.store.claim_company(jobs[0], company, "one", **how) == []
    assert service.store.claim("one", owner_cap=2, **how) is None
    assert service.store.claim("one", owner_cap=2, together={"ada": 5}, **how).job.id == jobs[6]
    assert service.store.claim("one", owner_cap=2, together={"ada": 5}, **how) is None


def test_other_parameters_limits_and_owners_are_no_company(service):
    for number in range(2):
        service.image(number)
    one = service.array(2, limits=JobLimits(time_s=50))
    other = service.array(2, array_id="a2", owner="bob")
    service.start()
    for each in service.wait(one + other):
        service.check(each)
    assert service.runs == [2, 2]


def test_a_list_that_a_user_has_made_is_refused(service):
    service.image(0)
    confine(DataRoots([service.data]).confine())
    (service.data / "own.files").write_text('{"millrace-files": 1, "folder": "/", "stored": null, "files": []}')
    job = NewJob(
        owner="ada", workload="smooth", input=str(service.data / "own.files"), output=str(service.data / "x.tif"),
        parameters={"size": "5"},
    )  # fmt: skip
    (job,) = service.store.accept([job], now=time.time())
    service.start()
    (done,) = service.wait([job])
    assert done.job.state is State.FAILED
    assert "a list of files, which a service does not take" in done.job.error


def test_a_link_in_place_of_the_staged_results_is_not_followed(service, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for number in range(3):
        service.image(number)

    def replace():
        service.before = lambda: None
        (staged,) = service.data.glob(".millrace-a1-*/*.staged")
        staged.rmdir()
        staged.symlink_to(outside)

    service.before = replace
    jobs = service.array(3)
    service.start()
    for each in service.wait(jobs):
        service.check(each)
    assert list(outside.iterdir()) == []
    assert service.runs == [3, 1, 1, 1]


def test_what_a_killed_server_left_is_removed_and_its_jobs_are_finished(service):
    for number in range(5):
        service.image(number)
    jobs = service.array(5)
    head = service.store.claim("dead", now=time.time(), lease_s=30, owner_cap=8)
    assert head.job.id == jobs[0]
    company = service.store.company(jobs[0], most=2)
    assert len(service.store.claim_company(jobs[0], company, "dead", now=time.time(), lease_s=30)) == 2
    (service.data / ".millrace-a1-1" / "1.result.files.staged").mkdir(parents=True)
    service.start()
    for each in service.wait(jobs):
        service.check(each)
    assert service.runs.count(1) == 3
    assert not [name for name in names_in(service.data) if name.startswith(".millrace")]


def test_previews_are_drawn_when_they_are_asked_for(service, tmp_path):
    for number in range(2):
        service.image(number)
    jobs = service.array(2)
    service.start()
    one, other = service.wait(jobs)
    output, picture = Path(one.asked.output), tmp_path / "one.png"
    draw_late_preview(one, output, picture, Processes(), None)
    assert read_image(picture).shape == SHAPE
    drawn = version(picture)
    draw_late_preview(one, output, picture, Processes(), None)
    assert version(picture) == drawn
    os.utime(other.asked.output, (time.time() + 60, time.time() + 60))  # as if written by another program
    draw_late_preview(other, Path(other.asked.output), tmp_path / "other.png", Processes(), None)
    assert not (tmp_path / "other.png").exists()


def test_how_many_run_together_follows_from_the_time_that_they_take(monkeypatch):
    sizes = Sizes()
    assert sizes.of("a") == FIRST_COMPANY
    sizes.took("a", 16, 0.1)
    assert sizes.of("a") == 128
    sizes.took("a", 128, 16.0)
    assert sizes.of("a") == 64
    sizes.took("a", 64, 1000.0)
    assert sizes.of("a") == 1
    sizes.failed("b", 512)
    assert sizes.of("b") == 64
    monkeypatch.setattr(together, "_ARRAYS_KEPT", 1)
    sizes.took("c", 2, 1.0)
    assert sizes.of("a") == FIRST_COMPANY
