"""Writing a TIFF: uncompressed strips, every directory before the samples.

All positions are fixed when the file is created, so any thread stores regions in any order. The directories are written
here rather than by tifffile, which puts those of later pages after the samples of earlier ones and learns its strips
only as it writes them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import ImageHeader, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.image.pyramid import at_level
from pipeline.formats.image.tiff.description import (
    description,
    further_tags,
    is_imagej,
    is_ome,
    page_axes,
    resolution_tags,
)
from pipeline.formats.image.tiff.ifd import Tag
from pipeline.formats.image.tiff.page import RGB
from pipeline.formats.image.tiff.tiling import Tiling
from pipeline.storage.partial import Opening

BIG_SUFFIXES = (".btf", ".tf8")
_CLASSIC_LIMIT_BYTES = (1 << 32) - 1
# Other readers load whole strips: short enough for their caches, long enough that the offset tables stay small.
_STRIP_BYTES = 128 << 10
_ALIGNMENT_BYTES = 4096
_SOFTWARE = b"Millrace\0"
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _INKS = 0, 1, 5
_COLOURS = {_WHITE_IS_ZERO: 1, _BLACK_IS_ZERO: 1, RGB: 3, _INKS: 4}  # samples of the colour itself
_UNSPECIFIED, _STRAIGHT_ALPHA = 0, 2  # ExtraSamples
_REDUCED = 1  # NewSubfileType: a smaller copy of another page
_SAMPLE_FORMATS = {"b": 1, "u": 1, "i": 2, "f": 3}
_OF_FIRST_PAGE = {Tag.IMAGE_DESCRIPTION, Tag.IJ_METADATA, Tag.IJ_METADATA_BYTE_COUNTS}
_SHORT, _LONG, _RATIONAL, _ASCII, _UNDEFINED, _LONG8, _IFD, _IFD8 = 3, 4, 5, 2, 7, 16, 13, 18
_FORMATS = {_SHORT: "H", _LONG: "I", _LONG8: "Q"}


class TiffWriter(PositionalWriter):
    """Writes strips of a TIFF or, past 4 GiB or with the suffix .btf or .tf8, a BigTIFF."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening) -> None:
        layout = Layout.of(header, path)
        self._order = layout.order
        shape = tuple(header.shape[axis] for axis in self._order)
        samples = ContiguousSamples(shape=shape, dtype=header.dtype.newbyteorder("<"), offset=layout.head_bytes)
        super().__init__(path, header, opening, samples=samples, head=layout.head())

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        start, stop = (tuple(ends[axis] for axis in self._order) for ends in (region.start, region.stop))
        stored = np.ascontiguousarray(samples.transpose(self._order))
        self._samples.write(self._partial, Region(start, stop), stored)


@dataclass(frozen=True)
class _Field:
    """One tag of a directory, a plain number if it is private; `value` as encoded in the file."""

    tag: int
    kind: int
    count: int
    value: bytes

    @property
    def is_of_every_page(self) -> bool:
        return isinstance(self.tag, Tag) and self.tag not in _OF_FIRST_PAGE


