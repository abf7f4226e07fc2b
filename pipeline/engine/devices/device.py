"""Devices that compute chunks: the CPU or one CUDA GPU, under one contract."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.packed import ChunkForm
from pipeline.config import format_bytes
from pipeline.engine.devices import cuda_driver
from pipeline.engine.devices.buffers import (
    CudaSlot,
    Slot,
    allocate_cuda_slot,
    allocate_host_slot,
    buffer_bytes,
    pinned,
)
from pipeline.engine.devices.cuda_driver import Call
from pipeline.engine.devices.discovery import cpu_model, cuda_properties
from pipeline.engine.stages import StageRecord
from pipeline.errors import DeviceError, OutOfDeviceMemory
from pipeline.workloads.protocol import Chunk, OpenJob, StatesDeviceMemory

if TYPE_CHECKING:
    from pipeline.engine.devices.packing import Packer

MIB = 1 << 20
CLOCK_TRIES = 5
# 1: one chunk at a time; 2: copies out beside computing; 3: copies in and out beside computing; 5: reading and writing
# too. With 2 and 3 a ring full of chunks is read, then goes through the device, then is written.
OVERLAPS = (1, 2, 3, 5)
# GPU memory for codecs: a reader may take 5 times the bytes of a slot's input, for decoded blocks and Zstandard's
# literals and sequences; a writer twice those of its output, and 64 MiB for Zstandard's encoder.
_DECODING, _ENCODING, _ENCODER_BYTES = 5, 2, 64 * MIB


def good_chunk_bytes(job_bytes: int, chunk_range: tuple[int, int]) -> int:
    """A 64th of the job, within a range."""
    least, most = chunk_range
    return min(max(job_bytes // 64, least), most)


class Device(ABC):
    """Takes a filled slot through upload, compute and download.

    `process` is called from `lanes` threads, each of which first calls `enter`; it may return before the work is
    done. `finish` waits for a slot's output, from any thread, and records the stages' times.
    """

    name: str
    lanes: int
    # How many of the five stages may be at work at once: see `OVERLAPS`.
    overlap: int
    # The number of threads of each kind.
    readers: int
    writers: int
    # Slots that keep every stage busy: one in each lane, and one or more on each side of them.
    ring_depth: int

    # True if the device decodes packed blocks (`ReadsPacked`).
    decodes = False
    # Codecs with which the device can encode chunks (`TakesPacked`).
    encodes: frozenset[str] = frozenset()

    # The least and the most bytes of input and output together that make a good chunk.
    chunk_range: tuple[int, int]

    def target_bytes(self, job_bytes: int) -> int:
        """Bytes of input and output together that make a good chunk of such a job."""
        return good_chunk_bytes(job_bytes, self.chunk_range)

    @abstractmethod
    def allocate(self, input_bytes: int, output_bytes: int) -> Slot: ...

    @abstractmethod
    def begin(self) -> None:
        """Called at the start of a run: align the device's clock with the host's."""

    @abstractmethod
    def enter(self) -> None:
        """Prepare the calling thread."""

    def unpack(self, chunk: Chunk, slot: Slot) -> bool:
        """Fill a chunk's input from the slot's packed blocks, in a reader's thread; False if `OpenJob.read` must."""
        return False

    @abstractmethod
    def process(self, job: OpenJob, chunk: Chunk, slot: Slot, record: StageRecord) -> None: ...

    @abstractmethod
    def finish(self, chunk: Chunk, slot: Slot, record: StageRecord) -> None: ...

    @abstractmethod
    def drain(self) -> None:
        """Wait until no started work can touch a slot."""

    def bounded(
        self, memory_bytes: int | None, on_taken: Callable[[int], None], stated_bytes: int | None = None
    ) -> Device:
        """The same device for one job, which may take no more of its own memory; a CPU has none.

        on_taken     : called with the bytes that the job has taken
        stated_bytes : what it may take besides the ring
        """
        return self

    def for_job(
        self, job: OpenJob, memory_bytes: int | None = None, on_taken: Callable[[int], None] = lambda nbytes: None
    ) -> Device:
        """The device within a bound, and within what the job states, if there are any; see `bounded`."""
        stated_bytes = job.device_bytes if isinstance(job, StatesDeviceMemory) else None
        bound = memory_bytes is not None or stated_bytes is not None
        return self.bounded(memory_bytes, on_taken, stated_bytes) if bound else self

    def allocating(self) -> AbstractContextManager[None]:
        """In the context, this thread's temporary arrays count towards the bound."""
        return nullcontext()

    def with_fewer_lanes(self) -> Device:
        """The same device with fewer readers and writers if it has many, for larger chunks in the same memory."""
        return self

    def codec_bytes(self, input_bytes: int, output_bytes: int) -> int:
        """The most of its memory that decoding and encoding take besides a ring of such slots."""
        return 0

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """The description for the receipt."""


