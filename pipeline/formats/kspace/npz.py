"""Raw MRI data in NumPy's .npz: the arrays `kspace` and `traj`, and optional further ones.

kspace   : complex (coil, spoke, sample), or (slice, coil, spoke, sample), or (time, slice, coil, spoke, sample)
traj     : real (spoke, sample, 2 or 3), or (time, spoke, sample, 2 or 3)
matrix   : pixels along x, y (and z)                             fov_mm : the field of view along x, y and z
units    : "cycles/pixel", "cycles/fov" or "radians/pixel"       dwell_us : microseconds between samples
noise    : complex (coil, n), samples of a noise scan            dcf : real (spoke, sample), density compensation

Pickled objects are never loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError, counted
from pipeline.formats.kspace.base import (
    COMPLEX,
    LONGEST_FOV_MM,
    SHORTEST_FOV_MM,
    KSpaceHeader,
    KSpaceReader,
    Readouts,
    TrajectoryUnits,
    require_finite_samples,
    require_finite_trajectory,
)
from pipeline.formats.numpy_files import archive, is_archive

_NAMES = ("kspace", "traj", "matrix", "fov_mm", "units", "dwell_us", "noise", "dcf")


class NpzKSpace(KSpaceReader):
    """Loads the arrays whole, once: an archive cannot be read by position."""

    def __init__(self, path: Path) -> None:
        self.path = path
        arrays = _load(path)
        for name in ("kspace", "traj"):
            if name not in arrays:
                found = ", ".join(arrays) or "none of them"
                raise InputError(f"{path}: holds {found}; raw data needs the arrays kspace and traj")
        kspace, self._trajectory = arrays["kspace"], arrays["traj"]
        if kspace.size == 0:
            raise InputError(f"{path}: kspace {kspace.shape} is empty; it needs a coil, a spoke and a sample at least")
        if kspace.dtype.kind != "c" or not 3 <= kspace.ndim <= 5:
            raise InputError(
                f"{path}: kspace is {kspace.dtype} {kspace.shape}; complex ([[time,] slice,] coil, spoke, sample) is "
                "needed"
            )
        self._kspace = kspace.reshape((1,) * (5 - kspace.ndim) + kspace.shape)
        times, slices, coils, spokes, samples = self._kspace.shape
        self._check_trajectory(times, spokes, samples)
        dimensions = self._trajectory.shape[-1]
        if dimensions == 3 and slices > 1:
            raise InputError(f"{path}: {slices} slices with a trajectory in three dimensions; make them times instead")
        self._noise, self._density = arrays.get("noise"), arrays.get("dcf")
        self._check_noise(coils)
        dcf = self._density
        if dcf is not None and (dcf.dtype.kind not in "iuf" or dcf.shape != (spokes, samples)):
            raise InputError(
                f"{path}: dcf is {dcf.dtype} {dcf.shape}; real (spoke, sample) = {(spokes, samples)} is needed"
            )
        matrix = _matrix(path, arrays, dimensions)
        self.header = KSpaceHeader(
            coils=coils,
            dimensions=dimensions,
            times=times,
            slices=slices,
            units=_units(path, arrays),
            matrix=matrix,
            fov_mm=_fov(path, arrays),
            encoded=None if matrix is None else tuple(map(float, matrix)),
            dwell_us=_dwell(path, arrays),
            time_names=tuple(f"time {number}" for number in range(times)),
        )

    def extent(self, time: int, slice_: int) -> tuple[int, int]:
        return self._kspace.shape[3], self._kspace.shape[4]

    def trajectory(self, readouts: Readouts) -> NDArray[np.float64]:
        whole = self._trajectory if self._trajectory.ndim == 3 else self._trajectory[readouts.time]
        points = whole[readouts.first : readouts.stop].astype(np.float64)
        require_finite_trajectory(self.path, points, _named(readouts))
        return np.asarray(points)

    def read(self, readouts: Readouts, out: NDArray[Any]) -> None:
        with np.errstate(over="ignore"):  # a value that overflows becomes infinite, and is refused as such
            out[...] = self._kspace[readouts.time, readouts.slice, :, readouts.first : readouts.stop]
        require_finite_samples(self.path, out, _named(readouts))

    def noise(self) -> NDArray[np.complex64] | None:
        with np.errstate(over="ignore"):
            return None if self._noise is None else self._noise.astype(COMPLEX)

    def density(self, readouts: Readouts) -> NDArray[np.float32] | None:
        if self._density is None:
            return None
        with np.errstate(over="ignore"):
            return np.asarray(self._density[readouts.first : readouts.stop], np.float32)

    def hold_at_most(self, budget_bytes: int) -> int:
        return int(self._kspace.nbytes + self._trajectory.nbytes)

    def close(self) -> None:
        """The file is closed already."""

    def _check_trajectory(self, times: int, spokes: int, samples: int) -> None:
        shape = self._trajectory.shape
        wanted = [(spokes, samples), (times, spokes, samples)]
        if self._trajectory.dtype.kind not in "iuf" or shape[:-1] not in wanted or shape[-1] not in (2, 3):
            raise InputError(
                f"{self.path}: traj is {self._trajectory.dtype} {shape}; real (spoke, sample, 2 or 3) with "
                f"{counted(spokes, 'spoke')} of {counted(samples, 'sample')} is needed, as kspace has them"
            )

    def _check_noise(self, coils: int) -> None:
        noise = self._noise
        if noise is not None and (noise.dtype.kind != "c" or noise.ndim != 2 or len(noise) != coils):
            wanted = f"complex ({counted(coils, 'coil')}, n)"
            raise InputError(f"{self.path}: noise is {noise.dtype} {noise.shape}; {wanted} is needed")


def _load(path: Path) -> dict[str, NDArray[Any]]:
    if not is_archive(path):
        raise InputError(f"{path}: not an .npz file of plain numbers; save it with np.savez(file, kspace=…, traj=…)")
    with archive(path) as found:
        return {name: found[name] for name in found.files if name in _NAMES}


def _units(path: Path, arrays: dict[str, NDArray[Any]]) -> TrajectoryUnits | None:
    if "units" not in arrays:
        return None
    text = str(arrays["units"])
    known: tuple[TrajectoryUnits, ...] = get_args(TrajectoryUnits)
    for each in known:
        if text == each:
            return each
    raise InputError(f"{path}: units is {text!r}; known are {', '.join(known)}")


def _matrix(path: Path, arrays: dict[str, NDArray[Any]], dimensions: int) -> tuple[int, ...] | None:
    if "matrix" not in arrays:
        return None
    matrix = arrays["matrix"].reshape(-1)
    if matrix.dtype.kind not in "iu" or len(matrix) < dimensions or (matrix < 1).any():
        raise InputError(f"{path}: matrix is {matrix.tolist()}; {dimensions} whole numbers of pixels are needed")
    return tuple(int(n) for n in matrix[:dimensions])


def _fov(path: Path, arrays: dict[str, NDArray[Any]]) -> tuple[float, float, float] | None:
    if "fov_mm" not in arrays:
        return None
    fov = arrays["fov_mm"].reshape(-1)
    if fov.dtype.kind not in "iuf" or len(fov) != 3 or not ((fov >= SHORTEST_FOV_MM) & (fov <= LONGEST_FOV_MM)).all():
        raise InputError(
            f"{path}: fov_mm is {fov.tolist()}; three lengths from {SHORTEST_FOV_MM:g} to {LONGEST_FOV_MM:g} mm are "
            "needed, along x, y and z"
        )
    x, y, z = (float(length) for length in fov)
    return x, y, z


def _dwell(path: Path, arrays: dict[str, NDArray[Any]]) -> float | None:
    if "dwell_us" not in arrays:
        return None
    dwell = arrays["dwell_us"]
    if dwell.dtype.kind not in "iuf" or dwell.size != 1 or not (np.isfinite(dwell).all() and float(dwell.item()) > 0):
        raise InputError(f"{path}: dwell_us is {dwell.tolist()}; one number of microseconds above 0 is needed")
    return float(dwell.item())


def _named(readouts: Readouts) -> Callable[[int], str]:
    return lambda place: f"spoke {readouts.first + place}"
