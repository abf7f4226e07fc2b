"""Image-wide statistics of a result, gathered chunk by chunk wherever chunks are computed: the same bits however many
processes took part, however the image was cut, and even if workers died.

A chunk's part is exact and in whole numbers (see kernels.statistics), so that the sum of all parts is the image's in
any order. It is stored by the chunk's number and counted once: if a worker dies before it reports a chunk, the chunk is
computed again and gives the same part.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.statistics import MAX_SAMPLES, Totals, partial_shape, summarise
from kernels.statistics.totals import sparse
from pipeline.errors import StorageError, counted
from pipeline.formats.image.base import ImageHeader
from pipeline.workloads.common.samples import computed_in, widened
from pipeline.workloads.protocol import ArraySpec, Chunk


class ImageStatistics:
    """Minimum, maximum, mean, standard deviation and histogram of each channel of an image that is made in chunks.

    `note` and `add_note` may be called from several threads.
    """

    def __init__(self, header: ImageHeader) -> None:
        self._stored_bytes, self._dtype = header.dtype.itemsize, computed_in(header.dtype)
        self._axis = header.channel_axis
        self._channels = 1 if self._axis is None else header.shape[self._axis]
        self._lock = threading.Lock()
        self.forget(0)

    @property
    def most_bytes(self) -> int:
        """Chunks of input and output together may not take more than this."""
        return MAX_SAMPLES * self._stored_bytes

    @property
    def spec(self) -> ArraySpec:
        """What each chunk has as a further output."""
        return ArraySpec(partial_shape(self._dtype, self._channels), np.dtype(np.int64))

    def forget(self, chunks: int) -> None:
        """Begin anew: the image is cut into so many chunks, and their numbers mean other regions."""
        with self._lock:
            self._totals = Totals(self._dtype, self._channels)
            self._counted: set[int] = set()
            self._chunks = chunks

    def compute(self, output: Any, partial: Any, stream: Any) -> None:
        """A chunk's part, on the device where its output is."""
        summarise(widened(output, self._dtype), channel_axis=self._axis, out=partial, stream=stream)

    def note(self, chunk: Chunk, partial: NDArray[np.int64]) -> Callable[[], Any]:
        """Count a chunk in; returns a function that makes its part for other processes, ready for JSON."""
        partial = partial.copy()
        samples = math.prod(chunk.region.shape) // self._channels
        with self._lock:
            if chunk.index not in self._counted:
                self._counted.add(chunk.index)
                self._totals.add(partial, samples)
        return lambda: sparse(partial)

    def add_note(self, chunk: int, partial: Iterable[Mapping[str, int]]) -> None:
        """Count in the part of a chunk that another process, or an interrupted run, wrote."""
        with self._lock:
            if chunk not in self._counted:
                self._counted.add(chunk)
                self._totals.add_sparse(partial)

    def describe(self) -> list[dict[str, Any]]:
        """The statistics by channel of the chunks counted so far."""
        with self._lock:
            return self._totals.describe()

    @property
    def is_complete(self) -> bool:
        """Whether every chunk has been counted."""
        with self._lock:
            return 0 < self._chunks == len(self._counted)

    def check(self) -> None:
        """StorageError if a chunk is in the output and was not counted."""
        if not self.is_complete:
            missing = counted(self._chunks - len(self._counted), "chunk")
            raise StorageError(
                f"statistics of {missing} are missing: entries of the ledger cannot be read: run again without --resume"
            )
