"""Decoding a TIFF's strips and tiles: compressed ones, and those with the bits of each byte in reverse order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs import silence_loggers
from pipeline.codecs.block_cache import BlockCache, Box
from pipeline.codecs.bounded import check_image
from pipeline.codecs.parallel import items_at_once
from pipeline.codecs.scratch import scratch
from pipeline.errors import InputError
from pipeline.formats.image.base import ImageHeader, Place, Schedule
from pipeline.formats.image.tiff.page import COMPRESSIONS, GRAY, IMAGE_CODECS, JPEG, LERC, Page, PagePart
from pipeline.storage.confinement import by_descriptor
from pipeline.storage.positional import PositionalFile

# Writers may pad images to whole blocks of their codec.
_PADDING_SAMPLES = 1 << 16
# The schemes that are decoded together, without tifffile.
_TOGETHER = {"none", "deflate", "LZW", "PackBits", "Zstandard"}
# Of samples of one bit none: tifffile unpacks them.
_PREDICTORS = {"b": (), "u": (1, 2), "i": (1, 2), "f": (1, 3)}

Span = tuple[int, int]  # start, stop


class DecodedBlocks:
    """Decodes blocks, and caches the latest within a bound of bytes.

    Blocks of common codecs are decoded together, by compiled loops; tifffile decodes the others, and judges those that
    do not decode.
    """

    def __init__(self, file: PositionalFile, pages: Sequence[Page]) -> None:
        """InputError if tifffile cannot parse a page that it is needed for."""
        self._file = file
        encoded = {coding_of(page): page for page in pages if not page.raw}
        self._pages = {page.index: page for page in pages}
        self._lock = threading.Lock()
        self._decoders = _decoders(file.path, {key: page for key, page in encoded.items() if not is_together(page)})
        blocks = [(page.offsets.shape[2], page.block[0] * page.block_row_bytes) for page in encoded.values()]
        self._cache = BlockCache(
            row_bytes=max((across * nbytes for across, nbytes in blocks), default=0),
            block_bytes=max((nbytes for _, nbytes in blocks), default=0),
        )

    def hold_at_most(self, budget_bytes: int) -> int:
        """Bound the decoded bytes kept between calls; returns the bound in force. Uncompressed pages keep none."""
        return 0 if all(page.raw for page in self._pages.values()) else self._cache.hold_at_most(budget_bytes)

    def expect(self, header: ImageHeader, spans: Sequence[Sequence[Span]], planes: Mapping[int, Place]) -> Schedule:
        """Announce the regions that will be read: all combinations of these (start, stop) along the image's axes.

        planes : the place of each page, by its index, along the axes before Y
        """

        def schedule(page: Page) -> Schedule:
            sizes = {"Y": page.block[0], "X": page.block[1], "S": header.shape[-1]}
            return Schedule(spans, [sizes.get(letter, 1) for letter in header.axes], header.shape)

        kinds = {page.block: page for page in self._pages.values()}
        schedules = {block: schedule(page) for block, page in kinds.items()}

        def found(key: Place) -> tuple[Schedule, Place]:
            page = self._pages[key[0]]
            return schedules[page.block], (*planes[page.index], *key[2:], 0)[: len(header.axes)]

        def uses(key: Place) -> int:
            schedule, block = found(key)
            return schedule.uses(block)

        def next_use(key: Place, after: Place) -> Place | None:
            schedule, block = found(key)
            return schedule.next_use(block, after)

        def part(key: Place, after: Place) -> Box:
            schedule, block = found(key)
            spans = dict(zip(header.axes, schedule.part(block, after), strict=True))
            return spans["Y"], spans["X"], slice(0, self._pages[key[0]].block_samples)

        self._cache.expect(uses, next_use, part)
        return next(iter(schedules.values()))

    def reading(self, at: Place) -> AbstractContextManager[None]:
        """A read of this place in the schedule."""
        return self._cache.reading(at)

    def use(
        self, page: Page, place: Place, look: Callable[[NDArray[Any]], bool], at: Place, box: Box = (), *, wait: bool
    ) -> bool | None:
        """What `look` returns for samples (rows, columns, samples; read-only) of the block at `place`.

        at  : the place of the read in the schedule
        box : which samples; (): all

        None if another thread is decoding it and `wait` is False. InputError if it does not decode.
        """
        # tifffile decodes into memory of its own.
        key = (page.index, *place)
        return self._cache.use(key, 0, lambda _: self._decode(page, *place), look, box, at=at, wait=wait)

    def lacks(self, page: Page, place: Place) -> bool:
        """Whether the block at `place` has to be decoded."""
        return self._cache.lacks((page.index, *place))

    def read_together(
        self,
        pages: Mapping[int, Page],
        plane: int,
        parts: Sequence[PagePart],
        channels: slice,
        target: NDArray[Any],
        at: Place,
    ) -> list[PagePart]:
        """Decode blocks of pages of one coding, and copy their parts to `target` (pages, rows, columns, channels; any
        strides).

        pages : by their places in `target`
        at    : the place of the read in the schedule

        Returns those that are left: use each alone, to decode it another way, or to name its fault.
        """
        from pipeline.formats.image.tiff.together import read_tiles_of

        first = next(iter(pages.values()))

        def read(some: Sequence[PagePart]) -> list[PagePart]:
            def look(numbers: list[int], memories: list[tuple[int, bool]]) -> list[int]:
                chosen = [some[number] for number in numbers]
                return read_tiles_of(self._file, pages, plane, chosen, memories, channels, target)

            def samples(number: int, memory: NDArray[np.uint8]) -> NDArray[Any]:
                height = first.height(some[number][1][0])
                return memory[: height * first.block_row_bytes].view(first.dtype).reshape(height, *first.pixels)

            keys = [(pages[number].index, plane, down, across) for number, (down, _, _), (across, _, _) in some]
            left = self._cache.use_together(keys, first.block_bytes, look, samples, keeps=not first.raw, at=at)
            return [some[number] for number in left]

        # Memory for decoded blocks bounds a group.
        groups = 1 if first.raw else -(-len(parts) // items_at_once(len(parts), first.block_bytes))
        return [each for number in range(groups) for each in read(parts[number::groups])]

    def _decode(self, page: Page, plane: int, down: int, across: int) -> NDArray[Any]:
        grid = page.offsets.shape
        start, nbytes = page.offsets[plane, down, across], int(page.byte_counts[plane, down, across])
        data = scratch("encoded", nbytes)
        segment = (plane * grid[1] + down) * grid[2] + across
        if self._file.read_some(start, data.data) < nbytes:
            raise InputError(f"{self._where(page, segment)} is cut off; the file shrank while it was read, run again")
        return self._by_tifffile(page, data.tobytes(), segment, down, across)

    def _where(self, page: Page, segment: int) -> str:
        return f"{self._file.path}: page {page.index}, {'tile' if page.tiled else 'strip'} {segment}"

    def _by_tifffile(self, page: Page, data: bytes, segment: int, down: int, across: int) -> NDArray[Any]:
        where, coding = self._where(page, segment), coding_of(page)
        with self._lock:
            if coding not in self._decoders:
                self._decoders |= _decoders(self._file.path, {coding: page})
        tables = {} if page.jpeg_tables is None else {"jpegtables": page.jpeg_tables}
        codec = IMAGE_CODECS.get(COMPRESSIONS[page.compression])
        try:
            if codec is not None:  # tifffile bounds only the others by the size of the strip or tile
                samples = page.block[0] * page.block[1] * page.block_samples
                check_image(codec, data, 2 * samples + _PADDING_SAMPLES, page.dtype)
            decoded, corner, _ = self._decoders[coding](data, segment, **tables)
            valid = _valid(page, data)
        except Exception as exc:
            # The codecs' errors have no common ancestor; a damaged size may raise MemoryError.
            how = COMPRESSIONS[page.compression]
            raise InputError(
                f"{where} does not decode as tag Compression states ({how}: {_words(exc)}); damaged: copy or export it "
                "again"
            ) from exc
        block: NDArray[Any] = decoded[0]
        if codec == "jpeg" and page.dtype.kind == "i" and block.dtype.kind == "u":
            block = block.view(block.dtype.str.replace("u", "i"))  # JPEG has no sign: the tag SampleFormat has it
        rows = min(page.block[0], page.shape[0] - down * page.block[0])
        columns = min(page.block[1], page.shape[1] - across * page.block[1])
        if (
            tuple(corner[2:4]) != (down * page.block[0], across * page.block[1])
            or block.dtype != page.dtype
            or block.shape[0] < rows
            or block.shape[1] < columns
            or block.shape[2] != page.block_samples
        ):
            raise InputError(f"{where} decodes to {block.shape} {block.dtype}; damaged: copy or export it again")
        # Padding at the edges, and rows beyond the image's last, would only fill the memory.
        block = np.ascontiguousarray(block[:rows, :columns])
        if _hides_missing(page, block):
            raise InputError(
                f"{where} holds {np.finfo(block.dtype).min:.8g}, which LERC stores if only some samples of a pixel "
                "are NaN: store the samples in planes of their own, or use another compression"
            )
        return block if valid is None else np.where(valid[:rows, :columns], block, block.dtype.type(np.nan))


def is_together(page: Page) -> bool:
    """Whether `DecodedBlocks.read_together` reads the page: not strips that one call reads as they are, nor what only
    tifffile decodes (images, reversed bits, unusual predictors)."""
    if page.raw and not page.tiled:
        return False
    is_known = COMPRESSIONS[page.compression] in _TOGETHER and page.fill_order == 1
    return is_known and page.predictor in _PREDICTORS[page.dtype.kind]


def _valid(page: Page, data: bytes) -> NDArray[np.bool_] | None:
    """The mask of a block's valid floats (rows, columns, 1 or samples); None: all are. LERC stores NaN as a mask beside
    zeros, and tifffile ignores the mask."""
    if page.compression != LERC or page.dtype.kind != "f":
        return None
    import imagecodecs

    mask = imagecodecs.lerc_decode(data, masks=True)[1]
    return None if mask is None else np.asarray(mask, bool).reshape(*mask.shape[:2], -1)


def _hides_missing(page: Page, block: NDArray[Any]) -> bool:
    """Whether NaN was lost: LERC's mask covers whole pixels, so NaN in some of a pixel's samples becomes the type's
    smallest number."""
    if page.compression != LERC or page.dtype.kind != "f" or page.block_samples == 1:
        return False
    return bool((block == np.finfo(block.dtype).min).any())


def coding_of(page: Page) -> tuple[object, ...]:
    """The properties that pages with a common decoder share."""
    storage = (page.separate, page.tiled, page.block, page.compression, page.predictor, page.fill_order)
    return (page.shape, page.stored_dtype, page.photometric, *storage)


def _decoders(path: Path, encoded: dict[tuple[object, ...], Page]) -> dict[tuple[object, ...], Callable[..., Any]]:
    """tifffile's decoding function for each kind of page: a closure over the page's tags, safe in several threads."""
    if not encoded:
        return {}
    import tifffile

    silence_loggers()
    try:
        with by_descriptor(path) as here, tifffile.TiffFile(here, _multifile=False) as tiff:
            found = {}
            for coding, page in encoded.items():
                theirs = tiff.pages[page.index] if page.sub_ifd is None else tiff.pages[page.index].pages[page.sub_ifd]
                if page.separate and page.compression == JPEG:
                    theirs.photometric = GRAY  # of each plane: tifffile takes the first of RGB for all three
                found[coding] = theirs.decode
            return found
    except MemoryError:
        raise
    except Exception as exc:
        # tifffile documents TiffFileError, but damaged tags raise many other errors.
        raise InputError(f"{path}: its compressed pages cannot be read ({_words(exc)}); export the file again") from exc


def _words(exc: Exception) -> str:
    """A foreign error's text on one short line."""
    return " ".join(f"{type(exc).__name__} {exc}".split())[:160]
