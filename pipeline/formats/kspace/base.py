"""The interface of raw MRI data formats: k-space samples of several coils along trajectories.

A file holds images, numbered by time (contrasts, phases, repetitions, sets) and slice. Each image has readouts (spokes,
interleaves) of equally many samples, and every readout its own trajectory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.formats import Reader

TrajectoryUnits = Literal["cycles/pixel", "cycles/fov", "radians/pixel"]

SUFFIXES = (".h5", ".mrd", ".cfl", ".hdr", ".npz")
COMPLEX = np.dtype(np.complex64)
# Limit of a sample's real and imaginary part: keeps the reconstruction's sums of squares within single precision.
LARGEST_SAMPLE = 1e17
# Other lengths would leave the single precision of affines.
SHORTEST_FOV_MM, LONGEST_FOV_MM = 1e-6, 1e9


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a slice lies in the patient, in mm, along DICOM's axes: left, posterior, superior.

    position   : the centre of the field of view
    directions : unit vectors along the image's axes x (read), y (phase) and z (slice)
    """

    position: tuple[float, float, float]
    directions: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class KSpaceHeader:
    """What a file of raw data declares, without the samples.

    coils      : receiver channels
    dimensions : columns of the trajectory, 2 or 3
    times      : images of each slice
    slices     : 1 where `dimensions` is 3
    units      : of the trajectory, if the format or the file defines them
    matrix     : pixels along x, y (and z) of the image, if the file states them
    fov_mm     : the field of view along x, y and z, if the file states it
    encoded    : the encoded matrix, scaled to the image's field of view: k in cycles/pixel times this is k in cycles
                 per image field of view
    encoded_fov: the ratio of the image's field of view to the encoded one
    dwell_us   : microseconds from one sample of a readout to the next, if all readouts have the same
    plane_steps: the trajectory's third column counts Cartesian steps, in cycles per encoded field of view
    placements : of each slice; empty if unknown
    cartesian  : samples lie on a grid, and need no density compensation
    time_names : the name of each time, such as "contrast 1, repetition 3"
    """

    coils: int
    dimensions: int
    times: int
    slices: int
    units: TrajectoryUnits | None = None
    matrix: tuple[int, ...] | None = None
    fov_mm: tuple[float, float, float] | None = None
    encoded: tuple[float, ...] | None = None
    encoded_fov: tuple[float, ...] | None = None
    dwell_us: float | None = None
    plane_steps: bool = False
    cartesian: bool = False
    placements: tuple[Placement, ...] = ()
    time_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Readouts:
    """A range of an image's readouts: `first` inclusive, `stop` exclusive."""

    time: int
    slice: int
    first: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.first


class KSpaceReader(Reader):
    """An open file of raw data; several threads may call its methods at once."""

    header: KSpaceHeader

    @abstractmethod
    def extent(self, time: int, slice_: int) -> tuple[int, int]:
        """The number of readouts of an image, and of samples in each."""

    @abstractmethod
    def trajectory(self, readouts: Readouts) -> NDArray[np.float64]:
        """(readouts, samples, dimensions) in the file's own units. InputError if a value is not finite."""

    @abstractmethod
    def read(self, readouts: Readouts, out: NDArray[Any]) -> None:
        """Fill `out`, complex64 (coils, readouts, samples). InputError, naming the record, if it is damaged or a sample
        is not finite."""

    def noise(self) -> NDArray[np.complex64] | None:
        """(coils, n) samples of a noise scan, if the file holds one."""
        return None

    def density(self, readouts: Readouts) -> NDArray[np.float32] | None:
        """(readouts, samples): the file's own density compensation, if it holds one."""
        return None

    def hold_at_most(self, budget_bytes: int) -> int:
        """Keep no more than this between reads, if possible; returns the bytes kept."""
        return 0


def require_finite_samples(path: Path, samples: NDArray[Any], record: Callable[[int], str]) -> None:
    """InputError naming coil, record and sample of the first of (coils, readouts, samples) not finite, or too large.

    record : returns the name of a readout, from its index in the array
    """
    parts = np.ascontiguousarray(samples, COMPLEX).view(np.float32)
    if parts.size == 0 or (parts.min() >= -LARGEST_SAMPLE and parts.max() <= LARGEST_SAMPLE):  # false for NaN
        return
    finite = np.isfinite(samples)
    wrong = ~finite if not finite.all() else np.maximum(np.abs(samples.real), np.abs(samples.imag)) > LARGEST_SAMPLE
    coil, readout, sample = (int(place) for place in np.argwhere(wrong)[0])
    what = (
        f"beyond {LARGEST_SAMPLE:g}, whose squares overflow single precision; divide all samples by one number"
        if finite.all()
        else "not a finite number; repair or leave out that readout"
    )
    raise InputError(
        f"{path}: {record(readout)}, sample {sample} of coil {coil} is {samples[coil, readout, sample]}: {what}"
    )


def require_finite_trajectory(path: Path, points: NDArray[Any], record: Callable[[int], str]) -> None:
    """InputError naming record and sample of the first point of (readouts, samples, dimensions) not finite."""
    finite = np.isfinite(points)
    if not finite.all():
        readout, sample, axis = (int(place) for place in np.argwhere(~finite)[0])
        raise InputError(
            f"{path}: {record(readout)}: the trajectory of sample {sample} has {points[readout, sample, axis]} "
            f"along {'xyz'[axis]}; repair or leave out that readout"
        )
