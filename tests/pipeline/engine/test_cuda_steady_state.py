"""Once a pipeline runs, it allocates nothing, copies only between pinned and device memory, waits only for events."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kernels.smoothing import uniform_filter
from pipeline.engine.device_pipeline import DevicePipeline, slot_bytes
from pipeline.engine.devices import cuda_driver
from pipeline.engine.devices.device import CudaDevice
from pipeline.formats.image.base import Region
from pipeline.workloads.protocol import ArraySpec, Chunk

SHAPE = (257, 1031, 3)
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
PINNED = 1  # cudaMemoryTypeHost

pytestmark = pytest.mark.gpu


class Smoothed:
    """Box 3×3 of random chunks, checked as they are written."""

    name = "smoothed"
    unit = "pixels"

    def __init__(self):
        self.workload = self.job = self  # as an output has them
        self.wrong = []

    def chunks(self, count):
        spec = ArraySpec(SHAPE, np.dtype(np.uint16))
        region = Region((0, 0, 0), SHAPE)
        halo = ((0, 0),) * 3
        return [Chunk(index=i, region=region, halo=halo, inputs=(spec,), outputs=(spec,), work=1) for i in range(count)]

    def image(self, chunk):
        return np.random.default_rng(chunk.index).integers(0, 65536, SHAPE, np.uint16)

    def read(self, chunk, inputs):
        inputs[0][...] = self.image(chunk)

    def compute(self, chunk, inputs, outputs, stream):
        uniform_filter(inputs[0], 3, axes=(0, 1), out=outputs[0], stream=stream)

    def write(self, chunk, outputs):
        if not np.array_equal(outputs[0], uniform_filter(self.image(chunk), 3, axes=(0, 1))):
            self.wrong.append(chunk.index)


class EventsOnly:
    """A stream that refuses to be waited for."""

    def __init__(self, stream):
        self._stream = stream

    def synchronize(self):
        raise AssertionError("a bare synchronize in steady state")

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self._stream.__enter__()

    def __exit__(self, *error):
        return self._stream.__exit__(*error)


@pytest.fixture
def watched(monkeypatch):
    """A running pipeline whose copies and allocations are noted."""
    import cupy

    copies, allocations, lock = [], [], threading.Lock()
    make, pool = cuda_driver.make, cupy.get_default_memory_pool()

    def noted_make(calls):
        for function, arguments in calls:
            if "Memcpy" in function.__name__:
                target, source, _, stream = (argument.value for argument in arguments)
                kind = HOST_TO_DEVICE if "HtoD" in function.__name__ else DEVICE_TO_HOST
                host = source if kind == HOST_TO_DEVICE else target
                with lock:
                    copies.append((kind, cupy.cuda.runtime.pointerGetAttributes(host).type, stream))
        make(calls)

    def forbidden_copy(*_):
        raise AssertionError("a copy that the engine did not ask for")

    def noted_malloc(nbytes):
        with lock:
            allocations.append(nbytes)
        return pool.malloc(nbytes)

    monkeypatch.setattr(cuda_driver, "make", noted_make)
    for name in ("memcpy", "memcpyAsync"):
        monkeypatch.setattr(cupy.cuda.runtime, name, forbidden_copy)
    workload, device = Smoothed(), CudaDevice(0)
    chunks = workload.chunks(200)
    cupy.cuda.set_allocator(noted_malloc)
    try:
        with DevicePipeline(device, workload, slot_bytes(chunks)) as pipeline:
            pipeline.stream(chunks[: 2 * device.ring_depth])
            copies.clear()
            allocations.clear()
            yield cupy, device, workload, pipeline, chunks, copies, allocations
    finally:
        cupy.cuda.set_allocator(pool.malloc)


@pytest.mark.alone
def test_steady_state_allocates_nothing_and_copies_only_pinned_memory(watched, monkeypatch):
    cupy, device, workload, pipeline, chunks, copies, allocations = watched
    free = cupy.cuda.runtime.memGetInfo()[0]
    for name in ("_upload", "_compute", "_download"):
        monkeypatch.setattr(device, name, EventsOnly(getattr(device, name)))
    monkeypatch.setattr(cupy.cuda.runtime, "deviceSynchronize", None)
    pipeline.stream(chunks)
    monkeypatch.undo()
    assert workload.wrong == []
    assert allocations == []
    assert cupy.cuda.runtime.memGetInfo()[0] == free
    assert {(kind, memory) for kind, memory, _ in copies} == {(HOST_TO_DEVICE, PINNED), (DEVICE_TO_HOST, PINNED)}
    assert len(copies) == 2 * len(chunks)
    assert {stream for *_, stream in copies} == {device._upload.ptr, device._download.ptr}
