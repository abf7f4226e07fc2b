"""The strips and tiles of a region, read or written together by the loops of `pipeline.codecs.loops.tiles`.

Imported only when they are read or written: the loops need LLVM or Numba, which take long to load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.loops import tiles as loops
from pipeline.codecs.loops.system import DONE, LEFT
from pipeline.codecs.loops.threads import in_threads
from pipeline.codecs.parallel import threads_for
from pipeline.formats.image.base import ImageHeader
from pipeline.formats.image.tiff.page import COMPRESSIONS, Page, PagePart
from pipeline.formats.image.tiff.tiling import Tiling
from pipeline.storage.positional import PositionalFile
from pipeline.storage.writable import WritableFile

Numbers = NDArray[np.int64]


def read_tiles_of(
    file: PositionalFile,
    pages: Mapping[int, Page],
    plane: int,
    parts: Sequence[PagePart],
    memories: Sequence[tuple[int, bool]],
    channels: slice,
    target: NDArray[Any],
) -> list[int]:
    """Decode blocks, and copy their parts to `target` (pages, rows, columns, channels; any strides).

    pages    : of one coding, by their places in `target`
    memories : of each block, the address of its memory and whether that holds it; 0: it is not kept

    Returns the numbers of those that are left: those that are not stored, or do not decode.
    """
    page = next(iter(pages.values()))
    codec = loops.decoder(COMPRESSIONS[page.compression])
    if codec is None:
        return list(range(len(parts)))
    rows, strides = _table(parts, target, channels, page.pixels)
    numbers, down, across = np.array([(number, y[0], x[0]) for number, y, x in parts], np.int64).T
    places = np.searchsorted(list(pages), numbers), down, across
    rows[:, loops.OFFSET] = np.stack([each.offsets[plane] for each in pages.values()])[places]
    rows[:, loops.LENGTH] = np.stack([each.byte_counts[plane] for each in pages.values()])[places]
    rows[:, loops.HEIGHT] = [page.height(each) for each in down.tolist()]
    rows[:, loops.MEMORY : loops.HELD + 1] = memories
    stored = np.flatnonzero(rows[:, loops.OFFSET])
    rows = rows[stored]
    with file.in_use() as descriptor:
        if descriptor < 0 and page.raw:
            return list(range(len(parts)))
        longest, fetched = int(rows[:, loops.LENGTH].max(initial=0)), None
        if descriptor < 0:  # of an object, in one request
            longest, fetched = 0, _fetched(file, rows)
        form = _form(page.pixels, page.stored_dtype, page.predictor)
        done = _run(
            loops.read_tiles, rows, descriptor, codec, form, strides,
            nbytes=page.block_bytes, encoded=0 if page.raw else longest, predictor=page.predictor, copies=page.raw,
        )  # fmt: skip
        stored = stored[done]
        del fetched
    return sorted(set(range(len(parts))).difference(stored.tolist()))


def write_tiles_of(
    file: WritableFile,
    tiling: Tiling,
    header: ImageHeader,
    source: NDArray[Any],
    parts: Sequence[PagePart],
    offsets: Sequence[tuple[int, int]],
) -> list[int]:
    """Encode whole tiles, and write them and their sizes in bytes to `offsets`.

    source : (pages, rows, columns, samples), any strides

    Returns the numbers of those that are left.
    """
    if not parts or header.dtype.kind == "b" or tiling.compression == "jpeg2000":
        return list(range(len(parts)))
    codec, predictor = loops.encoder(*tiling.codec), tiling.predictor(header)
    if codec is None:
        return list(range(len(parts)))
    pixels = tiling.columns, header.samples_per_pixel
    rows, strides = _table(parts, source, slice(0, pixels[1]), pixels)
    rows[:, [loops.OFFSET, loops.LENGTH]] = offsets
    form, nbytes = _form(pixels, header.dtype, predictor), tiling.rows * pixels[0] * pixels[1] * header.dtype.itemsize
    with file.written_in_place() as (descriptor, mapped):
        done = _run(
            loops.write_tiles, rows, descriptor, mapped, codec, form, strides,
            nbytes=nbytes, encoded=tiling.slot_bytes(header), predictor=predictor, copies=tiling.codec[0] == "none",
        )  # fmt: skip
    return np.flatnonzero(~done).tolist()


def _table(
    parts: Sequence[PagePart], array: NDArray[Any], channels: slice, pixels: tuple[int, int]
) -> tuple[Numbers, Numbers]:
    """Rows for the loops with the parts of blocks that are copied, and the strides along the extents in them.

    array  : of the region (pages, rows, columns, channels), any strides
    pixels : columns of a block, and samples of its pixels
    """
    itemsize, samples, count = array.itemsize, pixels[1], channels.stop - channels.start
    pages = np.array([number for number, _, _ in parts], np.int64)
    spans = np.array([(*_ends(rows), *_ends(columns)) for _, (_, *rows), (_, *columns) in parts], np.int64)
    into, within, extents = spans.reshape(-1, 2, 3).transpose(2, 0, 1)
    strides = np.array([array.strides[1:], (pixels[0] * samples * itemsize, samples * itemsize, itemsize)], np.int64)
    rows = np.zeros((len(parts), loops.EXTENTS + 3), np.int64)
    rows[:, loops.PART] = array.ctypes.data + pages * array.strides[0] + into @ strides[0, :2]
    rows[:, loops.INSIDE] = within @ strides[1, :2] + channels.start * itemsize
    rows[:, loops.EXTENTS : loops.EXTENTS + 2], rows[:, loops.EXTENTS + 2] = extents, count
    if count == samples and (count == 1 or array.strides[2:] == (count * itemsize, itemsize)):
        # Pixels are copied as one run of samples.
        rows[:, loops.EXTENTS + 1] *= count
        rows, strides = rows[:, :-1], np.delete(strides, 2 if count == 1 else 1, axis=1)
    return np.ascontiguousarray(rows), np.ascontiguousarray(strides)


def _ends(spans: Sequence[slice]) -> tuple[int, int, int]:
    """Where a part begins in the region and in the block, and its extent."""
    into, within = spans
    return into.start, within.start, within.stop - within.start


def _form(pixels: tuple[int, int], dtype: np.dtype[Any], predictor: int) -> Numbers:
    return np.array([*pixels, dtype.itemsize, predictor, not dtype.isnative], np.int64)


def _fetched(file: PositionalFile, rows: Numbers) -> NDArray[np.uint8]:
    """The encoded bytes of the rows' blocks, whose addresses take the place of their offsets."""
    lengths = rows[:, loops.LENGTH]
    starts = np.cumsum(lengths) - lengths
    data = np.empty(int(lengths.sum()), np.uint8)
    runs = zip(rows[:, loops.OFFSET].tolist(), starts.tolist(), lengths.tolist(), strict=True)
    file.read_runs([(offset, data[start : start + length].data) for offset, start, length in runs])
    rows[:, loops.OFFSET] = data.ctypes.data + starts
    return data


def _run(
    loop: Any, rows: Numbers, *given: Any, nbytes: int, encoded: int, predictor: int, copies: bool
) -> NDArray[np.bool_]:
    """Calls a loop; returns which rows are done. `nbytes`, `encoded`: of a decoded and an encoded block."""
    ends, room = np.full(len(rows), LEFT, np.int8), (nbytes, encoded, nbytes * (predictor != loops.NO_PREDICTOR))
    in_threads(loop, rows, ends, *given, threads=threads_for(len(rows), nbytes), room=room, copies=copies)
    return np.equal(ends, DONE)
