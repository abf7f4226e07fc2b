"""Writing a compressed TIFF: tiles are encoded as they come, into a scratch file, and gathered when all are present.

The scratch file has a slot for each tile, as long as the tile can get, so that any thread of any process stores tiles
in any order. A region that covers a tile in part stores its samples in the slot, and the tile is encoded at the end.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.parallel import for_each
from pipeline.codecs.scratch import scratch
from pipeline.formats.image.base import ImageHeader, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.spooled_writer import SpooledWriter
from pipeline.formats.image.tiff.tiling import Tiling
from pipeline.formats.image.tiff.writer import Layout
from pipeline.storage.partial import Opening, PartialFile

_GATHERED_BYTES = 512 << 10
_LENGTH = np.dtype("<i8")  # of each encoded tile; 0: the slot holds samples
_Tile = tuple[int, int, int]  # plane, down, across


class CompressedTiffWriter(SpooledWriter):
    """Writes tiles of deflate, LZW or Zstandard after a predictor."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening, tiling: Tiling) -> None:
        self._tiling = tiling
        self._layout = Layout.of(header, path, tiling)
        self._grid = (self._layout.depth, *tiling.grid(header))
        planes = header.planes
        page_of_plane = np.arange(self._layout.depth).reshape(
            [planes[axis] for axis in self._layout.order[: len(planes)]]
        )
        self._page_of_plane = page_of_plane.transpose(np.argsort(self._layout.order[: len(planes)]))
        self._slot_bytes = tiling.slot_bytes(header)
        tiles = int(np.prod(self._grid, dtype=object))
        self._slots_at = tiles * _LENGTH.itemsize
        super().__init__(path, header, opening, scratch_bytes=self._slots_at + tiles * self._slot_bytes)

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if samples.size == 0:
            return
        spans = dict(zip(self.header.axes, zip(region.start, region.stop, strict=True), strict=True))
        rows, columns, channels = spans["Y"], spans["X"], spans.get("S", (0, 1))
        pages = self._page_of_plane[region.slices[: self._page_of_plane.ndim]].ravel().tolist()
        blocks = samples.reshape(len(pages), rows[1] - rows[0], columns[1] - columns[0], -1)

        def store(tile: _Tile) -> None:
            (top, bottom), (left, right) = self._spans(tile)
            first, last, begin, end = (
                max(top, rows[0]),
                min(bottom, rows[1]),
                max(left, columns[0]),
                min(right, columns[1]),
            )
            part = blocks[pages.index(tile[0]), first - rows[0] : last - rows[0], begin - columns[0] : end - columns[0]]
            if part.shape == (bottom - top, right - left, self._layout.samples):
                self._store_encoded(tile, self._tiling.encoded(self.header, part))
                return
            within = Region((first - top, begin - left, channels[0]), (last - top, end - left, channels[1]))
            self._scratch.write_at(self._place(tile) * _LENGTH.itemsize, bytes(_LENGTH.itemsize))
            self._slot(tile).write(self._scratch, within, np.ascontiguousarray(part))

        down = range(rows[0] // self._tiling.rows, -(-rows[1] // self._tiling.rows))
        across = range(columns[0] // self._tiling.columns, -(-columns[1] // self._tiling.columns))
        for_each(store, list(itertools.product(pages, down, across)))

    def _encode_into(self, file: PartialFile) -> None:
        """Gather the tiles with several threads if all are encoded, which gives the same bytes as one after another."""
        tiles = math.prod(self._grid)
        lengths = np.frombuffer(self._scratch.head(tiles * _LENGTH.itemsize), _LENGTH)
        if not lengths.all():
            super()._encode_into(file)
            return
        ends = self._layout.head_bytes + np.cumsum(lengths)
        offsets = ends - lengths
        file.reserve(int(ends[-1]))
        # Tiles whose place in the file begins within the same few hundred kilobytes.
        firsts = np.flatnonzero(np.diff(offsets // _GATHERED_BYTES, prepend=-1))

        def gather(run: tuple[int, int]) -> None:
            start = int(offsets[run[0]])
            data = scratch("encoded", int(ends[run[1] - 1]) - start)
            reads = [(self._slots_at + tile * self._slot_bytes, int(offsets[tile]) - start, int(ends[tile]) - start)
                     for tile in range(*run)]  # fmt: skip
            self._scratch.read_runs((slot, data[first:last].data) for slot, first, last in reads)
            file.write_at(start, data.data)

        for_each(gather, list(itertools.pairwise([*firsts.tolist(), tiles])))
        tables = np.stack([offsets, lengths], 1).reshape(self._grid[0], -1, 2).transpose(0, 2, 1)
        file.write_at(0, b"".join(self._layout.head(np.ascontiguousarray(tables))))

    def _encoded(self) -> Iterator[bytes]:
        """The directories, whose tables are filled in after the tiles, and the tiles."""
        assert self._file is not None, "its owner publishes it"
        yield bytes(self._layout.head_bytes)
        tables = np.zeros((self._grid[0], 2, self._grid[1] * self._grid[2]), np.int64)
        end = self._layout.head_bytes
        for (plane, down, across), data in self._tiles():
            tables[plane, :, down * self._grid[2] + across] = end, len(data)
            end += len(data)
            yield data
        self._file.write_at(0, b"".join(self._layout.head(tables)))

    def _tiles(self) -> Iterator[tuple[_Tile, bytes]]:
        """Every tile with its encoded bytes, in order; several threads encode those that were stored in part."""
        threads = len(os.sched_getaffinity(0))
        pending: deque[tuple[_Tile, Future[bytes]]] = deque()
        with ThreadPoolExecutor(threads, thread_name_prefix="tiles") as pool:
            planes, down, across = map(range, self._grid)
            for tile in itertools.product(planes, down, across):
                pending.append((tile, pool.submit(self._stored, tile)))
                if len(pending) > 4 * threads:
                    first, found = pending.popleft()
                    yield first, found.result()
            for first, found in pending:
                yield first, found.result()

    def _stored(self, tile: _Tile) -> bytes:
        """A tile's encoded bytes."""
        length = int.from_bytes(self._scratch.head(_LENGTH.itemsize, self._place(tile) * _LENGTH.itemsize), "little")
        if length:
            return self._scratch.head(length, self._slot_at(tile))
        (top, bottom), (left, right) = self._spans(tile)
        samples = np.empty((bottom - top, right - left, self._layout.samples), self.header.dtype)
        self._slot(tile).read(self._scratch, Region.whole(samples.shape), samples)
        return self._tiling.encoded(self.header, samples).tobytes()

    def _store_encoded(self, tile: _Tile, data: NDArray[np.uint8]) -> None:
        assert len(data) <= self._slot_bytes, "a codec enlarges by less"
        length = len(data).to_bytes(_LENGTH.itemsize, "little")
        self._scratch.write_runs(
            [(self._slot_at(tile), data.data), (self._place(tile) * _LENGTH.itemsize, memoryview(length))]
        )

    def _slot(self, tile: _Tile) -> ContiguousSamples:
        """A tile's samples as they are stored before they are encoded."""
        shape = self._tiling.shape(self.header)
        return ContiguousSamples(shape=shape, dtype=self.header.dtype, offset=self._slot_at(tile))

    def _slot_at(self, tile: _Tile) -> int:
        return self._slots_at + self._place(tile) * self._slot_bytes

    def _place(self, tile: _Tile) -> int:
        return (tile[0] * self._grid[1] + tile[1]) * self._grid[2] + tile[2]

    def _spans(self, tile: _Tile) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows and columns of the image in a tile."""
        top, left = tile[1] * self._tiling.rows, tile[2] * self._tiling.columns
        bottom, right = top + self._tiling.rows, left + self._tiling.columns
        return (top, min(bottom, self._layout.rows)), (left, min(right, self._layout.columns))
