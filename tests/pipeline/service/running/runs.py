"""What tests of runs share: streams that can be stopped at a chunk, and the result of a job."""

from __future__ import annotations

import threading
import time

from kernels.smoothing import uniform_filter
from pipeline.engine.devices.device import CpuDevice
from pipeline.engine.run import stream_on_device
from tests.images import read_image

WAIT_S = 60.0


class Streams:
    """The streams of a place: each call goes through `before`, and every chunk through `on_chunk`."""

    def __init__(self):
        self.device = CpuDevice(1)
        self.before = lambda: None
        self.on_chunk = lambda chunk: None
        self.chunks = []

    def stream(self, job, plan, ledger, events):
        self.before()

        def written(chunk):
            self.chunks.append((job.spec.output.name, chunk.index))
            events.on_written(chunk)
            self.on_chunk(chunk)

        from dataclasses import replace

        return stream_on_device(job, plan, ledger, replace(events, on_written=written))


def expected(data):
    return uniform_filter(read_image(data / "in.npy"), 5)


def ledger_has_chunks(data):
    end = time.monotonic() + WAIT_S
    while not list(data.glob("*.ledger/chunks-*")):
        assert time.monotonic() < end
        time.sleep(0.005)


def stopped_at(streams, count):
    """Holds the job at the chunk of this number until told; returns (it is there, let it go)."""
    there, go = threading.Event(), threading.Event()

    def hold(chunk):
        if chunk.index >= count and not there.is_set():
            there.set()
            assert go.wait(WAIT_S)

    streams.on_chunk = hold
    return there, go
