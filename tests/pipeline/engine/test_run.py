"""A job on a device that is short of memory: chunks are halved until they fit, and the receipt says so."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.engine import checkpoints
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.ledger import Ledger
from pipeline.engine.run import RunEvents, RunOptions, plan_job, run_job
from pipeline.errors import OutOfDeviceMemory
from pipeline.workloads import JobSpec, workloads
from tests.images import names_in, read_image, write_image


class SmallDevice(CpuDevice):
    """Has room for slots up to a size, and for computing on inputs up to another."""

    def __init__(self, slot_bytes, compute_bytes):
        super().__init__(2)
        self.slot_bytes = slot_bytes
        self.compute_bytes = compute_bytes

    def allocate(self, input_bytes, output_bytes):
        if input_bytes + output_bytes > self.slot_bytes:
            raise OutOfDeviceMemory("no room for a slot; lower --memory")
        return super().allocate(input_bytes, output_bytes)

    def process(self, workload, chunk, slot, record):
        if chunk.input_bytes > self.compute_bytes:
            raise OutOfDeviceMemory("no room to compute; lower --chunk-bytes")
        super().process(workload, chunk, slot, record)


class ShrinkingDevice(CpuDevice):
    """Has room for every chunk until so many of them are computed, and from then on for three quarters as much."""

    def __init__(self, chunks):
        super().__init__(1)
        self.left = chunks
        self.largest = 0

    def process(self, workload, chunk, slot, record):
        self.largest = max(self.largest, chunk.input_bytes)
        if chunk.input_bytes > self.largest * 3 // 4:
            if self.left == 0:
                raise OutOfDeviceMemory("no room to compute; lower --chunk-bytes")
            self.left -= 1
        super().process(workload, chunk, slot, record)


def run_small(folder, device, events=None, **given):
    samples = np.random.default_rng(2).integers(0, 65536, (700, 301)).astype(np.uint16)
    if not (folder / "in.npy").exists():
        write_image(folder / "in.npy", samples, "YX")
    parameters = workloads()["smooth"].Parameters(size="5")
    spec = JobSpec(workload="smooth", input=folder / "in.npy", output=folder / "out.npy", parameters=parameters)
    options = RunOptions(memory_bytes=64 << 20, **given)
    return samples, run_job(plan_job(spec, device, options), options, events=events)


@pytest.mark.parametrize(("slot_bytes", "compute_bytes"), [(200_000, 1 << 30), (1 << 30, 50_000), (200_000, 50_000)])
def test_chunks_are_halved_until_they_fit(tmp_path, slot_bytes, compute_bytes):
    samples, receipt = run_small(tmp_path, SmallDevice(slot_bytes, compute_bytes))
    assert receipt["halvings"] >= 2
    assert receipt["chunks"] >= 4
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), uniform_filter(samples, 5))


def test_a_device_without_any_room_is_an_error(tmp_path):
    write_image(tmp_path / "in.npy", np.zeros((17, 13), np.uint16), "YX")  # soon in chunks of single samples
    with pytest.raises(OutOfDeviceMemory, match="no room for a slot"):
        run_small(tmp_path, SmallDevice(10, 10))
    assert names_in(tmp_path) == ["in.npy"]


class Heard:
    """Which chunks were told of since the job was last cut, how often it was, and how many are kept in the end."""

    def __init__(self):
        self.written, self.plans, self.kept = [], [], []

    def events(self, **more):
        return RunEvents(**({"on_written": self.note, "on_recut": self.recut, "on_kept": self.keep} | more))

    def note(self, chunk):
        self.written.append(chunk.index)

    def recut(self, plan):
        self.plans.append(len(plan.chunks))
        self.written.clear()

    def keep(self, kept, chunks):
        self.kept.append((kept, chunks))


def test_who_counts_chunks_hears_that_they_are_cut_anew(tmp_path):
    heard = Heard()
    samples, receipt = run_small(tmp_path, ShrinkingDevice(4), heard.events(), chunk_bytes=60_000)
    assert receipt["halvings"] == len(heard.plans) >= 1
    assert heard.plans[-1] == receipt["chunks"]
    assert sorted(heard.written) == list(range(receipt["chunks"]))
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), uniform_filter(samples, 5))


class Killed(BaseException):
    """As if by kill -9: what a run does at other errors leaves as much where it has kept chunks."""


def test_a_halved_job_that_is_killed_goes_on_with_the_halves(tmp_path, monkeypatch):
    """What was entered in larger chunks counts no more: their numbers are those of other regions now."""
    monkeypatch.setattr(checkpoints, "INTERVAL_SECONDS", 0.0)  # on leaving, too, all that is written is entered
    heard, entered = Heard(), []

    restart = Ledger.restart

    def watched(ledger, identity):
        entered.append(len(ledger.entries()))
        restart(ledger, identity)

    monkeypatch.setattr(Ledger, "restart", watched)

    def kill(chunk):
        heard.note(chunk)
        if heard.plans and len(heard.written) == 3:
            raise Killed

    with pytest.raises(Killed):
        run_small(tmp_path, ShrinkingDevice(4), heard.events(on_written=kill), chunk_bytes=60_000)
    assert len(entered) == len(heard.plans) == 1
    assert entered[0] > 0
    ((kept, chunks),) = heard.kept
    assert chunks == heard.plans[-1]
    assert 0 < kept < chunks
    samples, receipt = run_small(tmp_path, CpuDevice(1), resume=True)
    assert (receipt["resumed_chunks"], receipt["chunks"], receipt["halvings"]) == (kept, chunks, 0)
    np.testing.assert_array_equal(read_image(tmp_path / "out.npy"), uniform_filter(samples, 5))
