"""Gathers the encoded strips or tiles of a region, for a device that decodes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.packed import NotPackedError, Packing, is_decoded
from pipeline.errors import InputError
from pipeline.formats.image.tiff.page import COMPRESSIONS, Page
from pipeline.storage.positional import PositionalFile

_CODECS = {"deflate": "deflate", "Zstandard": "zstd"}
_DIFFERENCES = 2
# Of a zlib stream: two bytes before raw deflate, and the checksum after it.
_ZLIB_HEAD, _ZLIB_TAIL = 2, 4


def can_be_packed(page: Page) -> bool:
    """Whether a device may decode the page's strips or tiles, as far as its tags tell."""
    return (
        is_decoded(_CODECS.get(COMPRESSIONS[page.compression], ""))
        and page.fill_order == 1
        and not page.separate
        and page.stored_dtype.isnative
        and page.dtype.kind != "b"
        and (page.predictor == 1 or (page.predictor == _DIFFERENCES and page.dtype.kind in "ui"))
    )


def pack_tiles(
    packing: Packing, file: PositionalFile, page: Page, down: int, numbers: range, origins: Sequence[tuple[int, ...]]
) -> None:
    """Add tiles side by side, or one strip: those of row `down` with these numbers across. `origins`: their first
    samples in the region.

    NotPackedError if the processor must decode them; raises as `PositionalFile.read_some`.
    """
    offsets = page.offsets[0, down, numbers.start : numbers.stop]
    counts = page.byte_counts[0, down, numbers.start : numbers.stop]
    rows = page.block[0] if page.tiled else min(page.block[0], page.shape[0] - down * page.block[0])
    nbytes = rows * page.block_row_bytes
    for origin in itertools.compress(origins, offsets == 0):
        packing.add_fill(origin, nbytes)
    stored = offsets != 0
    if not stored.any():
        return
    offsets, counts = offsets[stored], counts[stored]
    starts = np.cumsum(counts) - counts
    at, data = packing.take(int(counts.sum()))
    if np.array_equal(offsets - offsets[0], starts):
        pieces = [(int(offsets[0]), data)]
    else:
        spans = zip(offsets.tolist(), starts.tolist(), counts.tolist(), strict=True)
        pieces = [(offset, data[start : start + count]) for offset, start, count in spans]
    for offset, piece in pieces:
        if file.read_some(offset, piece.data) < len(piece):
            raise InputError(f"{file.path}: page {page.index} is cut off; the file shrank while it was read, run again")
    codec, sources, lengths = _CODECS[COMPRESSIONS[page.compression]], at + starts, counts
    if codec == "deflate":
        _require_zlib(data, starts, counts)
        sources, lengths = sources + _ZLIB_HEAD, counts - _ZLIB_HEAD - _ZLIB_TAIL
    packing.add_streams(list(itertools.compress(origins, stored)), codec, sources, lengths, nbytes)


def _require_zlib(data: NDArray[np.uint8], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """NotPackedError unless each begins as a zlib stream without a dictionary."""
    if counts.min() <= _ZLIB_HEAD + _ZLIB_TAIL:
        raise NotPackedError("short streams")
    method, flags = data[starts].astype(np.int64), data[starts + 1].astype(np.int64)
    if np.any((method & 15 != 8) | ((method * 256 + flags) % 31 != 0) | (flags & 32 != 0)):
        raise NotPackedError("no zlib streams")
