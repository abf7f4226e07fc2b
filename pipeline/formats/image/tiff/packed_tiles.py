"""Gathers the encoded strips or tiles of a region, for a device that decodes them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.packed import LONGEST_STREAM_BYTES, NotPackedError, Packing
from pipeline.formats.image.tiff.page import COMPRESSIONS, Page
from pipeline.storage.positional import PositionalFile

# The predictor that stores samples less those before them in their row.
OF_DIFFERENCES = 2


def can_be_packed(page: Page) -> bool:
    """Whether a device may decode the page's strips or tiles, as far as its tags tell."""
    return (
        COMPRESSIONS[page.compression] == "deflate"
        and page.block_bytes <= LONGEST_STREAM_BYTES["zlib"]
        and page.fill_order == 1
        and not page.separate
        and page.stored_dtype.isnative
        and page.dtype.kind in "uif"
        and (page.predictor == 1 or (page.predictor == OF_DIFFERENCES and page.dtype.kind in "ui"))
    )


def pack_tiles(
    packing: Packing, file: PositionalFile, page: Page, down: int, numbers: range, origins: NDArray[np.int64]
) -> None:
    """Add tiles side by side, or one strip: those of row `down` with these numbers across. `origins`:
    (tiles, axes), their first samples in the region.

    NotPackedError if the processor must decode them, or name what is wrong.
    """
    from pipeline.codecs.loops.chunk_files import read_shared  # slow to load

    offsets, counts = (each[0, down, numbers.start : numbers.stop] for each in (page.offsets, page.byte_counts))
    nbytes, stored = page.height(down) * page.block_row_bytes, offsets != 0
    packing.add_fill(origins[~stored], nbytes)
    if not stored.any():
        return
    offsets, counts = offsets[stored], counts[stored]
    starts = np.cumsum(counts) - counts
    at, data = packing.take(int(counts.sum()))
    with file.in_use() as descriptor:
        if not read_shared(np.stack([np.full_like(counts, descriptor), offsets, data.ctypes.data + starts, counts], 1)):
            raise NotPackedError("a file that was cut short")
    packing.add_streams(origins[stored], at + starts, counts, nbytes)
