"""One contract for every device: all chunks through all stages, in bounded memory, and a clean end after any error."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from kernels.runtime.threads import for_each
from pipeline import metrics
from pipeline.engine import device_pipeline
from pipeline.engine.device_pipeline import DevicePipeline, slot_bytes
from pipeline.engine.devices.buffers import ALIGNMENT_BYTES, allocate_host_slot, buffer_bytes, carve
from pipeline.engine.devices.device import OVERLAPS, CpuDevice, CudaDevice
from pipeline.engine.stages import ALWAYS, StageRecord
from pipeline.formats.image.base import Region
from pipeline.stopping import SIGNALS, Stopped
from pipeline.workloads.protocol import ArraySpec, Chunk, Plan
from tests.pipeline.in_time import in_background, in_time

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
@in_time
def test_every_chunk_goes_through_every_stage(device, count, threads):
    workload, plan, seen = Counting(), make_plan(count), []
    with open_pipeline(device, workload, plan, readers=threads, writers=threads) as pipeline:
        record = pipeline.stream(plan.chunks, seen.append)
    check_results(workload, count)
    assert sorted(chunk.index for chunk in seen) == list(range(count))
    assert workload.most_in_flight <= device.ring_depth
    for stage in ALWAYS:
        totals = record.totals[stage]
        assert totals.chunks == count
        assert totals.nbytes == (plan.output_bytes if stage in ("download", "write") else plan.input_bytes)
    assert 0 < record.overlap_efficiency <= 1.05
    assert record.wall_seconds > 0


@pytest.mark.parametrize("stage", ["read", "compute", "write"])
@pytest.mark.parametrize("index", [0, 5, 40])
@in_time
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


@in_time
def test_interruption_stops_every_thread(monkeypatch):
    before, plan = set(threading.enumerate()), make_plan(500)

    workload = Counting(delay_s=0.01)
    with pytest.raises(KeyboardInterrupt), open_pipeline(CpuDevice(2), workload, plan) as pipeline:
        interrupt_the_next_wait(pipeline, plan, monkeypatch)
    assert len(workload.results) < 500
    assert set(threading.enumerate()) <= before


@in_time
def test_a_stopped_job_does_not_wait_for_a_reader_without_an_answer(monkeypatch):
    monkeypatch.setattr(device_pipeline, "_PATIENCE_S", 0.05)
    answer, asked = threading.Event(), threading.Event()

    class Silent(Counting):
        def read(self, chunk, inputs):
            asked.set()
            assert answer.wait(60)

    workload, plan = Silent(), make_plan(5)
    pipeline = open_pipeline(CpuDevice(2), workload, plan).__enter__()
    in_background(pipeline.stream, plan.chunks)
    assert asked.wait(60)
    pipeline.__exit__(Stopped, Stopped(signal.SIGINT), None)
    (reader,) = (thread for thread in pipeline._threads if thread.is_alive())
    assert "-read-" in reader.name
    answer.set()
    reader.join(60)
    assert workload.results == {}


def slowly(chunk=None):
    """Longer than a test may take, in parts of an instant."""
    for_each(lambda part: time.sleep(0.01), range(24_000), 2)


class Slow(Counting):
    def __init__(self):
        super().__init__()
        self.computing = threading.Event()

    def compute(self, chunk, inputs, outputs, stream):
        self.computing.set()
        slowly()


@in_time
def test_chunks_that_are_not_wanted_are_not_computed_to_their_end(monkeypatch):
    before, plan = set(threading.enumerate()), make_plan(5)
    with pytest.raises(KeyboardInterrupt), open_pipeline(CpuDevice(2), Slow(), plan) as pipeline:
        interrupt_the_next_wait(pipeline, plan, monkeypatch)
    assert {thread for thread in threading.enumerate() if thread.name.startswith("cpu")} <= before


def ended(workload, plan, **options):
    """Streams until the workload is computing, then ends the pipeline; returns the error of who streamed."""
    pipeline = open_pipeline(CpuDevice(2), workload, plan)
    pipeline.__enter__()
    streaming = in_background(pipeline.stream, plan.chunks)
    assert workload.computing.wait(60)
    pipeline.end(ArithmeticError("enough"), **options)
    return streaming.exception(60)


@in_time
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


@in_time
def test_what_an_end_cannot_wait_for_is_given_up():
    workload = Slow()
    assert str(ended(workload, make_plan(5), within_s=0.1)) == "enough"
    assert workload.results == {}


@pytest.mark.parametrize("segments", [1, 3])
@in_time
def test_segments_of_several_threads_share_one_ring(device, segments):
    workload, plan = Counting(), make_plan(60)
    size = 60 // segments
    cuts = [plan.chunks[first : first + size] for first in range(0, 60, size)]
    with open_pipeline(device, workload, plan) as pipeline:
        streaming = [in_background(pipeline.stream, cut) for cut in cuts]
        records = [each.result(60) for each in streaming]
        again = pipeline.stream(())
    check_results(workload, 60)
    assert [record.totals["write"].chunks for record in records] == [size] * segments
    assert again.totals["write"].chunks == 0
    assert workload.most_in_flight <= device.ring_depth


class Scripted(Counting):
    """Tells of each chunk that begins a stage, and does there what the test has set; a chunk is written as it comes."""

    def __init__(self, **scripts):
        super().__init__()
        self.scripts = scripts  # (chunk's index) → None, by stage
        self.begun = {"read": [], "compute": [], "write": []}
        self.order = []  # (stage, chunk)
        self.changed = threading.Condition()

    def fail_if(self, stage, chunk):
        with self.changed:
            self.begun[stage].append(chunk.index)
            self.order.append((stage, chunk.index))
            self.changed.notify_all()
        self.scripts.get(stage, int)(chunk.index)

    def wait_for(self, stage, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun[stage]) >= count, 60), f"{stage}: {self.begun[stage]}"


def failing(index, before=lambda: None, error=ArithmeticError):
    """Fails at a chunk, but does something before."""

    def script(chunk):
        if chunk == index:
            before()
            raise error(f"chunk {chunk}")

    return script


@pytest.mark.parametrize("overlap", [2, 3])
@in_time
def test_with_less_overlap_a_ring_is_full_before_it_is_computed_and_computed_before_it_is_written(overlap):
    def late(following):
        """Gives the next stage the time to begin too early, before the last chunk of a ring."""

        def wait(index):
            with workload.changed:
                if index == 3:
                    assert not workload.changed.wait_for(lambda: workload.begun[following], 0.05)

        return wait

    workload, plan = Scripted(read=late("compute"), compute=late("write")), make_plan(11)
    with DevicePipeline(CpuDevice(3, overlap), workload, slot_bytes(plan.chunks), slots=4) as pipeline:
        pipeline.stream(plan.chunks)
    for ring in (range(4), range(4, 8), range(8, 11)):
        stages = [stage for stage, chunk in workload.order if chunk in ring]
        assert stages == [stage for stage in ("read", "compute", "write") for _ in ring]


class Watched(StageRecord):
    """The record of a segment; tells when it waits for its chunks."""

    def __init__(self):
        super().__init__()
        self.waits = threading.Event()

    def timed(self):
        self.waits.set()
        return super().timed()


@in_time
def test_nothing_is_computed_or_written_after_a_failure():
    """Three chunks are read, and wait, when the first fails."""
    workload = Scripted(compute=failing(0, lambda: workload.wait_for("read", 3)))
    with (
        pytest.raises(ArithmeticError, match="chunk 0"),
        open_pipeline(CpuDevice(1), workload, make_plan(9)) as pipeline,
    ):
        pipeline.stream(make_plan(9).chunks)
    assert workload.begun == {"read": [0, 1, 2], "compute": [0], "write": []}


@in_time
def test_nothing_is_written_or_read_after_a_failed_write():
    """Two chunks are computed, and wait, when the first fails."""
    workload = Scripted(write=failing(0, lambda: workload.wait_for("compute", 3)))
    with (
        pytest.raises(ArithmeticError, match="chunk 0"),
        open_pipeline(CpuDevice(1), workload, make_plan(9)) as pipeline,
    ):
        pipeline.stream(make_plan(9).chunks)
    assert workload.begun == {"read": [0, 1, 2], "compute": [0, 1, 2], "write": [0]}


@in_time
def test_the_first_of_two_errors_is_raised_ever_after():
    go, plan = threading.Event(), make_plan(4)

    def fail(index):
        if index == 0:
            workload.wait_for("compute", 2)
            raise ArithmeticError("the first")
        assert go.wait(60)
        raise KeyError("the second")

    workload = Scripted(compute=fail)
    pipeline = open_pipeline(CpuDevice(2), workload, plan)
    pipeline.__enter__()
    with pytest.raises(ArithmeticError, match="the first"):
        pipeline.stream(plan.chunks)
    go.set()
    pipeline.__exit__(KeyError, KeyError("the third"), None)
    with pytest.raises(ArithmeticError, match="the first"):
        pipeline.stream(plan.chunks)


@pytest.mark.parametrize("stage", ["read", "compute", "write"])
@in_time
def test_an_error_wakes_every_segment_that_waits(stage):
    """The failing chunk is of the first; the second has chunks in hand, the third waits to be read."""
    workload = Scripted(**{stage: failing(3, lambda: all(each.waits.wait(60) for each in records))})
    plan, records = make_plan(60), [Watched() for _ in range(3)]
    pipeline = open_pipeline(CpuDevice(2), workload, plan)
    pipeline.__enter__()
    streaming = []
    for number, record in enumerate(records):
        chunks = plan.chunks[20 * number : 20 * number + 20]
        streaming.append(in_background(partial(pipeline.stream, chunks, record=record)))
        assert record.waits.wait(60)
    errors = [each.exception(60) for each in streaming]
    assert errors == [errors[0]] * 3
    with pytest.raises(ArithmeticError, match="chunk 3"):
        pipeline.stream(plan.chunks[:1])
    pipeline.__exit__(None, None, None)


@in_time
def test_leaving_with_an_error_drops_the_chunks_that_wait():
    workload, plan = Scripted(compute=slowly), make_plan(60)
    pipeline = open_pipeline(CpuDevice(1), workload, plan)
    pipeline.__enter__()
    streaming = in_background(pipeline.stream, plan.chunks)
    workload.wait_for("read", 3)
    workload.wait_for("compute", 1)
    pipeline.__exit__(RuntimeError, RuntimeError("left"), None)
    assert str(streaming.exception(60)) == "left"
    assert workload.begun == {"read": [0, 1, 2], "compute": [0], "write": []}


@in_time
def test_an_error_of_the_caller_fails_the_segment():
    """Even at its last chunk: its caller has not noted that it is written."""
    plan = make_plan(5)

    def refuse(chunk):
        if len(workload.results) == 5:
            raise ArithmeticError("not wanted")

    workload = Counting()
    with pytest.raises(ArithmeticError, match="not wanted"), open_pipeline(CpuDevice(1), workload, plan) as pipeline:
        pipeline.stream(plan.chunks, refuse)


@in_time
def test_ending_in_time_leaves_no_clock_running():
    before = set(threading.enumerate())
    workload = Scripted()
    workload.computing = threading.Event()
    workload.scripts["compute"] = lambda index: workload.computing.set()
    assert str(ended(workload, make_plan(60), within_s=3600.0)) in ("enough", "None")
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("slots", [1, 2, None])
@in_time
def test_a_ring_has_as_many_slots_as_asked_for(overlap, slots):
    device, workload, plan, allocated = CpuDevice(3, overlap), Counting(), make_plan(7), []
    sizes = slot_bytes(plan.chunks)
    allocate = device.allocate
    device.allocate = lambda *sizes: allocated.append(sizes) or allocate(*sizes)
    with DevicePipeline(device, workload, sizes, slots=slots) as pipeline:
        pipeline.stream(plan.chunks)
    assert allocated == [sizes] * (slots or device.ring_depth)
    assert workload.most_in_flight <= len(allocated)
    check_results(workload, 7)


def test_slots_hold_the_largest_chunk_on_either_side():
    small, large = ArraySpec((3,), np.dtype(np.uint8)), ArraySpec((300,), np.dtype(np.uint8))
    wide, tall = (
        replace(make_plan(1).chunks[0], inputs=(a,), outputs=(b,)) for a, b in ((small, large), (large, small))
    )
    assert slot_bytes([wide, tall]) == (512, 512)
    assert slot_bytes([wide]) == (256, 512)


class Noted(CpuDevice):
    """A device that notes what is asked of it, on which thread."""

    def __init__(self):
        super().__init__(2)
        self.calls, self.slots = [], {}

    def process(self, job, chunk, slot, record):
        self.slots[chunk.index] = slot
        super().process(job, chunk, slot, record)

    def finish(self, chunk, slot, record):
        assert slot is self.slots[chunk.index]
        super().finish(chunk, slot, record)

    def note(self, what):
        self.calls.append((what, threading.current_thread().name))

    def begin(self):
        self.note("begin")

    def enter(self):
        self.note("enter")

    def drain(self):
        alive = [thread.name for thread in threading.enumerate() if thread.name.startswith("noted-")]
        self.note(f"drain {alive}")

    name = "noted"


@in_time
def test_what_a_device_is_asked():
    """Its threads enter it, and none touches it any more when it drains."""
    device, workload, plan = Noted(), Counting(), make_plan(3)
    here = threading.current_thread().name
    with open_pipeline(device, workload, plan, readers=2, writers=1) as pipeline:
        assert all(thread.daemon for thread in pipeline._threads), "a process can end though one hangs"
        record = pipeline.stream(plan.chunks)
    assert (device.calls[0], device.calls[-1]) == (("begin", here), ("drain []", here))
    threads = ("compute-0", "compute-1", "read-0", "read-1", "write-0")
    assert sorted(device.calls[1:-1]) == [("enter", f"noted-{name}") for name in threads]
    assert {stage: totals.lanes for stage, totals in record.totals.items()} == {
        "read": 2, "upload": 1, "compute": 2, "download": 1, "write": 1
    }  # fmt: skip


@in_time
def test_a_pipeline_counts_its_chunks_bytes_and_work():
    count, plan = metrics.work_of("counting", "samples"), make_plan(5)
    workload = Scripted(write=failing(4, lambda: workload.wait_for("write", 5)))
    before = dict(vars(count), chunks=dict(count.chunks))
    with pytest.raises(ArithmeticError), open_pipeline(CpuDevice(1), workload, plan) as pipeline:
        pipeline.stream(plan.chunks)
    made = {name: getattr(count, name) - before[name] for name in ("input_bytes", "output_bytes", "work")}
    assert made == {
        "input_bytes": plan.input_bytes, "output_bytes": plan.output_bytes * 4 // 5, "work": 4 * SAMPLES
    }  # fmt: skip
    assert {name: number - before["chunks"][name] for name, number in count.chunks.items()} == {
        "written": 4, "kept": 0, "failed": 1
    }  # fmt: skip


@in_time
def test_an_interrupted_computation_is_no_failure_of_its_own():
    count, workload = metrics.work_of("counting", "samples"), Slow()
    before = count.chunks["failed"]
    ended(workload, make_plan(5), within_s=0.05)
    assert count.chunks["failed"] == before


@in_time
def test_the_oldest_step_is_of_the_chunk_that_has_been_longest_in_one_stage():
    """By it hung chunks are found. Here it is that of the higher number."""
    go, plan = [threading.Event(), threading.Event()], make_plan(2)

    def after_the_other(index):
        if index == 0:
            workload.wait_for("compute", 1)

    def held(index):
        assert go[index].wait(60)

    workload, before = Scripted(read=after_the_other, compute=held), time.monotonic()
    with open_pipeline(CpuDevice(2), workload, plan) as pipeline:
        chunk, since = pipeline.oldest_step
        assert chunk is None
        assert before <= since <= time.monotonic()
        streaming = in_background(pipeline.stream, plan.chunks[::-1])
        workload.wait_for("compute", 2)
        chunk, began = pipeline.oldest_step
        assert chunk == 1
        assert since <= began <= time.monotonic()
        go[1].set()
        while pipeline.oldest_step[0] != 0:
            time.sleep(0.001)
        assert began <= pipeline.oldest_step[1] <= time.monotonic()
        released = time.monotonic()
        go[0].set()
        streaming.result(60)
    chunk, since = pipeline.oldest_step
    assert chunk is None
    assert released <= since <= time.monotonic()


@in_time
def test_a_segment_that_is_done_is_forgotten():
    """A pipeline lives as long as its worker's job."""
    plan, seen = make_plan(3), lambda chunk: None
    with open_pipeline(CpuDevice(1), Counting(), plan) as pipeline:
        pipeline.stream(plan.chunks, seen)
        pipeline.stream(plan.chunks[:0], seen)
        kept = weakref.ref(seen)
        del seen
        for each in make_plan(9).chunks[3:]:
            pipeline.stream([each])
        gc.collect()
        assert kept() is None


