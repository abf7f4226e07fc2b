"""The ring's memory: slots that are allocated once and carry one chunk after another."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.packed import ChunkForm, PackedBlocks
from pipeline.codecs.parallel import for_each
from pipeline.engine.devices.cuda_driver import Call
from pipeline.errors import DeviceError, OutOfDeviceMemory, StorageError
from pipeline.workloads.protocol import ArraySpec, Chunk

# Every array in a buffer is aligned like a CUDA allocation, to a whole number of cache lines.
ALIGNMENT_BYTES = 256
_HUGE_PAGE_BYTES = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # not shared, as by default: shared memory rarely has huge pages


def buffer_bytes(specs: Sequence[ArraySpec]) -> int:
    """Bytes of one buffer that holds all these arrays."""
    return sum(_aligned(spec.nbytes) for spec in specs)


def carve(buffer: NDArray[np.uint8], specs: Sequence[ArraySpec]) -> list[NDArray[Any]]:
    """Arrays of these shapes and dtypes side by side in a buffer of bytes; nothing is copied."""
    arrays, offset = [], 0
    for spec in specs:
        arrays.append(np.frombuffer(buffer, spec.dtype, spec.nbytes // spec.dtype.itemsize, offset).reshape(spec.shape))
        offset += _aligned(spec.nbytes)
    return arrays


class Views:
    """Caches the arrays last carved from each buffer: most chunks have the shape of the one before."""

    def __init__(self, carve_buffer: Callable[[Any, Sequence[ArraySpec]], list[Any]]) -> None:
        self._carve = carve_buffer
        self._last: dict[int, tuple[Sequence[ArraySpec], list[Any]]] = {}

    def of(self, buffer: Any, specs: Sequence[ArraySpec]) -> list[Any]:
        found = self._last.get(id(buffer))
        if found is None or found[0] != specs:
            found = self._last[id(buffer)] = (specs, self._carve(buffer, specs))
        return found[1]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass
class Slot:
    """Room for one chunk: host memory for its input and output, and on a GPU their twins on the device.

    A slot has one owner at a time; the ring of free slots is the pipeline's back-pressure.
    """

    host_input: NDArray[np.uint8]
    host_output: NDArray[np.uint8]
    # The device memory of a GPU; None on a CPU, which computes on the host arrays.
    cuda: CudaSlot | None = None
    # The blocks that the input's memory holds instead of its arrays; None: the arrays.
    packed: PackedBlocks | None = None
    # How the output is encoded on the device, and its encoded chunks; None: it is not.
    form: ChunkForm | None = None
    chunks: list[NDArray[np.uint8]] | None = None
    _views: Views = field(default_factory=lambda: Views(carve))

    @property
    def room(self) -> NDArray[np.uint8]:
        """Memory for packed blocks, which are uploaded to where the output will be."""
        return self.host_input[: len(self.host_output)]

    def inputs(self, chunk: Chunk) -> list[NDArray[Any]]:
        return self._views.of(self.host_input, chunk.inputs)

    def outputs(self, chunk: Chunk) -> list[NDArray[Any]]:
        return self._views.of(self.host_output, chunk.outputs)


def allocate_host_slot(input_bytes: int, output_bytes: int) -> Slot:
    """A slot in ordinary, page-aligned memory, which is unmapped as soon as it is dropped."""
    try:
        return Slot(_pages(input_bytes), _pages(output_bytes))
    except OSError as error:
        raise StorageError(
            f"the system has no memory for a slot of {input_bytes + output_bytes} bytes; lower --memory"
        ) from error


def _pages(nbytes: int) -> NDArray[np.uint8]:
    pages = mmap.mmap(-1, max(nbytes, 1), _PRIVATE)
    _advise_huge(pages)
    return np.frombuffer(pages, np.uint8)


def _advise_huge(pages: mmap.mmap) -> None:
    with suppress(OSError):  # of a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)


def _event() -> Any:
    import cupy

    # Waiting sleeps instead of spinning: reader and writer threads need the core.
    return cupy.cuda.Event(block=True)


@dataclass
class CudaSlot:
    """Device memory of a slot, and the events that order and time its work on the three streams."""

    input: Any  # cupy.cuda.MemoryPointer
    output: Any
    upload_began: Any = field(default_factory=_event)
    upload_done: Any = field(default_factory=_event)
    decode_done: Any = field(default_factory=_event)
    compute_began: Any = field(default_factory=_event)
    compute_done: Any = field(default_factory=_event)
    encode_began: Any = field(default_factory=_event)
    encode_done: Any = field(default_factory=_event)
    packed_done: Any = field(default_factory=_event)
    download_began: Any = field(default_factory=_event)
    download_done: Any = field(default_factory=_event)
    # The driver calls of the last chunk, with its input and output bytes: most chunks reuse them.
    calls: tuple[tuple[int, int], list[Call], list[Call]] = ((-1, -1), [], [])
    _views: Views = field(default_factory=lambda: Views(_carve_device))

    def inputs(self, chunk: Chunk) -> list[Any]:
        return self._views.of(self.input, chunk.inputs)

    def outputs(self, chunk: Chunk) -> list[Any]:
        return self._views.of(self.output, chunk.outputs)


def allocate_cuda_slot(input_bytes: int, output_bytes: int) -> Slot:
    """A slot of pinned host memory and memory of the current device, of exactly these sizes.

    CuPy's pools round up (the pinned one to a power of two) and share blocks between streams, so each block is taken
    from the driver directly and kept.
    """
    import cupy

    runtime_error = cupy.cuda.runtime.CUDARuntimeError
    try:
        device_input = cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(input_bytes, 1)), 0)
        device_output = cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(output_bytes, 1)), 0)
    except (cupy.cuda.memory.OutOfMemoryError, runtime_error) as error:
        needed = input_bytes + output_bytes
        raise OutOfDeviceMemory(f"the GPU has no room for a slot of {needed} bytes; lower --memory") from error
    try:
        return Slot(pinned(input_bytes), pinned(output_bytes), CudaSlot(device_input, device_output))
    except (OSError, runtime_error) as error:
        raise DeviceError(f"no pinned memory for a slot: {error}; lower --memory") from error


class _HugePages(mmap.mmap):
    """Memory in huge pages if the system has any: it clears and pins them in a fraction of the time of small ones."""

    release: Callable[[], None] | None = None  # unpins it

    def __del__(self) -> None:
        if self.release is not None:
            with suppress(Exception):  # CUDA may have ended before, as the process does
                self.release()


def pinned(nbytes: int) -> NDArray[np.uint8]:
    """Host memory that a GPU copies from and to."""
    import cupy

    if nbytes < _HUGE_PAGE_BYTES:
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(max(nbytes, 1)), 0)
        return np.frombuffer(memory, np.uint8, max(nbytes, 1))
    pages = _HugePages(-1, nbytes + _HUGE_PAGE_BYTES, _PRIVATE)
    _advise_huge(pages)
    pages.madvise(mmap.MADV_DONTFORK)  # after a fork, writing to a page would move it away from the GPU
    whole = np.frombuffer(pages, np.uint8)
    first = -whole.ctypes.data % _HUGE_PAGE_BYTES
    found = whole[first : first + nbytes]
    each = 8 * _HUGE_PAGE_BYTES

    def touch(begin: int) -> None:
        found[begin : begin + each : mmap.PAGESIZE] = 0

    for_each(touch, range(0, nbytes, each), each)  # four at once: 16 double the CPU time
    cupy.cuda.runtime.hostRegister(found.ctypes.data, nbytes, 0)
    pages.release = partial(cupy.cuda.runtime.hostUnregister, found.ctypes.data)
    return found


def _carve_device(pointer: Any, specs: Sequence[ArraySpec]) -> list[Any]:
    import cupy

    arrays, offset = [], 0
    for spec in specs:
        arrays.append(cupy.ndarray(spec.shape, spec.dtype, memptr=pointer + offset))
        offset += _aligned(spec.nbytes)
    return arrays
