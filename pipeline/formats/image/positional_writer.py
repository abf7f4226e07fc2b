"""Writing uncompressed files, in which the position of every sample is known from the start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pipeline.formats.image.base import ImageHeader, PartialWriter, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.storage.partial import Opening, PartialFile, behind_link

_BATCH_BYTES = 1 << 20


class PositionalWriter(PartialWriter):
    """Writes regions straight to their position, in any order, from any thread of any joined process."""

    def __init__(
        self, path: Path, header: ImageHeader, opening: Opening, *, samples: ContiguousSamples, head: Iterable[bytes]
    ) -> None:
        """`head`: the file's first bytes, in pieces; the samples follow and end the file."""
        self.path = path
        self.header = header
        self._samples = samples
        self._partial: PartialFile = PartialFile(behind_link(path), samples.offset + samples.nbytes, opening)
        if opening is Opening.NEW:
            try:
                self._write_head(head)
            except BaseException:
                self._partial.discard()
                raise

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        self._samples.write(self._partial, region, samples)

    def _write_head(self, head: Iterable[bytes]) -> None:
        ready, place = bytearray(), 0
        for piece in head:
            ready += piece
            if len(ready) >= _BATCH_BYTES:
                self._partial.write_at(place, bytes(ready))
                place += len(ready)
                ready.clear()
        self._partial.write_at(place, bytes(ready))
