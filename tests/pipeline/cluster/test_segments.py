"""Segments on a worker: jobs side by side, jobs that are ended, and workers that outlive their run."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from kernels.runtime.threads import check_wanted
from kernels.smoothing import uniform_filter
from pipeline.cluster import segments
from pipeline.cluster.segments import (
    ClusterJob,
    Segment,
    SegmentReceipt,
    WorkerDevice,
    close_job,
    cut_segments,
    run_segment,
)
from pipeline.engine.device_pipeline import DevicePipeline
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.identity import input_version
from pipeline.engine.ledger import Entry, Ledger
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.engine.stages import ALWAYS, StageRecord
from pipeline.errors import InputError, MillraceError, OutOfDeviceMemory, OutputError
from pipeline.formats.image.base import Region
from pipeline.storage.partial import Opening
from pipeline.workloads import Budget, JobSpec, workloads
from pipeline.workloads.protocol import ArraySpec, Chunk, Plan
from tests.images import names_in, read_image, write_image
from tests.pipeline.in_time import in_background, in_time

WAIT_S = 60.0


@pytest.fixture
def folder(tmp_path):
    samples = np.random.default_rng(2).integers(0, 65536, (900, 301)).astype(np.uint16)
    write_image(tmp_path / "in.npy", samples, "YX")
    return tmp_path


@pytest.fixture(autouse=True)
def _worker(monkeypatch):
    """This process as a worker that has no job yet, and reports often."""
    monkeypatch.setattr(segments, "REPORT_S", 0.0)
    monkeypatch.setattr(segments, "_ended", segments.EndedJobs())
    monkeypatch.setattr(segments, "_jobs", {})
    yield
    for name in list(segments._jobs):
        in_background(close_job, name).result(WAIT_S)
    segments.leaving.clear()


class Streamed:
    """A job whose output and ledger are made, its segments for whoever calls `run`."""

    _runs = itertools.count()

    def __init__(self, folder, output="out.npy", *, held_at=None):
        parameters = workloads()["smooth"].Parameters(size="5")
        spec = JobSpec(workload="smooth", input=folder / "in.npy", output=folder / output, parameters=parameters)
        self.options = RunOptions(memory_bytes=64 << 20, chunk_bytes=30_000, resume=True, start_over=True, job=output)
        self.job = plan_job(spec, CpuDevice(1), self.options)
        self.name = f"{output}-{next(self._runs)}"
        self.held_at, self.there, self.go = held_at, threading.Event(), threading.Event()
        self.unwanted = threading.Event()

    def tell(self, stages):
        if stages["write"][2] >= (self.held_at or 1 << 30) and not self.there.is_set():
            self.there.set()
            assert self.go.wait(WAIT_S)

    def check(self):
        if self.unwanted.is_set():
            raise MillraceError("nobody wants it")

    def stream(self, job, plan, ledger, events):
        """As the cluster does, on this thread."""
        if not ledger.exists:
            ledger.create()
        cluster_job = ClusterJob(
            name=self.name, spec=job.spec, budget=job.budget, held_bytes=0, ledger_identity=ledger.identity,
            worker_device=WorkerDevice(device="cpu", threads=1),
        )  # fmt: skip
        self.chunks = [chunk.index for chunk in plan.chunks]
        receipt = run_segment(cluster_job, Segment(chunks=tuple(self.chunks)), self.tell, self.check)
        for notes in receipt.notes:
            job.output.add_notes(notes)
        record = StageRecord()
        record.include(receipt.stages)
        return record

    def run(self):
        return run_job(self.job, self.options, stream=self.stream)


@in_time
def test_a_job_that_comes_leaves_one_alone_that_is_under_way(folder):
    first, second = Streamed(folder, "a.npy", held_at=2), Streamed(folder, "b.npy")
    outcome = in_background(first.run)
    assert first.there.wait(WAIT_S)
    second.run()
    first.go.set()
    assert outcome.result(WAIT_S)["chunks"] == len(first.chunks)
    expected = uniform_filter(read_image(folder / "in.npy"), 5)
    for output in ("a.npy", "b.npy"):
        np.testing.assert_array_equal(read_image(folder / output), expected)
    # What nobody uses makes room for the next.
    third = Streamed(folder, "c.npy", held_at=1)
    outcome = in_background(third.run)
    assert third.there.wait(WAIT_S)
    assert list(segments._jobs) == [third.name]
    third.go.set()
    outcome.result(WAIT_S)


@in_time
def test_a_job_that_is_ended_keeps_the_chunks_in_hand(folder):
    job = Streamed(folder, held_at=3)
    outcome = in_background(job.run)
    assert job.there.wait(WAIT_S)
    closing = in_background(close_job, job.name)
    job.go.set()
    closing.result(WAIT_S)
    assert isinstance(outcome.exception(WAIT_S), MillraceError)
    again = Streamed(folder)
    receipt = again.run()
    assert receipt["resumed_chunks"] >= 3
    assert len(again.chunks) == receipt["chunks"] - receipt["resumed_chunks"]
    np.testing.assert_array_equal(read_image(folder / "out.npy"), uniform_filter(read_image(folder / "in.npy"), 5))
    assert names_in(folder) == ["in.npy", "out.npy", "out.npy.receipt.json"]


@in_time
def test_a_segment_that_comes_after_its_job_was_ended_does_not_open_it_anew(folder):
    late = Streamed(folder, "out.zarr")
    close_job(late.name)
    with pytest.raises(MillraceError, match="the job was ended"):
        late.run()
    assert not segments._jobs
    assert not list((folder / "out.zarr.partial").rglob("c/*"))
    Streamed(folder, "out.zarr").run()  # another try is another run
    np.testing.assert_array_equal(read_image(folder / "out.zarr"), uniform_filter(read_image(folder / "in.npy"), 5))


@pytest.mark.parametrize("ledger", ["none yet", "its own"])
@in_time
def test_a_worker_that_stood_still_as_it_opened_a_job_leaves_the_next_run_alone(folder, monkeypatch, ledger):
    """It finds another run's output under the name that it was told."""
    late, following = Streamed(folder), Streamed(folder)

    def stand_still(job):
        late.job.output.discard()
        following.job.output.open(Opening.NEW)
        its_own = Ledger(job.spec.output, following.job.identity)
        its_own.create() if ledger == "its own" else its_own.remove()

    monkeypatch.setattr(segments, "refuse_other_input", stand_still)
    with pytest.raises(MillraceError, match="the job was ended"):
        late.run()
    assert not np.load(folder / "out.npy.partial").any()
    following.job.output.discard()


