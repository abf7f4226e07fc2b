"""k-space and trajectory as two of BART's file pairs (.cfl, .hdr; see `pipeline.formats.cfl`)."""

from __future__ import annotations

import math
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
        """Dimensions 4 to 0 of one time and slice: (maps, coils, readouts, samples, 1 or columns)."""
        place = dict(zip(reversed(_TIMES), np.unravel_index(readouts.time, self._times), strict=True))
        place[SLICE] = np.intp(readouts.slice)
        axes = reversed(range(_MAPS + 1, DIMENSIONS))
        return np.asarray(pair.array[tuple(0 if pair.dims[axis] == 1 else int(place[axis]) for axis in axes)])


def _shown(dims: tuple[int, ...]) -> str:
    last = max((axis for axis, n in enumerate(dims) if n > 1), default=0)
    return "(" + ", ".join(map(str, dims[: max(last + 1, 4)])) + ")"


def _named(readouts: Readouts) -> Callable[[int], str]:
    return lambda place: f"readout {readouts.first + place}"
