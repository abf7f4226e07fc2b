"""One device's stream of chunks: read → upload → compute → download → write, all five at once.

Reader threads fill free slots, the device processes filled slots in its lanes, writer threads empty finished ones.
A slot cycles through free → filled → started → free. Reading waits for a free slot: that is the back-pressure, and the
ring bounds host memory for jobs of any size. Threads and ring live as long as the pipeline, so that several segments
of a job can follow one another without a gap.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar

from kernels.runtime.threads import Interrupted, interruptible
from pipeline import metrics
from pipeline.codecs.packed import ChunkForm
from pipeline.engine.devices.buffers import Slot, buffer_bytes
from pipeline.engine.devices.device import Device
from pipeline.engine.output import Output
from pipeline.engine.stages import StageRecord
from pipeline.stopping import SIGNALS, Stopped
from pipeline.workloads.protocol import Chunk, ReadsPacked

T = TypeVar("T")

# A stopped job waits no longer for its readers: an object store that does not answer keeps them for a minute.
_PATIENCE_S = 2.0


@dataclass(kw_only=True, eq=False)
class _Passage:
    """The chunks of one call of `stream`."""

    record: StageRecord
    on_written: Callable[[Chunk], None]
    computing: int  # chunks that have not reached a writer
    unwritten: int
    ended: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Item:
    """One chunk in its slot."""

    chunk: Chunk
    passage: _Passage
    slot: Slot


class _FreeSlots:
    """The free slots. The one freed last is taken first: it is still in the caches."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        # One token for each free slot, and a False at the end. SimpleQueue is written in C, LifoQueue is not.
        self._tokens: SimpleQueue[bool] = SimpleQueue()

    def put(self, slot: Slot) -> None:
        self.slots.append(slot)
        self._tokens.put(True)

    def end(self) -> None:
        """No more slots will be freed: waiting threads get None."""
        self._tokens.put(False)

    def get(self) -> Slot | None:
        """Waits for a slot; None after the end."""
        if self._tokens.get():
            return self.slots.pop()
        self.end()  # for the next thread
        return None


# The queue between two stages; None ends the thread that takes it.
_Line = SimpleQueue[_Item | None]
# A chunk to be read, and whether it is the last of its passage.
_Waiting = tuple[Chunk, _Passage, bool] | None


