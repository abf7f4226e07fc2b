"""One TIFF page as its tags declare it, checked: samples, strips or tiles, and their positions in the file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import counted
from pipeline.formats.image.base import OF_COMPLEX, Part
from pipeline.formats.image.tiff.ifd import MAX_SEGMENTS, Directory, Tag

# (bits, SampleFormat) → dtype
_DTYPES = {(1, 1): "?", (8, 1): "u1", (16, 1): "u2", (32, 1): "u4", (64, 1): "u8"}
_DTYPES |= {(8, 2): "i1", (16, 2): "i2", (32, 2): "i4", (64, 2): "i8", (16, 3): "f2", (32, 3): "f4", (64, 3): "f8"}
_FORMATS = {1: "unsigned integer", 2: "signed integer", 3: "float", 5: "complex integer", 6: "complex"}
_COMPLEX = (5, 6)
_SUPPORTED = "integers of 1, 8, 16, 32 and 64 bits and floats of 16, 32 and 64 are: convert the file first"

UNCOMPRESSED = 1
JPEG = 7
LERC = 34887
# The schemes that tifffile decodes through imagecodecs and that can hold these samples.
COMPRESSIONS = {
    1: "none",
    5: "LZW",
    7: "JPEG",
    8: "deflate",
    32773: "PackBits",
    32946: "deflate",
    33003: "JPEG 2000",
    33004: "JPEG 2000",
    33005: "JPEG 2000",
    34712: "JPEG 2000",
    34887: "LERC",
    34892: "JPEG",
    34925: "LZMA",
    34926: "Zstandard",
    34927: "WebP",
    50000: "Zstandard",
    50001: "WebP",
    50002: "JPEG XL",
    52546: "JPEG XL",
}
_LOSSY_IMAGE_CODECS = {7, 34892}
# The schemes whose blocks are images with headers of their own, by imagecodecs' names.
IMAGE_CODECS = {"JPEG": "jpeg", "JPEG 2000": "jpeg2k", "JPEG XL": "jpegxl", "LERC": "lerc", "WebP": "webp"}
GRAY, RGB, YCBCR = 1, 2, 6
_PHOTOMETRICS = {0, GRAY, RGB, 5, 34892}  # white is zero, black is zero, RGB, inks, linear raw
_OTHER_PHOTOMETRICS = {3: "palette", 4: "mask", 6: "YCbCr", 8: "CIELab", 9: "ICCLab", 10: "ITULab", 32803: "mosaic"}
_REDUCED, _MASK = 1, 4  # bits of NewSubfileType
# The most bytes that one compressed byte decodes to (deflate's format bounds it, LZW's codes grow by one sample each, a
# PackBits pair repeats one byte 128 times): a header that declares more is wrong. Other schemes have no such bound.
_MOST_BYTES_PER_BYTE = {UNCOMPRESSED: 1, 5: 2000, 8: 1040, 32946: 1040, 32773: 64}
BlockPart = tuple[Part, Part]  # what a region has of a strip or tile, along rows and columns
PagePart = tuple[int, Part, Part]  # the same after its page's place in the region

MAX_DECODED_BYTES = 1 << 30  # of one compressed strip or tile


@dataclass(frozen=True, kw_only=True, eq=False)
class Page:
    """A page's samples and their storage.

    shape              : rows, columns, samples per pixel
    stored_dtype       : in the file's byte order; `dtype` is the same in native order
    separate           : every sample has its own strips or tiles (PlanarConfiguration 2)
    block              : rows and columns of a strip (then as wide as the image) or tile
    offsets, byte_counts : of every strip or tile, (planes, down, across); both 0: not stored, all samples zero
    sub_ifd            : number of the SubIFD of page `index` that this is, if it is one
    """

    index: int
    shape: tuple[int, int, int]
    stored_dtype: np.dtype[Any]
    separate: bool
    tiled: bool
    block: tuple[int, int]
    offsets: NDArray[np.int64]
    byte_counts: NDArray[np.int64]
    compression: int
    predictor: int
    fill_order: int
    photometric: int
    jpeg_tables: bytes | None
    sub_ifd: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stored_dtype.newbyteorder("=")

    @property
    def raw(self) -> bool:
        """Whether the file holds the samples unencoded, apart from their byte order."""
        return self.compression == UNCOMPRESSED and self.fill_order == 1 and self.dtype.kind != "b"

    @property
    def block_samples(self) -> int:
        """Samples per pixel within one strip or tile."""
        return 1 if self.separate else self.shape[2]

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one whole strip or tile, decoded."""
        return self.block[0] * self.block_row_bytes

    @cached_property
    def block_row_bytes(self) -> int:
        return self.block[1] * self.block_samples * self.dtype.itemsize

    @property
    def stored_row_bytes(self) -> int:
        """Bytes of a row of a strip or tile before compression: eight samples of one bit share a byte."""
        return -(-self.block_row_bytes // 8) if self.dtype.kind == "b" else self.block_row_bytes

    @property
    def pixels(self) -> tuple[int, int]:
        """Columns of a strip or tile, and samples of its pixels."""
        return self.block[1], self.block_samples

    def height(self, down: int) -> int:
        """Rows that a strip or tile holds, of those `down` from the top."""
        return self.block[0] if self.tiled else min(self.block[0], self.shape[0] - down * self.block[0])

    @property
    def plane_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2] * self.dtype.itemsize

    @property
    def one_run(self) -> bool:
        """Whether the whole page is contiguous in the file."""
        if not self.raw or self.tiled or self.separate or not self.offsets[0, 0, 0]:
            return False
        return bool(np.all(np.diff(self.offsets[0, :, 0]) == self.block[0] * self.block_row_bytes))

    def moved(self, planes: int) -> Self:
        """The page `planes` pages further on, in a stack whose first page alone has a directory."""
        return replace(
            self,
            index=self.index + planes,
            block=self.shape[:2],
            offsets=self.offsets[:, :1] + planes * self.plane_bytes,
            byte_counts=np.full((1, 1, 1), self.plane_bytes, np.int64),
        )


