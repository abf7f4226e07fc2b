"""Segments on a worker: jobs side by side, jobs that are ended, and workers that outlive their run."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from kernels.smoothing import box
from pipeline.cluster import segments
from pipeline.cluster.segments import ClusterJob, Segment, WorkerDevice, close_job, run_segment
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.ledger import Entry, Ledger
from pipeline.engine.run import RunOptions, plan_job, run_job
from pipeline.engine.stages import StageRecord
from pipeline.errors import MillraceError
from pipeline.storage.partial import Opening
from pipeline.workloads import JobSpec, workloads
from tests.images import names_in, read_image, write_image

WAIT_S = 60.0


@pytest.fixture
def folder(tmp_path):
    samples = np.random.default_rng(2).integers(0, 65536, (900, 301)).astype(np.uint16)
    write_image(tmp_path / "in.npy", samples, "YX")
    yield tmp_path
    for name in list(segments._jobs):
        close_job(name)


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


@pytest.fixture(autouse=True)
def _tells_often(monkeypatch):
    monkeypatch.setattr(segments, "REPORT_S", 0.0)


def in_thread(work):
    outcome = []

    def run():
        try:
            outcome.append(work())
        except MillraceError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_a_job_that_comes_leaves_one_alone_that_is_under_way(folder):
    first, second = Streamed(folder, "a.npy", held_at=2), Streamed(folder, "b.npy")
    thread, outcome = in_thread(first.run)
    assert first.there.wait(WAIT_S)
    second.run()
    first.go.set()
    thread.join(WAIT_S)
    assert outcome[0]["chunks"] == len(first.chunks)
    expected = box(read_image(folder / "in.npy"), 5)
    for output in ("a.npy", "b.npy"):
        np.testing.assert_array_equal(read_image(folder / output), expected)
    # What nobody uses makes room for the next.
    third = Streamed(folder, "c.npy", held_at=1)
    thread, outcome = in_thread(third.run)
    assert third.there.wait(WAIT_S)
    assert list(segments._jobs) == [third.name]
    third.go.set()
    thread.join(WAIT_S)


def test_a_job_that_is_ended_keeps_the_chunks_in_hand(folder):
    job = Streamed(folder, held_at=3)
    thread, outcome = in_thread(job.run)
    assert job.there.wait(WAIT_S)
    closing = threading.Thread(target=close_job, args=(job.name,))
    closing.start()
    job.go.set()
    closing.join(WAIT_S)
    thread.join(WAIT_S)
    assert isinstance(outcome[0], MillraceError)
    again = Streamed(folder)
    receipt = again.run()
    assert receipt["resumed_chunks"] >= 3
    assert len(again.chunks) == receipt["chunks"] - receipt["resumed_chunks"]
    np.testing.assert_array_equal(read_image(folder / "out.npy"), box(read_image(folder / "in.npy"), 5))
    assert names_in(folder) == ["in.npy", "out.npy", "out.npy.receipt.json"]


def test_a_segment_that_comes_after_its_job_was_ended_does_not_open_it_anew(folder):
    late = Streamed(folder, "out.zarr")
    close_job(late.name)
    with pytest.raises(MillraceError, match="the job was ended"):
        late.run()
    assert not segments._jobs
    assert not list((folder / "out.zarr.partial").rglob("c/*"))
    Streamed(folder, "out.zarr").run()  # another try is another run
    np.testing.assert_array_equal(read_image(folder / "out.zarr"), box(read_image(folder / "in.npy"), 5))


@pytest.mark.parametrize("ledger", ["none yet", "its own"])
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


def test_a_segment_that_nobody_wants_any_more_stops_after_the_chunks_in_hand(folder):
    """Its worker stood still while the job was ended."""
    job = Streamed(folder, held_at=2)
    thread, outcome = in_thread(job.run)
    assert job.there.wait(WAIT_S)
    job.unwanted.set()
    job.go.set()
    thread.join(WAIT_S)
    assert str(outcome[0]) == "nobody wants it"
    assert not segments._jobs
    again = Streamed(folder)
    receipt = again.run()
    assert 2 <= receipt["resumed_chunks"] < receipt["chunks"]


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
    np.testing.assert_array_equal(read_image(folder / "out.npy"), box(read_image(folder / "in.npy"), 5))


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
    np.testing.assert_array_equal(read_image(folder / "out.npy"), box(read_image(folder / "in.npy"), 5))


def test_a_ledger_is_removed_though_a_worker_of_a_lost_run_still_writes_to_it(folder):
    ledger, ended = Ledger(folder / "out.npy", {"chunks": 99}), threading.Event()
    ledger.create()

    def write():
        while not ended.is_set():
            for chunk in range(9):
                try:
                    ledger.add(Entry(chunks=(chunk,), notes={}, device="cpu"))
                except MillraceError:
                    ended.wait(0.001)

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(20):
        Ledger(folder / "out.npy", {"chunks": 99}).create()
    ended.set()
    writer.join(WAIT_S)
    ledger.remove()
    assert names_in(folder) == ["in.npy"]