class GpuBound:
    """Memory of a GPU that one job may take: its ring's slots, a pool for the temporary arrays of its kernels, and one
    for those of codecs, so that these cannot take what the job stated for its kernels."""

    def __init__(
        self, memory_bytes: int | None, pool: Any, codecs: Any, on_taken: Callable[[int], None],
        stated_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.codecs = pool, codecs
        self._memory_bytes, self._stated_bytes = memory_bytes, stated_bytes
        self._slots_bytes = self._codec_bytes = 0
        self._has_codecs = False
        self._on_taken = on_taken
        self._limit()

    def take(self, slot_bytes: int, codec_bytes: int = 0) -> None:
        """A slot takes its memory. OutOfDeviceMemory if the bound leaves none. codec_bytes: see `Device`."""
        self._slots_bytes += slot_bytes
        self._codec_bytes = codec_bytes
        if self._memory_bytes is not None and self._memory_bytes <= self._slots_bytes:
            raise OutOfDeviceMemory(
                f"the job's ring takes more than the {format_bytes(self._memory_bytes)} of GPU memory that it may take"
            )
        self._limit()
        self.note()

    def _limit(self) -> None:
        most, codec_bytes = self._stated_bytes, self._codec_bytes if self._has_codecs else 0
        if self._memory_bytes is None:
            self.pool.set_limit(size=most)
        else:
            left = self._memory_bytes - self._slots_bytes
            codec_bytes = min(codec_bytes, left // 4)
            self.pool.set_limit(size=left - codec_bytes if most is None else min(left - codec_bytes, most))
            codec_bytes = min(codec_bytes, left - self.pool.total_bytes())  # which no longer grows past the limit
        self.codecs.set_limit(size=max(codec_bytes, 1))  # 0 would be no limit

    def admit_codecs(self) -> None:
        """Leave memory to codecs from now on: not all jobs have them."""
        if not self._has_codecs:
            self._has_codecs = True
            self._limit()

    def advice(self) -> str:
        """What to do if there is no memory within the bound."""
        limit = self.pool.get_limit()
        if limit == self._stated_bytes:
            return f"the job stated {format_bytes(limit)}, of which the GPU may have less: use --device cpu"
        return "lower --chunk-bytes"

    def note(self) -> None:
        self._on_taken(self._slots_bytes + self.pool.total_bytes() + self.codecs.total_bytes())


class CpuDevice(Device):
    """Chunks side by side, one on each core; upload and download are the host arrays themselves."""

    name = "cpu"
    readers = writers = 1
    # Small enough that the ring stays in the last-level cache on its way from reader to writer.
    chunk_range = (8 * MIB, 8 * MIB)
    # Each chunk of many small files takes some milliseconds of the interpreter: 5,000 files of 512² u16 on two cores
    # take 0.83 and 0.87 of the time that they take in chunks of 8 MiB.
    chunk_range_of_files = (8 * MIB, 32 * MIB)

    def __init__(self, threads: int | None = None, overlap: int = 5) -> None:
        self.overlap = overlap
        self.lanes = 1 if overlap == 1 else threads or len(os.sched_getaffinity(0))
        self.ring_depth = 1 if overlap == 1 else self.lanes + 2

    def allocate(self, input_bytes: int, output_bytes: int) -> Slot:
        return allocate_host_slot(input_bytes, output_bytes)

    def begin(self) -> None:
        """Its clock is the host's."""

    def enter(self) -> None:
        """Needs no preparation."""

    def process(self, job: OpenJob, chunk: Chunk, slot: Slot, record: StageRecord) -> None:
        began = time.perf_counter()
        record.add("upload", chunk.index, began, began, chunk.input_bytes)
        job.compute(chunk, slot.inputs(chunk), slot.outputs(chunk), None)
        record.add("compute", chunk.index, began, time.perf_counter(), chunk.input_bytes)

    def finish(self, chunk: Chunk, slot: Slot, record: StageRecord) -> None:
        now = time.perf_counter()
        record.add("download", chunk.index, now, now, chunk.output_bytes)

    def drain(self) -> None:
        """Nothing outlives `process`."""

    def describe(self) -> Mapping[str, Any]:
        return {"name": self.name, "model": cpu_model(), "threads": self.lanes}


class _OfThread(threading.local):
    """What a reader or writer thread decodes or encodes with, beside the others: a stream, a pinned int32, memory."""

    @cached_property
    def stream(self) -> Any:
        import cupy

        return cupy.cuda.Stream(non_blocking=True)

    @cached_property
    def word(self) -> NDArray[np.int32]:
        return pinned(4).view(np.int32)

    @cached_property
    def packer(self) -> Packer:
        from pipeline.engine.devices.packing import Packer

        return Packer()


class CudaDevice(Device):
    """Three non-blocking streams (in, compute, out); events alone order a slot's way through them."""

    lanes = 1
    # Duplex copies reach N / (N + 1) of the bus in N chunks; 1 MiB chunks reach 88 % of its rate, 16 MiB 99 %.
    chunk_range = (4 * MIB, 64 * MIB)

    def __init__(self, ordinal: int, overlap: int = 5) -> None:
        import cupy

        self.overlap = overlap
        # One thread copies 5 to 13 GB/s between a file and pinned memory, the bus carries 50 each way.
        self.readers = max(1, min(len(os.sched_getaffinity(0)) // 4, 6))
        self.writers = self.readers
        self.ring_depth = 1 if overlap == 1 else self.readers + self.writers + 1
        self._cupy = cupy
        self._ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.enter()
        self._upload, self._compute, self._download = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
        if overlap == 2:
            self._upload = self._compute
        self._origin = cupy.cuda.Event()
        self._origin_time = 0.0
        self._bound: GpuBound | None = None
        self.decodes, self.encodes = True, frozenset({"lz4", "zstd"})
        self._of_thread = _OfThread()

    def bounded(
        self, memory_bytes: int | None, on_taken: Callable[[int], None], stated_bytes: int | None = None
    ) -> CudaDevice:
        twin = copy(self)
        twin._of_thread = _OfThread()  # its memory counts
        pools = self._cupy.cuda.MemoryPool(), self._cupy.cuda.MemoryPool()
        twin._bound = GpuBound(memory_bytes, *pools, on_taken, stated_bytes)
        for pool in pools:
            weakref.finalize(twin._bound, pool.free_all_blocks).atexit = False  # CuPy's pools do not by themselves
        return twin

    @contextmanager
    def allocating(self, *, codecs: bool = False) -> Iterator[None]:
        if self._bound is None:
            yield
            return
        if codecs:
            self._bound.admit_codecs()
        pool = self._bound.codecs if codecs else self._bound.pool
        with self._cupy.cuda.using_allocator(pool.malloc):
            yield
        self._bound.note()

    def with_fewer_lanes(self) -> CudaDevice:
        twin = copy(self)
        twin.readers, twin.writers = max(self.readers - 1, 1), max(self.writers // 2, 1)
        twin.ring_depth = min(self.ring_depth, twin.readers + twin.writers + 1)
        return twin

    def codec_bytes(self, input_bytes: int, output_bytes: int) -> int:
        return self.readers * _DECODING * input_bytes + self.writers * (_ENCODING * output_bytes + _ENCODER_BYTES)

    def allocate(self, input_bytes: int, output_bytes: int) -> Slot:
        self.enter()
        if self._bound is not None:
            self._bound.take(input_bytes + output_bytes, self.codec_bytes(input_bytes, output_bytes))
        return allocate_cuda_slot(input_bytes, output_bytes)

    def begin(self) -> None:
        """Reads both clocks at once; of a few tries, keeps the fastest."""
        soonest = float("inf")
        for _ in range(CLOCK_TRIES):
            origin, asked = self._cupy.cuda.Event(), time.perf_counter()
            origin.record(self._upload)
            origin.synchronize()
            answered = time.perf_counter()
            if answered - asked < soonest:
                soonest, self._origin, self._origin_time = answered - asked, origin, answered

    def enter(self) -> None:
        self._cupy.cuda.Device(self._ordinal).use()

    def unpack(self, chunk: Chunk, slot: Slot) -> bool:
        from pipeline.engine.devices.unpacking import NO_FAULT, Unpacking

        twin, packed = slot.cuda, slot.packed
        assert twin is not None, "the slot was allocated for another device"
        assert packed is not None, "there are blocks to decode"
        if packed.decoded_bytes + packed.room.nbytes > _DECODING * len(slot.host_input):
            return False
        stream, word = self._of_thread.stream, self._of_thread.word
        try:
            with stream, self.allocating(codecs=True):
                unpacking = Unpacking(packed, slot.host_input, twin.output)
                cuda_driver.make(
                    (
                        cuda_driver.record(twin.upload_began, stream),
                        cuda_driver.copy_in(twin.output.ptr, slot.host_input.ctypes.data, packed.nbytes, stream),
                        cuda_driver.record(twin.upload_done, stream),
                    )
                )
                fault = unpacking.launch(twin.inputs(chunk)[0], stream)
                cuda_driver.make(
                    (
                        cuda_driver.copy_out(word.ctypes.data, fault.data.ptr, fault.nbytes, stream),
                        cuda_driver.record(twin.decode_done, stream),
                    )
                )
                twin.decode_done.synchronize()
        except self._cupy.cuda.memory.OutOfMemoryError:
            self.decodes = False  # the processor decodes what is read from now on
            return False
        except (DeviceError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            raise DeviceError(f"{self.name}, chunk {chunk.index}: {error}") from error
        return int(word[0]) == NO_FAULT

    def process(self, job: OpenJob, chunk: Chunk, slot: Slot, record: StageRecord) -> None:
        twin = slot.cuda
        assert twin is not None, "the slot was allocated for another device"
        before, after = self._calls(chunk, slot, twin)
        if slot.packed is not None:
            before = before[-1:]  # the input is on the device
        try:
            cuda_driver.make(before)
            with self._compute, self.allocating():
                job.compute(chunk, twin.inputs(chunk), twin.outputs(chunk), self._compute)
            cuda_driver.make(after)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            advice = "lower --chunk-bytes" if self._bound is None else self._bound.advice()
            raise OutOfDeviceMemory(f"{self.name}, chunk {chunk.index}: {error}; {advice}") from error
        except (DeviceError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            raise DeviceError(f"{self.name}, chunk {chunk.index}: {error}") from error

    def _pack(self, chunk: Chunk, slot: Slot, form: ChunkForm, twin: CudaSlot) -> list[NDArray[np.uint8]] | None:
        """Encode a chunk's output, which is complete, and copy it back; None if there is no memory for it.

        The encoded chunks take the place of the input, on the device and on the host.
        """
        from pipeline.engine.devices.packing import table_bytes

        stream, packer, count = self._of_thread.stream, self._of_thread.packer, len(form.origins)
        host, room, first = slot.host_input.ctypes.data, len(slot.host_input), table_bytes(count)
        samples, most_bytes = twin.outputs(chunk)[0], _ENCODING * len(slot.host_output) + _ENCODER_BYTES
        if room < first or packer.nbytes(form, samples.itemsize) > most_bytes:
            return None
        try:
            with stream, self.allocating(codecs=True):
                cuda_driver.make((cuda_driver.record(twin.encode_began, stream),))
                packer.launch(form, samples, twin.input, room, stream)
        except self._cupy.cuda.memory.OutOfMemoryError:
            self.encodes = frozenset()  # the processor encodes from now on
            return None
        cuda_driver.make(
            (
                cuda_driver.record(twin.encode_done, stream),
                cuda_driver.copy_out(host, twin.input.ptr, first, stream),
                cuda_driver.record(twin.packed_done, stream),
            )
        )
        twin.packed_done.synchronize()
        *sizes, total = slot.host_input[: 8 * (count + 1)].view(np.int64).tolist()
        if total < 0:
            return None
        cuda_driver.make(
            (
                cuda_driver.copy_out(host + first, twin.input.ptr + first, total, stream),
                cuda_driver.record(twin.packed_done, stream),
            )
        )
        twin.packed_done.synchronize()
        ends = np.cumsum([first, *sizes]).tolist()
        return [slot.host_input[begin:end] for begin, end in itertools.pairwise(ends)]

    def _calls(self, chunk: Chunk, slot: Slot, twin: CudaSlot) -> tuple[list[Call], list[Call]]:
        """The driver calls before and after a chunk's kernels."""
        sizes = buffer_bytes(chunk.inputs), buffer_bytes(chunk.outputs)
        if twin.calls[0] != sizes:
            host_input, host_output = slot.host_input.ctypes.data, slot.host_output.ctypes.data
            before = [
                cuda_driver.record(twin.upload_began, self._upload),
                cuda_driver.copy_in(twin.input.ptr, host_input, sizes[0], self._upload),
                cuda_driver.record(twin.upload_done, self._upload),
                cuda_driver.wait(self._compute, twin.upload_done),
                cuda_driver.record(twin.compute_began, self._compute),
            ]
            after = [
                cuda_driver.record(twin.compute_done, self._compute),
                cuda_driver.wait(self._download, twin.compute_done),
                cuda_driver.record(twin.download_began, self._download),
                cuda_driver.copy_out(host_output, twin.output.ptr, sizes[1], self._download),
                cuda_driver.record(twin.download_done, self._download),
            ]
            twin.calls = sizes, before, after
        return twin.calls[1:]

    def finish(self, chunk: Chunk, slot: Slot, record: StageRecord) -> None:
        twin = slot.cuda
        assert twin is not None, "the slot was allocated for another device"
        try:
            twin.download_done.synchronize()
            stages = [
                ("upload", twin.upload_began, twin.upload_done, chunk.input_bytes),
                ("compute", twin.compute_began, twin.compute_done, chunk.input_bytes),
                ("download", twin.download_began, twin.download_done, chunk.output_bytes),
            ]
            if slot.packed is not None:
                stages[0] = ("upload", twin.upload_began, twin.upload_done, slot.packed.nbytes)
                stages.append(("decode", twin.upload_done, twin.decode_done, chunk.input_bytes))
            slot.chunks = None if slot.form is None else self._pack(chunk, slot, slot.form, twin)
            if slot.chunks is not None:
                stages.append(("encode", twin.encode_began, twin.encode_done, chunk.output_bytes))
            for stage, began, done, nbytes in stages:
                # From the two events directly: float milliseconds since the origin lose precision.
                start = self._host_time(began) if record.keeps_timeline else 0.0
                record.add(stage, chunk.index, start, start + cuda_driver.seconds(began, done), nbytes)
        except (DeviceError, self._cupy.cuda.runtime.CUDARuntimeError) as error:
            raise DeviceError(f"{self.name}, chunk {chunk.index}: {error}") from error

    def _host_time(self, event: Any) -> float:
        """The time of an event, in seconds of `time.perf_counter`."""
        return self._origin_time + cuda_driver.seconds(self._origin, event)

    def drain(self) -> None:
        try:
            for stream in (self._upload, self._compute, self._download):
                stream.synchronize()
        except self._cupy.cuda.runtime.CUDARuntimeError:
            return  # the device has failed; the pipeline's error says so

    def describe(self) -> Mapping[str, Any]:
        return {"name": self.name, **cuda_properties(self._ordinal)}
