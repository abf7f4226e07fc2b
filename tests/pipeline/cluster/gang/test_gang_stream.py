"""Frames shared by ranks: the bits of one device, for any number of ranks, whichever of them dies."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.cluster.communicators.nccl import NcclCommunicator
from pipeline.cluster.gang import gang_stream, rank_device
from pipeline.cluster.gang.gang_stream import GangStream, cut_runs
from pipeline.cluster.gang.rank_device import DeviceRoom
from pipeline.cluster.segments import ClusterJob, WorkerDevice
from pipeline.engine.ledger import Ledger
from pipeline.engine.output import Output
from pipeline.engine.run import RunEvents, run_job
from pipeline.engine.stages import StageRecord
from pipeline.errors import InputError, MillraceError, RankLost
from pipeline.formats.image.base import Region
from pipeline.workloads import Chunk, workload_named
from pipeline.workloads.coulomb.frames import ChosenFrames
from pipeline.workloads.protocol import ArraySpec
from tests.pipeline.cluster.dask.thread_workers import ThreadWorkers
from tests.pipeline.workloads.coulomb.coulomb_jobs import job, make_map, write_trajectory

FRAMES = 23
# A few planes of the grid, with what combining takes besides.
CHUNK_BYTES = {"avg": 20_000, "min": 8000, "max": 8000, "std": 40_000}
GRID = {"origin": "-9.3,1.1,17.7", "shape": "37,13,11", "spacing": "0.5,1.1,1.7", "cutoff": 5}
CELLS = [(15.0 + number / 7, 14.0, 16.0, 90, 90, 90) for number in range(FRAMES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    write_trajectory(folder, FRAMES, cells=CELLS)
    return folder


def options(folder, how, **more):
    return {"trajectory": str(folder / "a.dcd"), "combine": how, **GRID, **more}


class Streamed:
    """A stream over workers that are threads; remembers what the ledger held at the end."""

    _runs = itertools.count()

    def __init__(self, workers, ranks, memory=64 << 20, threads=1):
        self.workers, self.ranks, self.memory, self.threads = workers, ranks, memory, threads
        self.entries = []

    def __call__(self, planned, plan, ledger, events):
        if not ledger.exists:
            ledger.create()
        cluster_job = ClusterJob(
            name=f"test-{next(self._runs)}", spec=planned.spec, budget=planned.budget, held_bytes=0,
            ledger_identity=ledger.identity, worker_device=WorkerDevice(device="cpu", threads=self.threads),
        )  # fmt: skip
        found = GangStream(self.workers, cluster_job, planned, ranks=self.ranks, memory_bytes=self.memory)
        assert found.is_better
        record = StageRecord()
        found.stream(plan, ledger, events, record)
        self.entries = ledger.entries()
        return record


def shared(folder, how, workers, ranks, output="out.npy", memory=64 << 20, threads=1, **more):
    planned, run_options = job(folder, "a.pqr", output, chunk_bytes=CHUNK_BYTES[how], **options(folder, how, **more))
    stream = Streamed(workers, ranks, memory, threads)
    receipt = run_job(planned, run_options, stream=stream)
    return np.load(folder / output), receipt, stream


@pytest.mark.parametrize("how", ["avg", "min", "max", "std"])
def test_any_number_of_ranks_gives_the_bits_of_one_device(folder, how):
    alone, _ = make_map(folder, "a.pqr", output="alone.npy", **options(folder, how))
    for ranks in (1, 2, 3) if how == "std" else (3,):
        found, receipt, stream = shared(folder, how, ThreadWorkers(ranks), ranks)
        np.testing.assert_array_equal(found.view(np.uint32), alone.view(np.uint32))
        assert sorted(chunk for entry in stream.entries for chunk in entry.chunks) == list(range(receipt["chunks"]))
        assert receipt["chunks"] >= 4
        assert receipt["audit"]["samples"] > 250
        assert receipt["stages"]["read"]["seconds"] > 0


def test_each_stage_counts_its_own_seconds(folder, monkeypatch):
    """Whoever waits for a slow disk neither computes nor brings results back, and is one lane, whatever its threads."""
    original, ranks, slow_s = ChosenFrames.frame, 2, 0.05

    def slow(frames, number):
        time.sleep(slow_s)
        return original(frames, number)

    make_map(folder, "a.pqr", output="alone.npy", **options(folder, "avg"))  # the kernel is compiled
    monkeypatch.setattr(ChosenFrames, "frame", slow)
    _, receipt, _ = shared(folder, "avg", ThreadWorkers(ranks), ranks, threads=4)
    stages = receipt["stages"]
    assert stages["read"]["seconds"] >= FRAMES * slow_s
    assert 0 < stages["compute"]["seconds"] < stages["read"]["seconds"] / 2
    assert 0 < stages["download"]["seconds"] < stages["read"]["seconds"] / 2
    assert {stage["lanes"] for stage in stages.values()} == {ranks}
    busiest = max(stage["seconds"] for stage in stages.values()) / ranks
    assert receipt["overlap_efficiency"] == pytest.approx(busiest / receipt["wall_seconds"], abs=1e-3)
    assert stages["compute"]["bytes"] == stages["read"]["bytes"]
    assert stages["download"]["bytes"] == stages["write"]["bytes"] == receipt["written_bytes"]


def test_a_rank_that_comes_after_its_job_was_ended_does_not_open_it_anew(folder):
    planned, _ = job(folder, "a.pqr", "late.npy", chunk_bytes=CHUNK_BYTES["avg"], **options(folder, "avg"))
    cluster_job = ClusterJob(
        name="ended", spec=planned.spec, budget=planned.budget, held_bytes=0, ledger_identity={},
        worker_device=WorkerDevice(device="cpu", threads=1),
    )  # fmt: skip
    gang_stream._close("ended")
    with pytest.raises(MillraceError, match="the job was ended"):
        gang_stream._opened(cluster_job, None)
    assert not gang_stream._open
    planned.output.discard()


def test_a_rank_that_stood_still_as_it_opened_a_job_leaves_the_next_run_alone(folder):
    """It finds another run's output under the name that it was told."""
    planned, _ = job(folder, "a.pqr", "next.npy", chunk_bytes=CHUNK_BYTES["avg"], **options(folder, "avg"))
    identity = planned.identity
    cluster_job = ClusterJob(
        name="of an earlier run", spec=planned.spec, budget=planned.budget, held_bytes=0,
        ledger_identity={**identity, "runs": ["earlier"]}, worker_device=WorkerDevice(device="cpu", threads=1),
    )  # fmt: skip
    planned.output.open()
    Ledger(planned.spec.output, identity).create()
    with pytest.raises(MillraceError, match="the job was ended"):
        gang_stream._opened(cluster_job, planned.job.facts())
    assert not gang_stream._open
    Ledger(planned.spec.output, identity).remove()
    planned.output.discard()


