"""BART's file pairs: a .hdr of text with the dimensions, and a .cfl of complex64, the first dimension fastest.

Dimensions: 0 … 2 x, y, z (of k-space: 1, samples, readouts; of a trajectory: 3, samples, readouts), 3 coils, 4 sets of
coil sensitivity maps, 5 echoes, 10 time, 11 second time, 13 slices, 14 averages. Trajectories are in cycles per field
of view. Source: https://mrirecon.github.io/bart, "mri.h" and "Non-Cartesian trajectories".
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.config import brief
from pipeline.errors import InputError, counted
from pipeline.storage.confinement import by_descriptor
from pipeline.storage.positional import PositionalFile, first_bytes, reading

COMPLEX = np.dtype("<c8")
DIMENSIONS = 16
TIME, SLICE = 10, 13
SUFFIXES = (".cfl", ".hdr")
_LONGEST_HEADER_BYTES = 64 << 10


def pair_of(path: Path) -> tuple[Path, Path]:
    """The paths of .cfl and .hdr, from either of them or without a suffix; upper or lower case, as the files exist."""
    return _beside(path, ".cfl"), _beside(path, ".hdr")


def files_of(path: Path) -> tuple[Path, ...]:
    """The files that an input consists of: both of a pair, which may be named without a suffix, else the file alone."""
    return pair_of(path) if path.suffix.lower() in ("", *SUFFIXES) else (path,)


def _beside(path: Path, suffix: str) -> Path:
    if path.suffix.lower() == suffix:
        return path
    likely = with_suffix_in_case(path, suffix)
    others = (path.with_suffix(suffix), path.with_suffix(suffix.upper()))
    return next((each for each in (likely, *others) if os.path.lexists(each)), likely)


def with_suffix_in_case(path: Path, suffix: str) -> Path:
    """The path with another suffix, each letter in upper case where the path's own suffix is."""
    given = path.suffix.ljust(len(suffix))
    return path.with_suffix(
        "".join(new.upper() if old.isupper() else new for old, new in zip(given, suffix, strict=False))
    )


class Cfl:
    """A memory-mapped pair: `array` has the dimensions `dims` in reverse, so that the first is last and fastest."""

    def __init__(self, path: Path) -> None:
        """`path`: of either file. InputError if one is missing or damaged, or their sizes disagree."""
        self.path, header = pair_of(path)
        self.dims = _read_dims(header)
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
                f"{self.path}: holds {counted(size, 'byte')}, but its .hdr declares {needed:,}: the two do not belong "
                "together; write them again"
            )
        with reading(self.path), by_descriptor(self.path) as here:
            self.array: NDArray[np.complex64] = np.memmap(here, COMPLEX, mode="r", shape=self.dims[::-1])


def _read_dims(path: Path) -> tuple[int, ...]:
    """The dimensions of a .hdr, filled up with 1 to sixteen."""
    lines = first_bytes(path, _LONGEST_HEADER_BYTES).decode("latin-1").splitlines()
    try:
        title = next(number for number, line in enumerate(lines) if line.strip().lower() == "# dimensions")
        dims = tuple(int(word) for word in lines[title + 1].split())
    except (StopIteration, IndexError, ValueError) as exc:
        raise InputError(
            f"{path}: has no line of whole numbers after '# Dimensions'; write it with BART again"
        ) from exc
    if not 1 <= len(dims) <= DIMENSIONS or min(dims) < 1:
        shown = brief(" ".join(map(str, dims)))
        raise InputError(f"{path}: its dimensions are {shown}; 1 to {DIMENSIONS} numbers above 0 are needed")
    return dims + (1,) * (DIMENSIONS - len(dims))
