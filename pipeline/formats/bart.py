"""BART's pairs of files: a .hdr of text with the dimensions, a .cfl of complex64, the first dimension fastest.

Dimensions: 0 … 2 x, y, z (of k-space: 1, samples, readouts; of a trajectory: 3, samples, readouts), 3 coils, 4 sets of
maps, 5 echoes, 10 time, 11 second time, 13 slices, 14 averages. Trajectories are in cycles per field of view.
Source: https://mrirecon.github.io/bart, "mri.h" and "Non-Cartesian trajectories".
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.formats.base import ImageWriter, Region
from pipeline.formats.contiguous import ContiguousSamples
from pipeline.formats.image_series import SeriesFormat, SeriesHeader
from pipeline.formats.kspace import (
    COMPLEX,
    KSpaceHeader,
    KSpaceReader,
    Readouts,
    require_finite_samples,
    require_finite_trajectory,
)
from pipeline.formats.partial import Opening, PartialFile, Sealed, not_told
from pipeline.formats.positional import PositionalFile, first_bytes, reading
from pipeline.formats.positional_writer import PositionalWriter
from pipeline.formats.region_fit import require_fit

_DIMENSIONS = 16
_COIL, _MAPS, _TIME, _SLICE = 3, 4, 10, 13
_LATER = (5, 6, 7, 8, 9, 10, 11, 12, 14, 15)  # what makes images follow one another
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
    likely = _alike(path, suffix)
    others = (path.with_suffix(suffix), path.with_suffix(suffix.upper()))
    return next((each for each in (likely, *others) if os.path.lexists(each)), likely)


def _alike(path: Path, suffix: str) -> Path:
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
    if not 1 <= len(dims) <= _DIMENSIONS or min(dims) < 1:
        raise InputError(f"{path}: its dimensions are {' '.join(map(str, dims))}; 1 to 16 numbers above 0 are needed")
    return dims + (1,) * (_DIMENSIONS - len(dims))


class BartKSpace(KSpaceReader):
    """k-space (1, samples, readouts, coils, …) and its trajectory (3, samples, readouts, …)."""

    def __init__(self, path: Path, trajectory: Path) -> None:
        self._kspace, self._points = Cfl(path), Cfl(trajectory)
        self.path = self._kspace.path
        dims, points = self._kspace.dims, self._points.dims
        if dims[0] != 1 or dims[_MAPS] != 1:
            raise InputError(
                f"{self.path}: its dimensions {_shown(dims)} are of no non-Cartesian k-space: 1, samples, readouts, "
                "coils"
            )
        fitting = all(points[axis] in (1, dims[axis]) for axis in (*_LATER, _SLICE))
        if points[0] not in (2, 3) or points[1:3] != dims[1:3] or points[_COIL] != 1 or not fitting:
            raise InputError(
                f"{self._points.path}: its dimensions {_shown(points)} are of no trajectory for the k-space "
                f"{_shown(dims)}: 3, samples and readouts as there"
            )
        first = self._points.array.reshape(-1, *points[2::-1])[0].real
        dimensions = 3 if points[0] == 3 and np.nanmax(np.abs(first[..., 2]), initial=0) > 0 else 2
        if dimensions == 3 and dims[_SLICE] > 1:
            raise InputError(f"{self.path}: {dims[_SLICE]} slices with a trajectory in three dimensions")
        self._later = tuple(dims[axis] for axis in reversed(_LATER))
        times = math.prod(self._later)
        self.header = KSpaceHeader(
            coils=dims[_COIL],
            dimensions=dimensions,
            times=times,
            slices=dims[_SLICE],
            units="cycles/fov",
            time_names=tuple(f"time {number}" for number in range(times)),
        )

    def extent(self, time: int, slice_: int) -> tuple[int, int]:
        return self._kspace.dims[2], self._kspace.dims[1]

    def trajectory(self, readouts: Readouts) -> NDArray[np.float64]:
        part = self._part(self._points, readouts)[0, 0, readouts.first : readouts.stop].real
        require_finite_trajectory(self._points.path, part, _named(readouts))
        dimensions = self.header.dimensions
        if dimensions == 2 and part.shape[-1] == 3 and np.any(part[..., 2] != 0):
            raise InputError(f"{self._points.path}: lies in one plane at first and leaves it later; z must be 0 or not")
        return np.ascontiguousarray(part[..., :dimensions], np.float64)

    def read(self, readouts: Readouts, out: NDArray[Any]) -> None:
        out[...] = self._part(self._kspace, readouts)[0, :, readouts.first : readouts.stop, :, 0]
        require_finite_samples(self.path, out, _named(readouts))

    def close(self) -> None:
        """Nothing is held but mappings, which go with the reader."""

    def _part(self, pair: Cfl, readouts: Readouts) -> NDArray[Any]:
        """(maps, coils, readouts, samples, first) of one time and slice."""
        place = dict(zip(reversed(_LATER), np.unravel_index(readouts.time, self._later), strict=True))
        place[_SLICE] = np.intp(readouts.slice)
        indices = []
        for axis in reversed(range(_MAPS + 1, _DIMENSIONS)):
            indices.append(0 if pair.dims[axis] == 1 else int(place[axis]))
        return np.asarray(pair.array[tuple(indices)])


class BartSeries(SeriesFormat):
    """Images as BART has them: x, y, z, time in dimension 10, slices in 13; always complex."""

    name = "BART"
    suffixes = (".cfl",)

    def refusal(self, header: SeriesHeader, path: Path) -> str | None:
        return None

    def also_written(self, path: Path) -> tuple[Path, ...]:
        return (_alike(path, ".hdr"),)

    def create(self, path: Path, header: SeriesHeader, opening: Opening = Opening.NEW) -> ImageWriter:
        return BartSeriesWriter(path, header, opening)


class BartSeriesWriter(PositionalWriter):
    """The .cfl grows beside its name; the .hdr is made when it is published."""

    def __init__(self, path: Path, header: SeriesHeader, opening: Opening) -> None:
        times, slices, rows, columns = header.shape
        self._slices_last = not header.is_volume
        stored = (slices, times, rows, columns) if self._slices_last else header.shape
        samples = ContiguousSamples(shape=stored, dtype=np.dtype("<c8"), offset=0)
        dims = [columns, rows, 1 if self._slices_last else slices, *[1] * 7, times, 1, 1]
        dims += [slices if self._slices_last else 1, 1, 1]
        self._text = f"# Dimensions\n{' '.join(map(str, dims))}\n".encode()
        super().__init__(path, header.image, opening, samples=samples, head=[])

    def write(self, region: Region, samples: NDArray[Any]) -> None:
        require_fit(self.header, region, samples)
        if not self._slices_last:
            self._samples.write(self._file, region, samples.astype(COMPLEX, copy=False))
            return
        turned = Region(_turned(region.start), _turned(region.stop))
        self._samples.write(self._file, turned, np.ascontiguousarray(samples.swapaxes(0, 1), COMPLEX))

    def publish(self, sealed: Sealed = not_told) -> None:
        header = PartialFile(_alike(self.path, ".hdr"), len(self._text))

        def publish_header() -> None:  # first: whoever finds the samples under their name finds it too
            sealed()
            header.publish()

        try:
            header.write_at(0, self._text)
            super().publish(publish_header)
        finally:
            header.discard()


def _turned(place: tuple[int, ...]) -> tuple[int, ...]:
    return (place[1], place[0], *place[2:])


def _shown(dims: tuple[int, ...]) -> str:
    last = max((axis for axis, n in enumerate(dims) if n > 1), default=0)
    return "(" + ", ".join(map(str, dims[: max(last + 1, 4)])) + ")"


def _named(readouts: Readouts) -> Callable[[int], str]:
    return lambda place: f"readout {readouts.first + place}"
