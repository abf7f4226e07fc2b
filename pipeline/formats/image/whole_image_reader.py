"""Reading files that can only be decoded sequentially: the first read decodes the whole image."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from pipeline.formats.image.base import ImageHeader, ImageReader, Region, require_fit
from pipeline.storage.positional import PositionalFile


class WholeImageReader(ImageReader):
    """Holds the whole image, `header.nbytes`, from the first `read` until `close`."""

    def __init__(self, file: PositionalFile, header: ImageHeader, decode: Callable[[], NDArray[Any]]) -> None:
        """`decode` returns samples of the header's shape and dtype, or raises InputError; it is called once."""
        self.path = file.path
        self.header = header
        self._file = file
        self._decode = decode
        self._image: NDArray[Any] | None = None
        self._lock = threading.Lock()

    def read(self, region: Region, out: NDArray[Any]) -> None:
        require_fit(self.header, region, out)
        with self._lock:
            if self._image is None:
                self._image = self._decode()
            image = self._image
        out[...] = image[region.slices]

    def hold_at_most(self, budget_bytes: int) -> int:
        return self.header.nbytes

    def close(self) -> None:
        self._image = None
        self._file.close()