@pytest.mark.parametrize("fails", [False, True])
def test_signals_wait_until_the_threads_have_started(monkeypatch, fails):
    """One that came in between would leave a thread half started."""
    blocked, start, plan = [], threading.Thread.start, make_plan(1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def watched(thread):
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        if fails:
            raise RuntimeError("can't start new thread")
        start(thread)

    pipeline = open_pipeline(CpuDevice(1), Counting(), plan)
    monkeypatch.setattr(threading.Thread, "start", watched)
    if fails:
        with pytest.raises(RuntimeError, match="new thread"):
            pipeline.__enter__()
    else:
        pipeline.__enter__()
    monkeypatch.undo()
    assert blocked == [before | set(SIGNALS)] * (1 if fails else 3)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    if not fails:
        pipeline.__exit__(None, None, None)


@pytest.mark.parametrize("count", [1, 7, 23])
@in_time
def test_less_overlap_keeps_the_stages_apart(device, count):
    plan = make_plan(count)
    with open_pipeline(device, Counting(delay_s=0.002), plan) as pipeline:
        timeline = pipeline.stream(plan.chunks, keep_timeline=True).timeline
    assert len(timeline) == 5 * count
    work = [each for each in timeline if each.ended > each.began]
    ends = {(each.stage, each.chunk): each.ended for each in timeline}
    for each in timeline:  # no chunk is in a stage before it left the one before
        before = ALWAYS[max(ALWAYS.index(each.stage) - 1, 0)]
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


@in_time
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