def is_beside_the_image(directory: Directory) -> bool:
    """Whether the page is a smaller copy (a pyramid's level, a thumbnail) or a mask of another."""
    return is_smaller_copy(directory) or bool(directory.number(Tag.NEW_SUBFILE_TYPE, 0) & _MASK)


def is_smaller_copy(directory: Directory) -> bool:
    """Whether the page declares itself to be one, and no mask."""
    kind = directory.number(Tag.NEW_SUBFILE_TYPE, 0)
    return not kind & _MASK and (bool(kind & _REDUCED) or directory.number(Tag.SUBFILE_TYPE, 1) == 2)


def samples_of(directory: Directory) -> tuple[tuple[int, int, int], np.dtype[Any]]:
    """Rows, columns and samples per pixel, and the dtype as stored. InputError if a tag is wrong or unsupported."""
    rows, columns = _size(directory, Tag.IMAGE_LENGTH), _size(directory, Tag.IMAGE_WIDTH)
    samples = directory.number(Tag.SAMPLES_PER_PIXEL, 1)
    if samples == 0:
        raise directory.fault(Tag.SAMPLES_PER_PIXEL, "is 0; the file is damaged, export it again")
    return (rows, columns, samples), _dtype(directory, samples)


def read_page(directory: Directory) -> Page:
    """Interpret one IFD. InputError if it is wrong, or holds unsupported samples."""
    shape, dtype = samples_of(directory)
    rows, columns, samples = shape
    if directory.number(Tag.IMAGE_DEPTH, 1) != 1:
        raise directory.fault(Tag.IMAGE_DEPTH, "volumes within one page are not supported; write one page a plane")
    compression = directory.number(Tag.COMPRESSION, UNCOMPRESSED)
    if compression not in COMPRESSIONS:
        raise directory.fault(Tag.COMPRESSION, f"scheme {compression} is not supported; use LZW, deflate or none")
    planar = directory.number(Tag.PLANAR_CONFIGURATION, 1)
    if planar not in (1, 2):
        raise directory.fault(Tag.PLANAR_CONFIGURATION, f"is {planar}, neither 1 nor 2; export the file again")
    tiled = Tag.TILE_WIDTH in directory
    tile = (_size(directory, Tag.TILE_LENGTH), _size(directory, Tag.TILE_WIDTH)) if tiled else None
    page = Page(
        index=directory.index,
        shape=shape,
        stored_dtype=dtype,
        separate=planar == 2 and samples > 1,
        tiled=tiled,
        block=tile or (min(rows, _size(directory, Tag.ROWS_PER_STRIP, rows)), columns),
        offsets=np.zeros((1, 1, 1), np.int64),
        byte_counts=np.zeros((1, 1, 1), np.int64),
        compression=compression,
        predictor=_predictor(directory, compression),
        fill_order=directory.number(Tag.FILL_ORDER, 1),
        photometric=_photometric(directory, compression, samples),
        jpeg_tables=(directory.blob(Tag.JPEG_TABLES) or None) if compression in _LOSSY_IMAGE_CODECS else None,
        sub_ifd=directory.sub_ifd,
    )
    return _with_segments(directory, page)


def _size(directory: Directory, tag: Tag, default: int | None = None) -> int:
    value = directory.number(tag, default)
    if not 1 <= value < 1 << 32:
        raise directory.fault(tag, f"is {value}; the file is damaged, export it again")
    return value


def _dtype(directory: Directory, samples: int) -> np.dtype[Any]:
    described = []
    for tag, default in ((Tag.BITS_PER_SAMPLE, 1), (Tag.SAMPLE_FORMAT, 1)):
        values = directory.all_numbers(tag, samples) or (default,)
        if len(set(values)) > 1:
            raise directory.fault(tag, f"differs between channels ({values}); store all channels alike")
        described.append(values[0])
    bits, sample_format = described
    code = _DTYPES.get((bits, sample_format))
    if code is None:
        kind = _FORMATS.get(sample_format, f"format {sample_format}")
        way_out = OF_COMPLEX if sample_format in _COMPLEX else _SUPPORTED
        raise directory.fault(Tag.BITS_PER_SAMPLE, f"{bits}-bit {kind} samples are not supported; {way_out}")
    return np.dtype(directory.encoding.order + code)


