"""One contract for every device: all chunks through all stages, in bounded memory, and a clean end after any error."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from kernels.runtime.threads import for_each
from pipeline.engine.device_pipeline import DevicePipeline, slot_bytes
from pipeline.engine.devices.buffers import ALIGNMENT_BYTES, allocate_host_slot, buffer_bytes, carve
from pipeline.engine.devices.device import OVERLAPS, CpuDevice, CudaDevice
from pipeline.engine.stages import STAGES
from pipeline.formats.image.base import Region
from pipeline.workloads.protocol import ArraySpec, Chunk, Plan

# The device's clock is read on the host's with the time of one synchronisation.
CLOCK_SKEW_S = 1e-3
SAMPLES = 4099  # a prime, so that no array ends on an aligned address


def make_plan(count):
    spec = ArraySpec((SAMPLES,), np.dtype(np.uint16))
    short = ArraySpec((7,), np.dtype(np.float64))
    chunks = tuple(
        Chunk(
            index=index,
            region=Region((index,), (index + 1,)),
            halo=((0, 0),),
            inputs=(short, spec),
            outputs=(spec, short),
            work=SAMPLES,
        )
        for index in range(count)
    )
    return Plan(chunks=chunks)


class Counting:
    """Adds one to integers and doubles floats; can be told to fail at a stage, and watches how many slots are out."""

    name = "counting"
    unit = "samples"

    def __init__(self, fail_at=(None, None), delay_s=0.0):
        self.workload = self.job = self  # as an output has them
        self.fail_at = fail_at
        self.delay_s = delay_s
        self.results = {}
        self.threads = set()
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    def fail_if(self, stage, chunk):
        if self.fail_at == (stage, chunk.index):
            raise ArithmeticError(f"{stage} {chunk.index}")

    def read(self, chunk, inputs):
        with self.lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.fail_if("read", chunk)
        inputs[0][...] = chunk.index + np.arange(7)
        inputs[1][...] = chunk.index + np.arange(SAMPLES)

    def compute(self, chunk, inputs, outputs, stream):
        self.fail_if("compute", chunk)
        self.threads.add(threading.current_thread().name)
        outputs[0][...] = inputs[1] + 1
        outputs[1][...] = inputs[0] * 2
        time.sleep(self.delay_s)

    def write(self, chunk, outputs):
        self.fail_if("write", chunk)
        with self.lock:
            self.in_flight -= 1
            assert chunk.index not in self.results
            self.results[chunk.index] = [output.copy() for output in outputs]


def open_pipeline(device, workload, plan, **threads):
    slots = min(device.ring_depth, len(plan.chunks))
    return DevicePipeline(device, workload, slot_bytes(plan.chunks), slots=slots, **threads)


def check_results(workload, count):
    assert sorted(workload.results) == list(range(count))
    for index, (integers, floats) in workload.results.items():
        np.testing.assert_array_equal(integers, (index + np.arange(SAMPLES) + 1).astype(np.uint16))
        np.testing.assert_array_equal(floats, 2.0 * (index + np.arange(7)))


def devices():
    for overlap in OVERLAPS:
        yield pytest.param(lambda overlap=overlap: CpuDevice(3, overlap), id=f"cpu-{overlap}")
        yield pytest.param(lambda overlap=overlap: CudaDevice(0, overlap), id=f"cuda-{overlap}", marks=pytest.mark.gpu)
    yield pytest.param(lambda: CpuDevice(1), id="cpu-one-lane")


@pytest.fixture(params=devices())
def device(request):
    return request.param()


@pytest.mark.parametrize("count", [1, 2, 67])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_chunk_goes_through_every_stage(device, count, threads):
    workload, plan, seen = Counting(), make_plan(count), []
    with open_pipeline(device, workload, plan, readers=threads, writers=threads) as pipeline:
        record = pipeline.stream(plan.chunks, seen.append)
    check_results(workload, count)
    assert sorted(chunk.index for chunk in seen) == list(range(count))
    assert workload.most_in_flight <= device.ring_depth
    for stage in STAGES:
        totals = record.totals[stage]
        assert totals.chunks == count
        assert totals.nbytes == (plan.output_bytes if stage in ("download", "write") else plan.input_bytes)
    assert 0 < record.overlap_efficiency <= 1.05
    assert record.wall_seconds > 0


@pytest.mark.parametrize("stage", ["read", "compute", "write"])
@pytest.mark.parametrize("index", [0, 5, 40])
def test_the_first_error_stops_every_thread(device, stage, index):
    before = set(threading.enumerate())
    workload = Counting(fail_at=(stage, index))
    plan = make_plan(41)
    with (
        pytest.raises(ArithmeticError, match=f"{stage} {index}"),
        open_pipeline(device, workload, plan, readers=2, writers=2) as pipeline,
    ):
        pipeline.stream(plan.chunks)
    assert index not in workload.results
    assert set(threading.enumerate()) <= before


def interrupt_the_next_wait(pipeline, plan, monkeypatch):
    def interrupted_wait(self, timeout=None):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupted_wait)
    pipeline.stream(plan.chunks)


def test_interruption_stops_every_thread(monkeypatch):
    before, plan = set(threading.enumerate()), make_plan(500)

    workload = Counting(delay_s=0.01)
    with pytest.raises(KeyboardInterrupt), open_pipeline(CpuDevice(2), workload, plan) as pipeline:
        interrupt_the_next_wait(pipeline, plan, monkeypatch)
    assert len(workload.results) < 500
    assert set(threading.enumerate()) <= before


class Slow(Counting):
    """Its chunks take minutes, in parts of an instant."""

    def __init__(self):
        super().__init__()
        self.computing = threading.Event()

    def compute(self, chunk, inputs, outputs, stream):
        self.computing.set()
        for_each(lambda part: time.sleep(0.01), range(30_000), 2)


def test_chunks_that_are_not_wanted_are_not_computed_to_their_end(monkeypatch):
    before, plan, began = set(threading.enumerate()), make_plan(5), time.monotonic()
    with pytest.raises(KeyboardInterrupt), open_pipeline(CpuDevice(2), Slow(), plan) as pipeline:
        interrupt_the_next_wait(pipeline, plan, monkeypatch)
    assert time.monotonic() - began < 30
    assert {thread for thread in threading.enumerate() if thread.name.startswith("cpu")} <= before


def ended(workload, plan, **options):
    """Streams until the workload is computing, then ends the pipeline; returns the error of who streamed."""
    pipeline = open_pipeline(CpuDevice(2), workload, plan)
    pipeline.__enter__()
    with ThreadPoolExecutor(1) as tasks:
        streaming = tasks.submit(pipeline.stream, plan.chunks)
        assert workload.computing.wait(60)
        pipeline.end(ArithmeticError("enough"), **options)
        return streaming.exception(timeout=60)


def test_a_pipeline_that_is_ended_writes_what_it_has_in_hand():
    class Watched(Counting):
        computing = threading.Event()

        def compute(self, chunk, *arrays):
            self.computing.set()
            super().compute(chunk, *arrays)

    workload, plan = Watched(delay_s=0.05), make_plan(500)
    assert str(ended(workload, plan)) == "enough"
    assert workload.in_flight == 0, "what was read is written"
    assert 0 < len(workload.results) < 100
    check_results(workload, len(workload.results))


def test_what_an_end_cannot_wait_for_is_given_up():
    workload, began = Slow(), time.monotonic()
    assert str(ended(workload, make_plan(5), within_s=0.1)) == "enough"
    assert time.monotonic() - began < 30
    assert workload.results == {}


@pytest.mark.parametrize("segments", [1, 3])
def test_segments_of_several_threads_share_one_ring(device, segments):
    workload, plan = Counting(), make_plan(60)
    size = 60 // segments
    cuts = [plan.chunks[first : first + size] for first in range(0, 60, size)]
    with open_pipeline(device, workload, plan) as pipeline, ThreadPoolExecutor(2) as tasks:
        records = list(tasks.map(pipeline.stream, cuts))
        again = pipeline.stream(())
    check_results(workload, 60)
    assert [record.totals["write"].chunks for record in records] == [size] * segments
    assert again.totals["write"].chunks == 0
    assert workload.most_in_flight <= device.ring_depth


def test_every_waiting_segment_learns_of_an_error():
    workload, plan = Counting(fail_at=("write", 3)), make_plan(60)
    cuts = [plan.chunks[first : first + 20] for first in (0, 20, 40)]
    with ThreadPoolExecutor(3) as tasks, open_pipeline(CpuDevice(2), workload, plan) as pipeline:
        futures = [tasks.submit(pipeline.stream, cut) for cut in cuts]
        errors = [future.exception(timeout=60) for future in futures]
        with pytest.raises(ArithmeticError, match="write 3"):
            pipeline.stream(plan.chunks[:1])
    assert isinstance(errors[0], ArithmeticError)
    assert all(error is errors[0] for error in errors if error is not None)


@pytest.mark.parametrize("count", [1, 7, 23])
def test_less_overlap_keeps_the_stages_apart(device, count):
    plan = make_plan(count)
    with open_pipeline(device, Counting(delay_s=0.002), plan) as pipeline:
        timeline = pipeline.stream(plan.chunks, keep_timeline=True).timeline
    assert len(timeline) == 5 * count
    work = [each for each in timeline if each.ended > each.began]
    ends = {(each.stage, each.chunk): each.ended for each in timeline}
    for each in timeline:  # no chunk is in a stage before it left the one before
        before = STAGES[max(STAGES.index(each.stage) - 1, 0)]
        assert before == each.stage or ends[before, each.chunk] <= each.began + CLOCK_SKEW_S
    if device.overlap == 1:
        work.sort(key=lambda each: each.began)
        assert all(one.ended <= other.began + CLOCK_SKEW_S for one, other in pairwise(work))
    if device.overlap < 5:
        host = [each for each in work if each.stage in ("read", "write")]
        inner = [each for each in work if each.stage not in ("read", "write")]
        assert not any(overlapping(one, other) for one in host for other in inner)


def overlapping(one, other):
    return one.began + CLOCK_SKEW_S < other.ended and other.began + CLOCK_SKEW_S < one.ended


def test_cpu_lanes_work_side_by_side():
    workload, plan = Counting(delay_s=0.002), make_plan(60)
    with open_pipeline(CpuDevice(3), workload, plan) as pipeline:
        pipeline.stream(plan.chunks)
    assert len(workload.threads) == 3


def test_carved_arrays_are_aligned_and_apart():
    specs = make_plan(1).chunks[0].inputs
    slot = allocate_host_slot(buffer_bytes(specs), 1)
    first, second = carve(slot.host_input, specs)
    assert first.ctypes.data % ALIGNMENT_BYTES == second.ctypes.data % ALIGNMENT_BYTES == 0
    first[...], second[...] = 1, 2
    assert (first == 1).all()
    assert (second == 2).all()
    assert first.shape == (7,)


@pytest.mark.gpu
def test_cuda_streams_are_three_and_none_is_the_default():
    device = CudaDevice(0)
    streams = {stream.ptr for stream in (device._upload, device._compute, device._download)}
    assert len(streams) == 3
    assert 0 not in streams
