"""TIFF's image file directories (IFDs): found, read and checked, without touching samples.

Every offset, count and size is compared with the file before anything of that size is allocated, so that a wrong header
raises an InputError that names the page and the tag. (tifffile logs such faults and continues with defaults.)

Sources: TIFF 6.0 (Aldus, 1992), sections 2, 8, 15; BigTIFF (Aware Systems, 2007).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.storage.positional import PositionalFile

MAX_PAGES = 1 << 20
MAX_ENTRIES = 4096  # tags of one page; real files have about twenty
MAX_SEGMENTS = 1 << 26  # strips or tiles of one page
MAX_SUB_IFDS = 64  # of one page
MAX_TEXT_BYTES = 1 << 26  # a description, a colour profile; OME-XML of thousands of planes has some MiB
_WINDOW_BYTES = 1024  # an IFD and the small values behind it, usually in one read


_TITLES = {
    "XMP": "XMP",
    "SUB_IFDS": "SubIFDs",
    "ICC_PROFILE": "ICCProfile",
    "JPEG_TABLES": "JPEGTables",
    "GDAL_METADATA": "GDAL_METADATA",
    "GDAL_NODATA": "GDAL_NODATA",
    "IJ_METADATA": "IJMetadata",
    "IJ_METADATA_BYTE_COUNTS": "IJMetadataByteCounts",
}


class Tag(IntEnum):
    """The tags that Millrace reads or writes."""

    NEW_SUBFILE_TYPE = 254
    SUBFILE_TYPE = 255
    IMAGE_WIDTH = 256
    IMAGE_LENGTH = 257
    BITS_PER_SAMPLE = 258
    COMPRESSION = 259
    PHOTOMETRIC_INTERPRETATION = 262
    FILL_ORDER = 266
    DOCUMENT_NAME = 269
    IMAGE_DESCRIPTION = 270
    MAKE = 271
    MODEL = 272
    STRIP_OFFSETS = 273
    ORIENTATION = 274
    SAMPLES_PER_PIXEL = 277
    ROWS_PER_STRIP = 278
    STRIP_BYTE_COUNTS = 279
    X_RESOLUTION = 282
    Y_RESOLUTION = 283
    PLANAR_CONFIGURATION = 284
    RESOLUTION_UNIT = 296
    SOFTWARE = 305
    DATE_TIME = 306
    ARTIST = 315
    HOST_COMPUTER = 316
    PREDICTOR = 317
    TILE_WIDTH = 322
    TILE_LENGTH = 323
    TILE_OFFSETS = 324
    TILE_BYTE_COUNTS = 325
    SUB_IFDS = 330
    EXTRA_SAMPLES = 338
    SAMPLE_FORMAT = 339
    JPEG_TABLES = 347
    XMP = 700
    IMAGE_DEPTH = 32997
    COPYRIGHT = 33432
    MODEL_PIXEL_SCALE = 33550
    MODEL_TIEPOINT = 33922
    MODEL_TRANSFORMATION = 34264
    ICC_PROFILE = 34675
    GEO_KEY_DIRECTORY = 34735
    GEO_DOUBLE_PARAMS = 34736
    GEO_ASCII_PARAMS = 34737
    GDAL_METADATA = 42112
    GDAL_NODATA = 42113
    IJ_METADATA_BYTE_COUNTS = 50838
    IJ_METADATA = 50839

    @property
    def title(self) -> str:
        """The name as its specification spells it."""
        name = "".join(word.capitalize() for word in self.name.split("_"))
        if self.name.startswith(("MODEL_", "GEO_")):
            return f"{name}Tag"
        return _TITLES.get(self.name, name)


_KNOWN = {int(tag) for tag in Tag}
# Field types: bytes of one value.
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_UNSIGNED = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8", 18: "u8"}
_RATIONAL = 5


@dataclass(frozen=True)
class Encoding:
    """The file's number format: '<' or '>' byte order, classic (32-bit offsets) or BigTIFF (64-bit)."""

    order: str
    big: bool

    @property
    def entry(self) -> struct.Struct:
        """Tag, field type, count, and the value or its offset."""
        return struct.Struct(self.order + ("HHQ8s" if self.big else "HHI4s"))

    @property
    def entry_count(self) -> struct.Struct:
        return struct.Struct(self.order + ("Q" if self.big else "H"))

    @property
    def offset(self) -> struct.Struct:
        return struct.Struct(self.order + ("Q" if self.big else "I"))


