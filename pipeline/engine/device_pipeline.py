"""One device's stream of chunks: read → upload → compute → download → write, all five at once.

Reader threads fill free slots, the device takes filled slots through its lanes, writer threads empty finished ones.
A slot goes round: free → filled → started → free. No free slot, no reading: that is the back-pressure, and host memory
is bounded by the ring whatever the size of the job.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import LifoQueue, Queue
from typing import Any

from pipeline import metrics
from pipeline.engine.buffers import Slot, buffer_bytes
from pipeline.engine.device import Device
from pipeline.engine.stages import StageRecord
from pipeline.workloads.base import Chunk, Plan, Workload

# What goes from stage to stage; None ends the thread that takes it.
Item = tuple[Chunk, Slot] | None


class DevicePipeline:
    """Streams a plan's chunks through one device. Use once: `run`, then drop it, and the ring's memory with it."""

    def __init__(
        self,
        device: Device,
        workload: Workload,
        plan: Plan,
        *,
        on_written: Callable[[Chunk], None] = lambda chunk: None,
        readers: int | None = None,
        writers: int | None = None,
        keep_timeline: bool = False,
    ) -> None:
        """`readers`, `writers`: threads; default what suits the device."""
        self._device = device
        self._workload = workload
        self._on_written = on_written
        self._threads = {
            "read": readers or device.io_threads,
            "start": device.lanes,
            "write": writers or device.io_threads,
        }
        self._chunks: Iterator[Chunk] = iter(plan.chunks)
        self._chunks_lock = threading.Lock()
        self._error: BaseException | None = None
        self._error_lock = threading.Lock()
        self.record = StageRecord(keeps_timeline=keep_timeline)
        # The slot freed last is the one still in the caches.
        self._free: LifoQueue[Slot | None] = LifoQueue()
        self._filled: Queue[Item] = Queue()
        self._started: Queue[Item] = Queue()
        slots = min(device.ring_depth, len(plan.chunks))
        # Without full overlap a whole ring is read before it is started, and finished before it is written.
        self._batch = 1 if device.overlap == 5 else slots
        if self._batch > 1:
            self._threads.update(read=1, write=1)
        for stage, threads in (("read", "read"), ("compute", "start"), ("write", "write")):
            self.record.totals[stage].lanes = self._threads[threads]
        for _ in range(slots):
            self._free.put(device.allocate(*slot_bytes(plan)))

    def run(self) -> StageRecord:
        """Every chunk through every stage. Raises the first error of any thread, once all have stopped."""
        self._device.begin()
        began = time.perf_counter()
        threads = [
            *self._threads_of("read", self._read_chunks),
            *self._threads_of("start", self._start_chunks),
            *self._threads_of("write", self._write_chunks),
        ]
        try:
            with _signals_held():
                for thread in threads:
                    thread.start()
            for thread in threads:
                thread.join()
        except BaseException as interruption:
            self._fail(interruption)
            for thread in threads:
                if thread.is_alive():
                    thread.join()
        self._device.drain()
        self.record.wall_seconds = time.perf_counter() - began
        metrics.pipeline_wall_seconds.inc(self.record.wall_seconds)
        if self._error is not None:
            raise self._error
        return self.record

    def _threads_of(self, stage: str, body: Callable[[], None]) -> list[threading.Thread]:
        """Threads of one stage; the last of them to end tells the next stage that nothing more comes."""
        left = threading.Semaphore(self._threads[stage] - 1)

        def guarded() -> None:
            try:
                body()
            except BaseException as error:
                self._fail(error)
            if not left.acquire(blocking=False):
                self._end_of(stage)

        return [
            threading.Thread(target=guarded, name=f"{self._device.name}-{stage}-{number}", daemon=True)
            for number in range(self._threads[stage])
        ]

    def _end_of(self, stage: str) -> None:
        queue, following = {
            "read": (self._filled, "start"),
            "start": (self._started, "write"),
            "write": (None, ""),
        }[stage]
        if queue is not None:
            for _ in range(self._threads[following]):
                queue.put(None)

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, and wake the readers, which may be waiting for a slot that never comes."""
        with self._error_lock:
            if self._error is None:
                self._error = error
        for _ in range(self._threads["read"]):
            self._free.put(None)

    # The stages. After a failure each only lets slots pass, so that every thread comes to its end.

    def _read_chunks(self) -> None:
        more = True
        while more and self._error is None:
            batch: list[tuple[Chunk, Slot]] = []
            while more and len(batch) < self._batch:
                slot = self._free.get()
                with self._chunks_lock:
                    chunk = None if slot is None else next(self._chunks, None)
                if slot is None or chunk is None:
                    self._free.put(slot)  # for the next reader, which may be waiting for it to learn the same
                    more = False
                else:
                    self._read(chunk, slot)
                    batch.append((chunk, slot))
            for item in batch:
                self._filled.put(item)

    def _read(self, chunk: Chunk, slot: Slot) -> None:
        began = time.perf_counter()
        self._workload.read(chunk, slot.inputs(chunk))
        self.record.add("read", chunk.index, began, time.perf_counter(), chunk.input_bytes)

    def _start_chunks(self) -> None:
        self._device.enter()
        for chunk, slot in _until_end(self._filled):
            if self._error is None:
                self._device.process(self._workload, chunk, slot, self.record)
                self._started.put((chunk, slot))

    def _write_chunks(self) -> None:
        self._device.enter()
        batch: list[tuple[Chunk, Slot]] = []
        for chunk, slot in _until_end(self._started):
            if self._error is not None:
                continue
            self._device.finish(chunk, slot, self.record)
            batch.append((chunk, slot))
            if len(batch) == self._batch:
                self._write(batch)
        self._write(batch)

    def _write(self, batch: list[tuple[Chunk, Slot]]) -> None:
        """Write the chunks and empty the batch."""
        while batch and self._error is None:
            chunk, slot = batch.pop(0)
            began = time.perf_counter()
            self._workload.write(chunk, slot.outputs(chunk))
            self.record.add("write", chunk.index, began, time.perf_counter(), chunk.output_bytes)
            metrics.chunks.labels(self._workload.name, "written").inc()
            metrics.work.labels(self._workload.name, self._workload.unit).inc(chunk.work)
            self._on_written(chunk)
            self._free.put(slot)


def slot_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes of the input and of the output buffer that hold any chunk of the plan."""
    inputs = max(buffer_bytes(chunk.inputs) for chunk in plan.chunks)
    outputs = max(buffer_bytes(chunk.outputs) for chunk in plan.chunks)
    return inputs, outputs


@contextmanager
def _signals_held() -> Iterator[None]:
    """No signal interrupts what is done here: one that broke into starting a thread would leave it half made."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _until_end(queue: Queue[Any]) -> Iterator[tuple[Chunk, Slot]]:
    while (item := queue.get()) is not None:
        yield item
