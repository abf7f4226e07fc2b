"""Decoding within a bound: a damaged or hostile block of a few kilobytes may otherwise inflate to gigabytes."""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pipeline.codecs import silence_loggers
from pipeline.codecs.blosc import check_blosc

Buffer = Any  # what supports the buffer protocol

_LZ4_SIZE = struct.Struct("<I")
# JPEG 2000's marker SIZ after the start of the code stream: sizes and offsets along x and y, tiles, components.
_JPEG2000 = re.compile(rb"\xff\x4f\xff\x51..(.{36})", re.DOTALL)
_SIZ = struct.Struct(">2x4I16xH")
# JPEG's frame headers; the other three markers of that range are no frames.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_AT_ONCE = {"gzip": "gzip_decode", "zlib": "deflate_decode"}  # imagecodecs' functions
_SHAPE = re.compile(r"(?<!out\.)shape=\(([\d, ]+)\)")


class TooLarge(ValueError):
    """A block is, or would be, larger than its file declares."""


def decode(codec: str, data: Buffer, limit: int, **options: Any) -> Buffer:
    """The bytes of a compressed block: `limit` at most, more are never allocated.

    codec   : a key of `DECODERS`; lz4 and blosc in numcodecs' framing
    options : of `lzma.LZMADecompressor`

    Raises TooLarge, or an exception of any type if the data are damaged.
    """
    return DECODERS[codec](data, limit, **options)


def decode_into(codec: str, data: Buffer, out: Buffer) -> None:
    """Decode a block of exactly `len(out)` bytes into `out`, both arrays of uint8.

    Raises as `decode`, and ValueError if there are fewer.
    """
    import imagecodecs

    if codec == "blosc":
        found = check_blosc(data)
        if found > len(out):
            raise _too_large(len(out))
        if found == len(out):
            imagecodecs.blosc_decode(data, out=out, numthreads=1)
    elif codec == "zstd":
        found = len(_zstd(data, out))
    elif codec in _AT_ONCE and _decoded_at_once(codec, data, out):
        return
    else:
        block = np.frombuffer(decode(codec, data, len(out)), np.uint8)
        found = len(block)
        if found == len(out):
            out[:] = block
    if found != len(out):
        raise ValueError(f"it decodes to {found:,} bytes instead of {len(out):,}")


def _decoded_at_once(codec: str, data: Buffer, out: Buffer) -> bool:
    """Decode one whole stream, twice as fast as in pieces; False if it is not that, or damaged."""
    import imagecodecs

    # A gzip member ends with its size: after another member, the stream that is decoded is not the whole.
    if codec == "gzip" and data[-4:].tobytes() != (len(out) & 0xFFFFFFFF).to_bytes(4, "little"):
        return False
    try:
        return len(getattr(imagecodecs, _AT_ONCE[codec])(data, out=out)) == len(out)
    except (RuntimeError, ValueError):
        return False


def encoded_limit(nbytes: int) -> int:
    """The most bytes between two codecs of a chunk: one may add a header, checksums and a share of the bytes."""
    return nbytes + nbytes // 64 + 4096


def check_image(codec: str, data: bytes, samples: int, dtype: np.dtype[Any]) -> None:
    """TooLarge if an encoded image has more than this many samples: its decoder would allocate them all.

    codec : jpeg, jpeg2k, jpegxl, lerc or webp

    Raises an exception of any type if its header is damaged, or of another dtype.
    """
    if codec == "jpeg":
        found = _jpeg_samples(data)
    else:
        found = _jpeg2000_samples(data) if codec == "jpeg2k" else _samples_told(codec, data, dtype)
    if found > samples:
        raise TooLarge(f"it holds {found:,} samples, which is more than is declared")


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"it inflates past the {limit:,} bytes that are declared")


def _streams(new: Callable[[], Any], data: Buffer, limit: int) -> bytes:
    """One stream after another, each with a decompressor of zlib, bz2 or lzma."""
    pieces, left, rest = [], limit, bytes(data)
    while rest:
        stream = new()
        pieces.append(stream.decompress(rest, left + 1))
        left -= len(pieces[-1])
        if left < 0:
            raise _too_large(limit)
        if not stream.eof:
            raise ValueError("it is truncated")
        rest = stream.unused_data.lstrip(b"\0")  # padding
    return b"".join(pieces)


def _lzma(data: Buffer, limit: int, **options: Any) -> bytes:
    return _streams(lambda: lzma.LZMADecompressor(**options), data, limit)


def _zstd(data: Buffer, limit: Buffer) -> Buffer:
    """`limit` may also be the memory to decode into."""
    import imagecodecs

    try:
        return imagecodecs.zstd_decode(data, out=limit)
    except imagecodecs.ZstdError as error:
        if "too small" in str(error):
            raise _too_large(limit if isinstance(limit, int) else len(limit)) from error
        raise


def _lz4(data: Buffer, limit: int) -> Buffer:
    import numcodecs  # type: ignore[import-untyped]

    if len(data) >= _LZ4_SIZE.size and _LZ4_SIZE.unpack_from(data)[0] > limit:
        raise _too_large(limit)
    return numcodecs.lz4.decompress(data)


def _blosc(data: Buffer, limit: int) -> Buffer:
    import numcodecs

    if check_blosc(np.frombuffer(data, np.uint8)) > limit:
        raise _too_large(limit)
    return numcodecs.blosc.decompress(data)


DECODERS: dict[str, Callable[..., Buffer]] = {
    "blosc": _blosc,
    "bz2": partial(_streams, bz2.BZ2Decompressor),
    "gzip": partial(_streams, partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)),
    "lz4": _lz4,
    "lzma": _lzma,
    "zlib": partial(_streams, zlib.decompressobj),
    "zstd": _zstd,
}


def _jpeg_samples(data: bytes) -> int:
    """Samples that the frame header declares. ValueError if there is none."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            rows, columns, components = struct.unpack_from(">HHB", data, at + 5)
            return int(rows * columns * components)
        # A fill byte, or a segment.
        at += 1 if marker == 0xFF else 2 + length
    raise ValueError("a JPEG without a frame header")


def _jpeg2000_samples(data: bytes) -> int:
    found = _JPEG2000.search(data)
    if found is None:
        raise ValueError("a JPEG 2000 image without a header")
    right, bottom, left, top, components = _SIZ.unpack(found[1])
    return int(max(right - left, 0) * max(bottom - top, 0) * components)


def _samples_told(codec: str, data: bytes, dtype: np.dtype[Any]) -> int:
    """What imagecodecs finds in the image's header: it refuses an output of another shape before it decodes."""
    import imagecodecs

    silence_loggers()
    try:
        getattr(imagecodecs, f"{codec}_decode")(data, out=np.empty((0,) * 5, dtype))
    except ValueError as error:
        found = _SHAPE.search(str(error))
        if found is None:
            raise
        return int(np.prod([int(size) for size in found[1].split(",") if size.strip()], dtype=object))
    raise ValueError("it declares no shape")