class StreamEvent:
    """An event of a GPU whose clock advances by a second with every record."""

    clock = 0

    def record(self):
        StreamEvent.clock += 1
        self.at, self.awaited = StreamEvent.clock, False

    def synchronize(self):
        self.awaited = True


def test_a_gpus_arrays_are_timed_by_its_own_clock_once_they_are_done_with(monkeypatch):
    def seconds(began, done):
        assert done.awaited
        return done.at - began.at

    monkeypatch.setattr(rank_device.cuda_driver, "seconds", seconds)
    arrays = [np.zeros(6, np.float32)]
    copied = []
    twin = SimpleNamespace(
        inputs=lambda chunk: [SimpleNamespace(set=copied.append)],
        upload_began=StreamEvent(), upload_done=StreamEvent(), compute_done=StreamEvent(),
    )  # fmt: skip
    record = StageRecord()
    room = DeviceRoom(arrays, twin, [ArraySpec((6,), arrays[0].dtype)], record)
    room.wait()  # nothing is under way
    for turn in range(1, 4):
        room.upload()
        StreamEvent.clock += 10
        room.computed()
        assert record.counts()["compute"][2] == turn - 1
        for _ in range(2):
            room.wait()
        assert record.counts()["upload"] == pytest.approx((turn, 24 * turn, turn))
        assert record.counts()["compute"] == pytest.approx((11 * turn, 24 * turn, turn))
    room.upload()  # and an error keeps the work from being given to it
    room.wait()
    assert (record.counts()["upload"][2], record.counts()["compute"][2], len(copied)) == (4, 3, 4)


def test_what_a_lost_rank_may_have_spoilt_is_not_written(folder, monkeypatch):
    """Nor noted for the audit: in another try somebody else may write, and note, the same chunk."""
    alone, _ = make_map(folder, "a.pqr", output="alone.npy", **options(folder, "avg"))
    done, write = [], Output.write

    def confirm(communicator):
        done.append(communicator.epoch)
        if communicator.epoch == 1:
            raise RankLost("a rank is gone")

    def writes(workload, chunk, outputs):
        done.append("written")
        write(workload, chunk, outputs)

    monkeypatch.setattr(NcclCommunicator, "confirm", confirm)
    monkeypatch.setattr(Output, "write", writes)
    found, _, _ = shared(folder, "avg", ThreadWorkers(2), 2)
    assert 1 in done
    assert done.index("written") > done.index(2) > max(place for place, each in enumerate(done) if each == 1)
    np.testing.assert_array_equal(found.view(np.uint32), alone.view(np.uint32))