class Directory:
    """One IFD: the values of its tags on demand, each checked against the file. Pages count from 0."""

    def __init__(
        self,
        file: PositionalFile,
        file_bytes: int,
        encoding: Encoding,
        index: int,
        entries: dict[int, tuple[int, int, bytes]],
        sub_ifd: int | None = None,
    ) -> None:
        self.file = file
        self.file_bytes = file_bytes
        self.encoding = encoding
        self.index = index
        self._entries = entries
        self.sub_ifd = sub_ifd

    def __contains__(self, tag: Tag) -> bool:
        return tag in self._entries

    def fault(self, tag: Tag, what: str) -> InputError:
        """An error that names the file, the page and the tag; `what` ends with what to do."""
        page = f"page {self.index}" if self.sub_ifd is None else f"page {self.index}, SubIFD {self.sub_ifd}"
        return InputError(f"{self.file.path}: {page}, tag {tag.title}: {what}")

    def number(self, tag: Tag, default: int | None = None) -> int:
        """The tag's first value, or `default`; InputError if it is missing and has no default."""
        if tag not in self._entries:
            if default is None:
                raise self.fault(tag, "is missing; the file is damaged, export it again")
            return default
        kind, count, value = self._entries[tag]
        if count == 1 and kind in _UNSIGNED and _TYPE_BYTES[kind] <= len(value):
            return int.from_bytes(value[: _TYPE_BYTES[kind]], "little" if self.encoding.order == "<" else "big")
        return int(self.numbers(tag, 1)[0])

    def numbers(self, tag: Tag, wanted: int) -> NDArray[np.int64]:
        """The tag's first `wanted` values; InputError if it has fewer."""
        if tag not in self._entries:
            raise self.fault(tag, "is missing; the file is damaged, export it again")
        kind, count, _ = self._entries[tag]
        if kind not in _UNSIGNED:
            raise self.fault(tag, f"has field type {kind} where whole numbers belong; export the file again")
        if count < wanted:
            raise self.fault(tag, f"has {counted(count, 'value')}, but {wanted:,} are needed; export the file again")
        code = np.dtype(self.encoding.order + _UNSIGNED[kind])
        values = np.frombuffer(self._value(tag, wanted * code.itemsize), code).astype(np.uint64)
        if values.size and int(values.max()) > np.iinfo(np.int64).max:
            raise self.fault(tag, f"holds {int(values.max())}, beyond any file; export the file again")
        return values.astype(np.int64)

    def all_numbers(self, tag: Tag, at_most: int) -> tuple[int, ...]:
        """Every value of a tag that may be absent, or the first `at_most`."""
        if tag not in self._entries:
            return ()
        return tuple(int(value) for value in self.numbers(tag, min(self._entries[tag][1], at_most)))

    def count(self, tag: Tag) -> int:
        """How many values a tag has; 0 if it is absent."""
        return self._entries[tag][1] if tag in self._entries else 0

    def rational(self, tag: Tag) -> tuple[int, int] | None:
        """Numerator and denominator; None if the tag is absent or not a fraction."""
        if tag not in self._entries or self._entries[tag][:2] != (_RATIONAL, 1):
            return None
        numerator, denominator = struct.unpack(self.encoding.order + "II", self._value(tag, 8))
        return numerator, denominator

    def blob(self, tag: Tag) -> bytes:
        """The tag's bytes; empty if it is absent."""
        if tag not in self._entries:
            return b""
        kind, count, _ = self._entries[tag]
        nbytes = count * _TYPE_BYTES.get(kind, 1)
        if nbytes > MAX_TEXT_BYTES:
            raise self.fault(tag, f"declares {nbytes:,} bytes, more than {MAX_TEXT_BYTES:,}; remove the tag")
        return self._value(tag, nbytes)

    def differs(self, tag: int, other: Directory) -> bool:
        """Whether both have the tag, and not with the same entry; their values may still be equal."""
        mine, others = self._entries.get(tag), other._entries.get(tag)
        return mine is not None and others is not None and mine != others

    def raw(self, tag: Tag) -> tuple[int, bytes] | None:
        """The tag's field type and its bytes in the file's byte order; None if it is absent."""
        return (self._entries[tag][0], self.blob(tag)) if tag in self._entries else None

    @property
    def private(self) -> list[int]:
        """The tags that `Tag` lacks."""
        return [tag for tag in self._entries if tag not in _KNOWN]

    def private_value(self, tag: int) -> tuple[int, int, bytes] | None:
        """Field type, count and bytes in the file's byte order; None if they cannot be read."""
        kind, count, value = self._entries[tag]
        nbytes = count * _TYPE_BYTES.get(kind, MAX_TEXT_BYTES + 1)
        (start,) = self.encoding.offset.unpack(value)
        if nbytes > MAX_TEXT_BYTES or (nbytes > len(value) and start + nbytes > self.file_bytes):
            return None
        return kind, count, value[:nbytes] if nbytes <= len(value) else self.file.head(nbytes, start)

    def text(self, tag: Tag) -> str:
        return self.blob(tag).split(b"\0")[0].decode("utf-8", errors="replace").strip()

    def sub_ifds(self) -> list[Directory]:
        """The directories that hang on this one, which are not in the chain. InputError if one is not in the file."""
        found = []
        for number, offset in enumerate(self.all_numbers(Tag.SUB_IFDS, MAX_SUB_IFDS)):
            where = f"{self.file.path}: page {self.index}, tag SubIFDs: directory {number}"
            entries, _ = _read_entries(self.file, self.encoding, offset, where, self.file_bytes)
            found.append(Directory(self.file, self.file_bytes, self.encoding, self.index, entries, number))
        return found

    def _value(self, tag: Tag, wanted_bytes: int) -> bytes:
        kind, count, value = self._entries[tag]
        declared = count * _TYPE_BYTES.get(kind, 1)
        if declared <= len(value):
            return value[:wanted_bytes]
        (start,) = self.encoding.offset.unpack(value)
        if start + declared > self.file_bytes:
            end = f"bytes {start:,} to {start + declared:,}, but the file ends at {self.file_bytes:,}"
            raise self.fault(tag, f"its values lie at {end}; the file is truncated or damaged, copy or export it again")
        found = self.file.head(wanted_bytes, start)
        if len(found) < wanted_bytes:
            raise self.fault(tag, "its values are gone; the file shrank while it was read, run again")
        return found