def test_of_jobs_that_were_ended_only_the_newest_are_remembered():
    ended = segments.EndedJobs()
    for number in range(segments.ENDED_KEPT + 1):
        ended.add(f"job-{number}")
        ended.add(f"job-{number}")
    ended.refuse("job-0")
    for number in (1, segments.ENDED_KEPT):
        with pytest.raises(MillraceError, match="the job was ended"):
            ended.refuse(f"job-{number}")


@in_time
def test_a_segment_that_nobody_wants_any_more_stops_after_the_chunks_in_hand(folder):
    """Its worker stood still while the job was ended."""
    job = Streamed(folder, held_at=2)
    outcome = in_background(job.run)
    assert job.there.wait(WAIT_S)
    job.unwanted.set()
    job.go.set()
    assert str(outcome.exception(WAIT_S)) == "nobody wants it"
    assert not segments._jobs
    again = Streamed(folder)
    receipt = again.run()
    assert 2 <= receipt["resumed_chunks"] < receipt["chunks"]


@in_time
def test_a_segment_asked_for_again_computes_only_what_is_not_in(folder):
    job = Streamed(folder)
    run_once = job.stream
    counts = []

    def stream(*arguments):
        record = run_once(*arguments)
        counts.append(record.totals["write"].chunks)
        if len(counts) < 3:
            if len(counts) == 1:  # its worker died between two entries
                path = next(job.job.spec.output.parent.glob("*.ledger/chunks-*"))
                entry = Ledger(job.job.spec.output, arguments[2].identity).entries()[0]
                path.unlink()
                arguments[2].add(replace(entry, chunks=entry.chunks[:4]))
            return stream(*arguments)
        return record

    receipt = run_job(job.job, job.options, stream=stream)
    assert counts == [receipt["chunks"], receipt["chunks"] - 4, 0]
    np.testing.assert_array_equal(read_image(folder / "out.npy"), uniform_filter(read_image(folder / "in.npy"), 5))


