"""Writing a TIFF: uncompressed strips, every directory before the samples.

All positions are fixed when the file is created, so any thread stores regions in any order. The directories are written
here rather than by tifffile, which puts those of later pages after the samples of earlier ones and learns its strips
only as it writes them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.image.base import ImageHeader, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.image.tiff.description import description, further_tags, page_axes, resolution_tags
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
_SAMPLE_FORMATS = {"b": 1, "u": 1, "i": 2, "f": 3}
_OF_FIRST_PAGE = {Tag.IMAGE_DESCRIPTION, Tag.IJ_METADATA, Tag.IJ_METADATA_BYTE_COUNTS}
_SHORT, _LONG, _RATIONAL, _ASCII, _UNDEFINED, _LONG8 = 3, 4, 5, 2, 7, 16
_FORMATS = {_SHORT: "H", _LONG: "I", _LONG8: "Q"}


class TiffWriter(PositionalWriter):
    """Writes strips of a TIFF or, past 4 GiB or with the suffix .btf or .tf8, a BigTIFF."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening) -> None:
        layout = Layout.of(header, path)
        self._order = layout.order
        shape = tuple(header.shape[axis] for axis in self._order)
        samples = ContiguousSamples(shape=shape, dtype=header.dtype.newbyteorder("<"), offset=layout.offset(0))
        super().__init__(path, header, opening, samples=samples, head=layout.head())

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        start, stop = (tuple(ends[axis] for axis in self._order) for ends in (region.start, region.stop))
        stored = np.ascontiguousarray(samples.transpose(self._order))
        self._samples.write(self._partial, Region(start, stop), stored)


@dataclass(frozen=True)
class _Field:
    """One tag of a directory; `value` as encoded in the file."""

    tag: Tag
    kind: int
    count: int
    value: bytes


