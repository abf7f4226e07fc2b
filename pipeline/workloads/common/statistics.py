"""Image-wide statistics of a result, gathered chunk by chunk wherever chunks are computed: the same bits however many
processes took part, however the image was cut, and whoever died on the way.

A chunk's part is exact and in whole numbers (see kernels.statistics), so that the sum of all parts is the image's in
any order. It is told under the chunk's number and counted once: a chunk that is computed twice, because its worker died
before it could tell, tells the same again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.statistics import MAX_SAMPLES, Totals, partial_shape, summarise
from kernels.statistics.totals import sparse
from pipeline.errors import StorageError, counted
from pipeline.formats.image.base import ImageHeader
from pipeline.workloads.base import ArraySpec, Chunk


class ImageStatistics:
    """Minimum, maximum, mean, standard deviation and histogram of each channel of an image that is made in chunks.

    `note`, `notes` and `add_notes` may be called from several threads.
    """

    def __init__(self, header: ImageHeader) -> None:
        self._dtype = header.dtype
        self._axis = header.channel_axis
        self._channels = 1 if self._axis is None else header.shape[self._axis]
        self._lock = threading.Lock()
        self.forget()

    @property
    def most_bytes(self) -> int:
        """Chunks of input and output together may not take more than this."""
        return MAX_SAMPLES * self._dtype.itemsize

    @property
    def spec(self) -> ArraySpec:
        """What each chunk has as a further output."""
        return ArraySpec(partial_shape(self._dtype, self._channels), np.dtype(np.int64))

    def forget(self) -> None:
        """The image is cut anew: chunks' numbers mean other regions."""
        with self._lock:
            self._totals = Totals(self._dtype, self._channels)
            self._counted: set[int] = set()
            self._untold: dict[int, NDArray[np.int64]] = {}

    def compute(self, output: Any, partial: Any, stream: Any) -> None:
        """A chunk's part, on the device where its output is."""
        summarise(output, channel_axis=self._axis, out=partial, stream=stream)

    def note(self, chunk: Chunk, partial: NDArray[np.int64]) -> None:
        """Count a chunk in."""
        samples = math.prod(chunk.region.shape) // self._channels
        with self._lock:
            if chunk.index not in self._counted:
                self._counted.add(chunk.index)
                self._totals.add(partial, samples)
                self._untold[chunk.index] = partial.copy()

    def notes(self) -> Mapping[str, Any]:
        """The parts that have not been told yet, by the chunk's number: each goes into the ledger once."""
        with self._lock:
            untold, self._untold = self._untold, {}
        return {str(index): sparse(partial) for index, partial in untold.items()}

    def add_notes(self, notes: Mapping[str, Any]) -> None:
        """Parts that another process, or an interrupted run, has told."""
        with self._lock:
            for index, partial in notes.items():
                if int(index) not in self._counted:
                    self._counted.add(int(index))
                    self._totals.add_sparse(partial)

    def describe(self) -> list[dict[str, Any]]:
        """By channel, of the chunks counted so far."""
        with self._lock:
            return self._totals.describe()

    def covers(self, chunks: int) -> bool:
        """Whether so many chunks have been counted."""
        with self._lock:
            return len(self._counted) == chunks

    def check(self, chunks: int) -> None:
        """StorageError where a chunk is in the output and was not counted."""
        if not self.covers(chunks):
            raise StorageError(
                f"statistics of {counted(chunks - len(self._counted), 'chunk')} are missing: entries of the ledger "
                "cannot be read: run again without --resume"
            )
