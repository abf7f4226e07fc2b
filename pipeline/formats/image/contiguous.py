"""Reading and writing regions of samples stored contiguously and uncompressed, in either byte order."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.parallel import for_each
from pipeline.formats.image.base import Region
from pipeline.storage.object_file import ObjectFile
from pipeline.storage.positional import PositionalFile, memory_of
from pipeline.storage.writable import WritableFile

# Bytes to swap or to cut out of wider rows pass through a scratch block that stays in the processor's cache: on an AMD
# EPYC guest 4 to 7 GB/s, against 1.8 GB/s when swapped in the caller's array after reading. A multiple of all sample
# sizes.
SCRATCH_BYTES = 256 << 10
# Reading this much in excess takes about as long as one more system call from Python.
GAP_BYTES = 16 << 10
# One thread writes 1.4 GB/s into new pages of a file in memory (H200's host).
PART_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class ContiguousSamples:
    """An array in a file, in C order from byte `offset`; `dtype` as stored, in either byte order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, file: PositionalFile, region: Region, out: NDArray[Any]) -> None:
        """Fill `out` (C-contiguous, native byte order, the region's shape), using at most one scratch block."""
        if out.size == 0:
            return
        axis = self._run_axis(region)
        strides = self._strides()
        run_bytes = math.prod(region.shape[axis:]) * self.dtype.itemsize
        row_bytes = strides[axis] * self.shape[axis]
        is_object = isinstance(file, ObjectFile)  # which reads close runs by one request
        is_close = axis > 0 and row_bytes - run_bytes <= GAP_BYTES and 2 * row_bytes <= SCRATCH_BYTES
        if is_close and not is_object:
            self._read_wider(file, region, out, axis)
        elif self.dtype.isnative or is_object:
            file.read_runs(_cut(memory_of(out), ((offset, run_bytes) for offset in self._run_offsets(region, axis))))
            if not self.dtype.isnative:
                out.byteswap(inplace=True)
        else:
            for runs, target in self._scratch_blocks(self._run_offsets(region, axis), run_bytes, out.reshape(-1)):
                scratch = scratch_block(target.nbytes)
                file.read_runs(_cut(scratch.data, runs))
                target[...] = scratch.view(self.dtype)

    def write(self, file: WritableFile, region: Region, samples: NDArray[Any]) -> None:
        """Store `samples` (C-contiguous, native byte order, the region's shape) without modifying them."""
        if samples.size == 0:
            return
        with file.written_in_place() as (_, mapped):
            if len(mapped) >= self.offset + self.nbytes:
                _copy(samples, np.ndarray(self.shape, self.dtype, mapped, self.offset)[region.slices])
                return
        axis = self._run_axis(region)
        run_bytes = math.prod(region.shape[axis:]) * self.dtype.itemsize
        offsets = self._run_offsets(region, axis)
        if self.dtype.isnative:
            file.write_runs(_cut(memory_of(samples), ((offset, run_bytes) for offset in offsets)))
            return
        for runs, source in self._scratch_blocks(offsets, run_bytes, samples.reshape(-1)):
            scratch = scratch_block(source.nbytes)
            scratch.view(self.dtype)[...] = source
            file.write_runs(_cut(scratch.data, runs))

    def _strides(self) -> tuple[int, ...]:
        """Bytes from one index to the next along each axis, as unbounded integers."""
        return tuple(math.prod(self.shape[a + 1 :]) * self.dtype.itemsize for a in range(len(self.shape)))

    def _run_axis(self, region: Region) -> int:
        """The first axis of contiguous runs: the region covers all axes after it whole."""
        axis = len(self.shape) - 1
        while axis > 0 and region.shape[axis] == self.shape[axis]:
            axis -= 1
        return axis

    def _run_offsets(self, region: Region, axis: int) -> Iterator[int]:
        """The offset of each run of the region in the file, in the order of the region's samples."""
        strides = self._strides()
        first = self.offset + region.start[axis] * strides[axis]
        if axis == 0:
            yield first
            return
        *planes, rows = (
            range(start, stop) for start, stop in zip(region.start[:axis], region.stop[:axis], strict=True)
        )
        stride = strides[axis - 1]
        for index in itertools.product(*planes):
            plane = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
            yield from range(plane + rows.start * stride, plane + rows.stop * stride, stride)

    def _scratch_blocks(
        self, offsets: Iterable[int], run_bytes: int, samples: NDArray[Any]
    ) -> Iterator[tuple[list[tuple[int, int]], NDArray[Any]]]:
        """Runs split or grouped into scratch blocks: (offset, bytes) of each piece, and the samples of all of them."""
        pieces = (
            (offset + first, min(SCRATCH_BYTES, run_bytes - first))
            for offset in offsets
            for first in range(0, run_bytes, SCRATCH_BYTES)
        )
        at_once = max(1, SCRATCH_BYTES // run_bytes)
        position = 0
        while runs := list(itertools.islice(pieces, at_once)):
            length = sum(nbytes for _, nbytes in runs) // self.dtype.itemsize
            yield runs, samples[position : position + length]
            position += length

    def _read_wider(self, file: PositionalFile, region: Region, out: NDArray[Any], axis: int) -> None:
        """Read closely spaced runs together with the gaps between them, many at a time, and cut the runs out."""
        row_shape = self.shape[axis:]
        row_bytes = math.prod(row_shape) * self.dtype.itemsize
        at_once = SCRATCH_BYTES // row_bytes
        rows_axis = axis - 1
        cut = slice(region.start[axis], region.stop[axis])
        planes = out.reshape(-1, *region.shape[rows_axis:])
        for plane, offset in zip(planes, self._run_offsets(region, rows_axis), strict=True):
            for row in range(0, len(plane), at_once):
                rows = min(at_once, len(plane) - row)
                scratch = scratch_block(rows * row_bytes)
                file.read_at(offset + row * row_bytes, scratch.data)
                plane[row : row + rows] = scratch.view(self.dtype).reshape(rows, *row_shape)[:, cut]


def _copy(samples: NDArray[Any], target: NDArray[Any]) -> None:
    """Several threads share large arrays."""
    target = np.atleast_1d(target.squeeze())
    source, rows = samples.reshape(target.shape), max(PART_BYTES * len(target) // samples.nbytes, 1)

    def copy(first: int) -> None:
        target[first : first + rows] = source[first : first + rows]

    for_each(copy, range(0, len(target), rows))


def _cut(memory: memoryview, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, memoryview]]:
    """The memory of each run (offset in the file, bytes), one after another."""
    position = 0
    for offset, nbytes in runs:
        yield offset, memory[position : position + nbytes]
        position += nbytes


_of_thread = threading.local()


def scratch_block(nbytes: int) -> NDArray[np.uint8]:
    """The first `nbytes` of this thread's scratch block, valid until the thread's next call."""
    block: NDArray[np.uint8] | None = getattr(_of_thread, "scratch", None)
    if block is None or len(block) < nbytes:
        block = _of_thread.scratch = np.empty(max(nbytes, SCRATCH_BYTES), np.uint8)
    return block[:nbytes]
