"""Reading regions of a TIFF: raw samples straight into the caller's memory, others by strip or tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs.packed import NotPackedError, PackedBlocks, Packing
from pipeline.codecs.parallel import for_each, split
from pipeline.codecs.scratch import scratch
from pipeline.formats.image.base import ImageHeader, ImageReader, Place, Region, Schedule, blocks_along, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.tiff.blocks import DecodedBlocks, Span, coding_of, is_together
from pipeline.formats.image.tiff.described import described
from pipeline.formats.image.tiff.ifd import read_directories
from pipeline.formats.image.tiff.packed_tiles import OF_DIFFERENCES, can_be_packed, pack_tiles
from pipeline.formats.image.tiff.page import BlockPart, Page
from pipeline.formats.image.tiff.stack import Stack, arrange, at_level
from pipeline.storage.object_file import opened_to_read
from pipeline.storage.objects import ObjectPath


@dataclass(frozen=True)
class _Piece:
    """A region of a page."""

    rows: Span
    columns: Span
    channels: Span

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in (self.rows, self.columns, self.channels))

    @property
    def region(self) -> Region:
        return Region(*zip(self.rows, self.columns, self.channels, strict=True))

    @property
    def of_one_channel(self) -> _Piece:
        return _Piece(self.rows, self.columns, (0, 1))


class TiffReader(ImageReader):
    """A TIFF or BigTIFF: one image, or pages of one shape and dtype along T, C and Z."""

    def __init__(self, path: Path, level: int = 0) -> None:
        """`level`: of the pyramid. InputError if a tag is wrong, a page differs, or the samples are of an unsupported
        kind."""
        self.path = path
        self._file = opened_to_read(path)
        try:
            directories = read_directories(self._file)
            self._stack = arrange(directories)
            if level:
                self._stack = at_level(directories, self._stack, level)
            self._blocks = DecodedBlocks(self._file, self._stack.pages)
            first = self._stack.pages[0]
            metadata, calibration, notes = described(self._stack, directories)
        except BaseException:
            self._file.close()
            raise
        self.header = ImageHeader(
            shape=self._stack.shape,
            axes=self._stack.axes,
            dtype=first.dtype,
            metadata=metadata,
            calibration=calibration,
            levels=self._stack.levels,
            notes=notes,
        )
        self._planes = np.arange(len(self._stack.pages)).reshape(self.header.planes)
        self.block_shape = _block_shape(self._stack)
        self.any_strides = self._planes.ndim < 2  # pages of several axes are one axis in `read`
        self._schedule: Schedule | None = None

    @property
    def run(self) -> tuple[np.dtype[Any], int] | None:
        first = self._stack.pages[0]
        is_one_run = len(self._stack.pages) == 1 and first.one_run
        return (first.stored_dtype, int(first.offsets[0, 0, 0])) if is_one_run else None

    def read(self, region: Region, out: NDArray[Any]) -> None:
        require_fit(self.header, region, out, any_strides=self.any_strides)
        if out.size == 0:
            return
        spans = dict(zip(self.header.axes, zip(region.start, region.stop, strict=True), strict=True))
        whole = _Piece(spans["Y"], spans["X"], spans.get("S", (0, 1)))
        planes = self._planes[region.slices[: self._planes.ndim]].ravel().tolist()
        pages = [self._stack.pages[plane] for plane in planes]

        at = self._schedule.place(region) if self._schedule else ()
        stacked = out.reshape(len(pages), *whole.shape)
        with self._blocks.reading(at):
            left = self._left_together(pages, whole, stacked, at)

            def read_page(number: int) -> None:
                self._read_page(pages[number], whole, stacked[number], at, left.get(number))

            rest = [number for number in range(len(pages)) if left.get(number) != {}]
            if pages[0].raw:
                for number in rest:
                    read_page(number)
            else:
                for_each(read_page, rest, pages[0].block_bytes)

    @cached_property
    def packs(self) -> bool:
        pages = self._stack.pages
        kinds = {(page.tiled, page.block, page.compression, page.predictor) for page in pages}
        return not isinstance(self.path, ObjectPath) and len(kinds) == 1 and all(map(can_be_packed, pages))

    def read_packed(self, region: Region, memory: NDArray[np.uint8]) -> PackedBlocks | None:
        first = self._stack.pages[0]
        if not self.packs or not all(region.shape):
            return None
        planes = self._planes.ndim
        (*outer, top, left), rest = region.start[: planes + 2], region.start[planes + 2 :]
        rows, columns = (
            blocks_along((region.start[axis], region.stop[axis]), size)
            for axis, size in zip((planes, planes + 1), first.block, strict=True)
        )
        shape = (*[1] * planes, *first.block, first.block_samples)[: len(region.start)]
        packing = Packing(memory, "zlib", shape, self.header.dtype.itemsize, 0)
        across = range(columns[0][0], columns[-1][0] + 1)
        try:
            for plane, (down, _, _) in itertools.product(np.ndindex(*region.shape[:planes]), rows):
                page = self._stack.pages[self._planes[tuple(map(sum, zip(plane, outer, strict=True)))]]
                beside = [number * first.block[1] - left for number in across]
                origins = [(*plane, down * first.block[0] - top, at, *(-start for start in rest)) for at in beside]
                pack_tiles(packing, self._file, page, down, across, np.array(origins))
            differences = first.pixels if first.predictor == OF_DIFFERENCES else None
            return packing.packed(differences=differences)
        except NotPackedError:
            return None

    def at_level(self, level: int) -> ImageReader:
        """Its header has the level's shape, and the whole image's calibration."""
        return TiffReader(self.path, level)

    def expect(self, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        places = np.ndindex(self._planes.shape)
        planes = {page.index: place for place, page in zip(places, self._stack.pages, strict=True)}
        self._schedule = self._blocks.expect(self.header, spans, planes)

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._blocks.hold_at_most(budget_bytes)

    def close(self) -> None:
        self._file.close()

    def _left_together(
        self, pages: Sequence[Page], piece: _Piece, stacked: NDArray[Any], at: Place
    ) -> dict[int, dict[int, list[BlockPart]]]:
        """Read what can be read together; of those pages, by number, the blocks that are left, by plane."""
        alike: dict[Any, dict[int, Page]] = {}
        for number, page in enumerate(pages):
            if is_together(page):
                alike.setdefault(coding_of(page), {})[number] = page
        found: dict[int, dict[int, list[BlockPart]]] = {number: {} for some in alike.values() for number in some}
        for some in alike.values():
            first = next(iter(some.values()))
            parts = [(number, *part) for number in some for part in _blocks_of(first, piece)]
            for plane, inside, target in _planes_of(first, piece, stacked):
                left = self._blocks.read_together(some, plane, parts, slice(*inside.channels), target, at)
                for number, down, across in left:
                    found[number].setdefault(plane, []).append((down, across))
        return found

    def _read_page(
        self, page: Page, piece: _Piece, target: NDArray[Any], at: Place, left: dict[int, list[BlockPart]] | None
    ) -> None:
        """Fill `target` (rows, columns, channels; any strides) from one page, block by block. `left`: see
        `_left_together`."""
        for plane, inside, part in _planes_of(page, piece, target):
            if page.raw and not page.tiled:
                self._read_strips(page, plane, inside, part)
            else:
                blocks = _blocks_of(page, piece) if left is None else left.get(plane, [])
                self._read_blocks(page, plane, blocks, slice(*inside.channels), part, at)

    def _read_blocks(
        self, page: Page, plane: int, blocks: list[BlockPart], channels: slice, target: NDArray[Any], at: Place
    ) -> None:
        """Fill `target` from blocks of one of a page's planes."""
        busy: list[BlockPart] = []

        def copy(block: BlockPart) -> None:
            if not self._copy_block(page, plane, block, channels, target, at, wait=False):
                busy.append(block)

        missing, here = split(blocks, lambda block: self._blocks.lacks(page, (plane, block[0][0], block[1][0])))
        for_each(copy, here + missing, page.block_bytes)  # those first that may leave their memory to others
        for block in busy:
            self._copy_block(page, plane, block, channels, target, at, wait=True)

    def _read_strips(self, page: Page, plane: int, piece: _Piece, target: NDArray[Any]) -> None:
        """Read straight into `target` if it is contiguous, which channels stored separately are not."""
        into = target if target.flags.c_contiguous else np.empty(piece.shape, page.dtype)
        for start, stop, offset in _runs(page, plane, piece.rows):
            rows = into[start - piece.rows[0] : stop - piece.rows[0]]
            if offset is None:
                rows[...] = 0
            else:
                self._read_run(page, offset, _Piece((0, stop - start), piece.columns, piece.channels), rows)
        if into is not target:
            target[...] = into

    def _read_run(self, page: Page, offset: int, piece: _Piece, target: NDArray[Any]) -> None:
        """Fill contiguous `target` from rows of strips or of a tile that are contiguous from `offset`."""
        shape = (piece.rows[1], page.block[1], page.block_samples)
        samples = ContiguousSamples(shape=shape, dtype=page.stored_dtype, offset=offset)
        samples.read(self._file, piece.region, target)

    def _copy_block(
        self, page: Page, plane: int, block: BlockPart, channels: slice, target: NDArray[Any], at: Place, *, wait: bool
    ) -> bool:
        """Copy what the region has of one strip or tile; False if another thread is decoding it and `wait` is False."""
        (down, rows, within_rows), (across, columns, within_columns) = block
        place = (plane, down, across)
        offset = int(page.offsets[place])
        if not offset:
            target[rows, columns] = 0
            return True
        if page.raw:
            within = _Piece(_span(within_rows), _span(within_columns), _span(channels))
            samples = math.prod(within.shape)
            stored = scratch("samples", samples * page.dtype.itemsize).view(page.dtype).reshape(within.shape)
            self._read_run(page, offset, within, stored)
            target[rows, columns] = stored
            return True

        def look(samples: NDArray[Any]) -> bool:
            target[rows, columns] = samples
            return True

        return self._blocks.use(page, place, look, at, (within_rows, within_columns, channels), wait=wait) is not None


