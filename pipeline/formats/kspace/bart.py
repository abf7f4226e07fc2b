"""Cartesian k-space as one of BART's file pairs, or k-space and trajectory as two; see `pipeline.formats.cfl`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats.cfl import DIMENSIONS, SLICE, Cfl
from pipeline.formats.kspace.base import (
    KSpaceHeader,
    KSpaceReader,
    Readouts,
    require_finite_samples,
    require_finite_trajectory,
)

_COIL, _MAPS = 3, 4
# From this share of samples that are not 0, readouts are whole.
_DENSE = 0.98
# The dimensions that together number the times: echoes, time, averages, …
_TIMES = tuple(axis for axis in range(_MAPS + 1, DIMENSIONS) if axis != SLICE)


class BartKSpace(KSpaceReader):
    """k-space (1, samples, readouts, coils, …) and its trajectory (3, samples, readouts, …)."""

    def __init__(self, path: Path, trajectory: Path) -> None:
        self._kspace, self._points = Cfl(path), Cfl(trajectory)
        self.path = self._kspace.path
        dims, points = self._kspace.dims, self._points.dims
        if dims[0] != 1 or dims[_MAPS] != 1:
            raise InputError(
                f"{self.path}: its dimensions {_shown(dims)} are not those of non-Cartesian k-space: 1, samples, "
                "readouts, coils"
            )
        fitting = all(points[axis] in (1, dims[axis]) for axis in (*_TIMES, SLICE))
        if points[0] not in (2, 3) or points[1:3] != dims[1:3] or points[_COIL] != 1 or not fitting:
            raise InputError(
                f"{self._points.path}: its dimensions {_shown(points)} are not those of a trajectory for the k-space "
                f"{_shown(dims)}: 3, and the same samples and readouts"
            )
        first = self._points.array.reshape(-1, *points[2::-1])[0].real
        dimensions = 3 if points[0] == 3 and np.nanmax(np.abs(first[..., 2]), initial=0) > 0 else 2
        if dimensions == 3 and dims[SLICE] > 1:
            raise InputError(f"{self.path}: {dims[SLICE]} slices with a trajectory in three dimensions")
        self._times = tuple(dims[axis] for axis in reversed(_TIMES))
        times = math.prod(self._times)
        self.header = KSpaceHeader(
            coils=dims[_COIL],
            dimensions=dimensions,
            times=times,
            slices=dims[SLICE],
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
            raise InputError(
                f"{self._points.path}: its first image lies in the plane z = 0, a later one does not; all must agree"
            )
        return np.ascontiguousarray(part[..., :dimensions], np.float64)

    def read(self, readouts: Readouts, out: NDArray[Any]) -> None:
        out[...] = self._part(self._kspace, readouts)[0, :, readouts.first : readouts.stop, :, 0]
        require_finite_samples(self.path, out, _named(readouts))

    def close(self) -> None:
        """Nothing is open but memory maps, which are freed with the reader."""

    def _part(self, pair: Cfl, readouts: Readouts) -> NDArray[Any]:
        return _one_image(pair, self._times, readouts.time, readouts.slice)


def _one_image(pair: Cfl, times: tuple[int, ...], time: int, slice_: int) -> NDArray[Any]:
    """Dimensions 4 to 0 of one time and slice: (maps, coils, readouts, samples, 1 or columns)."""
    place = dict(zip(reversed(_TIMES), np.unravel_index(time, times), strict=True))
    place[SLICE] = np.intp(slice_)
    axes = reversed(range(_MAPS + 1, DIMENSIONS))
    return np.asarray(pair.array[tuple(0 if pair.dims[axis] == 1 else int(place[axis]) for axis in axes)])


def _shown(dims: tuple[int, ...]) -> str:
    last = max((axis for axis, n in enumerate(dims) if n > 1), default=0)
    return "(" + ", ".join(map(str, dims[: max(last + 1, 4)])) + ")"


def _named(readouts: Readouts) -> Callable[[int], str]:
    return lambda place: f"readout {readouts.first + place}"


def is_cartesian(path: Path) -> bool:
    """Whether a pair holds k-space on a grid, (x, y, z, coils, …)."""
    return Cfl(path).dims[0] > 1


class BartCartesian(KSpaceReader):
    """k-space on a grid (x, y, z, coils, …), centred at n // 2; samples that are 0 in every coil were not acquired.

    Readouts run along x. If some readouts lack samples that others have, each sample is a readout of its own.
    """

    def __init__(self, path: Path) -> None:
        self._kspace = Cfl(path)
        self.path = self._kspace.path
        dims = self._kspace.dims
        if dims[_MAPS] != 1:
            raise InputError(f"{self.path}: its dimensions {_shown(dims)} are not those of k-space: x, y, z, coils")
        self._times = tuple(dims[axis] for axis in reversed(_TIMES))
        dimensions = 3 if dims[2] > 1 else 2
        if dimensions == 3 and dims[SLICE] > 1:
            raise InputError(f"{self.path}: {dims[SLICE]} slices of volumes; split it into one a file")
        times = math.prod(self._times)
        matrix = dims[:dimensions]
        self.header = KSpaceHeader(
            coils=dims[_COIL],
            dimensions=dimensions,
            times=times,
            slices=dims[SLICE],
            units="cycles/fov",
            matrix=matrix,
            encoded=tuple(map(float, matrix)),
            cartesian=True,
            time_names=tuple(f"time {number}" for number in range(times)),
        )
        self._acquired: dict[tuple[int, int], NDArray[np.intp]] = {}
        self._lock = threading.Lock()

    def _places(self, time: int, slice_: int) -> NDArray[np.intp]:
        """(readouts, samples): the acquired places of an image, in the order of the file, as indices of (z, y, x)."""
        with self._lock:
            found = self._acquired.get((time, slice_))
            if found is None:
                sampled = (self._image(time, slice_) != 0).any(axis=0)  # NaN is a sample
                if not sampled.any():
                    raise InputError(f"{self.path}: slice {slice_}, time {time} holds only zeros; leave it out")
                numbers = np.arange(sampled.size).reshape(sampled.shape)
                lines, columns = sampled.any(axis=2), sampled.any(axis=(0, 1))
                whole = np.zeros_like(sampled)
                whole[lines] = columns
                # Lone zeros inside readouts are samples that happen to be 0.
                dense = sampled.sum() >= _DENSE * whole.sum()
                found = numbers[lines][:, columns] if dense else numbers[sampled][:, None]
                self._acquired[time, slice_] = found
        return found

    def _image(self, time: int, slice_: int) -> NDArray[Any]:
        """(coils, z, y, x)."""
        return np.asarray(_one_image(self._kspace, self._times, time, slice_)[0])

    def extent(self, time: int, slice_: int) -> tuple[int, int]:
        readouts, samples = self._places(time, slice_).shape
        return readouts, samples

    def trajectory(self, readouts: Readouts) -> NDArray[np.float64]:
        places = self._places(readouts.time, readouts.slice)[readouts.first : readouts.stop]
        shape = self._kspace.dims[2::-1]
        index = np.unravel_index(places, shape)[::-1][: self.header.dimensions]
        centred = [each - n // 2 for each, n in zip(index, self._kspace.dims, strict=False)]
        return np.stack(centred, axis=-1).astype(np.float64)

    def read(self, readouts: Readouts, out: NDArray[Any]) -> None:
        places = self._places(readouts.time, readouts.slice)[readouts.first : readouts.stop]
        flat = self._image(readouts.time, readouts.slice).reshape(self.header.coils, -1)
        out[...] = flat[:, places]
        require_finite_samples(self.path, out, _named(readouts))

    def close(self) -> None:
        """Only a memory map is open, which is freed with the reader."""
