"""Writing a tiled TIFF and its pyramid: tiles are encoded as they come, into a scratch file, and gathered when all are
present.

The scratch file has a slot for each tile, as long as the tile can get, so that any thread of any process stores tiles
in any order. A region that covers a tile in part stores its samples in the slot, and the tile is encoded at the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.parallel import for_each, split
from pipeline.codecs.scratch import scratch
from pipeline.formats.image.base import ImageHeader, Part, Region, blocks_along, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.pyramid import STREAMED, Reduction, at_level, finish, require_alignment
from pipeline.formats.image.spooled_writer import SpooledWriter
from pipeline.formats.image.tiff.tiling import Tiling
from pipeline.formats.image.tiff.writer import Layout
from pipeline.storage.partial import Opening, PartialFile

_GATHERED_BYTES = 512 << 10
_ENCODED_AT_ONCE_BYTES = 16 << 20
_LENGTH = np.dtype("<i8")  # of each encoded tile; 0: the slot holds samples
# Of a region: a plane's number in it and in the file; its part of a tile's rows, and of the columns.
_Place = tuple[tuple[int, int], Part, Part]


@dataclass(frozen=True)
class _Level:
    """The tiles of a level, which are numbered from `first` along pages, down and across."""

    header: ImageHeader
    tiling: Tiling
    first: int
    keeps_samples: bool  # further levels are made of them

    @cached_property
    def grid(self) -> tuple[int, int]:
        return self.tiling.grid(self.header)

    @cached_property
    def size(self) -> tuple[int, int]:
        rows, columns = (self.header.shape[self.header.axes.index(letter)] for letter in "YX")
        return rows, columns

    @property
    def tiles(self) -> int:
        return math.prod(self.header.planes) * math.prod(self.grid)

    def number(self, page: int, down: int, across: int) -> int:
        return self.first + (page * self.grid[0] + down) * self.grid[1] + across

    def shape(self, down: int, across: int) -> tuple[int, int, int]:
        """A tile's rows and columns within the image, and its samples per pixel."""
        rows, columns = self.size[0] - down * self.tiling.rows, self.size[1] - across * self.tiling.columns
        return min(rows, self.tiling.rows), min(columns, self.tiling.columns), self.header.samples_per_pixel


