"""Reading the samples of a volume, in the file's order of axes or another, also of a compressed file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.formats.image.base import ImageHeader, ImageReader, Region, require_fit
from pipeline.formats.image.volumes.inflated import InflatedFile, content_of
from pipeline.formats.image.volumes.ordered import OrderedSamples
from pipeline.storage.positional import PositionalFile


class VolumeReader(ImageReader):
    """Reads samples straight from the file, or inflates the blocks that hold them."""

    def __init__(self, file: PositionalFile, header: ImageHeader, samples: OrderedSamples) -> None:
        """InputError if the file is too short for its samples."""
        self.path, self.header, self._samples = file.path, header, samples
        self._file = content_of(file, samples.offset + samples.nbytes)
        if self._file.size < samples.offset + samples.nbytes:
            raise InputError(
                f"{file.path}: truncated: its header promises {counted(samples.nbytes, 'byte')} of samples, "
                f"the file holds {max(self._file.size - samples.offset, 0):,}; copy or save it again"
            )
        if isinstance(self._file, InflatedFile):
            self.header = replace(header, metadata={**header.metadata, "compression": "deflate"})
            lengths = zip(header.axes, header.shape, strict=True)
            self.block_shape = tuple(n if letter in "YXS" else 1 for letter, n in lengths)

    @property
    def run(self) -> tuple[np.dtype[Any], int] | None:
        is_run = self._samples.in_order and not isinstance(self._file, InflatedFile)
        return (self._samples.dtype, self._samples.offset) if is_run else None

    def read(self, region: Region, out: NDArray[Any]) -> None:
        require_fit(self.header, region, out)
        self._samples.read(self._file, region, out)

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._file.hold_at_most(budget_bytes) if isinstance(self._file, InflatedFile) else 0

    def close(self) -> None:
        self._file.close()