@in_time
def test_what_a_worker_of_a_lost_run_enters_late_does_not_count(folder):
    job = Streamed(folder)
    lost = Ledger(job.job.spec.output, {"chunks": len(job.job.plan.chunks)})
    lost.create()

    def stream(*arguments):
        arguments[2].create()
        lost.add(Entry(chunks=tuple(range(9)), notes={}, device="cpu"))  # into the ledger of the run that came after
        record = job.stream(*arguments)
        assert record.totals["write"].chunks == len(job.job.plan.chunks)
        return record

    run_job(job.job, job.options, stream=stream)
    np.testing.assert_array_equal(read_image(folder / "out.npy"), uniform_filter(read_image(folder / "in.npy"), 5))


# One segment of a job that computes nothing


def plan_of(count):
    spec = ArraySpec((1,), np.dtype(np.uint8))
    chunks = (
        Chunk(index=i, region=Region((i,), (i + 1,)), halo=((0, 0),), inputs=(spec,), outputs=(spec,), work=1)
        for i in range(count)
    )
    return Plan(chunks=tuple(chunks))


@pytest.mark.parametrize("count", [1, 7, 16, 17, 1000])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_segments_are_consecutive_even_and_complete(count, workers):
    cut = cut_segments(plan_of(count), workers)
    assert [chunk for segment in cut for chunk in segment.chunks] == list(range(count))
    lengths = [len(segment.chunks) for segment in cut]
    assert len(cut) == min(count, segments.SEGMENTS_A_WORKER * workers)
    assert max(lengths) - min(lengths) <= 1


def test_segments_of_what_is_left_have_the_numbers_of_the_whole():
    left = plan_of(9).without({0, 1, 2, 5})
    assert [segment.chunks for segment in cut_segments(left, 1)] == [(3,), (4,), (6,), (7,), (8,)]


class Job:
    """An open job of a few chunks, its output, and what is asked of both. `held`: chunks whose computing waits."""

    def __init__(self, spec, plan, held, computing):
        self.spec, self.plan_, self.held, self.computing = spec, plan, held, computing
        self.calls, self.at_most = [], None
        self.go, self.was_read = threading.Event(), defaultdict(threading.Event)

    def sink(self, opening):
        self.calls.append(opening.name)
        return self

    def plan(self, budget):
        self.budget = budget
        return self.plan_

    def hold_at_most(self, budget_bytes):
        self.at_most = budget_bytes
        return 0

    def reference(self):
        return SimpleNamespace(places=np.empty((0, 1), np.int64))

    def read(self, chunk, inputs):
        self.was_read[chunk.index].set()

    def compute(self, chunk, inputs, outputs, stream):
        if chunk.index in self.held:
            self.computing.set()
            while not self.go.wait(0.01):
                check_wanted()

    def write(self, region, samples):
        self.calls.append(region.start[0])

    def note(self, chunk, outputs):
        return lambda: f"note {chunk.index}"

    def add_note(self, chunk, note):
        pass

    def flush(self):
        pass

    def discard(self):
        self.calls.append("discard")

    def close(self):
        self.calls.append("close")