def read_directories(file: PositionalFile) -> list[Directory]:
    """The chain of IFDs from the file's start: at least one."""
    file_bytes = file.size
    encoding, offset = _read_start(file)
    found: list[Directory] = []
    seen: set[int] = set()
    while offset:
        where = f"{file.path}: page {len(found)}: its directory"
        if offset in seen:
            raise InputError(f"{where} at byte {offset:,} is that of an earlier page: a loop; export the file again")
        if len(found) == MAX_PAGES:
            raise InputError(f"{file.path}: more than {MAX_PAGES:,} pages; split the file")
        seen.add(offset)
        entries, offset = _read_entries(file, encoding, offset, where, file_bytes)
        found.append(Directory(file, file_bytes, encoding, len(found), entries))
    if not found:
        raise InputError(f"{file.path}: a TIFF without any page; its writer did not finish, export it again")
    return found


def _read_start(file: PositionalFile) -> tuple[Encoding, int]:
    start = file.head(16)
    order = {b"II": "<", b"MM": ">"}.get(start[:2])
    if order is None or len(start) < 8:
        raise InputError(f"{file.path}: not a TIFF: it begins with {start[:4]!r}; name a TIFF file")
    version = struct.unpack(order + "H", start[2:4])[0]
    if version == 42:
        return Encoding(order, big=False), struct.unpack(order + "I", start[4:8])[0]
    if version == 43 and len(start) == 16 and struct.unpack(order + "HH", start[4:8]) == (8, 0):
        return Encoding(order, big=True), struct.unpack(order + "Q", start[8:16])[0]
    raise InputError(f"{file.path}: TIFF version {version} is neither TIFF (42) nor BigTIFF (43); export it as one")


def _read_entries(
    file: PositionalFile, encoding: Encoding, offset: int, where: str, file_bytes: int
) -> tuple[dict[int, tuple[int, int, bytes]], int]:
    """One IFD's entries (field type, count, value field) by tag, and the next IFD's offset."""
    head, entry, link = encoding.entry_count, encoding.entry, encoding.offset
    if offset + head.size > file_bytes:
        raise InputError(
            f"{where} lies at byte {offset:,}, but the file ends at {file_bytes:,}; truncated: copy or export it again"
        )
    window = file.head(_WINDOW_BYTES, offset)
    (count,) = head.unpack_from(window)
    if not 1 <= count <= MAX_ENTRIES:
        raise InputError(f"{where} declares {counted(count, 'tag')}; the file is damaged, export it again")
    end = head.size + count * entry.size
    if len(window) < end + link.size:
        window = file.head(end + link.size, offset)
    if len(window) < end + link.size:
        raise InputError(f"{where} is cut off at byte {file_bytes:,}; truncated: copy or export it again")
    entries: dict[int, tuple[int, int, bytes]] = {}
    for tag, kind, values, value in entry.iter_unpack(window[head.size : end]):
        entries.setdefault(tag, (kind, values, value))
    return entries, link.unpack_from(window, end)[0]
