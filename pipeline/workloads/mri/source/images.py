"""The images that a job reconstructs from a file of raw data, and their inputs, read on demand."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels.sense import covariance, whitening
from kernels.sense.gradient_delays import ENOUGH_SPOKES, delayed, estimated_delays
from pipeline.errors import InputError, ParameterError, counted
from pipeline.formats.cfl import Cfl
from pipeline.formats.kspace import open_kspace
from pipeline.formats.kspace.base import LARGEST_SAMPLE, Readouts
from pipeline.formats.numpy_files import mapped_array
from pipeline.workloads.mri.parameters import DENSITIES, NO_PENALTY, SENSITIVITIES, MriParameters
from pipeline.workloads.mri.source.grid import ImageGrid, image_grid
from pipeline.workloads.mri.source.sorting import SortedReader

T = TypeVar("T")

# Beyond any scanner's off resonance (1 MHz is 0.3 % of 7 T's 300 MHz); the phase is still accurate in float64.
FARTHEST_HERTZ = 1e6
_ON_GRID = 1e-6  # cycles


@dataclass(frozen=True)
class SharedReadouts(Readouts):
    """A frame's readouts, `own` of them from `own_first`, among neighbours whose outer samples it borrows."""

    own_first: int
    own: int

    def used(self, radius: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which samples count, (readouts, samples). radius: theirs, in cycles per field of view.

        As far from the centre as its own spokes suffice (π |k| of them), a frame has only these; further out it takes
        the nearest neighbours that are needed (KWIC; Song, Dougherty, Magn. Reson. Med. 44, 2000).
        """
        number = np.arange(self.first, self.stop)
        away = np.maximum(self.own_first - number, number - (self.own_first + self.own - 1))
        nearer = np.where(away > 0, self.own + 2 * (away - 1), 0)
        return np.asarray((away <= 0)[:, None] | (math.pi * radius > nearer[:, None]))


@dataclass(frozen=True)
class Image:
    """One image of the result: its place there, and its readouts."""

    time: int
    slice: int
    readouts: Readouts
    samples: int  # of each readout

    @property
    def points(self) -> int:
        return self.readouts.count * self.samples


def groups_of(images: Sequence[Image]) -> list[tuple[Image, ...]]:
    """The images of each slice, in the order of their times."""
    slices = dict.fromkeys(image.slice for image in images)
    return [tuple(image for image in images if image.slice == slice_) for slice_ in slices]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """The k-space positions of an image's samples.

    points : (m, dimensions) float64, cycles per field of view
    digest : equal if two images differ in their samples alone
    spokes : readouts and samples of each; their product is m
    given  : (m,) float32 density weights, if --density takes them from a file
    nominal: the points without gradient delays, whose spokes pass through the centre
    used   : (m,), the samples that count, if a frame borrows from its neighbours
    """

    points: NDArray[np.float64]
    digest: bytes
    spokes: tuple[int, int]
    given: NDArray[np.float32] | None
    nominal: NDArray[np.float64]
    used: NDArray[np.bool_] | None = None

    @cached_property
    def on_grid(self) -> bool:
        """Whether all points are whole cycles."""
        return bool((self.points == np.rint(self.points)).all())


class ImageSource:
    """A file of raw data and the images that the parameters select. Thread-safe."""

    def __init__(self, path: Path, parameters: MriParameters) -> None:
        """Raises InputError or ParameterError, which name the file or the option."""
        self.path = path
        self._parameters = parameters
        self._reader = open_kspace(path, trajectory=parameters.trajectory)
        try:
            self.header = self._reader.header
            self._sorted: SortedReader | None = None
            if parameters.sorting is not None:
                self._reader = self._sorted = SortedReader(self._reader, parameters.sorting, path)
            self.slices = parameters.slice_range.of(self.header.slices, "--slices", path)
            points = self._reader.trajectory(self.whole(0, self.slices[0]))
            self.grid: ImageGrid = image_grid(parameters, self.header, points, path)
            self._cut_frames()
            self._check_coils()
            self.white = self._whitening()
            self.delays, self.delay_error = self._gradient_delays()
            self.trajectory(self.images[0].readouts)  # also checks the density weights
        except BaseException:
            self._reader.close()
            raise

    @property
    def coils(self) -> int:
        return self.header.coils

    @property
    def channels(self) -> int:
        """Coils, or virtual ones."""
        return self._parameters.compress or self.coils

    @property
    def times(self) -> int:
        return self.header.times * self.frames

    def whole(self, time: int, slice_: int) -> Readouts:
        """All readouts of a time of the file and a slice."""
        return Readouts(time, slice_, 0, self._reader.extent(time, slice_)[0])

    def trajectory(self, readouts: Readouts) -> Trajectory:
        """Raises InputError if it is damaged or leaves the matrix."""
        where = f"{self.path}, slice {readouts.slice}, time {readouts.time}"
        nominal = points = self.grid.scaled(self._reader.trajectory(readouts), where)
        if self.delays is not None:
            try:
                plane, points = slice(len(self.delays)), nominal.copy()
                points[..., plane] = delayed(points[..., plane], self.delays)
            except ValueError as error:
                raise InputError(f"--gradient-delay: {where}: {error}; leave it out") from error
        if self.header.cartesian:  # scaling has rounded
            nearest = np.rint(points)
            points = np.where(np.abs(points - nearest) < _ON_GRID, nearest, points)
        given = self._given_density(readouts)
        used = None
        if isinstance(readouts, SharedReadouts):
            used = readouts.used(np.sqrt((nominal**2).sum(axis=-1))).reshape(-1)
        flat = np.ascontiguousarray(points.reshape(-1, points.shape[-1]))
        digest = hashlib.blake2b(flat.tobytes(), digest_size=16)
        digest.update(b"" if given is None else given.tobytes())
        digest.update(b"" if used is None else used.tobytes())
        digest.update(str(points.shape).encode())
        spokes, samples = points.shape[:2]
        return Trajectory(
            points=flat,
            digest=digest.digest(),
            spokes=(spokes, samples),
            given=given,
            nominal=flat if self.delays is None else nominal.reshape(flat.shape),
            used=used,
        )

    def read(self, readouts: Readouts, out: NDArray[Any]) -> None:
        """complex64 (coils, readouts, samples), as they are in the file."""
        self._reader.read(readouts, out)
        if self.white is not None:
            self._refuse_faint_noise(self.white, out)

    def samples(self, readouts: Readouts) -> NDArray[np.complex64]:
        """As `read`, in a new array."""
        _, samples = self._reader.extent(readouts.time, readouts.slice)
        out = np.empty((self.coils, readouts.count, samples), np.complex64)
        self.read(readouts, out)
        return out

    def sensitivities(self, slice_: int) -> NDArray[np.complex64] | None:
        """(coils, *matrix) of a file, if --sensitivities names one."""
        if self._parameters.sensitivities in SENSITIVITIES:
            return None
        planes = self.grid.shape[::-1]
        shape = (self.header.slices, self.coils, *planes)
        name = Path(self._parameters.sensitivities)
        array = read_array(name, shape, "--sensitivities", "(slice, coil, [z,] y, x)")[slice_]
        with np.errstate(over="ignore"):
            maps = np.ascontiguousarray(array.transpose(0, *range(len(planes), 0, -1)), np.complex64)
        if not np.isfinite(maps).all() or not maps.any():
            raise InputError(
                f"--sensitivities {name}: slice {slice_} holds values that are not finite, or only 0; create it again, "
                "or leave --sensitivities out"
            )
        return maps

    def field_map(self, slice_: int) -> NDArray[np.float64] | None:
        """(*matrix) in hertz, if --field-map names a file."""
        name = self._parameters.field_map
        if name is None:
            return None
        shape = (self.header.slices, *self.grid.shape[::-1])
        array = read_array(name, shape, "--field-map", "(slice, [z,] y, x)")[slice_]
        if np.iscomplexobj(array):
            array = array.real
        if not np.isfinite(array).all():
            raise InputError(f"--field-map {name}: holds values that are not finite; set unknown ones to 0")
        farthest = float(np.abs(array).max(initial=0))
        if farthest > FARTHEST_HERTZ:
            raise InputError(f"--field-map {name}: reaches {farthest:.3g} Hz; it must be in hertz: convert it")
        return np.ascontiguousarray(array.T, np.float64)

    def sample_times_s(self, samples: int) -> NDArray[np.float64]:
        """Seconds after the first sample of a readout. ParameterError if the dwell time is unknown."""
        dwell = self._parameters.dwell or self.header.dwell_us
        if dwell is None:
            raise ParameterError(
                f"--dwell: {self.path} does not state the time between samples, or not one for all readouts: give it "
                "in microseconds"
            )
        return np.asarray(np.arange(samples) * (dwell * 1e-6), np.float64)

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._reader.hold_at_most(budget_bytes)

    def close(self) -> None:
        self._reader.close()

    def _cut_frames(self) -> None:
        """All images, slice by slice, so that the frames of a slice can share its calibration."""
        asked, states = self._parameters.frames, self._sorted
        self.frames = 1 if states is None else states.states
        self.images: list[Image] = []
        if asked is not None:
            step = self._parameters.frame_step or asked
            extents = {self._reader.extent(t, s)[0] for t in range(self.header.times) for s in self.slices}
            fewest = min(extents)
            if asked > fewest:
                has = counted(fewest, "readout")
                raise ParameterError(f"--frames {asked}: an image of {self.path} has {has}; choose fewer")
            self.frames = (fewest - asked) // step + 1
        for place, slice_ in enumerate(self.slices):
            for time in range(self.header.times):
                count, samples = self._reader.extent(time, slice_)
                for frame in range(self.frames):
                    first = 0 if asked is None else frame * step
                    readouts = Readouts(time, slice_, first, first + asked if asked is not None else count)
                    if states is not None:
                        readouts = states.range_of(frame, time, slice_)
                    readouts = self._with_neighbours(readouts, count)
                    self.images.append(Image(time * self.frames + frame, place, readouts, samples))

    def _with_neighbours(self, readouts: Readouts, count: int) -> Readouts:
        """With those of which --view-sharing borrows."""
        aside = self._parameters.view_sharing
        if aside is None:
            return readouts
        if self.header.cartesian or self.header.dimensions == 3:
            raise ParameterError(
                f"--view-sharing {aside}: {self.path} is not of two-dimensional, non-Cartesian readouts: leave it out"
            )
        if readouts.count == count:
            raise ParameterError(
                f"--view-sharing {aside}: {self.path} has one frame, without neighbours: give --frames"
            )
        first, stop = max(readouts.first - aside, 0), min(readouts.stop + aside, count)
        return SharedReadouts(readouts.time, readouts.slice, first, stop, readouts.first, readouts.count)

    def _check_coils(self) -> None:
        asked = self._parameters.compress
        if asked is not None and asked > self.coils:
            has = counted(self.coils, "coil")
            raise ParameterError(f"--compress {asked}: {self.path} has {has}; choose as many or fewer")
        self.sensitivities(self.slices[0])
        self.field_map(self.slices[0])
        if self._parameters.field_map is not None:
            self.sample_times_s(1)

    def _gradient_delays(self) -> tuple[NDArray[np.float64] | None, float | None]:
        """In samples, (d, d), as given, or from the first image; and by how much its spokes' crossings miss them.

        d is 2 for planes of spokes, whose third axis is Cartesian.
        """
        asked, given = self._parameters.gradient_delay, self._parameters.delays
        dimensions = 2 if self.header.plane_steps else len(self.grid.shape)
        option = f"--gradient-delay {asked}: {self.path}"
        if asked == NO_PENALTY:
            return None, None
        if self.header.cartesian:
            raise ParameterError(f"{option} is Cartesian, and the option is for radial data: leave it out")
        if given is not None:
            if len(given) != dimensions:
                raise ParameterError(f"{option} has delays along {dimensions} axes: give {dimensions} numbers")
            return np.diag(given), None
        if dimensions == 3:
            raise ParameterError(f"{option}: spokes in three dimensions do not cross: give x,y,z in samples")
        whole = self.whole(0, self.slices[0])
        points = self.grid.scaled(self._reader.trajectory(whole), str(self.path))
        planes = points[:, 0, 2] if self.header.plane_steps else np.zeros(len(points))
        same = np.flatnonzero(planes == planes[np.argmin(np.abs(planes))])
        chosen = same[np.unique(np.linspace(0, len(same) - 1, min(len(same), ENOUGH_SPOKES)).astype(int))]
        single = [self.samples(Readouts(whole.time, whole.slice, int(one), int(one) + 1)) for one in chosen]
        try:
            return estimated_delays(np.concatenate(single, axis=1), points[chosen, :, :2])
        except ValueError as error:
            raise ParameterError(f"{option}: {error}") from error

    def _whitening(self) -> NDArray[np.complex128] | None:
        noise = self._reader.noise() if self._parameters.prewhiten == "auto" else None
        if noise is None:
            return None
        try:
            return whitening(covariance(noise))
        except ValueError as error:
            raise InputError(f"{self.path}: {error}; pass --prewhiten no to skip it") from error

    def _refuse_faint_noise(self, white: NDArray[np.complex128], samples: NDArray[Any]) -> None:
        """InputError if whitened samples may exceed the range that a file's samples must keep to."""
        parts = np.ascontiguousarray(samples, np.complex64).view(np.float32)
        reach = float(np.abs(white).sum(axis=1).max()) * max(float(parts.max()), -float(parts.min()))
        if reach > LARGEST_SAMPLE:
            raise InputError(
                f"{self.path}: its noise is so faint that whitened samples may reach {reach:.2g}; single precision has "
                f"no squares beyond {LARGEST_SAMPLE:g}: is it of this scan? Pass --prewhiten no to skip it"
            )

    def _given_density(self, readouts: Readouts) -> NDArray[np.float32] | None:
        name = self._parameters.density
        if name in DENSITIES:
            return None
        where = f"slice {readouts.slice}, time {readouts.time}, readouts {readouts.first} to {readouts.stop - 1}"
        if name == "file":
            found = self._reader.density(readouts)
            if found is None:
                raise ParameterError(
                    f"--density file: {self.path} holds no density weights for {where}; name another file, or "
                    "pipe-menon"
                )
            return _weights(found, f"--density file: {self.path}", where)
        states, key = self._sorted, (readouts.time, readouts.slice)
        whole = self._reader.extent(*key) if states is None else states.in_file(*key)
        array = read_array(Path(name), whole, "--density", "(readout, sample)").real
        rows = slice(readouts.first, readouts.stop) if states is None else states.places(readouts)
        return _weights(array[rows], f"--density {name}", where)


def _weights(given: NDArray[Any], what: str, where: str) -> NDArray[np.float32]:
    """(readouts, samples) as (m,). InputError unless they are weights; `what`: names their source."""
    with np.errstate(over="ignore"):
        weights = np.ascontiguousarray(given, np.float32).reshape(-1)
    if not np.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
        raise InputError(
            f"{what}: weights must be finite and at least 0, and some above 0, which those of {where} are not; correct "
            "them, or choose pipe-menon"
        )
    return weights


class LruCache(Generic[T]):
    """The most recently used values. Threads that need the same value at the same time make it once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[threading.Lock, list[T]]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        with self._lock:
            entry = self._values.setdefault(key, (threading.Lock(), []))
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        making, found = entry
        with making:
            if not found:
                found.append(make())
            return found[0]


def read_array(path: Path, shape: tuple[int, ...], what: str, axes: str) -> NDArray[Any]:
    """An array of `shape`, mapped from the file; axes of length one may be missing or anywhere.

    path : .npy, or .cfl, whose dimensions count backwards: x is the last axis
    what : the option that names it, for messages; axes: their names, for messages

    Raises InputError if the file is damaged or has another shape.
    """
    array = Cfl(path).array if path.suffix.lower() == ".cfl" else mapped_array(path)
    if array.dtype.kind not in "iufc":
        raise InputError(f"{what} {path}: holds {array.dtype}; numbers are needed")
    found = tuple(n for n in array.shape if n > 1)
    if found != tuple(n for n in shape if n > 1):
        raise InputError(f"{what} {path}: has the shape {array.shape}; {axes} = {shape} is needed for this data")
    return np.asarray(array).reshape(shape)