class IteratingJob(Job):
    """Goes on where a chunk's saved state says, and saves another before it ends."""

    def keep_iterates(self, store):
        self.store, self.found = store, {}

    def compute(self, chunk, inputs, outputs, stream):
        saved = self.store.saved(chunk.index)
        self.found[chunk.index] = None if saved is None else int(saved["step"])
        self.store.save(chunk.index, {"step": np.array(10 + chunk.index)})


class OneLane(CpuDevice):
    """Notes the slots that are allocated and freed jobs; has memory for so many."""

    def __init__(self):
        super().__init__(1)
        self.allocated, self.room = 0, 1000

    def allocate(self, *sizes):
        self.allocated += 1
        if self.allocated > self.room:
            raise OutOfDeviceMemory("no room")
        return super().allocate(*sizes)


class Worker:
    """This process as a worker: its device, and the jobs that it opens, in order."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.device, self.jobs, self.asked = folder, OneLane(), [], []
        self.chunks, self.held, self.computing, self.kind = 6, (), threading.Event(), Job
        monkeypatch.setattr(segments, "own_device", self.own_device)
        monkeypatch.setattr(segments, "workload_named", self.workload)
        (folder / "in").write_bytes(b"input")

    def own_device(self, worker_device):
        self.asked.append(worker_device)
        return self.device

    def workload(self, name):
        def open_job(spec):
            self.jobs.append(self.kind(spec, plan_of(self.chunks), self.held, self.computing))
            return self.jobs[-1]

        return SimpleNamespace(name=name, unit="chunks", open=open_job)

    def job(self, name="job", chunks=6):
        """A job whose run has begun."""
        spec = JobSpec(workload="none", input=self.folder / "in", output=self.folder / name, parameters=None)
        ledger = Ledger(spec.output, {"chunks": chunks, "input": input_version(spec.input)})
        ledger.create()
        return ClusterJob(
            name=name, spec=spec, budget=Budget(budget_bytes=7, target_bytes=5), held_bytes=12345,
            ledger_identity=ledger.identity, worker_device=WorkerDevice(device="cpu", threads=1),
        )  # fmt: skip

    def run(self, job, *chunks, **options):
        return run_segment(job, Segment(chunks=chunks), options.pop("report", lambda stages: None), **options)

    def start(self, job, *chunks, **options):
        return in_background(partial(self.run, job, *chunks, **options))


def entered(job):
    return [entry.chunks for entry in Ledger(job.spec.output, job.ledger_identity).entries()]


@pytest.fixture
def worker(tmp_path, monkeypatch):
    return Worker(tmp_path, monkeypatch)


@in_time
def test_a_segment_is_written_and_entered_with_its_notes(worker):
    job, reports, checks = worker.job(), [], []
    receipt = worker.run(job, 1, 2, 4, report=reports.append, check=lambda: checks.append(len(checks)))
    (opened,) = worker.jobs
    assert opened.calls == ["JOIN", 1, 2, 4]
    assert (opened.at_most, opened.budget, worker.asked) == (12345, job.budget, [job.worker_device])
    assert receipt.segment == Segment(chunks=(1, 2, 4))
    assert receipt.notes == ({str(n): {"values": [], "note": f"note {n}"} for n in (1, 2, 4)},)
    assert {stage: counts[1:] for stage, counts in receipt.stages.items()} == dict.fromkeys(ALWAYS, (3, 3))
    assert [counts["write"][2] for counts in reports] == [1, 2, 3]
    assert len(checks) == 4
    assert entered(job) == [(1, 2, 4)]
    assert worker.device.allocated == worker.device.ring_depth
    # The next one of the same job finds it open.
    worker.run(job, 3, 5)
    assert worker.jobs == [opened]
    close_job(job.name)
    assert opened.calls == ["JOIN", 1, 2, 4, 3, 5, "discard", "close"]


@in_time
def test_a_segment_reports_only_now_and_then(worker, monkeypatch):
    monkeypatch.setattr(segments, "REPORT_S", 3600.0)
    worker.run(worker.job(), 0, 1, report=lambda stages: pytest.fail("too soon"))


@in_time
def test_what_is_in_the_ledger_opens_nothing(worker):
    job = worker.job()
    Ledger(job.spec.output, job.ledger_identity).add(Entry(chunks=(1, 2), notes={"1": "told"}, device="cpu"))
    assert worker.run(job, 1, 2) == SegmentReceipt(segment=Segment(chunks=(1, 2)), notes=({"1": "told"},), stages={})
    assert not worker.jobs
    receipt = worker.run(job, 1, 2, 3)
    assert receipt.notes == ({"1": "told"}, {"3": {"values": [], "note": "note 3"}})
    assert worker.jobs[0].calls == ["JOIN", 3]


@in_time
def test_iterates_of_a_segment_are_kept_in_the_ledger_of_the_run_until_it_is_entered(worker):
    job, worker.kind = worker.job(), IteratingJob
    ledger = Ledger(job.spec.output, job.ledger_identity)
    ledger.save_iterate(1, {"step": np.array(5)})
    ledger.save_iterate(3, {"step": np.array(6)})
    saved = []
    worker.run(job, 1, 2, report=lambda stages: saved.append(ledger.has_iterates))
    assert worker.jobs[0].found == {1: 5, 2: None}
    assert saved == [True, True]
    assert ledger.iterate(1) is ledger.iterate(2) is None
    assert ledger.iterate(3)["step"] == 6
    # The ledger is the run's: a worker whose run is over makes no other.
    ledger.remove()
    worker.jobs[0].store.save(4, {"step": np.array(7)})
    assert not ledger.exists


@in_time
def test_a_segment_that_nobody_wants_opens_nothing(worker):
    def refuse():
        raise MillraceError("nobody wants it")

    with pytest.raises(MillraceError, match="nobody wants it"):
        worker.run(worker.job(), 0, check=refuse)
    assert not worker.jobs


@pytest.mark.parametrize("chunks", [5, 7])
@in_time
def test_a_worker_that_cuts_a_job_otherwise_refuses_it(worker, chunks):
    job, worker.chunks = worker.job(), chunks
    with pytest.raises(MillraceError, match=rf"the worker process \d+ on .* cuts the job into {chunks} chunks"):
        worker.run(job, 0)
    assert worker.jobs[0].calls == ["JOIN", "discard", "close"]
    assert not segments._jobs
    worker.chunks = 6
    worker.run(job, 0)


@in_time
def test_a_ring_that_does_not_fit_leaves_nothing_open(worker):
    worker.device.room = 2
    with pytest.raises(OutOfDeviceMemory, match="no room"):
        worker.run(worker.job(), 0)
    assert worker.jobs[0].calls == ["JOIN", "discard", "close"]
    assert not segments._jobs


@in_time
def test_a_short_job_has_a_short_ring(worker):
    worker.chunks = 2
    worker.run(worker.job(chunks=2), 0, 1)
    assert worker.device.allocated == 2


def holding(worker, job, *chunks):
    """A segment whose first chunk is being computed, and the open job."""
    worker.held = chunks[:1]
    running = worker.start(job, *chunks)
    assert worker.computing.wait(WAIT_S)
    worker.held = ()
    return running, worker.jobs[-1]


@in_time
def test_segments_side_by_side_share_a_job_and_its_last_one_closes_it(worker):
    """One fails: the pipeline has failed for both, and the next segment opens another."""
    job = worker.job()
    running, opened = holding(worker, job, 0, 1)
    unwanted = threading.Event()

    def check():
        if unwanted.is_set():
            raise MillraceError("nobody wants it")

    other = worker.start(job, 2, 3, check=check)
    assert opened.was_read[2].wait(WAIT_S)
    unwanted.set()
    opened.go.set()
    assert str(running.exception(WAIT_S)) == str(other.exception(WAIT_S)) == "nobody wants it"
    assert worker.jobs == [opened]
    assert opened.calls[-2:] == ["discard", "close"]
    assert opened.calls.count("close") == 1
    left = [chunk for chunk in (0, 1, 2, 3) if chunk not in opened.calls]
    worker.run(job, *range(4))
    assert worker.jobs[1].calls == ["JOIN", *left]


@in_time
def test_an_unused_ring_is_freed_before_another_is_allocated(worker):
    idle, busy, third = worker.job("idle"), worker.job("busy"), worker.job("third")
    running, opened = holding(worker, busy, 0)
    worker.run(idle, 0)
    allocate = worker.device.allocate

    def watched(*sizes):
        assert worker.jobs[1].calls[-1] == "close"
        return allocate(*sizes)

    worker.device.allocate = watched
    worker.run(third, 0)
    assert sorted(segments._jobs) == ["busy", "third"]
    opened.go.set()
    running.result(WAIT_S)
    assert "close" not in opened.calls
    # A job that is in use keeps its ring though all others are idle.
    worker.run(busy, 1)
    assert len(worker.jobs) == 3


@in_time
def test_what_a_worker_has_in_hand(worker):
    began, job = time.monotonic(), worker.job()
    running, opened = holding(worker, job, 2, 3)
    ((name, (chunk, seconds)),) = segments.in_hand().items()
    assert (name, chunk) == (job.name, 2)
    assert 0 < seconds <= time.monotonic() - began
    opened.go.set()
    running.result(WAIT_S)
    assert segments.in_hand() == {}


@pytest.mark.parametrize(
    ("oldest", "told"),
    [(None, (5, 100.0)), ((None, 50.0), (5, 100.0)), ((None, 150.0), (5, 150.0)), ((7, 50.0), (7, 50.0))],
)
def test_a_segment_without_a_chunk_in_a_stage_is_at_its_first(oldest, told):
    """While its job is opened, or chunks of another segment or none are in the pipeline."""
    pipeline = None if oldest is None else SimpleNamespace(oldest_step=oldest)
    assert segments._Running(job="job", first=5, began=100.0, pipeline=pipeline).in_hand() == told


@pytest.mark.parametrize("leaves", [True, False])
@in_time
def test_a_worker_that_leaves_finishes_what_it_has_in_hand(worker, monkeypatch, leaves):
    """Whether it leaves, or only the job has ended."""
    leave, told = DevicePipeline.__exit__, threading.Event()

    def watched(*arguments):
        told.set()
        leave(*arguments)

    job, idle = worker.job(), worker.job("idle")
    running, opened = holding(worker, job, *range(6))
    worker.run(idle, 0)
    monkeypatch.setattr(DevicePipeline, "__exit__", watched)
    ending = in_background(segments.leave if leaves else partial(close_job, job.name))
    assert told.wait(WAIT_S)
    with pytest.raises(MillraceError, match="the job was ended"):
        worker.run(job, 5)
    assert not ending.done(), "a chunk is being computed"
    opened.go.set()
    assert str(running.exception(WAIT_S)) == "the job was ended"
    ending.result(WAIT_S)
    assert opened.calls[-2:] == ["discard", "close"]
    written = opened.calls[1:-2]
    assert 0 < len(written) < 6
    assert entered(job) == [tuple(written)]
    assert segments.leaving.is_set() == leaves
    assert (worker.jobs[1].calls[-1] == "close") == leaves
    assert ("idle" in segments._jobs) != leaves


@in_time
def test_chunks_that_take_too_long_for_an_ended_job_are_given_up(worker):
    job = worker.job()
    running, opened = holding(worker, job, 0, 1)
    close_job(job.name, within_s=0.01)
    assert str(running.exception(WAIT_S)) == "the job was ended"
    assert opened.calls == ["JOIN", "discard", "close"]
    assert entered(job) == []


@in_time
def test_closing_a_job_is_harmless_where_there_is_none(worker):
    job = worker.job()
    worker.run(job, 0)
    for _ in range(2):
        close_job(job.name)
        close_job("unknown")
    assert worker.jobs[0].calls.count("close") == 1


# The worker's device and files


def test_a_worker_opens_its_device_once(monkeypatch):
    opened, watched, cores = [], [], []

    class Gpu(CpuDevice):
        readers, writers = 5, 6

        def describe(self):
            return {"name": "cuda:0", "pci": "0000:01:00.0"}

    def open_it(name, threads):
        opened.append((name, threads))
        return Gpu(threads)

    monkeypatch.setattr(segments, "open_device", open_it)
    monkeypatch.setattr(segments, "watch", watched.append)
    monkeypatch.setattr(segments, "near_cores", lambda pci: [f"cores of {pci}"])
    monkeypatch.setattr(segments, "stay_on", cores.append)
    monkeypatch.setattr(segments, "opened_device", {})
    wanted = WorkerDevice(device="a device of this test", threads=3)
    device = segments.own_device(wanted)
    assert segments.own_device(wanted) is device
    assert (opened, watched, cores) == ([("a device of this test", 3)], [device], [["cores of 0000:01:00.0"]])
    assert segments.opened_device == device.describe()
    assert segments.profile(wanted) == segments.DeviceProfile(
        ring_depth=5,
        lanes={"read": 5, "compute": 3, "write": 6},
        chunk_range=Gpu.chunk_range,
        description=device.describe(),
        host=socket.gethostname(),
        process=os.getpid(),
    )
    # A CPU has no bus: its worker may use every core.
    monkeypatch.setattr(segments, "open_device", lambda name, threads: CpuDevice(threads))
    segments.opened_device.clear()
    segments.own_device(WorkerDevice(device="another device of this test", threads=3))
    assert len(cores) == 1


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({}, False),
        ({"mtime_ns": 2}, False),
        ({"mtime_ns": -2}, False),
        ({"mtime_ns": 3}, True),
        ({"mtime_ns": -3}, True),
        ({"bytes": 1}, True),
        ({"files": 1}, True),
    ],
)
def test_which_input_is_another(worker, change, refused):
    """Times may be of a network file system that keeps them coarsely."""
    job = worker.job()
    expected = job.ledger_identity["input"]
    for name, by in change.items():
        expected[name] += by * (10**9 if name == "mtime_ns" else 1)
    if refused:
        with pytest.raises(InputError, match=r"the worker process \d+ on .* every worker must see the same files"):
            worker.run(job, 0)
        assert not worker.jobs
    else:
        worker.run(job, 0)
    # A missing input is the reader's to report.
    job.spec.input.unlink()
    segments.refuse_other_input(job)


@in_time
def test_a_worker_that_does_not_see_the_files_is_named(folder):
    planned = Streamed(folder).job
    planned.output.discard()
    job = ClusterJob(
        name="one", spec=planned.spec, budget=planned.budget, held_bytes=0, ledger_identity=planned.identity,
        worker_device=WorkerDevice(device="cpu", threads=1),
    )  # fmt: skip
    with pytest.raises(OutputError, match=r"the worker process .* the folder under the same path"):
        run_segment(job, Segment(chunks=(0,)), lambda stages: None)
    (folder / "in.npy").unlink()
    with pytest.raises(InputError, match=r"the worker process .* no such file"):
        run_segment(job, Segment(chunks=(0,)), lambda stages: None)


@pytest.mark.parametrize("fault", ["hold_at_most", "sink"])
@in_time
def test_a_job_that_cannot_be_joined_is_closed(worker, monkeypatch, fault):
    def refuse(job, _):
        raise OutputError("in: refused")

    monkeypatch.setattr(Job, fault, refuse)
    with pytest.raises(OutputError, match="in: refused"):
        worker.run(worker.job(), 0)
    assert worker.jobs[0].calls[-1] == "close"
