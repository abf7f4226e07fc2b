"""The strips and tiles of a region, read together by the loop of `pipeline.codecs.tile_loops`.

Imported only when they are read: the loop needs Numba, which takes long to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs import tile_loops as loops
from pipeline.codecs.file_loops import DONE, LEFT
from pipeline.codecs.parallel import for_each, threads_for
from pipeline.codecs.scratch import scratch
from pipeline.formats.image.tiff.page import COMPRESSIONS, Page
from pipeline.storage.positional import PositionalFile


def read_tiles_of(
    file: PositionalFile,
    page: Page,
    plane: int,
    parts: Sequence[Any],
    memories: Sequence[tuple[int, bool]],
    channels: slice,
    target: NDArray[Any],
) -> list[int]:
    """Decode blocks, and copy their parts to `target` (rows, columns, channels; any strides).

    parts    : `blocks.BlockPart` of each block
    memories : of each block, the address of its memory and whether that holds it; 0: it is not kept

    Returns the numbers of those that are left: those that are not stored, or do not decode.
    """
    codec = loops.decoder(COMPRESSIONS[page.compression])
    if codec is None:
        return list(range(len(parts)))
    itemsize, samples = page.dtype.itemsize, page.block_samples
    places = np.array([(down, across) for (down, _, _), (across, _, _) in parts], np.int64).reshape(-1, 2)
    spans = np.array([(*_ends(rows), *_ends(columns)) for (_, *rows), (_, *columns) in parts], np.int64)
    into, within, extents = spans.reshape(-1, 2, 3).transpose(2, 0, 1)
    strides = np.array([target.strides, (page.block_row_bytes, samples * itemsize, itemsize)], np.int64)
    count = channels.stop - channels.start
    rows = np.zeros((len(parts), loops.EXTENTS + 3), np.int64)
    rows[:, loops.OFFSET] = page.offsets[plane, *places.T]
    rows[:, loops.LENGTH] = page.byte_counts[plane, *places.T]
    rows[:, loops.HEIGHT] = [page.height(down) for down in places[:, 0].tolist()]
    rows[:, loops.MEMORY : loops.HELD + 1] = memories
    rows[:, loops.PART] = target.ctypes.data + into @ strides[0, :2]
    rows[:, loops.INSIDE] = within @ strides[1, :2] + channels.start * itemsize
    rows[:, loops.EXTENTS :] = np.column_stack([extents, np.full(len(parts), count)])
    if count == samples and (count == 1 or (target.strides[1:] == (count * itemsize, itemsize))):
        # Pixels are copied as one run of samples.
        rows[:, loops.EXTENTS + 1] *= count
        rows, strides = rows[:, :-1], np.delete(strides, 2 if count == 1 else 1, axis=1)
    stored = np.flatnonzero(rows[:, loops.OFFSET])
    stored = stored[_done(file, page, codec, rows[stored], strides) == DONE]
    return sorted(set(range(len(parts))).difference(stored.tolist()))


def _ends(spans: Sequence[slice]) -> tuple[int, int, int]:
    """Where a part begins in the region and in the block, and its extent."""
    into, within = spans
    return into.start, within.start, within.stop - within.start


def _done(
    file: PositionalFile, page: Page, codec: NDArray[np.int64], rows: NDArray[np.int64], strides: NDArray[np.int64]
) -> NDArray[np.int8]:
    """Calls the loop in several threads; returns what has become of each row."""
    rows, strides = np.ascontiguousarray(rows), np.ascontiguousarray(strides)
    ends, next_row = np.full(len(rows), LEFT, np.int8), np.zeros(1, np.int64)
    is_swapped = not page.stored_dtype.isnative
    form = np.array([*page.pixels, page.dtype.itemsize, page.predictor, is_swapped], np.int64)
    longest = int(rows[:, loops.LENGTH].max(initial=0))
    with file.in_use() as descriptor:
        fetched = None
        if descriptor < 0:  # of an object, in one request
            if page.raw:
                return ends
            lengths = rows[:, loops.LENGTH]
            starts = np.cumsum(lengths) - lengths
            fetched = np.empty(int(lengths.sum()), np.uint8)
            runs = zip(rows[:, loops.OFFSET].tolist(), starts.tolist(), lengths.tolist(), strict=True)
            file.read_runs([(offset, fetched[start : start + length].data) for offset, start, length in runs])
            rows[:, loops.OFFSET] = fetched.ctypes.data + starts

        def share(_: int) -> None:
            samples = scratch("samples", page.block_bytes)
            planes = scratch("predicted", page.block_bytes if page.predictor == loops.OF_FLOATS else 0)
            encoded = scratch("encoded", 0 if page.raw or fetched is not None else longest)
            loops.read_tiles(next_row, rows, ends, descriptor, codec, form, strides, samples, planes, encoded)

        for_each(share, range(threads_for(len(rows), page.block_bytes)))
    return ends
