"""Writing files that can only be encoded sequentially: samples are spooled beside the output until all are present."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pipeline.formats.image.base import ImageHeader, ImageWriter, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.storage.partial import Callback, Opening, PartialFile, behind_link, no_callback, samples_path


class SpooledWriter(ImageWriter):
    """Takes regions in any order; `publish` writes the encoded whole."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening, scratch_bytes: int | None = None) -> None:
        """`scratch_bytes`: of the spooled samples, if a subclass stores them in another way."""
        self.path = path
        self.header = header
        # The publisher encodes everything from the start, even after an interrupted run.
        final = behind_link(path)
        self._file = None if opening is Opening.JOIN else PartialFile(final)
        try:
            self._scratch = PartialFile(
                samples_path(final),
                header.nbytes if scratch_bytes is None else scratch_bytes,
                opening,
                scratch_for=final,
            )
        except BaseException:
            if self._file is not None:
                self._file.discard()
            raise
        self._samples = ContiguousSamples(shape=header.shape, dtype=header.dtype, offset=0)

    def _encoded(self) -> Iterator[bytes]:
        """The encoded file, in pieces; for writers that leave `_encode_into` as it is."""
        raise NotImplementedError

    def _encode_into(self, file: PartialFile) -> None:
        """Write the encoded file."""
        position = 0
        for piece in self._encoded():
            file.write_at(position, piece)
            position += len(piece)

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        self._samples.write(self._scratch, region, samples)

    def flush(self) -> None:
        self._scratch.flush()

    def publish(self, on_sealed: Callback = no_callback) -> None:
        if self._file is None:
            raise ValueError(f"{self.path}: only its owner publishes it")
        self._encode_into(self._file)
        self._file.publish(on_sealed)
        self._scratch.discard()

    def keep(self) -> None:
        self._scratch.keep()
        if self._file is not None:
            self._file.discard()

    def discard(self) -> None:
        self._scratch.discard()
        if self._file is not None:
            self._file.discard()
