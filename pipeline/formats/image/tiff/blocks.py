"""Decoding a TIFF's strips and tiles: compressed ones, and those with the bits of each byte in reverse order."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs import silence_loggers
from pipeline.codecs.block_cache import BlockCache
from pipeline.codecs.bounded import check_image
from pipeline.codecs.scratch import scratch
from pipeline.errors import InputError
from pipeline.formats.image.base import ImageHeader, Place, Schedule
from pipeline.formats.image.tiff.page import COMPRESSIONS, IMAGE_CODECS, LERC, Page
from pipeline.storage.confinement import by_descriptor
from pipeline.storage.positional import PositionalFile

# Writers may pad images to whole blocks of their codec.
_PADDING_SAMPLES = 1 << 16
# The schemes from bytes to bytes, by imagecodecs' functions.
_STRAIGHT = {
    "LZW": "lzw_decode",
    "PackBits": "packbits_decode",
    "Zstandard": "zstd_decode",
    "deflate": "deflate_decode",
}
_OF_INTEGERS, _OF_FLOATS = 2, 3
_MANY_CORES = 5
_AT_ONCE_BYTES = 1 << 20
# Of samples of one bit none: tifffile unpacks them.
_PREDICTORS = {"b": (), "u": (1, _OF_INTEGERS), "i": (1, _OF_INTEGERS), "f": (1, _OF_FLOATS)}

Span = tuple[int, int]  # start, stop


class DecodedBlocks:
    """Decodes in the calling thread, and caches the latest blocks within a bound of bytes.

    Blocks of common codecs are decoded straight into the cache's memory; tifffile does the others, and judges those
    that do not decode.
    """

    def __init__(self, file: PositionalFile, pages: Sequence[Page]) -> None:
        """InputError if tifffile cannot parse a page that it is needed for."""
        self._file = file
        encoded = {_coding(page): page for page in pages if not page.raw}
        self._pages = {page.index: page for page in pages}
        self._straight = {page.index: _straight(page) for page in pages if not page.raw}
        self._at_once = {index: _tiles_at_once(self._pages[index]) for index, found in self._straight.items() if found}
        self._lock = threading.Lock()
        self._decoders = _decoders(file.path, {key: page for key, page in encoded.items() if _straight(page) is None})
        blocks = [(page.offsets.shape[2], page.block[0] * page.block_row_bytes) for page in encoded.values()]
        self._cache = BlockCache(
            row_bytes=max((across * nbytes for across, nbytes in blocks), default=0),
            block_bytes=max((nbytes for _, nbytes in blocks), default=0),
        )

    def hold_at_most(self, budget_bytes: int) -> int:
        """Bound the decoded bytes kept between calls; returns the bound in force. Uncompressed pages keep none."""
        return self._cache.hold_at_most(budget_bytes) if self._straight else 0

    def expect(self, header: ImageHeader, spans: Sequence[Sequence[Span]], planes: Mapping[int, Place]) -> Schedule:
        """Announce the regions that will be read: all combinations of these (start, stop) along the image's axes.

        planes : the place of each page, by its index, along the axes before Y
        """

        def schedule(page: Page) -> Schedule:
            sizes = {"Y": page.block[0], "X": self.at_once(page) * page.block[1], "S": header.shape[-1]}
            return Schedule(spans, [sizes.get(letter, 1) for letter in header.axes], header.shape)

        kinds = {(page.block, self.at_once(page)): page for page in self._pages.values()}
        schedules = {kind: schedule(page) for kind, page in kinds.items()}

        def found(key: Place) -> tuple[Schedule, Place]:
            page = self._pages[key[0]]
            return schedules[page.block, self.at_once(page)], (*planes[page.index], *key[2:], 0)[: len(header.axes)]

        def uses(key: Place) -> int:
            schedule, block = found(key)
            return schedule.uses(block)

        def next_use(key: Place, after: Place) -> Place | None:
            schedule, block = found(key)
            return schedule.next_use(block, after)

        self._cache.expect(uses, next_use)
        return next(iter(schedules.values()))

    def begin(self, at: Place) -> None:
        """A read of this place in the schedule begins."""
        self._cache.begin(at)

    def use(
        self, page: Page, place: Place, look: Callable[[NDArray[Any]], bool], at: Place, *, wait: bool
    ) -> bool | None:
        """What `look` returns for the samples (rows, columns, samples; read-only) of the block at `place`.

        at : the place of the read in the schedule

        None if another thread is decoding it and `wait` is False. InputError if it does not decode.
        """

        at_once = self.at_once(page)

        def decode(memory: NDArray[np.uint8]) -> NDArray[Any]:
            return (self._decode if at_once == 1 else self._decode_tiles)(page, memory, *place)

        return self._cache.use((page.index, *place), at_once * page.block_bytes, decode, look, at=at, wait=wait)

    def lacks(self, page: Page, place: Place) -> bool:
        """Whether the block at `place` has to be decoded."""
        return self._cache.lacks((page.index, *place))

    def at_once(self, page: Page) -> int:
        """How many neighbouring tiles of a row are one block here, whose number takes the place of theirs."""
        return self._at_once.get(page.index, 1)

    def _decode_tiles(self, page: Page, memory: NDArray[np.uint8], plane: int, down: int, group: int) -> NDArray[Any]:
        """Several tiles side by side, with few calls for all of them."""
        first = group * self.at_once(page)
        numbers = range(first, min(first + self.at_once(page), page.offsets.shape[2]))
        shape = (len(numbers), *page.block, page.block_samples)
        nbytes = len(numbers) * page.block_bytes
        tiles = self._straight_tiles(page, plane, down, numbers, scratch("samples", nbytes))
        if tiles is None:  # one by one, for the message that names the tile
            tiles = np.zeros(shape, page.dtype)
            for tile, across in zip(tiles, numbers, strict=True):
                if page.offsets[plane, down, across]:
                    block = self._decode(page, np.empty(page.block_bytes, np.uint8), plane, down, across)
                    tile[: block.shape[0], : block.shape[1]] = block
        beside: NDArray[Any] = memory[:nbytes].view(page.dtype).reshape(shape[1], shape[0], *shape[2:])
        beside[...] = tiles.reshape(shape).transpose(1, 0, 2, 3)
        return beside.reshape(shape[1], -1, shape[3])

    def _straight_tiles(
        self, page: Page, plane: int, down: int, numbers: range, memory: NDArray[np.uint8]
    ) -> NDArray[Any] | None:
        """The tiles one below the other, in `memory`; None if one is not stored or does not decode."""
        offsets = page.offsets[plane, down, numbers.start : numbers.stop]
        counts = page.byte_counts[plane, down, numbers.start : numbers.stop]
        straight, ends = self._straight[page.index], np.cumsum(counts)
        if straight is None or not offsets.all():
            return None
        data, starts = scratch("encoded", int(ends[-1])), [0, *ends.tolist()]
        parts = [data[a:b] for a, b in itertools.pairwise(starts)]
        if np.array_equal(offsets - offsets[0], starts[:-1]):
            found = [self._file.read_some(int(offsets[0]), data.data) - len(data)]
        else:
            found = [
                self._file.read_some(int(at), part.data) - len(part) for at, part in zip(offsets, parts, strict=True)
            ]
        return None if any(found) else straight.decoded(parts, memory, page.block[1])

    def _decode(self, page: Page, memory: NDArray[np.uint8], plane: int, down: int, across: int) -> NDArray[Any]:
        grid = page.offsets.shape
        start, nbytes = page.offsets[plane, down, across], int(page.byte_counts[plane, down, across])
        data = scratch("encoded", nbytes)
        segment = (plane * grid[1] + down) * grid[2] + across
        if self._file.read_some(start, data.data) < nbytes:
            raise InputError(f"{self._where(page, segment)} is cut off; the file shrank while it was read, run again")
        straight = self._straight[page.index]
        if straight is not None:
            rows = page.block[0] if page.tiled else min(page.block[0], page.shape[0] - down * page.block[0])
            block = straight.decoded([data], memory[: rows * page.block_row_bytes], page.block[1])
            if block is not None:
                return block
        return self._by_tifffile(page, data.tobytes(), segment, down, across)

    def _where(self, page: Page, segment: int) -> str:
        return f"{self._file.path}: page {page.index}, {'tile' if page.tiled else 'strip'} {segment}"

    def _by_tifffile(self, page: Page, data: bytes, segment: int, down: int, across: int) -> NDArray[Any]:
        where, coding = self._where(page, segment), _coding(page)
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


@dataclass(frozen=True)
class _Straight:
    """How blocks are decoded without tifffile.

    decode    : a function of imagecodecs, from bytes to bytes
    dtype     : as stored
    samples   : per pixel
    predictor : 1: none, 2: differences of whole numbers, 3: differences of the bytes of floats
    """

    decode: Callable[..., Any]
    dtype: np.dtype[Any]
    samples: int
    predictor: int

    def decoded(
        self, encoded: Sequence[NDArray[np.uint8]], memory: NDArray[np.uint8], columns: int
    ) -> NDArray[Any] | None:
        """Blocks of one size, one below the other (rows, columns, samples), which fill `memory`; None if one does not
        decode."""
        import imagecodecs

        room = scratch("predicted", len(memory)) if self.predictor == _OF_FLOATS else memory
        try:
            size = len(memory) // len(encoded)
            for number, data in enumerate(encoded):
                if len(self.decode(data, out=room[number * size : (number + 1) * size])) != size:
                    return None
        except (RuntimeError, ValueError):
            return None
        block: Any = room.view(self.dtype).reshape(-1, columns, self.samples)
        if self.predictor == _OF_FLOATS:
            into: Any = memory.view(self.dtype).reshape(block.shape)
            block = imagecodecs.floatpred_decode(block, axis=-2, out=into)
        if not self.dtype.isnative:
            block = block.byteswap(inplace=True).view(self.dtype.newbyteorder("="))
        if self.predictor == _OF_INTEGERS:
            imagecodecs.delta_decode(block, axis=-2, out=block)
        return cast("NDArray[Any]", block)


def _tiles_at_once(page: Page) -> int:
    """Each call of a codec or of NumPy gives up the interpreter's lock; among many busy threads it takes about 40 µs to
    get it back, as much as 16 cores take for a tile."""
    if not page.tiled or len(os.sched_getaffinity(0)) < _MANY_CORES:
        return 1
    return max(min(_AT_ONCE_BYTES // page.block_bytes, int(page.offsets.shape[2])), 1)


def _straight(page: Page) -> _Straight | None:
    """None for what only tifffile decodes: images, reversed bits, unusual predictors."""
    name = _STRAIGHT.get(COMPRESSIONS[page.compression])
    if name is None or page.fill_order != 1 or page.predictor not in _PREDICTORS[page.dtype.kind]:
        return None
    import imagecodecs

    return _Straight(getattr(imagecodecs, name), page.stored_dtype, page.block_samples, page.predictor)


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


def _coding(page: Page) -> tuple[object, ...]:
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
            pages = {coding: tiff.pages[page.index] for coding, page in encoded.items()}
            levels = {coding: encoded[coding].sub_ifd for coding in encoded}
            return {
                coding: (page if levels[coding] is None else page.pages[levels[coding]]).decode
                for coding, page in pages.items()
            }
    except MemoryError:
        raise
    except Exception as exc:
        # tifffile documents TiffFileError, but damaged tags raise many other errors.
        raise InputError(f"{path}: its compressed pages cannot be read ({_words(exc)}); export the file again") from exc


def _words(exc: Exception) -> str:
    """A foreign error's text on one short line."""
    return " ".join(f"{type(exc).__name__} {exc}".split())[:160]
