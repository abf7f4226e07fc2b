"""k-space and trajectory as BART keeps them: a pair of files each (`pipeline.formats.cfl`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats.cfl import DIMENSIONS, Cfl
from pipeline.formats.kspace.base import (
    KSpaceHeader,
    KSpaceReader,
    Readouts,
    require_finite_samples,
    require_finite_trajectory,
)

_COIL, _MAPS, _TIME, _SLICE = 3, 4, 10, 13
_LATER = (5, 6, 7, 8, 9, 10, 11, 12, 14, 15)  # what makes images follow one another


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
        for axis in reversed(range(_MAPS + 1, DIMENSIONS)):
            indices.append(0 if pair.dims[axis] == 1 else int(place[axis]))
        return np.asarray(pair.array[tuple(indices)])


def _shown(dims: tuple[int, ...]) -> str:
    last = max((axis for axis, n in enumerate(dims) if n > 1), default=0)
    return "(" + ", ".join(map(str, dims[: max(last + 1, 4)])) + ")"


def _named(readouts: Readouts) -> Callable[[int], str]:
    return lambda place: f"readout {readouts.first + place}"
