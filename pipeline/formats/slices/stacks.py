"""Opening files by what they state themselves, with a letter for each axis.

Besides the letters of images there are X, Y and Z of maps in any order, and the dimensions of BART: C coils, M maps,
E echoes, T and U time, L slices, A averages.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.codecs.bounded import decode
from pipeline.errors import InputError, MillraceError
from pipeline.formats import image as images
from pipeline.formats.cfl import Cfl
from pipeline.formats.grid.cube import Cube
from pipeline.formats.grid.fixed_decimals import NumberStyle
from pipeline.formats.grid.opendx import OpenDx
from pipeline.formats.image.array_reader import ArrayReader, file_array
from pipeline.formats.image.base import OF_COMPLEX, ImageHeader, ImageReader
from pipeline.formats.image.volumes.mrc import Mrc
from pipeline.formats.image.volumes.nifti import Nifti
from pipeline.formats.image.zarr import is_zarr
from pipeline.formats.image.zarr.reader import open_level
from pipeline.formats.numpy_files import mapped_array
from pipeline.storage.confinement import by_descriptor, open_beneath
from pipeline.storage.objects import ObjectPath
from pipeline.storage.positional import first_bytes, reading

# Of a map as text that has to be parsed, or is compressed.
MOST_TEXT_BYTES = 256 << 20
_BART = "XYZCMEabcdTUeLAf"
_DX = re.compile(
    rb"object\s+\S+\s+class\s+gridpositions\s+counts\s+(\d+)\s+(\d+)\s+(\d+).*?data\s+follows[^\n]*\n", re.DOTALL
)
_NUMBER = re.compile(rb" ?[-+\d][.\d]+[eE][-+]\d+[ \n]?")
_LONGEST_DX_HEAD, _LONGEST_CUBE_HEAD = 64 << 10, 16 << 20  # a cube's has its atoms
_LONGEST_TAIL_BYTES = 512


def open_stack(path: Path) -> ImageReader:
    """An image, a map or a series of images, by what the file states; close it after use.

    The header's axes may have letters beyond those of images, in any order, and its samples may be complex.
    InputError if the file is none of these, or damaged.
    """
    name = path.name.lower()
    if isinstance(path, ObjectPath):
        return images.open_image(path)
    with reading(path):
        if path.is_dir():
            return _zarr(path) if is_zarr(path) else images.open_image(path)
        path.stat()
    opener = next((each for suffixes, each in _OPENERS.items() if name.endswith(suffixes)), images.open_image)
    with _declared(path):
        return opener(path)


@contextmanager
def _declared(path: Path) -> Iterator[None]:
    """Any other error of unpacking and mapping a header is a damaged one."""
    try:
        yield
    except (MillraceError, OSError, MemoryError):
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
        said = " ".join(str(error).split())[:120]
        raise InputError(f"{path}: its header is damaged ({said}); make it again") from error


def _stack(path: Path, axes: str, array: Any) -> ImageReader:
    """With as many of the last letters as the array has axes."""
    if len(array.shape) < 2 or math.prod(array.shape) == 0:
        raise InputError(f"{path}: an array of shape {tuple(array.shape)}, which is not an image; nothing to show")
    letters = axes[-len(array.shape) :]
    if len(letters) < len(array.shape):
        raise InputError(f"{path}: an array of {len(array.shape)} axes; {len(axes)} can be shown: save a part of it")
    if array.dtype.kind not in "buifcS":
        raise InputError(f"{path}: holds {array.dtype} values, which are not samples; save numbers")
    dtype = np.dtype(np.float64) if array.dtype.kind == "S" else np.dtype(array.dtype)
    return ArrayReader(path, ImageHeader(shape=tuple(array.shape), axes=letters, dtype=dtype), array)


def _plain(path: Path, array: Any) -> ImageReader:
    """An array whose axes have no names."""
    has_colours = array.ndim in (3, 4) and array.shape[-1] <= 4 and array.dtype.kind in "bui"
    return _stack(path, "ZYXS" if has_colours else "TZYX" if array.ndim == 4 else "abcdefTCZYX", array)


def _zarr(path: Path) -> ImageReader:
    """An image; else a series of complex ones."""
    try:
        return images.open_image(path)
    except InputError as error:
        if OF_COMPLEX not in str(error):
            raise
    array = open_level(path)
    found = _plain(path, array)
    found.block_shape = tuple(array.chunks)
    return found


def _cfl(path: Path) -> ImageReader:
    pair = Cfl(path)
    used = [axis for axis, length in enumerate(pair.dims) if length > 1]
    used = sorted({*used, *[axis for axis in range(len(pair.dims)) if axis not in used][: max(2 - len(used), 0)]})
    letters = "".join(_BART[axis] for axis in reversed(used))
    return _stack(path, letters, pair.array.reshape([pair.dims[axis] for axis in reversed(used)]))


def _dx(path: Path) -> ImageReader:
    text = _text(path) if path.name.lower().endswith(".gz") else None
    found = _DX.search(first_bytes(path, _LONGEST_DX_HEAD) if text is None else text[:_LONGEST_DX_HEAD])
    if found is None:
        raise InputError(f"{path}: not an OpenDX map of regular positions; make it again")
    shape = tuple(int(count) for count in found.groups())
    return _text_map(path, shape, found.end(), OpenDx.style, text)


def _cube(path: Path) -> ImageReader:
    lines = first_bytes(path, _LONGEST_CUBE_HEAD).split(b"\n", 6)
    try:
        atoms, *shape = (int(lines[number].split()[0]) for number in (2, 3, 4, 5))
    except (IndexError, ValueError) as error:
        raise InputError(f"{path}: not a cube of one map; make it again") from error
    if atoms < 0:
        raise InputError(f"{path}: a cube of orbitals, of which none is shown; export one map")
    ends = itertools.accumulate(len(line) + 1 for line in (*lines[:6], *lines[6].split(b"\n")[:atoms]))
    *_, start = ends
    return _text_map(path, tuple(shape), start, Cube.style)


def _text_map(
    path: Path, shape: tuple[int, ...], start: int, style: NumberStyle | None, text: bytes | None = None
) -> ImageReader:
    """Values from an offset of a text. As a whole it is parsed only if its numbers are not in the `style`'s places."""
    count = math.prod(shape)
    if text is None and style is not None:
        with reading(path):
            after = path.stat().st_size - start - count * style.width
        if count and 0 <= after < _LONGEST_TAIL_BYTES:
            texts = file_array(path, f"S{style.width}", shape, offset=start, after=after)
            if all(_NUMBER.fullmatch(texts.flat[index]) for index in (0, count // 2, count - 1)):
                return _stack(path, "XYZ", texts)
    rest = (_text(path) if text is None else text)[start:]
    if 2 * count - 1 > len(rest):
        raise InputError(f"{path}: truncated: its header promises {count:,} values; copy it again")
    return _stack(path, "XYZ", np.fromstring(rest.decode("latin-1"), np.float64, count, sep=" ").reshape(shape))


def _text(path: Path) -> bytes:
    with reading(path), open(path, "rb", opener=open_beneath) as file:
        found = file.read(MOST_TEXT_BYTES + 1)
    if path.name.lower().endswith(".gz") and len(found) <= MOST_TEXT_BYTES:
        try:
            found = bytes(decode("gzip", found, MOST_TEXT_BYTES))
        except (ValueError, zlib.error) as error:
            raise InputError(f"{path}: does not decompress ({error}); make it again") from error
    if len(found) > MOST_TEXT_BYTES:
        raise InputError(f"{path}: more text than {MOST_TEXT_BYTES >> 20} MiB; write the map as .mrc or .zarr")
    return found


def _dicom(path: Path) -> ImageReader:
    """Uncompressed, in one file."""
    from pipeline.formats.series.dicom import pydicom_for

    pydicom = pydicom_for(path)
    with reading(path), by_descriptor(path) as name:
        try:
            found = pydicom.dcmread(name)
            array = found.pixel_array
        except MemoryError:
            raise
        except Exception as error:  # pydicom's have no common ancestor
            said = " ".join(str(error).split())[:120]
            raise InputError(f"{path}: not an uncompressed DICOM image ({said}); convert it") from error
    colours = getattr(found, "SamplesPerPixel", 1) > 1
    return _stack(path, "ZYXS" if colours else "ZYX", array)


_OPENERS: dict[tuple[str, ...], Callable[[Path], ImageReader]] = {
    (".npy",): lambda path: _plain(path, mapped_array(path)),
    (".cfl", ".hdr"): _cfl,
    (".mrc", ".mrcs", ".map", ".ccp4"): Mrc(as_stored=True).open,
    (".dx", ".dx.gz"): _dx,
    (".cube", ".cub"): _cube,
    (".nii", ".nii.gz"): Nifti(any_samples=True).open,
    (".dcm",): _dicom,
}
SUFFIXES: tuple[str, ...] = tuple(
    dict.fromkeys(suffix for known in (*(form.suffixes for form in images.FORMATS), *_OPENERS) for suffix in known)
)
