"""MRC2014 and CCP4 maps (.mrc, .map, .ccp4): mode 2, float32, little-endian.

Source: https://www.ccpem.ac.uk/mrc_format/mrc2014.php. z changes fastest in the file: columns run along z, rows along
y, sections along x (MAPC 3, MAPR 2, MAPS 1), so that a slab along x is contiguous. The header can state the map's start
twice; readers use one of them or add both, so only one is filled: NCSTART, NRSTART and NSSTART if the start is a whole
number of steps, which PyMOL, ChimeraX, VMD and GridDataFormats all place right; otherwise ORIGIN in angstrom, which
some ignore in .map and .ccp4, and of which VMD swaps x and z.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.grid.base import GridFormat, GridHeader
from pipeline.formats.image.array_reader import ArrayReader, file_array
from pipeline.formats.image.base import ImageReader, ImageWriter
from pipeline.formats.image.contiguous import ContiguousSamples
from pipeline.formats.image.positional_writer import PositionalWriter
from pipeline.storage.partial import Callback, Opening, no_callback

_HEADER_BYTES = 1024
_NEEDING_STARTS = (".map", ".ccp4")
_MODE_FLOAT32 = 2
_COLUMNS_ROWS_SECTIONS = (3, 2, 1)  # z, y, x
_VERSION = 20141
_LABEL_CHARACTERS = 80
_STATISTICS_AT, _RMS_AT = 76, 216
_UNDETERMINED = (0.0, -1.0, -2.0, -1.0)  # minimum above maximum, mean below both, negative deviation
_BLOCK_BYTES = 4 << 20
_MOST_THREADS = 8
_TOLERATED_STEPS = 1e-4  # the largest deviation of a start from a whole number of steps
_FARTHEST_SIZES = 10  # ChimeraX ignores a start beyond this many map sizes


class Mrc(GridFormat):
    """Steps along x, y and z, or of a cell whose first step runs along x and second lies in the xy plane."""

    name = "MRC"
    suffixes = (".mrc", ".map", ".ccp4")

    def refusal(self, header: GridHeader, path: Path) -> str | None:
        (ax, ay, az), (_, by, bz), (_, _, cz) = header.vectors
        if (ay, az, bz) != (0, 0, 0) or min(ax, by, cz) <= 0:
            return f"{path}: MRC needs a first step along x and a second in the xy plane; choose .dx, .cube or .zarr"
        if path.suffix.lower() in _NEEDING_STARTS and _starts(header) is None:
            return (
                f"{path}: {path.suffix} needs a start of whole steps from 0, within ten times the map's size, "
                f"not {header.origin}; choose .mrc"
            )
        return None

    def file_bytes(self, header: GridHeader) -> int:
        return _HEADER_BYTES + header.nbytes

    def create(self, path: Path, header: GridHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return MrcWriter(path, header, opening)

    def open(self, path: Path, header: GridHeader) -> ImageReader:
        return ArrayReader(path, header.image, file_array(path, "<f4", header.shape, offset=_HEADER_BYTES))


class MrcWriter(PositionalWriter):
    """Writes regions straight to their offset; `publish` reads the file for minimum, maximum, mean and deviation."""

    def __init__(self, path: Path, header: GridHeader, opening: Opening) -> None:
        dtype = header.image.dtype.newbyteorder("<")
        samples = ContiguousSamples(shape=header.shape, dtype=dtype, offset=_HEADER_BYTES)
        super().__init__(path, header.image, opening, samples=samples, head=[_head(header)])

    def publish(self, on_sealed: Callback = no_callback) -> None:
        least, most, mean, deviation = self._statistics()
        self._partial.write_at(_STATISTICS_AT, struct.pack("<3f", least, most, mean))
        self._partial.write_at(_RMS_AT, struct.pack("<f", deviation))
        super().publish(on_sealed)

    def _statistics(self) -> tuple[float, float, float, float]:
        threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        total = _Moments()
        with ThreadPoolExecutor(threads, thread_name_prefix="statistics") as pool:
            for moments in pool.map(self._moments, self._blocks()):
                total = total.with_(moments)
        found = (total.least, total.most, total.mean, float(np.sqrt(total.squares / total.count)))
        with np.errstate(over="ignore"):
            known = np.isfinite(np.array(found, np.float32)).all()  # false if a value is NaN or infinite
        return found if known else _UNDETERMINED

    def _blocks(self) -> Iterator[tuple[int, int]]:
        end = _HEADER_BYTES + self._samples.nbytes
        for start in range(_HEADER_BYTES, end, _BLOCK_BYTES):
            yield start, min(_BLOCK_BYTES, end - start)

    def _moments(self, block: tuple[int, int]) -> _Moments:
        start, nbytes = block
        raw = np.empty(nbytes, np.uint8)
        self._partial.read_at(start, raw.data)
        values = raw.view(self._samples.dtype)
        with np.errstate(all="ignore"):
            mean = float(values.mean(dtype=np.float64))
            apart = values - np.float64(mean)
            squares = float(np.einsum("i,i->", apart, apart))  # BLAS would start threads of its own in each of ours
        return _Moments(float(values.min()), float(values.max()), len(values), mean, squares)


@dataclass(frozen=True)
class _Moments:
    """Minimum, maximum, count and mean of some values, and the sum of squares about the mean."""

    least: float = np.inf
    most: float = -np.inf
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_(self, other: _Moments) -> _Moments:
        """The moments of both together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return _Moments(
            min(self.least, other.least),
            max(self.most, other.most),
            count,
            self.mean + apart * other.count / count,
            self.squares + other.squares + apart**2 * self.count * other.count / count,
        )


