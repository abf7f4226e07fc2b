"""Images whose every sample has a known place in one uncompressed file from the start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pipeline.formats.image.base import ImageHeader, ImageWriter, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.storage.partial import Callback, Opening, PartialFile, behind_link, no_callback

_BATCH_BYTES = 1 << 20


class PositionalWriter(ImageWriter):
    """Regions go straight to their place, in any order, from any thread of any process that has joined."""

    def __init__(
        self, path: Path, header: ImageHeader, opening: Opening, *, samples: ContiguousSamples, head: Iterable[bytes]
    ) -> None:
        """`head`: the file's first bytes, in pieces; the samples lie behind it, and nothing behind them."""
        self.path = path
        self.header = header
        self._samples = samples
        self._file = PartialFile(behind_link(path), samples.offset + samples.nbytes, opening)
        if opening is Opening.NEW:
            try:
                self._write_head(head)
            except BaseException:
                self._file.discard()
                raise

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        self._samples.write(self._file, region, samples)

    def flush(self) -> None:
        self._file.flush()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        self._file.publish(on_sealed)

    def keep(self) -> None:
        self._file.keep()

    def discard(self) -> None:
        self._file.discard()

    def _write_head(self, head: Iterable[bytes]) -> None:
        ready, place = bytearray(), 0
        for piece in head:
            ready += piece
            if len(ready) >= _BATCH_BYTES:
                self._file.write_at(place, bytes(ready))
                place += len(ready)
                ready.clear()
        self._file.write_at(place, bytes(ready))