class Layout:
    """The file's layout: start and shared values, one directory and block table for each plane, the samples.

    With `tiling`, the samples are encoded tiles, whose offsets and lengths the tables get once they are known.
    """

    def __init__(self, header: ImageHeader, path: Path, *, big: bool, tiling: Tiling | None = None) -> None:
        sizes = dict(zip(header.axes, header.shape, strict=True))
        self.big, self._tiling = big, tiling
        pages = page_axes(header, path)
        # The header's axes in the order of the file.
        self.order = tuple(header.axes.index(letter) for letter in pages + header.axes[len(pages) :])
        self.depth, self.samples = math.prod(header.planes), header.samples_per_pixel
        self.rows, self.columns = sizes["Y"], sizes["X"]
        self._row_bytes = self.columns * self.samples * header.dtype.itemsize
        self._strip_rows = min(self.rows, max(1, _STRIP_BYTES // self._row_bytes))
        self._blocks = -(-self.rows // self._strip_rows) if tiling is None else math.prod(tiling.grid(header))
        self._inline_bytes = 8 if big else 4
        self._shared = bytearray()
        self._shared_at = 16 if big else 8
        # All directories share the longer values, which are stored once.
        self._fields = [self._field(field) for field in self._described(header, path)]
        self._shared += bytes(-len(self._shared) % 8)
        self._directories_at = self._shared_at + len(self._shared)
        tables = 1 if tiling is None else 2
        tags = len(self._fields) + tables
        entries = (8 + 20 * tags + 8) if big else (2 + 12 * tags + 4)
        self._table_at = entries + -entries % 8
        table = tables * self._blocks * self._inline_bytes if self._blocks > 1 else 0
        self._stride = self._table_at + table + -table % 8
        end = self._directories_at + self.depth * self._stride
        self._samples_at = end + -end % _ALIGNMENT_BYTES
        most = self.rows * self._row_bytes if tiling is None else self._blocks * tiling.slot_bytes(header)
        self._end = self._samples_at + self.depth * most

    @classmethod
    def of(cls, header: ImageHeader, path: Path, tiling: Tiling | None = None) -> Layout:
        classic = cls(header, path, big=False, tiling=tiling)
        if classic._end > _CLASSIC_LIMIT_BYTES or path.suffix.lower() in BIG_SUFFIXES:
            return cls(header, path, big=True, tiling=tiling)
        return classic

    @property
    def head_bytes(self) -> int:
        """Bytes before the samples."""
        return self._samples_at

    def offset(self, plane: int) -> int:
        """The offset of a plane's samples; planes are contiguous."""
        return self._samples_at + plane * self.rows * self._row_bytes

    def head(self, tiles: NDArray[np.int64] | None = None) -> Iterator[bytes]:
        """Everything before the samples. `tiles`: offset and length of every tile, (planes, 2, tiles)."""
        yield self._start()
        for plane in range(self.depth):
            yield self._directory(
                plane, self._strip_tables(plane) if tiles is None else self._tile_tables(tiles[plane])
            )

    def _start(self) -> bytes:
        """The file's first bytes, up to the first directory."""
        if self.big:
            return struct.pack("<2sHHHQ", b"II", 43, 8, 0, self._directories_at) + self._shared
        return struct.pack("<2sHI", b"II", 42, self._directories_at) + self._shared

    def _strip_tables(self, plane: int) -> dict[Tag, NDArray[Any]]:
        firsts = np.arange(self._blocks, dtype=np.uint64) * np.uint64(self._strip_rows * self._row_bytes)
        return {Tag.STRIP_OFFSETS: firsts + np.uint64(self.offset(plane))}

    def _tile_tables(self, tiles: NDArray[np.int64]) -> dict[Tag, NDArray[Any]]:
        return {Tag.TILE_OFFSETS: tiles[0], Tag.TILE_BYTE_COUNTS: tiles[1]}

    def _directory(self, plane: int, tables: Mapping[Tag, NDArray[Any]]) -> bytes:
        """One plane's directory, then its tables of blocks."""
        here = self._directories_at + plane * self._stride
        following = here + self._stride if plane + 1 < self.depth else 0
        fields, stored = [field for field in self._fields if plane == 0 or field.tag not in _OF_FIRST_PAGE], b""
        for tag, numbers in tables.items():
            table = numbers.astype("<u8" if self.big else "<u4").tobytes()
            inline = table if self._blocks == 1 else self._pointer(here + self._table_at + len(stored))
            fields.append(_Field(tag, _LONG8 if self.big else _LONG, self._blocks, inline))
            stored += table if self._blocks > 1 else b""
        fields.sort(key=lambda field: field.tag)
        form = "<HHQ8s" if self.big else "<HHI4s"
        packed = [struct.pack(form, field.tag, field.kind, field.count, field.value) for field in fields]
        head, tail = ("<Q", "<Q") if self.big else ("<H", "<I")
        entries = struct.pack(head, len(fields)) + b"".join(packed) + struct.pack(tail, following)
        return (entries.ljust(self._table_at, b"\0") + stored).ljust(self._stride, b"\0")

    def _pointer(self, offset: int) -> bytes:
        return struct.pack("<Q" if self.big else "<I", offset)

    def _field(self, field: _Field) -> _Field:
        """The field with its value inline, or moved to the shared values."""
        if len(field.value) <= self._inline_bytes:
            return field
        self._shared += bytes(-len(self._shared) % 8)
        offset = self._shared_at + len(self._shared)
        self._shared += field.value
        return _Field(field.tag, field.kind, field.count, self._pointer(offset))

    def _described(self, header: ImageHeader, path: Path) -> list[_Field]:
        """Every tag but the tables of blocks."""
        photometric, extra = _colour(header.metadata, self.samples, header.dtype)
        bits = 1 if header.dtype.kind == "b" else 8 * header.dtype.itemsize
        described = [
            _numbers(Tag.IMAGE_WIDTH, _LONG, self.columns),
            _numbers(Tag.IMAGE_LENGTH, _LONG, self.rows),
            _numbers(Tag.BITS_PER_SAMPLE, _SHORT, *[bits] * self.samples),
            _numbers(Tag.PHOTOMETRIC_INTERPRETATION, _SHORT, photometric),
            _numbers(Tag.SAMPLES_PER_PIXEL, _SHORT, self.samples),
            _numbers(Tag.PLANAR_CONFIGURATION, _SHORT, 1),
            _Field(Tag.SOFTWARE, _ASCII, len(_SOFTWARE), _SOFTWARE),
            _numbers(Tag.SAMPLE_FORMAT, _SHORT, *[_SAMPLE_FORMATS[header.dtype.kind]] * self.samples),
            *(self._strips() if self._tiling is None else self._tiles(self._tiling, header)),
        ]
        text = description(header, path)
        if text:
            described.append(_Field(Tag.IMAGE_DESCRIPTION, _ASCII, len(text), text))
        if extra:
            described.append(_numbers(Tag.EXTRA_SAMPLES, _SHORT, *extra))
        sizes = resolution_tags(header, path)
        if sizes is not None:
            x, y, unit = sizes
            described.append(_Field(Tag.X_RESOLUTION, _RATIONAL, 1, struct.pack("<II", *x)))
            described.append(_Field(Tag.Y_RESOLUTION, _RATIONAL, 1, struct.pack("<II", *y)))
            described.append(_numbers(Tag.RESOLUTION_UNIT, _SHORT, unit))
        described += [_Field(Tag(tag), *field) for tag, field in further_tags(header, path).items()]
        return described + _carried(header.metadata)

    def _strips(self) -> list[_Field]:
        counts = np.full(self._blocks, self._strip_rows * self._row_bytes, np.int64)
        counts[-1] = (self.rows - (self._blocks - 1) * self._strip_rows) * self._row_bytes
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


def _carried(metadata: Mapping[str, Any]) -> list[_Field]:
    """Orientation and colour profile of the input."""
    fields = []
    if "orientation" in metadata:
        fields.append(_numbers(Tag.ORIENTATION, _SHORT, metadata["orientation"]))
    if "icc_profile" in metadata:
        profile = metadata["icc_profile"]
        fields.append(_Field(Tag.ICC_PROFILE, _UNDEFINED, len(profile), profile))
    return fields