def _head(header: GridHeader) -> bytes:
    nx, ny, nz = header.shape
    cell = np.array(header.vectors) * np.array(header.shape)[:, None]
    starts = _starts(header)
    origin = header.origin if starts is None else (0.0, 0.0, 0.0)
    labels = [header.line(_LABEL_CHARACTERS), "Columns along z, rows along y, sections along x"]
    head = b"".join(
        (
            struct.pack("<4i", nz, ny, nx, _MODE_FLOAT32),
            struct.pack("<3i", *(starts or (0, 0, 0))[::-1]),
            struct.pack("<3i", nx, ny, nz),
            struct.pack("<6f", *np.linalg.norm(cell, axis=1), *_angles(cell)),
            struct.pack("<3i", *_COLUMNS_ROWS_SECTIONS),
            struct.pack("<3f", *_UNDETERMINED[:3]),
            struct.pack("<2i", 1, 0),  # space group P1: one volume; no extended header
            struct.pack("<12xi", _VERSION).ljust(100, b"\0"),
            struct.pack("<3f", *origin),
            b"MAP DD\0\0",  # little-endian
            struct.pack("<fi", _UNDETERMINED[3], len(labels)),
            *(label.ljust(_LABEL_CHARACTERS).encode("ascii") for label in labels),
        )
    )
    return head.ljust(_HEADER_BYTES, b"\0")


def _angles(cell: NDArray[np.float64]) -> tuple[float, ...]:
    """alpha, beta and gamma in degrees, exactly 90 where two vectors are at right angles."""
    unit = cell / np.linalg.norm(cell, axis=1)[:, None]
    cosines = (float(unit[one] @ unit[other]) for one, other in ((1, 2), (0, 2), (0, 1)))
    return tuple(90.0 if cosine == 0 else float(np.degrees(np.arccos(cosine))) for cosine in cosines)


def _starts(header: GridHeader) -> tuple[int, int, int] | None:
    """The origin in whole steps along x, y and z; None if it is not one."""
    steps = np.linalg.solve(np.array(header.vectors).T, np.array(header.origin))
    whole = np.rint(steps)
    if np.abs(steps - whole).max() > _TOLERATED_STEPS or np.abs(whole).max() > _FARTHEST_SIZES * max(header.shape):
        return None
    x, y, z = (int(step) for step in whole)
    return x, y, z