class Layout:
    """The file's layout: start; for each level its shared values, and a directory and block table for each plane; the
    samples.

    With `tiling`, the samples are encoded tiles, whose offsets and lengths the tables get once they are known. Levels
    of one image are smaller copies after it, as GDAL reads and writes them. Levels of several pages, and those that
    OME-TIFF and ImageJ read, are SubIFDs of their page, so that the chain has the pages alone.
    """

    def __init__(
        self, header: ImageHeader, path: Path, *, big: bool, tiling: Tiling | None = None, levels: int = 1
    ) -> None:
        pages = page_axes(header, path)
        # The header's axes in the order of the file.
        self.order = tuple(header.axes.index(letter) for letter in pages + header.axes[len(pages) :])
        self.depth, self.big = math.prod(header.planes), big
        self._hangs = levels > 1 and (is_ome(header, path) or is_imagej(header) or self.depth > 1)
        self._begin = end = 16 if big else 8
        self._levels: list[_Directories] = []
        for level in range(levels):
            found = _Directories(
                header, path, begin=end, big=big, tiling=tiling, level=level,
                hanging=levels - 1 if self._hangs and level == 0 else 0,
            )  # fmt: skip
            self._levels.append(found)
            end = found.end
        self._samples_at = end + -end % _ALIGNMENT_BYTES
        self._end = self._samples_at + self.depth * sum(level.most_bytes for level in self._levels)

    @classmethod
    def of(cls, header: ImageHeader, path: Path, tiling: Tiling | None = None, levels: int = 1) -> Layout:
        classic = cls(header, path, big=False, tiling=tiling, levels=levels)
        if classic._end > _CLASSIC_LIMIT_BYTES or path.suffix.lower() in BIG_SUFFIXES:
            return cls(header, path, big=True, tiling=tiling, levels=levels)
        return classic

    @property
    def head_bytes(self) -> int:
        """Bytes before the samples."""
        return self._samples_at

    def head(self, tiles: Sequence[NDArray[np.int64]] | None = None) -> Iterator[bytes]:
        """Everything before the samples. `tiles`: of each level, (planes, offset and length, tiles)."""
        order = struct.pack("<2sHHHQ", b"II", 43, 8, 0, self._at(0, 0))
        yield order if self.big else struct.pack("<2sHI", b"II", 42, self._at(0, 0))
        for number, level in enumerate(self._levels):
            yield level.shared
            for plane in range(self.depth):
                if tiles is None:
                    tables = level.strip_tables(self._samples_at, plane)
                else:
                    tables = dict(zip((Tag.TILE_OFFSETS, Tag.TILE_BYTE_COUNTS), tiles[number][plane], strict=True))
                if number == 0 and self._hangs:
                    tables[Tag.SUB_IFDS] = np.array(
                        [self._at(further, plane) for further in range(1, len(self._levels))]
                    )
                yield level.directory(plane, tables, self._following(number, plane))

    def _at(self, level: int, plane: int) -> int:
        return self._levels[level].at(plane)

    def _following(self, level: int, plane: int) -> int:
        """The offset of the next directory in the chain; 0: none."""
        if self._hangs or len(self._levels) == 1:
            return self._at(0, plane + 1) if level == 0 and plane + 1 < self.depth else 0
        return self._at(level + 1, 0) if level + 1 < len(self._levels) else 0