class DevicePipeline:
    """Streams chunks through one device while its context is open.

    `stream` may be called from several threads: chunks are read in the order of the calls.
    """

    def __init__(
        self,
        device: Device,
        output: Output,
        slot_bytes: tuple[int, int],
        *,
        slots: int | None = None,
        readers: int | None = None,
        writers: int | None = None,
    ) -> None:
        """`slot_bytes`: for the input and the output of the largest chunk. `slots`, `readers`, `writers`: default by
        device."""
        self._device = device
        self._output, self._job = output, output.job
        self._form_of: Callable[[Chunk], ChunkForm | None] = getattr(output, "chunk_form", lambda chunk: None)
        self._packs = self._job if isinstance(self._job, ReadsPacked) and self._job.packs else None
        self._lanes = {
            "read": readers or device.readers,
            "compute": device.lanes,
            "write": writers or device.writers,
        }
        slots = slots or device.ring_depth
        # Without full overlap a whole ring is read before it is started, and finished before it is written.
        self._batch = 1 if device.overlap == 5 else slots
        if self._batch > 1:
            self._lanes.update(read=1, write=1)
        self._counted = metrics.work_of(output.workload.name, output.workload.unit)
        self._at_work = metrics.AtWork(self._lanes)
        self._waiting: SimpleQueue[_Waiting] = SimpleQueue()
        self._filled: _Line = SimpleQueue()
        self._started: _Line = SimpleQueue()
        self._free = _FreeSlots()
        self._error: BaseException | None = None
        self._failed = threading.Event()
        self._is_ending = False
        self._passages: set[_Passage] = set()
        self._steps: dict[int, tuple[int, float]] = {}  # by thread: the chunk in its hands, and since when
        self._stepped_at = time.monotonic()
        self._lock = threading.Lock()
        for _ in range(slots):
            self._free.put(device.allocate(*slot_bytes))
        self._threads = [
            *self._threads_of("read", self._read_chunks, self._filled, "compute"),
            *self._threads_of("compute", self._start_chunks, self._started, "write"),
            *self._threads_of("write", self._write_chunks, None, ""),
        ]

    def __enter__(self) -> Self:
        self._device.begin()
        with _signals_held():
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
        for _ in range(self._lanes["read"]):
            self._waiting.put(None)
        until = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            is_given_up = isinstance(error, Stopped) and "-read-" in thread.name
            thread.join(max(until - time.monotonic(), 0) if is_given_up else None)
        self._device.drain()

    @property
    def oldest_step(self) -> tuple[int | None, float]:
        """The chunk that has been in one stage longest, and since when, on the monotonic clock; None if none is in a
        stage, and when the last one left its stage."""
        return min(list(self._steps.values()), key=lambda step: step[1], default=(None, self._stepped_at))

    def end(self, error: BaseException, within_s: float | None = None) -> None:
        """End the pipeline from another thread, instead of leaving the context: chunks that have been or are being read
        are still written, then `stream` raises the error.

        within_s : chunks not written within this time are given up; None: no limit
        """
        self._is_ending = True
        late = threading.Timer(within_s or 0, self._fail, (error,))
        if within_s is not None:
            late.start()
        try:
            self.__exit__(None, None, None)
        finally:
            late.cancel()
            self._fail(error)

    def stream(
        self,
        chunks: Sequence[Chunk],
        on_written: Callable[[Chunk], None] = lambda chunk: None,
        *,
        keep_timeline: bool = False,
        record: StageRecord | None = None,
    ) -> StageRecord:
        """Take the chunks through all stages; returns when all are written.

        record : an empty record to add to; default: a new one

        Raises the first error of any thread. The pipeline cannot be used after that: further calls raise the same.
        """
        record = record or StageRecord(keeps_timeline=keep_timeline)
        record.share({**self._lanes, "decode": self._lanes["read"], "encode": self._lanes["write"]})
        passage = _Passage(record=record, on_written=on_written, computing=len(chunks), unwritten=len(chunks))
        with self._lock:
            self._passages.add(passage)
        try:
            with record.timed(), self._at_work:
                for chunk in chunks:
                    self._waiting.put((chunk, passage, chunk is chunks[-1]))
                if self._error is None and chunks:
                    passage.ended.wait()
        except BaseException as interruption:
            self._fail(interruption)
            raise
        finally:
            with self._lock:
                self._passages.discard(passage)
        if self._error is not None:
            raise self._error
        return record

    def _threads_of(
        self, stage: str, body: Callable[[], None], following: _Line | None, next_stage: str
    ) -> list[threading.Thread]:
        """Threads of one stage; the last one to end ends the next stage."""
        left = threading.Semaphore(self._lanes[stage] - 1)

        def until_end() -> None:
            body()
            if following is not None and not left.acquire(blocking=False):
                for _ in range(self._lanes[next_stage]):
                    following.put(None)

        return [
            threading.Thread(target=until_end, name=f"{self._device.name}-{stage}-{number}", daemon=True)
            for number in range(self._lanes[stage])
        ]

    def _fail(self, error: BaseException) -> None:
        """Keep the first error, interrupt computing, and wake threads that wait for slots or chunks."""
        with self._lock:
            if self._error is None:
                self._error = error
            for passage in self._passages:
                passage.ended.set()
        self._failed.set()
        self._free.end()
        for line, stage in ((self._filled, "compute"), (self._started, "write")):
            for _ in range(self._lanes[stage]):
                line.put(None)

    @contextmanager
    def _step(self, chunk: Chunk) -> Iterator[None]:
        """A thread works on a chunk; an error ends the pipeline."""
        thread = threading.get_ident()
        self._steps[thread] = chunk.index, time.monotonic()
        try:
            yield
        except Interrupted:
            pass  # the failure has been recorded
        except BaseException as error:
            self._counted.failed()
            self._fail(error)
        finally:
            self._stepped_at = time.monotonic()
            del self._steps[thread]

    def _going(self, line: SimpleQueue[T | None]) -> Iterator[T]:
        """The items of a queue until its end; after a failure no more."""
        while (item := line.get()) is not None:
            if self._error is None:
                yield item

    # The stages

    def _read_chunks(self) -> None:
        self._device.enter()
        batch: list[_Item] = []
        for chunk, passage, is_last in self._going(self._waiting):
            slot = None if self._is_ending else self._free.get()
            if slot is None:
                continue
            with self._step(chunk):
                self._read(chunk, slot, passage.record)
                self._counted.read(chunk.input_bytes)
                batch.append(_Item(chunk, passage, slot))
                if is_last or len(batch) == self._batch:
                    for item in batch:
                        self._filled.put(item)
                    batch.clear()

    def _read(self, chunk: Chunk, slot: Slot, record: StageRecord) -> None:
        """Fill a chunk's input; as the file holds it if the job has that and the device decodes it."""
        began, job = time.perf_counter(), self._packs if self._device.decodes else None
        slot.packed = None if job is None else job.read_packed(chunk, slot.room)
        if slot.packed is not None:
            record.add("read", chunk.index, began, time.perf_counter(), chunk.input_bytes)
            if self._device.unpack(chunk, slot):
                return
            slot.packed, began = None, time.perf_counter()
        self._job.read(chunk, slot.inputs(chunk))  # a damaged block raises its error here
        record.add("read", chunk.index, began, time.perf_counter(), chunk.input_bytes)

    def _start_chunks(self) -> None:
        self._device.enter()
        with interruptible(self._failed):
            for item in self._going(self._filled):
                with self._step(item.chunk):
                    self._device.process(self._job, item.chunk, item.slot, item.passage.record)
                    self._started.put(item)

    def _write_chunks(self) -> None:
        self._device.enter()
        batch: list[_Item] = []
        for item in self._going(self._started):
            with self._step(item.chunk):
                form = self._form_of(item.chunk) if self._device.encodes else None
                item.slot.form = form if form is not None and form.codec in self._device.encodes else None
                self._device.finish(item.chunk, item.slot, item.passage.record)
                batch.append(item)
                with self._lock:
                    item.passage.computing -= 1
                if len(batch) == self._batch or item.passage.computing == 0:
                    for finished in batch:
                        self._write(finished)
                    batch.clear()

    def _write(self, item: _Item) -> None:
        chunk, passage, began = item.chunk, item.passage, time.perf_counter()
        if item.slot.chunks is None:
            self._output.write(chunk, item.slot.outputs(chunk))
        else:
            self._output.write(chunk, item.slot.outputs(chunk), item.slot.chunks)
        passage.record.add("write", chunk.index, began, time.perf_counter(), chunk.output_bytes)
        self._counted.written(chunk.output_bytes, chunk.work)
        self._free.put(item.slot)
        passage.on_written(chunk)
        with self._lock:
            passage.unwritten -= 1
            if passage.unwritten == 0:
                passage.ended.set()


def slot_bytes(chunks: Iterable[Chunk]) -> tuple[int, int]:
    """Bytes of the input and of the output buffer that hold any of these chunks."""
    sizes = [(buffer_bytes(chunk.inputs), buffer_bytes(chunk.outputs)) for chunk in chunks]
    return max(inputs for inputs, _ in sizes), max(outputs for _, outputs in sizes)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Blocks signals, which could interrupt the start of a thread halfway."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