class CompressedTiffWriter(SpooledWriter):
    """Writes tiles of JPEG 2000, of deflate, LZW or Zstandard after a predictor, or without compression."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening, tiling: Tiling, levels: int) -> None:
        self._tiling, self._reduction = tiling, Reduction.of(header)
        self._layout = Layout.of(header, path, tiling, levels)
        planes = header.planes
        page_of_plane = np.arange(self._layout.depth).reshape(
            [planes[axis] for axis in self._layout.order[: len(planes)]]
        )
        self._page_of_plane = page_of_plane.transpose(np.argsort(self._layout.order[: len(planes)]))
        self._levels: list[_Level] = []
        tiles = 0
        for level in range(levels):
            is_source = 0 < level < levels - 1 and level % STREAMED == 0
            self._levels.append(_Level(at_level(header, level), tiling, tiles, is_source))
            tiles += self._levels[-1].tiles
        self._tiles = tiles
        self._slot_bytes = tiling.slot_bytes(header)
        self._slots_at = tiles * _LENGTH.itemsize
        super().__init__(path, header, opening, scratch_bytes=self._slots_at + tiles * self._slot_bytes)

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if samples.size == 0:
            return
        further = len(self._levels) - 1
        if further:
            require_alignment(self.header, region)
        self._write_level(0, region, samples)
        for level, part, reduced in self._reduction.levels_of(region, samples, further):
            self._write_level(level, part, reduced)

    def _write_level(self, number: int, region: Region, samples: NDArray[Any]) -> None:
        from pipeline.formats.image.tiff.together import write_tiles_of

        level, planes, places = self._levels[number], self._planes(region, samples), self._places(region)

        def is_whole(place: _Place) -> bool:
            (plane, _), (down, rows, _), (across, columns, _) = place
            return planes[plane, rows, columns].shape == level.shape(down, across) and not level.keeps_samples

        def store(place: _Place) -> None:
            (plane, page), (down, rows, _), (across, columns, _) = place
            tile, part = level.number(page, down, across), planes[plane, rows, columns]
            if is_whole(place):
                self._store_encoded(tile, self._tiling.encoded(self.header, part))
                return
            self._scratch.write_at(tile * _LENGTH.itemsize, bytes(_LENGTH.itemsize))
            self._slot(tile).write(self._scratch, self._within(place, region), np.ascontiguousarray(part))

        whole, in_part = split(places, is_whole)
        numbers = [level.number(page, down, across) for (_, page), (down, _, _), (across, _, _) in whole]
        left = write_tiles_of(
            self._scratch, self._tiling, self.header, planes,
            [(plane, down, across) for (plane, _), down, across in whole],
            [(self._slot_at(tile), tile * _LENGTH.itemsize) for tile in numbers],
        )  # fmt: skip
        for_each(store, [*in_part, *(whole[each] for each in left)])

    def _read_level(self, number: int, region: Region) -> NDArray[Any]:
        """Samples of a level that keeps them."""
        level, samples = self._levels[number], np.empty(region.shape, self.header.dtype)
        planes = self._planes(region, samples)

        def read(place: _Place) -> None:
            (plane, page), (down, rows, _), (across, columns, _) = place
            within = self._within(place, region)
            part = np.empty(within.shape, self.header.dtype)
            self._slot(level.number(page, down, across)).read(self._scratch, within, part)
            planes[plane, rows, columns] = part

        for_each(read, self._places(region))
        return samples

    def _encode_into(self, file: PartialFile) -> None:
        """Gather the tiles; the bytes do not depend on which were stored in part."""
        finish(self.header, len(self._levels), self._read_level, self._write_level)
        lengths = np.frombuffer(self._scratch.head(self._slots_at), _LENGTH).copy()
        offsets, end = np.empty_like(lengths), self._layout.head_bytes
        in_part = np.flatnonzero(lengths == 0)
        file.reserve(end + int(lengths[: in_part[0] if in_part.size else None].sum()))
        for first, stop in self._batches(in_part):
            found = dict.fromkeys((first + np.flatnonzero(lengths[first:stop] == 0)).tolist(), b"")

            def encode(tile: int, found: dict[int, bytes] = found) -> None:
                found[tile] = self._encoded_slot(tile)

            for_each(encode, list(found), self._slot_bytes)
            lengths[list(found)] = list(map(len, found.values()))
            ends = end + np.cumsum(lengths[first:stop])
            offsets[first:stop], end = ends - lengths[first:stop], int(ends[-1])
            self._gather(file, first, offsets[first:stop], ends, found)
        tables = [
            np.stack([offsets, lengths])[:, level.first : level.first + level.tiles]
            .reshape(2, self._layout.depth, -1)
            .transpose(1, 0, 2)
            for level in self._levels
        ]
        file.write_at(0, b"".join(self._layout.head(tables)))

    def _batches(self, in_part: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """All tiles in runs (first, last + 1), few at once where some are to be encoded. `in_part`: those."""
        few, first = max(_ENCODED_AT_ONCE_BYTES // self._slot_bytes, 1), 0
        while first < self._tiles:
            following = np.searchsorted(in_part, first)
            is_encoded_up_to = int(in_part[following]) if following < len(in_part) else self._tiles
            stop = is_encoded_up_to if is_encoded_up_to - first >= few else min(first + few, self._tiles)
            yield first, stop
            first = stop

    def _gather(
        self,
        file: PartialFile,
        first: int,
        offsets: NDArray[np.int64],
        ends: NDArray[np.int64],
        encoded: dict[int, bytes],
    ) -> None:
        """Write tiles from the number `first` on to their places, with several threads; those of `encoded` from it."""
        # Tiles whose place in the file begins within the same few hundred kilobytes.
        begins = np.flatnonzero(np.diff(offsets // _GATHERED_BYTES, prepend=-1))

        def gather(run: tuple[int, int]) -> None:
            start = int(offsets[run[0]])
            data = scratch("encoded", int(ends[run[1] - 1]) - start)
            reads = []
            for place in range(*run):
                into = data[int(offsets[place]) - start : int(ends[place]) - start]
                if first + place in encoded:
                    into[...] = np.frombuffer(encoded[first + place], np.uint8)
                else:
                    reads.append((self._slot_at(first + place), into.data))
            self._scratch.read_runs(reads)
            file.write_at(start, data.data)

        for_each(gather, list(itertools.pairwise([*begins.tolist(), len(offsets)])))

    def _encoded_slot(self, tile: int) -> bytes:
        """The encoded bytes of a tile whose slot holds samples."""
        level = next(level for level in reversed(self._levels) if level.first <= tile)
        down, across = divmod((tile - level.first) % math.prod(level.grid), level.grid[1])
        samples = np.empty(level.shape(down, across), self.header.dtype)
        self._slot(tile).read(self._scratch, Region.whole(samples.shape), samples)
        return self._tiling.encoded(self.header, samples).tobytes()

    def _store_encoded(self, tile: int, data: NDArray[np.uint8]) -> None:
        assert len(data) <= self._slot_bytes, "a codec enlarges by less"
        length = len(data).to_bytes(_LENGTH.itemsize, "little")
        self._scratch.write_runs([(self._slot_at(tile), data.data), (tile * _LENGTH.itemsize, memoryview(length))])

    def _slot(self, tile: int) -> ContiguousSamples:
        """A tile's samples as they are stored before they are encoded."""
        shape = self._tiling.shape(self.header)
        return ContiguousSamples(shape=shape, dtype=self.header.dtype, offset=self._slot_at(tile))

    def _slot_at(self, tile: int) -> int:
        return self._slots_at + tile * self._slot_bytes

    def _planes(self, region: Region, samples: NDArray[Any]) -> NDArray[Any]:
        """A view of a region's samples: planes, rows, columns, samples per pixel."""
        rows = self.header.axes.index("Y")
        return samples.reshape(math.prod(region.shape[:rows]), *region.shape[rows : rows + 2], -1)

    def _places(self, region: Region) -> list[_Place]:
        """What a region of a level has of each of its tiles."""
        pages = self._page_of_plane[region.slices[: self._page_of_plane.ndim]].ravel().tolist()
        spans = dict(zip(self.header.axes, zip(region.start, region.stop, strict=True), strict=True))
        rows = blocks_along(spans["Y"], self._tiling.rows)
        columns = blocks_along(spans["X"], self._tiling.columns)
        return list(itertools.product(enumerate(pages), rows, columns))

    def _within(self, place: _Place, region: Region) -> Region:
        """The place of a region's part in its tile."""
        _, (_, _, rows), (_, _, columns) = place
        first, last = (region.start[-1], region.stop[-1]) if self.header.axes.endswith("S") else (0, 1)
        return Region((rows.start, columns.start, first), (rows.stop, columns.stop, last))