class _Directories:
    """The values that the directories of a level share, and its directories, one for each plane."""

    def __init__(
        self, header: ImageHeader, path: Path, *, begin: int, big: bool, tiling: Tiling | None, level: int, hanging: int
    ) -> None:
        """`header`: of the image; `begin`: their offset; `hanging`: how many SubIFDs each directory has."""
        self._level, header = level, at_level(header, level) if level else header
        sizes = dict(zip(header.axes, header.shape, strict=True))
        self._big, self._tiling, self._samples = big, tiling, header.samples_per_pixel
        self._depth = math.prod(header.planes)
        self._rows, self._columns = sizes["Y"], sizes["X"]
        self._row_bytes = self._columns * self._samples * header.dtype.itemsize
        self._strip_rows = min(self._rows, max(1, _STRIP_BYTES // self._row_bytes))
        self._blocks = -(-self._rows // self._strip_rows) if tiling is None else math.prod(tiling.grid(header))
        self._inline_bytes = 8 if big else 4
        self._shared = bytearray()
        self._begin = begin
        # All directories share the longer values, which are stored once.
        self._fields = [self._field(field) for field in self._described(header, path)]
        self._shared += bytes(-len(self._shared) % 8)
        self._directories_at = begin + len(self._shared)
        tables = [self._blocks] * (1 if tiling is None else 2) + [hanging] * (hanging > 0)
        tags = len(self._fields) + len(tables)
        entries = (8 + 20 * tags + 8) if big else (2 + 12 * tags + 4)
        self._table_at = entries + -entries % 8
        table = sum(length * self._inline_bytes for length in tables if length > 1)
        self._stride = self._table_at + table + -table % 8
        self.end = self._directories_at + self._depth * self._stride
        # Of a plane's samples, or of its tiles if none shrinks.
        self.most_bytes = self._rows * self._row_bytes if tiling is None else self._blocks * tiling.slot_bytes(header)

    @property
    def shared(self) -> bytes:
        return bytes(self._shared)

    def at(self, plane: int) -> int:
        return self._directories_at + plane * self._stride

    def strip_tables(self, samples_at: int, plane: int) -> dict[Tag, NDArray[Any]]:
        firsts = np.arange(self._blocks, dtype=np.uint64) * np.uint64(self._strip_rows * self._row_bytes)
        return {Tag.STRIP_OFFSETS: firsts + np.uint64(samples_at + plane * self._rows * self._row_bytes)}

    def directory(self, plane: int, tables: Mapping[Tag, NDArray[Any]], following: int) -> bytes:
        """One plane's directory, then its tables of offsets and lengths."""
        fields, stored = [field for field in self._fields if plane == 0 or field.is_of_every_page], b""
        for tag, numbers in tables.items():
            table = numbers.astype("<u8" if self._big else "<u4").tobytes()
            inline = table if len(numbers) == 1 else self._pointer(self.at(plane) + self._table_at + len(stored))
            kinds = (_IFD, _IFD8) if tag == Tag.SUB_IFDS else (_LONG, _LONG8)
            fields.append(_Field(tag, kinds[self._big], len(numbers), inline))
            stored += table if len(numbers) > 1 else b""
        fields.sort(key=lambda field: field.tag)
        form = "<HHQ8s" if self._big else "<HHI4s"
        packed = [struct.pack(form, field.tag, field.kind, field.count, field.value) for field in fields]
        head, tail = ("<Q", "<Q") if self._big else ("<H", "<I")
        entries = struct.pack(head, len(fields)) + b"".join(packed) + struct.pack(tail, following)
        return (entries.ljust(self._table_at, b"\0") + stored).ljust(self._stride, b"\0")

    def _pointer(self, offset: int) -> bytes:
        return struct.pack("<Q" if self._big else "<I", offset)

    def _field(self, field: _Field) -> _Field:
        """The field with its value inline, or moved to the shared values."""
        if len(field.value) <= self._inline_bytes:
            return field
        self._shared += bytes(-len(self._shared) % 8)
        offset = self._begin + len(self._shared)
        self._shared += field.value
        return _Field(field.tag, field.kind, field.count, self._pointer(offset))

    def _described(self, header: ImageHeader, path: Path) -> list[_Field]:
        """Every tag except the tables of offsets; for further levels, only the tags needed to decode them."""
        photometric, extra = _colour(header.metadata, self._samples, header.dtype)
        bits = 1 if header.dtype.kind == "b" else 8 * header.dtype.itemsize
        described = [
            _numbers(Tag.IMAGE_WIDTH, _LONG, self._columns),
            _numbers(Tag.IMAGE_LENGTH, _LONG, self._rows),
            _numbers(Tag.BITS_PER_SAMPLE, _SHORT, *[bits] * self._samples),
            _numbers(Tag.PHOTOMETRIC_INTERPRETATION, _SHORT, photometric),
            _numbers(Tag.SAMPLES_PER_PIXEL, _SHORT, self._samples),
            _numbers(Tag.PLANAR_CONFIGURATION, _SHORT, 1),
            _Field(Tag.SOFTWARE, _ASCII, len(_SOFTWARE), _SOFTWARE),
            _numbers(Tag.SAMPLE_FORMAT, _SHORT, *[_SAMPLE_FORMATS[header.dtype.kind]] * self._samples),
            *(self._strips() if self._tiling is None else self._tiles(self._tiling, header)),
        ]
        if extra:
            described.append(_numbers(Tag.EXTRA_SAMPLES, _SHORT, *extra))
        if "orientation" in header.metadata:
            described.append(_numbers(Tag.ORIENTATION, _SHORT, header.metadata["orientation"]))
        private = header.notes.private.values
        further = {
            tag: _Field(tag if tag in private else Tag(tag), *field)
            for tag, field in further_tags(header, path).items()
        }
        if self._level:
            nodata = [further[Tag.GDAL_NODATA]] if Tag.GDAL_NODATA in further else []
            return [_numbers(Tag.NEW_SUBFILE_TYPE, _LONG, _REDUCED), *described, *nodata]
        text = description(header, path)
        if text:
            described.append(_Field(Tag.IMAGE_DESCRIPTION, _ASCII, len(text), text))
        sizes = resolution_tags(header, path)
        if sizes is not None:
            x, y, unit = sizes
            described.append(_Field(Tag.X_RESOLUTION, _RATIONAL, 1, struct.pack("<II", *x)))
            described.append(_Field(Tag.Y_RESOLUTION, _RATIONAL, 1, struct.pack("<II", *y)))
            described.append(_numbers(Tag.RESOLUTION_UNIT, _SHORT, unit))
        if "icc_profile" in header.metadata:
            profile = header.metadata["icc_profile"]
            described.append(_Field(Tag.ICC_PROFILE, _UNDEFINED, len(profile), profile))
        return [*described, *further.values()]

    def _strips(self) -> list[_Field]:
        counts = np.full(self._blocks, self._strip_rows * self._row_bytes, np.int64)
        counts[-1] = (self._rows - (self._blocks - 1) * self._strip_rows) * self._row_bytes
        # A single row may exceed 4 GiB.
        kind = _LONG if counts.max() < 1 << 32 else _LONG8
        packed = counts.astype("<u4" if kind == _LONG else "<u8").tobytes()
        return [
            _numbers(Tag.COMPRESSION, _SHORT, 1),
            _numbers(Tag.ROWS_PER_STRIP, _LONG, self._strip_rows),
            _Field(Tag.STRIP_BYTE_COUNTS, kind, self._blocks, packed),
        ]

    def _tiles(self, tiling: Tiling, header: ImageHeader) -> list[_Field]:
        return [
            _numbers(Tag.COMPRESSION, _SHORT, tiling.scheme),
            _numbers(Tag.PREDICTOR, _SHORT, tiling.predictor(header)),
            _numbers(Tag.TILE_LENGTH, _LONG, tiling.rows),
            _numbers(Tag.TILE_WIDTH, _LONG, tiling.columns),
        ]


def _numbers(tag: Tag, kind: int, *values: int) -> _Field:
    return _Field(tag, kind, len(values), struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values))


def _colour(metadata: Mapping[str, Any], channels: int, dtype: np.dtype[Any]) -> tuple[int, tuple[int, ...]]:
    """PhotometricInterpretation and ExtraSamples: the input's if they fit, else what viewers expect of the channels.

    Grey + alpha and RGB + alpha are assumed only in 8 and 16 bits; otherwise further channels have no meaning.
    """
    carried, extra = metadata.get("photometric"), tuple(metadata.get("extra_samples", ()))
    if carried in _COLOURS and _COLOURS[carried] + len(extra) == channels:
        return int(carried), extra
    colours = 3 if channels in (3, 4) else 1
    alpha = channels - colours == 1 and dtype.name in ("uint8", "uint16")
    if channels == 4 and not alpha:
        colours = 1
    further = (_STRAIGHT_ALPHA,) if alpha else (_UNSPECIFIED,) * (channels - colours)
    return RGB if colours == 3 else _BLACK_IS_ZERO, further