def _predictor(directory: Directory, compression: int) -> int:
    if compression in _LOSSY_IMAGE_CODECS:
        return 1
    predictor = directory.number(Tag.PREDICTOR, 1)
    if predictor not in (1, 2, 3) or (predictor != 1 and compression == UNCOMPRESSED):
        how = COMPRESSIONS[compression]
        raise directory.fault(Tag.PREDICTOR, f"{predictor} with compression {how} is not supported; export it again")
    return predictor


def _photometric(directory: Directory, compression: int, samples: int) -> int:
    """The photometric interpretation of the samples as read: the JPEG decoder turns YCbCr into RGB."""
    photometric = directory.number(Tag.PHOTOMETRIC_INTERPRETATION, 1)
    if photometric == YCBCR and compression == JPEG and samples == 3:
        return RGB
    if photometric not in _PHOTOMETRICS:
        name = _OTHER_PHOTOMETRICS.get(photometric, str(photometric))
        raise directory.fault(
            Tag.PHOTOMETRIC_INTERPRETATION, f"{name} samples are not supported; convert to grey or RGB first"
        )
    return photometric


def _with_segments(directory: Directory, page: Page) -> Page:
    """The page with the positions of its strips or tiles, each within the file."""
    offset_tag, count_tag = (
        (Tag.TILE_OFFSETS, Tag.TILE_BYTE_COUNTS) if page.tiled else (Tag.STRIP_OFFSETS, Tag.STRIP_BYTE_COUNTS)
    )
    rows, columns, samples = page.shape
    grid = (samples if page.separate else 1, -(-rows // page.block[0]), -(-columns // page.block[1]))
    segments = grid[0] * grid[1] * grid[2]
    if segments > MAX_SEGMENTS:
        raise directory.fault(
            offset_tag, f"{segments:,} strips or tiles, more than {MAX_SEGMENTS:,}; write larger tiles"
        )
    block_bytes = page.block[0] * page.block_row_bytes
    if page.compression != UNCOMPRESSED and block_bytes > MAX_DECODED_BYTES:
        raise directory.fault(
            count_tag, f"one compressed strip or tile of {block_bytes:,} bytes; write tiles or shorter strips"
        )
    offsets = directory.numbers(offset_tag, segments).reshape(grid)
    needed = _needed_bytes(page, grid, directory.file_bytes)
    if count_tag in directory:
        counts = directory.numbers(count_tag, segments).reshape(grid)
    elif page.compression == UNCOMPRESSED:  # old writers left the counts out
        counts = needed
    else:
        raise directory.fault(count_tag, "is missing; the file is damaged, export it again")
    placed = replace(page, offsets=offsets, byte_counts=counts)
    _check_places(directory, placed, needed)
    return placed


def _needed_bytes(page: Page, grid: tuple[int, int, int], file_bytes: int) -> NDArray[np.int64]:
    """The smallest number of bytes that can store each strip or tile."""
    at_most = _MOST_BYTES_PER_BYTE.get(page.compression)
    if at_most is None:
        return np.ones(grid, np.int64)
    last_rows = page.block[0] if page.tiled else page.shape[0] - (grid[1] - 1) * page.block[0]
    # A wrong size may exceed 2⁶³; anything past the file's end is the same fault.
    needed = np.full(grid, min(-(-page.block[0] * page.stored_row_bytes // at_most), file_bytes + 1), np.int64)
    needed[:, -1] = min(-(-last_rows * page.stored_row_bytes // at_most), file_bytes + 1)
    return needed


def _check_places(directory: Directory, page: Page, needed: NDArray[np.int64]) -> None:
    """InputError for the first segment that is too short or lies outside of the file."""
    offsets, counts = page.offsets, page.byte_counts
    stored = (offsets != 0) | (counts != 0)
    short = stored & (counts < needed)
    # The size of an uncompressed strip counts, not its byte count: some writers round counts up past the file's end.
    lengths = needed if page.compression == UNCOMPRESSED else counts
    outside = stored & ((offsets == 0) | (offsets > directory.file_bytes) | (lengths > directory.file_bytes - offsets))
    wrong = np.flatnonzero(short | outside)
    if wrong.size == 0:
        return
    segment = int(wrong[0])
    kind, tag = ("tile", Tag.TILE_OFFSETS) if page.tiled else ("strip", Tag.STRIP_OFFSETS)
    start, count = int(offsets.flat[segment]), int(counts.flat[segment])
    if short.flat[segment]:
        raise directory.fault(
            tag, f"{kind} {segment} has {counted(count, 'byte')}, too few; the file is damaged, export it again"
        )
    raise directory.fault(
        tag,
        f"{kind} {segment} of {counted(count, 'byte')} at {start:,} is not within the file of {directory.file_bytes:,} "
        "bytes; truncated or damaged: copy or export it again",
    )
