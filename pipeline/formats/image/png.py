"""PNG: 8 and 16 bits a sample, one to four channels. Decoded by libpng (imagecodecs), encoded in bands of rows.

Source: https://www.w3.org/TR/png-3/. A PNG is one compressed stream: reading decodes the whole image once; writing
spools the samples to a file beside the output, which `publish` encodes on all cores in bounded memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.codecs import silence_loggers
from pipeline.codecs.deflate import deflated_bands
from pipeline.errors import InputError, counted
from pipeline.formats.image.base import ImageFormat, ImageHeader, ImageReader, ImageWriter, Region
from pipeline.formats.image.metadata import Calibration, Step, in_unit, png_text
from pipeline.formats.image.spooled_writer import SpooledWriter
from pipeline.formats.image.whole_image_reader import WholeImageReader
from pipeline.storage.object_file import ObjectFile, opened_to_read
from pipeline.storage.partial import Opening
from pipeline.storage.positional import PositionalFile, memory_of

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_IHDR = struct.Struct(">IIBBBBB")
LONGEST_SIDE = 1_000_000  # libpng's limit as commonly built; the format itself allows 2**31 - 1
_LONGEST_CARRIED = 4 << 20
# Chunks that define how samples are shown, carried over to a new PNG: colour space, gamma, luminance, resolution, and
# Exif's orientation.
_CARRIED = (b"cHRM", b"gAMA", b"iCCP", b"sRGB", b"cICP", b"mDCV", b"cLLI", b"pHYs", b"eXIf")
_UNTRUE = (b"tRNS", b"tIME", b"hIST", b"sBIT")  # of the input's samples and its file
_PHYS = struct.Struct(">IIB")
_PER_METER = 1
_ROUNDED = 1e-4  # by how much whole pixels in a metre may change a pixel's size
_OF_SCREENS = (1, 2834, 2835, 3779, 3780)  # of 72 and 96 pixels in an inch: the size is unknown
_ONCE = frozenset((b"IHDR", b"PLTE", b"tRNS", b"IEND"))  # the chunks, besides any number of IDAT, that define samples
_COLOUR_AT = 25  # the byte of the file that names the colour type
_GRAY, _RGB, _PALETTE, _GRAY_ALPHA, _RGB_ALPHA = 0, 2, 3, 4, 6
_CHANNELS = {_GRAY: 1, _RGB: 3, _PALETTE: 3, _GRAY_ALPHA: 2, _RGB_ALPHA: 4}
_DEPTHS = {_GRAY: (1, 2, 4, 8, 16), _RGB: (8, 16), _PALETTE: (1, 2, 4, 8), _GRAY_ALPHA: (8, 16), _RGB_ALPHA: (8, 16)}
_COLOUR_OF = {1: _GRAY, 2: _GRAY_ALPHA, 3: _RGB, 4: _RGB_ALPHA}
# Deflate's largest expansion: a header that declares more is wrong.
_LARGEST_EXPANSION = 1032
_BAND_BYTES = 1 << 20
_FILTER_UP = 2


class Png(ImageFormat):
    """Palettes are read as RGB, transparency as an alpha channel; 1, 2 and 4 bits are scaled to 8."""

    name = "PNG"
    suffixes = (".png",)

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        return first_bytes.startswith(_SIGNATURE)

    def open(self, path: Path) -> ImageReader:
        file = opened_to_read(path)
        try:
            header = _read_header(file)
        except BaseException:
            file.close()
            raise
        return WholeImageReader(file, header, lambda: _decode(file, header))

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        others = "; choose .tif, .npy or .zarr"
        if header.misread_elsewhere is not None:
            return f"{path}: PNG would show {header.misread_elsewhere}; choose .tif"
        if header.axes not in ("YX", "YXS") or (header.axes == "YXS" and header.shape[2] > 4):
            kind = f"{header.shape[-1]} channels" if header.axes == "YXS" else f"axes {header.axes}"
            return f"{path}: PNG holds one image of rows and columns with up to 4 channels, not {kind}{others}"
        if header.dtype not in (np.dtype(np.uint8), np.dtype(np.uint16)):
            return f"{path}: PNG holds uint8 and uint16 samples, not {header.dtype}{others}"
        if max(header.shape) > LONGEST_SIDE:
            return f"{path}: PNG readers take up to {LONGEST_SIDE:,} pixels a side, not {header.shape}{others}"
        return None

    def keeps(self, header: ImageHeader, path: Path) -> set[str]:
        sized = b"pHYs" in _described(header) | dict(header.metadata.get("png_chunks", ()))
        return {"profile", *png_text.KEPT} | ({"plane"} if sized else set())

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return PngWriter(path, header, opening)


class PngWriter(SpooledWriter):
    """Encodes bands of rows, from the first to the last."""

    def _encoded(self) -> Iterator[bytes]:
        return png_pieces(self.header, self._rows)

    def _rows(self, first: int, stop: int) -> NDArray[Any]:
        shape = (stop - first, *self.header.shape[1:])
        rows = np.empty(shape, self.header.dtype)
        self._samples.read(self._scratch, Region((first, *(0,) * (len(shape) - 1)), (stop, *shape[1:])), rows)
        return rows


def png_pieces(header: ImageHeader, rows_of: Callable[[int, int], NDArray[Any]]) -> Iterator[bytes]:
    """The bytes of a PNG. rows_of: returns rows from the first number up to the second, from several threads."""
    height, width, channels = (*header.shape, 1)[:3]
    depth = 8 * header.dtype.itemsize
    yield _SIGNATURE + _chunk(b"IHDR", _IHDR.pack(width, height, depth, _COLOUR_OF[channels], 0, 0, 0))
    carried = _described(header) | dict(header.metadata.get("png_chunks", ()))
    yield from (_chunk(kind, carried[kind]) for kind in _CARRIED if kind in carried)
    yield from (_chunk(kind, data) for kind, data in png_text.written(header.notes))

    def encoded(first: int, stop: int) -> memoryview:
        """Rows as PNG stores them: the filter's number, then the difference to the row above."""
        rows = rows_of(max(first - 1, 0), stop)
        stored = rows.astype(rows.dtype.newbyteorder(">"), copy=False).reshape(len(rows), -1).view(np.uint8)
        filtered = np.empty((stop - first, 1 + stored.shape[1]), np.uint8)
        filtered[:, 0] = _FILTER_UP
        if first == 0:
            filtered[0, 1:] = stored[0]
            np.subtract(stored[1:], stored[:-1], out=filtered[1:, 1:])
        else:
            np.subtract(stored[1:], stored[:-1], out=filtered[:, 1:])
        return memory_of(filtered)

    rows = max(1, _BAND_BYTES // (header.nbytes // height))
    bands = [(first, min(first + rows, height)) for first in range(0, height, rows)]
    for compressed in deflated_bands(encoded, bands):
        yield _chunk(b"IDAT", compressed)
    yield _chunk(b"IEND", b"")


@dataclass(frozen=True)
class _Chunk:
    kind: bytes
    offset: int  # of its data, after four bytes of length and four of kind
    length: int


def _chunk(kind: bytes, data: bytes | bytearray) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


def _chunks(file: PositionalFile) -> Iterator[_Chunk]:
    """The chunks from the first to IEND, without their data; InputError if the file ends earlier."""
    offset, size = len(_SIGNATURE), file.size
    while True:
        head = file.head(8, offset)
        length = int.from_bytes(head[:4], "big")
        if len(head) < 8 or offset + 12 + length > size:
            raise InputError(
                f"{file.path}: truncated: a chunk at byte {offset:,} is cut short; copy or export it again"
            )
        chunk = _Chunk(head[4:], offset + 8, length)
        yield chunk
        if chunk.kind == b"IEND":
            return
        offset += 12 + length


def _data_of(file: PositionalFile, chunk: _Chunk) -> bytearray:
    """The chunk's data, after checking its CRC."""
    stored = bytearray(chunk.length + 4)
    file.read_at(chunk.offset, memoryview(stored))
    data = stored[:-4]
    if zlib.crc32(data, zlib.crc32(chunk.kind)) != int.from_bytes(stored[-4:], "big"):
        raise InputError(
            f"{file.path}: corrupt: the chunk at byte {chunk.offset - 8:,} fails its check; export it again"
        )
    return data


def _read_header(file: PositionalFile) -> ImageHeader:
    """The header from the chunks before the samples; nothing is decoded."""
    if file.head(len(_SIGNATURE)) != _SIGNATURE:
        raise InputError(f"{file.path}: not a PNG file, or truncated; copy or export it again")
    chunks = _chunks(file)
    first = next(chunks)
    if first.kind != b"IHDR" or first.length != _IHDR.size:
        raise InputError(f"{file.path}: corrupt: a PNG starts with its IHDR chunk; copy or export it again")
    width, height, depth, colour, *methods = _IHDR.unpack(_data_of(file, first))
    if not (0 < width <= LONGEST_SIDE and 0 < height <= LONGEST_SIDE):
        raise InputError(
            f"{file.path}: its header states {width:,} × {height:,} pixels; 1 to {LONGEST_SIDE:,} a side can be read; "
            "export it as .tif"
        )
    if depth not in _DEPTHS.get(colour, ()):
        raise InputError(
            f"{file.path}: its header names colour type {colour} of {counted(depth, 'bit')}, which PNG lacks; "
            "export it again"
        )
    if methods[:2] != [0, 0] or methods[2] > 1:
        raise InputError(
            f"{file.path}: its header names methods (compression {methods[0]}, filter {methods[1]}, interlace "
            f"{methods[2]}) that PNG lacks; export it again"
        )
    row_bytes = (width * depth * (1 if colour == _PALETTE else _CHANNELS[colour]) + 7) // 8
    if row_bytes * height > _LARGEST_EXPANSION * file.size:
        raise InputError(
            f"{file.path}: truncated: its header promises {row_bytes * height:,} bytes of samples, "
            f"which {file.size:,} bytes cannot hold; copy or export it again"
        )
    transparent, carried, texts, others, samples = False, [], [], [], False
    for chunk in chunks:
        samples = samples or chunk.kind == b"IDAT"
        if samples and isinstance(file, ObjectFile):  # each further chunk would take a request
            break
        if chunk.kind in png_text.KINDS and chunk.length <= _LONGEST_CARRIED:
            texts.append((chunk.kind, bytes(_data_of(file, chunk))))
        if _is_told(chunk.kind):
            others.append(chunk.kind.decode("latin-1"))
        if samples:
            continue
        transparent = transparent or (chunk.kind == b"tRNS" and b"tRNS" in _wanted(colour))
        if chunk.kind in _CARRIED and chunk.length <= _LONGEST_CARRIED:
            carried.append((chunk.kind, bytes(_data_of(file, chunk))))
    channels, described = _CHANNELS[colour] + transparent, dict(carried)
    return ImageHeader(
        shape=(height, width) if channels == 1 else (height, width, channels),
        axes="YX" if channels == 1 else "YXS",
        dtype=np.dtype(np.uint16 if depth == 16 else np.uint8),
        metadata={"compression": "deflate"} | ({"png_chunks": tuple(carried)} if carried else {}) | _profile(described),
        calibration=_calibration(described),
        notes=replace(png_text.read(texts), left_out=_named(others)),
    )


def _described(header: ImageHeader) -> dict[bytes, bytes]:
    """The chunks of the pixel size and the colour profile of a file of another format."""
    found, size = {}, _physical(header.calibration)
    if size is not None:
        found[b"pHYs"] = _PHYS.pack(*size, _PER_METER)
    if "icc_profile" in header.metadata:
        found[b"iCCP"] = b"ICC profile\0\0" + zlib.compress(header.metadata["icc_profile"])
    return found


def _physical(known: Calibration) -> tuple[int, int] | None:
    """Pixels in a metre along X and Y; None if they are unknown, or no whole numbers hold them."""
    found = []
    for letter in "XY":
        step = known.steps.get(letter)
        size = None if step is None else in_unit(step.size, step.unit, "meter")
        if size is None or not 0 < round(1 / size) < 1 << 31 or abs(round(1 / size) * size - 1) > _ROUNDED:
            return None
        found.append(round(1 / size))
    return found[0], found[1]


def _calibration(chunks: Mapping[bytes, bytes]) -> Calibration:
    data = chunks.get(b"pHYs", b"")
    x, y, unit = _PHYS.unpack(data) if len(data) == _PHYS.size else (0, 0, 0)
    if unit != _PER_METER or not x or not y or x in _OF_SCREENS:
        return Calibration()
    return Calibration({"Y": Step(1 / y, "meter"), "X": Step(1 / x, "meter")})


def _is_told(kind: bytes) -> bool:
    """Whether a chunk says something of the image that a result does not have."""
    return bool(kind[0] & 0x20) and kind not in (*_CARRIED, *png_text.KINDS, *_UNTRUE)


def _named(kinds: list[str]) -> tuple[str, ...]:
    return (f"chunks {', '.join(dict.fromkeys(kinds))} of the PNG",) if kinds else ()


def _profile(chunks: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """The colour profile, as a TIFF holds it."""
    packed = chunks.get(b"iCCP", b"").partition(b"\0")[2][1:]
    try:
        profile = zlib.decompressobj().decompress(packed, _LONGEST_CARRIED)
    except zlib.error:  # carried as it is to another PNG
        return {}
    return {"icc_profile": profile} if profile else {}


def _wanted(colour: int) -> frozenset[bytes]:
    """The chunks besides IDAT that define samples of this colour type: the first of each, before IDAT."""
    idle: dict[int, tuple[bytes, ...]] = {_PALETTE: (), _GRAY: (b"PLTE",), _RGB: (b"PLTE",)}
    return _ONCE.difference(idle.get(colour, (b"PLTE", b"tRNS")))


def _decode(file: PositionalFile, header: ImageHeader) -> NDArray[Any]:
    """The whole image. Every chunk is checked first; the decoder only gets those that define samples."""
    import imagecodecs

    silence_loggers()
    stream, wanted, samples = bytearray(_SIGNATURE), _wanted(file.head(1, _COLOUR_AT)[0]), False
    for chunk in _chunks(file):
        data = _data_of(file, chunk)
        if chunk.kind == b"IDAT":
            samples, wanted = True, frozenset({b"IEND"})
        elif chunk.kind not in wanted:
            # An upper-case first letter marks a chunk without which the image cannot be understood.
            if not chunk.kind[0] & 0x20 and chunk.kind not in _ONCE:
                raise InputError(f"{file.path}: holds a chunk {chunk.kind!r} that PNG lacks; export it again")
            continue
        stream += _chunk(chunk.kind, data)
        wanted = wanted - {chunk.kind}
    if not samples:
        raise InputError(f"{file.path}: corrupt: holds no samples (no IDAT chunk); copy or export it again")
    try:
        image: NDArray[Any] = imagecodecs.png_decode(stream)
    except (imagecodecs.PngError, ValueError, RuntimeError) as exc:
        words = str(exc) or type(exc).__name__
        raise InputError(f"{file.path}: corrupt: its samples cannot be decoded ({words}); export it again") from exc
    if image.shape != header.shape or image.dtype != header.dtype:
        raise InputError(
            f"{file.path}: decoded to {image.dtype} {image.shape}, not {header.dtype} {header.shape} as its header "
            "states; export it again"
        )
    return image
