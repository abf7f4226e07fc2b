"""BART's pairs of files: a .hdr of text with the dimensions, a .cfl of complex64, the first dimension fastest.

Dimensions: 0 … 2 x, y, z (of k-space: 1, samples, readouts; of a trajectory: 3, samples, readouts), 3 coils, 4 sets of
maps, 5 echoes, 10 time, 11 second time, 13 slices, 14 averages. Trajectories are in cycles per field of view.
Source: https://mrirecon.github.io/bart, "mri.h" and "Non-Cartesian trajectories".
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.storage.positional import PositionalFile, first_bytes, reading

COMPLEX = np.dtype(np.complex64)
DIMENSIONS = 16
_LONGEST_HEADER = 64 << 10


def pair_of(path: Path) -> tuple[Path, Path]:
    """The .cfl and the .hdr, by the name of either or without a suffix, in whatever letters they are there."""
    return _beside(path, ".cfl"), _beside(path, ".hdr")


def files_of(path: Path) -> tuple[Path, ...]:
    """The files that an input is read from: both of a pair, which may be named without a suffix, else it alone."""
    return pair_of(path) if path.suffix.lower() in ("", ".cfl", ".hdr") else (path,)


def _beside(path: Path, suffix: str) -> Path:
    if path.suffix.lower() == suffix:
        return path
    likely = alike(path, suffix)
    others = (path.with_suffix(suffix), path.with_suffix(suffix.upper()))
    return next((each for each in (likely, *others) if os.path.lexists(each)), likely)


def alike(path: Path, suffix: str) -> Path:
    """With another suffix, in capitals where the path's own is."""
    given = path.suffix.ljust(len(suffix))
    return path.with_suffix(
        "".join(new.upper() if old.isupper() else new for old, new in zip(given, suffix, strict=False))
    )


class Cfl:
    """A pair of files, mapped: `array` has the file's dimensions reversed, so that the first is last and fastest."""

    def __init__(self, path: Path) -> None:
        """`path`: of either file. InputError where one is missing or damaged, or they do not fit each other."""
        self.path, header = pair_of(path)
        self.dims = _dims(header)
        file = PositionalFile(self.path)
        try:
            size = file.size
        finally:
            file.close()
        needed = math.prod(self.dims) * COMPLEX.itemsize
        if size < needed:
            raise InputError(
                f"{self.path}: truncated: its .hdr promises {counted(needed, 'byte')}, the file holds {size:,}; "
                "copy it again"
            )
        if size > needed:
            raise InputError(
                f"{self.path}: holds {counted(size, 'byte')}, and its .hdr tells of {needed:,}: the two do not belong "
                "together; write them again"
            )
        with reading(self.path):
            self.array: NDArray[np.complex64] = np.memmap(
                self.path, np.dtype("<c8"), mode="r", shape=tuple(self.dims[::-1])
            )


def _dims(path: Path) -> tuple[int, ...]:
    """The sixteen dimensions of a .hdr."""
    lines = first_bytes(path, _LONGEST_HEADER).decode("latin-1").splitlines()
    try:
        place = next(number for number, line in enumerate(lines) if line.strip().lower() == "# dimensions")
        dims = tuple(int(word) for word in lines[place + 1].split())
    except (StopIteration, IndexError, ValueError) as exc:
        raise InputError(
            f"{path}: has no line of whole numbers after '# Dimensions'; write it with BART again"
        ) from exc
    if not 1 <= len(dims) <= DIMENSIONS or min(dims) < 1:
        raise InputError(f"{path}: its dimensions are {' '.join(map(str, dims))}; 1 to 16 numbers above 0 are needed")
    return dims + (1,) * (DIMENSIONS - len(dims))