def _blocks_of(page: Page, piece: _Piece) -> list[BlockPart]:
    return list(itertools.product(blocks_along(piece.rows, page.block[0]), blocks_along(piece.columns, page.block[1])))


def _planes_of(page: Page, piece: _Piece, target: NDArray[Any]) -> Iterator[tuple[int, _Piece, NDArray[Any]]]:
    """The planes of a page: number, region to read, and the part of `target` (…, channels) that it fills. There is one
    plane for all samples, or one for each if they are stored separately."""
    if not page.separate:
        yield 0, piece, target
        return
    for place, plane in enumerate(range(*piece.channels)):
        yield plane, piece.of_one_channel, target[..., place : place + 1]


def _span(part: slice) -> Span:
    return part.start, part.stop


def _runs(page: Page, plane: int, rows: Span) -> Iterator[tuple[int, int, int | None]]:
    """Rows that are contiguous in the file: first, last + 1 and offset, which is None if they are not stored."""
    height = page.block[0]
    first, last = rows[0] // height, (rows[1] - 1) // height
    offsets = page.offsets[plane, first : last + 1, 0]
    breaks = np.flatnonzero(np.diff(offsets) != height * page.block_row_bytes) + 1
    for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(offsets)], strict=True):
        start, stop = max(rows[0], (first + begin) * height), min(rows[1], (first + end) * height)
        offset = int(offsets[begin])
        # No stored strip begins at byte 0: that is the file's own header.
        yield start, stop, offset + (start - (first + begin) * height) * page.block_row_bytes if offset else None


def _block_shape(stack: Stack) -> tuple[int, ...] | None:
    """The strips or tiles in the image's axes; None if every region costs the same."""
    first = stack.pages[0]
    if first.raw and not first.tiled:
        return None
    sizes = {"Y": first.block[0], "X": first.block[1], "S": first.block_samples}
    return tuple(min(sizes.get(axis, 1), size) for axis, size in zip(stack.axes, stack.shape, strict=True))
