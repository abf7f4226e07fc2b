"""Netpbm: PGM, PPM and PAM (P5, P6, P7; plain P2 and P3 for reading), 8 or 16 bits a sample, any MAXVAL.

Source: https://netpbm.sourceforge.net/doc/ (pgm.html, ppm.html, pam.html). Samples of two bytes are big-endian.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.formats.image.base import ImageFormat, ImageHeader, ImageReader, ImageWriter, Region, require_fit
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.formats.image.whole_image_reader import WholeImageReader
from pipeline.storage.object_file import opened_to_read
from pipeline.storage.partial import Opening
from pipeline.storage.positional import PositionalFile

_HEAD_BYTES = 64 << 10
_CHANNELS = {b"P2": 1, b"P3": 3, b"P5": 1, b"P6": 3}
# A comment runs from # to the end of its line and counts as that line end, at any position (netpbm's pm_getc).
_BLANK = rb"(?:\s|#[^\r\n]*[\r\n])"
_HEADER = re.compile(rb"P[2356]" + (_BLANK + rb"+(\d{1,18})") * 3 + _BLANK)
_COMMENT = re.compile(rb"#[^\r\n]*")
_LINE_END = re.compile(rb"[\r\n]")
_BLANKS = tuple(bytes([blank]) for blank in b" \t\n\v\f\r")
_DIGITS = b"0123456789"
_NO_NUMBER = re.compile(rb"[^\d\s]")
_LONGEST_NUMBER = 4096  # digits, nearly all of them leading zeros
# Plain text is parsed in blocks of this size: an image takes no more memory than its samples and a few blocks.
_TEXT_BYTES = 1 << 20
_PAM_FIELDS = (b"WIDTH", b"HEIGHT", b"DEPTH", b"MAXVAL")
_TUPLE_TYPES = {1: "GRAYSCALE", 2: "GRAYSCALE_ALPHA", 3: "RGB", 4: "RGB_ALPHA"}
_TUPLE_DEPTHS = {**{name: depth for depth, name in _TUPLE_TYPES.items()}, "BLACKANDWHITE": 1}
_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


class Pnm(ImageFormat):
    name = "PNM"
    suffixes = (".pgm", ".ppm", ".pnm", ".pam")

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        return re.match(rb"P[1-7][\s#]", first_bytes) is not None

    def open(self, path: Path) -> ImageReader:
        file = opened_to_read(path)
        try:
            head = file.head(_HEAD_BYTES)
            header, offset = _read_header(path, head)
            if head[:2] in (b"P2", b"P3"):
                return _plain_reader(file, header, offset)
            return PnmReader(file, header, offset)
        except BaseException:
            file.close()
            raise

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        others = "; choose .tif, .npy or .zarr"
        if header.misread_elsewhere is not None:
            return f"{path}: PNM and PAM would show {header.misread_elsewhere}; choose .tif"
        if header.axes not in ("YX", "YXS"):
            return f"{path}: PNM and PAM hold one image of rows and columns, not axes {header.axes}{others}"
        if header.dtype not in _DTYPES:
            return f"{path}: PNM and PAM hold uint8 and uint16 samples, not {header.dtype}{others}"
        if header.maxval is not None and _dtype_of(header.maxval) != header.dtype:
            return (
                f"{path}: PNM stores MAXVAL {header.maxval} as {_dtype_of(header.maxval)}, not {header.dtype}{others}"
            )
        channels, suffix = _channels(header), path.suffix.lower()
        fitting = {".pgm": (1,), ".ppm": (3,), ".pnm": (1, 3)}.get(suffix)
        if fitting is not None and channels not in fitting:
            counts = " or ".join([*map(str, fitting[:-1]), counted(fitting[-1], "channel")])
            return f"{path}: {suffix} holds {counts} a pixel, not {channels}; choose .pam, .tif or .npy"
        return None

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return PnmWriter(path, header, opening)


class PnmReader(ImageReader):
    """P5, P6 and P7: reads the samples straight from the file."""

    def __init__(self, file: PositionalFile, header: ImageHeader, offset: int) -> None:
        self.path = file.path
        self.header = header
        self._file = file
        self._samples = ContiguousSamples(shape=header.shape, dtype=header.dtype.newbyteorder(">"), offset=offset)
        # A Netpbm stream may hold several images: those after the first are ignored.
        if file.size < offset + header.nbytes:
            raise InputError(
                f"{file.path}: truncated: its header promises {counted(header.nbytes, 'byte')} of samples, "
                f"the file holds {file.size - offset:,}; copy or export it again"
            )

    def read(self, region: Region, out: NDArray[Any]) -> None:
        require_fit(self.header, region, out)
        self._samples.read(self._file, region, out)
        _check_maxval(self.path, self.header, out, region.start[0])

    def close(self) -> None:
        self._file.close()


class PnmWriter(PositionalWriter):
    """Writes big-endian samples; `.pam` holds any number of channels."""

    def __init__(self, path: Path, header: ImageHeader, opening: Opening) -> None:
        head = _head_of(header, path.suffix.lower())
        samples = ContiguousSamples(shape=header.shape, dtype=header.dtype.newbyteorder(">"), offset=len(head))
        super().__init__(path, header, opening, samples=samples, head=[head])

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if _highest(samples) > _maxval(self.header):
            raise ValueError(f"{self.path}: samples above its MAXVAL {_maxval(self.header)}")
        super().write(region, samples)


def _read_header(path: Path, head: bytes) -> tuple[ImageHeader, int]:
    """The header, and the offset of the samples."""
    if head[:2] in (b"P1", b"P4"):
        raise InputError(f"{path}: is a bitmap (PBM), one bit a pixel; convert it to PGM with pbmtopgm first")
    if head[:2] == b"P7":
        return _read_pam_header(path, head)
    found = _HEADER.match(head)
    if found is None:
        raise InputError(f"{path}: the PNM header is truncated or damaged; copy or export the file again")
    width, height, maxval = map(int, found.groups())
    return _checked_header(path, (width, height, _CHANNELS[head[:2]]), maxval), found.end()


def _read_pam_header(path: Path, head: bytes) -> tuple[ImageHeader, int]:
    fields: dict[bytes, int] = {}
    tuple_type: list[str] = []
    position = head.find(b"\n") + 1
    while True:
        end = head.find(b"\n", position)
        if position == 0 or end < 0:
            raise InputError(f"{path}: the PAM header has no ENDHDR line; copy or export the file again")
        key, value = [*head[position:end].split(None, 1), b"", b""][:2]
        position, value = end + 1, value.strip()
        if key == b"ENDHDR":
            break
        if key in _PAM_FIELDS and re.fullmatch(rb"\d{1,18}", value):
            fields[key] = int(value)
        elif key == b"TUPLTYPE":
            tuple_type.append(value.decode("ascii", "replace"))
        elif key and not key.startswith(b"#"):
            raise InputError(f"{path}: the PAM header holds an unknown line: {key[:40]!r}; export the file again")
    missing = [name.decode() for name in _PAM_FIELDS if name not in fields]
    if missing:
        raise InputError(f"{path}: the PAM header lacks {', '.join(missing)}; export the file again")
    width, height, depth, maxval = (fields[name] for name in _PAM_FIELDS)
    metadata = {"tuple_type": " ".join(tuple_type)} if tuple_type else {}
    return _checked_header(path, (width, height, depth), maxval, metadata), position


def _checked_header(
    path: Path, size: tuple[int, int, int], maxval: int, metadata: dict[str, Any] | None = None
) -> ImageHeader:
    width, height, depth = size
    if 0 in (width, height, depth):
        channels = counted(depth, "channel")
        raise InputError(f"{path}: the header states {width} × {height} pixels of {channels}; nothing to read")
    if not 1 <= maxval <= 65535:
        raise InputError(f"{path}: MAXVAL is {maxval}; it must lie in 1 … 65535; export the file again")
    shape, axes = ((height, width), "YX") if depth == 1 else ((height, width, depth), "YXS")
    return ImageHeader(shape=shape, axes=axes, dtype=_dtype_of(maxval), maxval=maxval, metadata=metadata or {})


def _plain_reader(file: PositionalFile, header: ImageHeader, offset: int) -> ImageReader:
    """P2 and P3: numbers in decimal text, which can only be read from the first to the last."""
    count = header.nbytes // header.dtype.itemsize
    text_bytes = file.size - offset
    if text_bytes < 2 * count - 1:  # a digit and a blank for each
        raise InputError(
            f"{file.path}: truncated: its header promises {counted(count, 'sample')}, "
            f"more than {counted(text_bytes, 'byte')} of text can hold; copy or export it again"
        )

    def decode() -> NDArray[Any]:
        samples, done = np.empty(count, header.dtype), 0
        for numbers in _numbers(file, offset):
            wanted = numbers[: count - done]
            if wanted.max(initial=0) > _maxval(header):
                raise InputError(
                    f"{file.path}: a sample is {wanted.max():.0f}, above MAXVAL {header.maxval}; export it again"
                )
            samples[done : done + len(wanted)] = wanted
            done += len(wanted)
            if done == count:
                return samples.reshape(header.shape)
        promised = counted(count, "number")
        raise InputError(f"{file.path}: its text does not hold {promised}, as its header states; export it again")

    return WholeImageReader(file, header, decode)


def _numbers(file: PositionalFile, offset: int) -> Iterator[NDArray[np.float64]]:
    """The numbers of plain text from `offset`, block by block, up to the first word that is not a number."""
    blocks = (file.head(_TEXT_BYTES, start) for start in range(offset, file.size, _TEXT_BYTES))
    begun, in_comment = b"", False
    for block in itertools.chain(blocks, (b"\n",)):
        if in_comment:
            block = block[_end_of_line(block) :]
        text = begun + block
        in_comment = b"#" in text[max(map(text.rfind, (b"\r", b"\n"))) + 1 :] or (in_comment and not block)
        text = _COMMENT.sub(b" ", text)
        whole = max(map(text.rfind, _BLANKS)) + 1  # a number after the last blank may continue in the next block
        text, begun = text[:whole], text[whole:]
        other = _NO_NUMBER.search(text)
        if other is not None:
            text = text[: other.start()].rstrip(_DIGITS)
        if text.strip():
            yield np.fromstring(text, np.float64, sep=" ")
        if other is not None or len(begun) > _LONGEST_NUMBER:
            return


def _end_of_line(text: bytes) -> int:
    found = _LINE_END.search(text)
    return found.start() if found else len(text)


def _head_of(header: ImageHeader, suffix: str) -> bytes:
    height, width = header.shape[:2]
    channels, maxval = _channels(header), _maxval(header)
    if suffix != ".pam":
        return f"P{5 if channels == 1 else 6}\n{width} {height}\n{maxval}\n".encode("ascii")
    lines = [f"WIDTH {width}", f"HEIGHT {height}", f"DEPTH {channels}", f"MAXVAL {maxval}"]
    tuple_type = _tuple_type(header.metadata.get("tuple_type"), channels)
    if tuple_type:
        lines.append(f"TUPLTYPE {tuple_type}")
    return "\n".join(["P7", *lines, "ENDHDR", ""]).encode("ascii")


def _tuple_type(carried: object, channels: int) -> str | None:
    """The input's own tuple type if it fits the channels, else the usual one."""
    usual = _TUPLE_TYPES.get(channels)
    if not isinstance(carried, str) or not re.fullmatch(r"[!-~]([ -~]{0,200}[!-~])?", carried):
        return usual
    return carried if _TUPLE_DEPTHS.get(carried, channels) == channels else usual


def _check_maxval(path: Path, header: ImageHeader, samples: NDArray[Any], first_row: int) -> None:
    maxval = _maxval(header)
    if _highest(samples) > maxval and maxval < np.iinfo(header.dtype).max:
        row = int(np.argmax(samples.reshape(len(samples), -1).max(axis=1) > maxval))
        raise InputError(
            f"{path}: row {first_row + row} holds a sample of {samples[row].max()}, above its MAXVAL {maxval}; "
            "export it again with the MAXVAL that its samples need"
        )


def _highest(samples: NDArray[Any]) -> int:
    return int(samples.max()) if samples.size else 0


def _maxval(header: ImageHeader) -> int:
    return header.maxval if header.maxval is not None else int(np.iinfo(header.dtype).max)


def _dtype_of(maxval: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if maxval < 256 else np.uint16)


def _channels(header: ImageHeader) -> int:
    return header.shape[2] if header.axes == "YXS" else 1