def test_little_memory_takes_several_runs(folder):
    alone, _ = make_map(folder, "a.pqr", output="alone.npy", **options(folder, "std"))
    found, receipt, stream = shared(folder, "std", ThreadWorkers(2), 2, memory=2 * 1500 * 200)
    np.testing.assert_array_equal(found.view(np.uint32), alone.view(np.uint32))
    assert receipt["chunks"] >= 4
    assert len(stream.entries) >= 3


def test_a_rank_that_dies_is_made_up_for(folder, monkeypatch):
    alone, _ = make_map(folder, "a.pqr", output="alone.npy", **options(folder, "avg"))
    workers = ThreadWorkers(3)
    victim = sorted(workers.last_heard())[1]
    original = gang_stream.compute_run
    epochs = []

    def dies(member, *arguments):
        epochs.append(member.epoch)
        if member.epoch == 1 and member.rank == 1:
            workers.kill(victim)
        return original(member, *arguments)

    monkeypatch.setattr(gang_stream, "compute_run", dies)
    found, receipt, _ = shared(folder, "avg", workers, 3)
    np.testing.assert_array_equal(found.view(np.uint32), alone.view(np.uint32))
    assert max(epochs) > 1
    assert receipt["audit"]["samples"] > 250


def test_a_run_that_was_stopped_goes_on(folder):
    """The first run of chunks is in when it stops; the next process computes the rest alone, to the same bits."""
    alone, _ = make_map(folder, "a.pqr", output="alone.npy", **options(folder, "max"))
    planned, run_options = job(folder, "a.pqr", "part.npy", chunk_bytes=CHUNK_BYTES["max"], **options(folder, "max"))
    written = []

    def stop(chunk):
        written.append(chunk.index)
        if len(written) == 2:
            raise MillraceError("stopped")

    with pytest.raises(MillraceError, match="stopped"):
        run_job(
            planned,
            run_options,
            events=RunEvents(on_written=stop),
            stream=Streamed(ThreadWorkers(2), 2, 2 * 1500 * 100),
        )
    found, receipt = make_map(
        folder, "a.pqr", output="part.npy", chunk_bytes=CHUNK_BYTES["max"], resume=True, **options(folder, "max")
    )
    assert 0 < receipt["resumed_chunks"] < receipt["chunks"]
    np.testing.assert_array_equal(found.view(np.uint32), alone.view(np.uint32))


def test_a_frame_that_cannot_be_read_is_named(folder):
    planned, run_options = job(folder, "a.pqr", "bad.npy", **options(folder, "avg"))
    frames = planned.job._frames

    def broken(number):
        raise InputError(f"a.dcd, frame {number}: cannot be read")

    original = workload_named("coulomb").join

    def joining(spec, facts):
        found = original(spec, facts)
        found._frames.frame = broken
        return found

    stream = Streamed(ThreadWorkers(2), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workload_named("coulomb"), "join", joining)
        with pytest.raises(InputError, match="cannot be read"):
            run_job(planned, run_options, stream=stream)
    assert len(frames) == FRAMES


def test_few_frames_stay_with_whole_chunks(folder):
    for frames, better in (("::", True), ("::5", False), ("3", False)):
        planned, _ = job(folder, "a.pqr", "few.npy", **options(folder, "avg", frames=frames))
        ledger = Ledger(planned.spec.output, planned.identity)
        cluster_job = ClusterJob(
            name="few", spec=planned.spec, budget=planned.budget, held_bytes=0,
            ledger_identity=ledger.identity, worker_device=WorkerDevice(device="cpu", threads=1),
        )  # fmt: skip
        found = GangStream(ThreadWorkers(3), cluster_job, planned, ranks=3, memory_bytes=64 << 20)
        assert found.is_better is better
        assert not replace_memory(found).is_better
        planned.output.discard()


def replace_memory(found):
    found._memory_bytes = 1000
    return found


def test_runs_are_boxes_within_the_memory():
    def chunk(index, start, stop):
        return Chunk(index=index, region=Region(start, stop), halo=((0, 0),) * 3, inputs=(), outputs=(), work=1)

    slabs = [chunk(n, (4 * n, 0, 0), (4 * n + 4, 5, 6)) for n in range(5)]
    assert [[each.index for each in run.chunks] for run in cut_runs(slabs, 300)] == [[0, 1], [2, 3], [4]]
    assert cut_runs(slabs, 10**9)[0].region == Region((0, 0, 0), (20, 5, 6))
    gap = [slabs[0], replace(slabs[3], index=1)]
    assert len(cut_runs(gap, 10**9)) == 2
    pieces = [chunk(0, (0, 0, 0), (4, 3, 6)), chunk(1, (0, 3, 0), (4, 5, 6)), chunk(2, (4, 0, 0), (8, 3, 6))]
    assert len(cut_runs(pieces, 10**9)) == 3
