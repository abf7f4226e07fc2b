"""NumPy's .npy: one array of two to four axes, no pickles.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html (versions 1.0, 2.0 and 3.0).
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.formats.image.base import (
    DTYPES,
    OF_COMPLEX,
    ImageFormat,
    ImageHeader,
    ImageReader,
    ImageWriter,
    Region,
    require_fit,
)
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.storage.object_file import opened_to_read
from pipeline.storage.partial import Opening
from pipeline.storage.positional import PositionalFile

_MAGIC = b"\x93NUMPY"
_AXES = ("YX", "YXS", "ZYX", "ZYXS")  # which a shape alone can tell apart
_LONGEST_HEADER = 64 << 10
_ALIGNMENT = 64
_SUPPORTED = {np.dtype(name).str[1:] for name in DTYPES}  # "u1", "f4", …
# The header is a Python dictionary in text. Only the form that NumPy writes is accepted: nothing is ever evaluated.
_DICTIONARY = re.compile(r"\s*\{(.*)\}\s*", re.DOTALL)
_DESCR = re.compile(r"'descr'\s*:\s*'([^']{1,40})'")
_ORDER = re.compile(r"'fortran_order'\s*:\s*(True|False)")
_SHAPE = re.compile(r"'shape'\s*:\s*\(\s*((?:\d{1,18}L?\s*(?:,\s*|(?=\))))*)\)")


class Npy(ImageFormat):
    """The shape determines the axes: (Y, X), (Y, X, up to 4 samples), (Z, Y, X), (Z, Y, X, samples)."""

    name = "NPY"
    suffixes = (".npy",)

    def recognises(self, path: Path, first_bytes: bytes) -> bool:
        return first_bytes.startswith(_MAGIC)

    def open(self, path: Path) -> ImageReader:
        file = opened_to_read(path)
        try:
            return NpyReader(file)
        except BaseException:
            file.close()
            raise

    def refusal(self, header: ImageHeader, path: Path) -> str | None:
        if header.axes not in _AXES:
            return f"{path}: .npy holds axes {', '.join(_AXES)}, not {header.axes}; choose .tif or .zarr"
        if header.dtype.name not in DTYPES:
            return f"{path}: .npy holds {', '.join(DTYPES)} here, not {header.dtype}; convert it first"
        return None

    def head(self, header: ImageHeader, path: Path) -> bytes:
        return npy_head(header)

    def create(self, path: Path, header: ImageHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        """C order, native byte order."""
        head = npy_head(header)
        samples = ContiguousSamples(shape=header.shape, dtype=header.dtype, offset=len(head))
        return PositionalWriter(path, header, opening, samples=samples, head=[head])


class NpyReader(ImageReader):
    """Reads C order straight from the file, in either byte order, and Fortran order through its transpose."""

    def __init__(self, file: PositionalFile) -> None:
        self.path = file.path
        self._file = file
        dtype, self._fortran, shape, offset = _read_header(file)
        self.header = ImageHeader(shape=shape, axes=_axes_of(file.path, shape), dtype=dtype.newbyteorder("="))
        self._samples = ContiguousSamples(shape=shape[::-1] if self._fortran else shape, dtype=dtype, offset=offset)
        if file.size < offset + self.header.nbytes:
            raise InputError(
                f"{file.path}: truncated: its header promises {counted(self.header.nbytes, 'byte')} of samples, "
                f"the file holds {file.size - offset:,}; copy or save it again"
            )

    @property
    def run(self) -> tuple[np.dtype[Any], int] | None:
        return None if self._fortran else (self._samples.dtype, self._samples.offset)

    def read(self, region: Region, out: NDArray[Any]) -> None:
        require_fit(self.header, region, out)
        if not self._fortran:
            self._samples.read(self._file, region, out)
            return
        transposed = np.empty(region.shape[::-1], self.header.dtype)
        self._samples.read(self._file, Region(region.start[::-1], region.stop[::-1]), transposed)
        out[...] = transposed.T

    def close(self) -> None:
        self._file.close()


def _read_header(file: PositionalFile) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """dtype as stored, whether in Fortran order, shape, and the byte at which the samples start."""
    head = file.head(12)
    version = head[6:8]
    length_field = {b"\x01\x00": "<H", b"\x02\x00": "<I", b"\x03\x00": "<I"}.get(version)
    if not head.startswith(_MAGIC) or len(head) < 12 or length_field is None:
        raise InputError(f"{file.path}: not an .npy file of version 1, 2 or 3, or truncated; save it again")
    start = 8 + struct.calcsize(length_field)
    (length,) = struct.unpack(length_field, head[8:start])
    raw = file.head(min(length, _LONGEST_HEADER), start)
    found = _DICTIONARY.fullmatch(raw.decode("latin-1")) if len(raw) == length else None
    fields = [pattern.search(found[1]) for pattern in (_DESCR, _ORDER, _SHAPE)] if found else [None]
    if found and fields[0] is None and fields[1] and fields[2]:
        raise InputError(f"{file.path}: holds records, not plain samples; {_wanted()}")
    if not all(fields):
        raise InputError(f"{file.path}: the .npy header is truncated or damaged; save the array again")
    descr, order, shape = (str(field[1]) for field in fields if field)
    lengths = tuple(int(word.strip().rstrip("L")) for word in shape.split(",") if word.strip())
    return _dtype_of(file.path, descr), order == "True", lengths, start + length


def _dtype_of(path: Path, descr: str) -> np.dtype[Any]:
    if descr[:1] not in "<>|=" or descr[1:] not in _SUPPORTED:
        way_out = OF_COMPLEX if descr[1:2] == "c" else _wanted()
        raise InputError(f"{path}: holds samples of type {_type_name(descr)}; {way_out}")
    return np.dtype(descr)


def _type_name(descr: str) -> str:
    kinds = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
    if descr[1:] == "b1":
        return "bool"
    if descr[1:2] == "O":
        return "object (pickled Python objects, never loaded)"
    if descr[1:2] in kinds and descr[2:].isdecimal():
        return f"{kinds[descr[1]]}{8 * int(descr[2:])}"
    return repr(descr)


def _wanted() -> str:
    return f"Millrace takes {', '.join(DTYPES)}; convert it with .astype and save it again"


def _axes_of(path: Path, shape: tuple[int, ...]) -> str:
    if not 2 <= len(shape) <= 4:
        axes = counted(len(shape), "axis", "axes")
        raise InputError(f"{path}: has {axes} {shape}; an image has 2 to 4; reshape and save it again")
    if math.prod(shape) == 0:
        raise InputError(f"{path}: its shape {shape} holds no samples; nothing to read")
    if len(shape) == 3:
        return "YXS" if shape[-1] <= 4 else "ZYX"
    return "YX" if len(shape) == 2 else "ZYXS"


def npy_head(header: ImageHeader) -> bytes:
    """The header in version 1.0, padded as NumPy does, so that the samples start at a multiple of 64 bytes."""
    fields = {"descr": np.lib.format.dtype_to_descr(header.dtype), "fortran_order": False, "shape": header.shape}
    text = "{" + ", ".join(f"{name!r}: {value!r}" for name, value in fields.items()) + ", }"
    padding = -(len(_MAGIC) + 4 + len(text) + 1) % _ALIGNMENT
    body = text.encode("latin-1") + b" " * padding + b"\n"
    return _MAGIC + b"\x01\x00" + struct.pack("<H", len(body)) + body
