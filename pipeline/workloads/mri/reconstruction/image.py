"""Reconstructs one image from its samples, on their device; caches what images of a trajectory or slice share."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft import Nufft, Toeplitz, cartesian_kernel, toeplitz_kernel
from kernels.sense import (
    CapturedCg,
    OffResonance,
    Segments,
    centre_images,
    cg_sense,
    compression,
    density,
    gridded,
    mixed,
    namespace,
    sense_normal,
    sensitivities,
    toeplitz_normal,
)
from kernels.sense.reconstruction import Transform
from kernels.sense.resumption import Resumption
from pipeline.errors import InputError, ParameterError
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.source.images import Image, ImageSource, LruCache, Trajectory

# Cached geometries. In three dimensions each kernel takes eight times the image.
_CACHED_2D, _CACHED_3D = 16, 2
# Pixels of all coils together from which several threads per image are faster.
_SHARED_PIXELS = 1 << 18
# Error of the off-resonance phase: a larger one spoils the image, and the audit's tolerance, which includes it.
_WORST_SEGMENTS = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """What a trajectory determines: transform, density weights (m,) float32, and with CG the normal operator."""

    transform: Nufft
    weights: Any
    toeplitz: Toeplitz | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """The coils of a slice.

    mixing : (channels, coils), prewhitening and compression in one; None: neither
    maps   : complex64 (channels, *matrix), on the device
    """

    mixing: NDArray[np.complex128] | None
    maps: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """The normal equations of one image: `normal` x = `right`, both weighted; data: (channels, m), unweighted.

    maps: complex64 (channels, *matrix)
    """

    maps: Any
    normal: Callable[[Any], Any]
    right: Any
    data: Any
    geometry: Geometry
    transform: Transform
    segment_error: float

    @property
    def capture(self) -> bool:
        """Whether a CUDA graph can hold the normal operator: on a GPU, and without transforms of samples."""
        return self.geometry.toeplitz is not None and not isinstance(self.right, np.ndarray)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstructed:
    """image : complex64 (*matrix), or (times, *matrix) of times that are joined, on the device
    curve : float64 relative residuals, or the (n, 3) status of `kernels.sense.regularized`
    transforms : of each time, for the audit; segment_error: of the off-resonance correction, 0 without
    notes : for the receipt"""

    image: Any
    curve: Any
    transforms: tuple[Transform, ...]
    method: str
    segment_error: float
    notes: Mapping[str, str] = field(default_factory=dict)


class _Solver:
    """Conjugate gradients of all images of a trajectory in one CUDA graph: it reads their maps in the same place."""

    def __init__(self, toeplitz: Toeplitz, like: Any, maps: Any, damping: float) -> None:
        self._maps = maps
        self._solver = CapturedCg(toeplitz_normal(toeplitz, maps), like, damping=damping)
        self._lock = threading.Lock()

    def solve(self, right: Any, maps: Any, **limits: Any) -> tuple[Any, Any]:
        with self._lock:
            if maps is not self._maps:
                self._maps[...] = maps
            return self._solver.solve(right, **limits)


class Reconstruction:
    """Reconstructs images on one device; may be called from several threads."""

    def __init__(self, source: ImageSource, parameters: MriParameters) -> None:
        self._source = source
        self._parameters = parameters
        most = most_cached(source.grid.shape)
        self._geometries: LruCache[Geometry] = LruCache(most)
        self._calibrations: LruCache[Calibration] = LruCache(most)
        self._solvers: LruCache[_Solver] = LruCache(most)
        self._toeplitz: Toeplitz | None = None  # the latest
        self._segments: LruCache[tuple[OffResonance, float]] = LruCache(most)
        self.workers = threads_for(source, len(source.images))

    def image(
        self,
        image: Image,
        samples: Any,
        trajectory: Trajectory,
        on_iteration: Callable[[int, Any], None] | None = None,
        resumption: Resumption | None = None,
    ) -> Reconstructed:
        """samples : complex64 (coils, readouts, samples), NumPy or CuPy, which selects the device."""
        asked = self._parameters
        encoded = self.encoded(image, samples, trajectory)
        found, curve = encoded.right, None
        damping = asked.penalty_strengths.get("l2") or asked.damping
        limits: dict[str, Any] = {"iterations": asked.most_iterations, "tolerance": asked.tolerance}
        limits |= {"on_iteration": on_iteration, "resumption": resumption}
        if asked.method == "cg-sense" and encoded.capture:
            found, curve = self._solver(trajectory, encoded, damping).solve(encoded.right, encoded.maps, **limits)
        elif asked.method == "cg-sense":
            found, curve = cg_sense(encoded.normal, encoded.right, damping=damping, **limits)
        return Reconstructed(
            image=found,
            curve=curve,
            transforms=(encoded.transform,),
            method=encoded.geometry.transform.method,
            segment_error=encoded.segment_error,
        )

    def _solver(self, trajectory: Trajectory, encoded: Encoded, damping: float) -> _Solver:
        def make() -> _Solver:
            toeplitz = encoded.geometry.toeplitz
            assert toeplitz is not None, "it can be captured"
            maps = encoded.maps if len(self._source.images) == 1 else encoded.maps.copy()  # others' will replace them
            return _Solver(toeplitz, encoded.right, maps, damping)

        return self._solvers.get(trajectory.digest, make)

    def encoded(self, image: Image, samples: Any, trajectory: Trajectory) -> Encoded:
        """The normal equations of an image; samples as for `image`."""
        geometry = self.geometry(trajectory, samples)
        calibration = self._calibration(image, samples, trajectory, geometry)
        flat = samples.reshape(samples.shape[0], -1)
        data = flat if calibration.mixing is None else mixed(flat, calibration.mixing)
        transform, error = self.corrected(image, trajectory, geometry, samples)
        if geometry.toeplitz is None:
            normal = sense_normal(transform, calibration.maps, geometry.weights)
        else:
            normal = toeplitz_normal(geometry.toeplitz, calibration.maps)
        right = gridded(transform, data, calibration.maps, geometry.weights)
        return Encoded(
            maps=calibration.maps,
            normal=normal,
            right=right,
            data=data,
            geometry=geometry,
            transform=transform,
            segment_error=error,
        )

    def geometry(self, trajectory: Trajectory, like: Any) -> Geometry:
        """The geometry of a trajectory, on the device of `like`; cached for the next image."""
        return self._geometries.get(trajectory.digest, lambda: self._make_geometry(trajectory, like))

    def _make_geometry(self, trajectory: Trajectory, like: Any) -> Geometry:
        asked, shape = self._parameters, self._source.grid.shape
        points = beside(trajectory.points, like)
        weights = self.weights(trajectory, points)
        transform = Nufft(
            points, shape, eps=asked.eps, method=asked.transform, coils=self._source.channels, workers=self.workers
        )
        toeplitz = None
        if asked.method == "cg-sense" and asked.field_map is None:
            if self.on_grid(trajectory):
                kernel = cartesian_kernel(points, weights, shape)
            else:
                kernel = toeplitz_kernel(points, weights, shape, asked.eps, workers=self.workers)
            toeplitz = Toeplitz(kernel, shape, workers=self.workers, beside=self._toeplitz)
            self._toeplitz = toeplitz
        return Geometry(transform=transform, weights=weights, toeplitz=toeplitz)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the images."""
        return self._source.grid.shape

    @property
    def channels(self) -> int:
        return self._source.channels

    def on_grid(self, trajectory: Trajectory) -> bool:
        """Whether `cartesian_kernel` makes its normal operator."""
        return self._source.header.cartesian and trajectory.on_grid and math.prod(self.shape) % 2 == 0

    def weights(self, trajectory: Trajectory, points: Any) -> Any:
        """The density weights (m,) that the parameters name, on the device of the points; 0 for samples without use."""
        if trajectory.used is None:
            return self._density(trajectory, points)
        used = beside(trajectory.used, points)
        found = namespace(points).zeros(len(points), np.float32)
        if self._parameters.density == "pipe-menon" and trajectory.given is None:
            found[used] = self._density(trajectory, points[used])
            return found
        # So many readouts share the samples at a distance from the centre.
        sharing = used.reshape(trajectory.spokes).sum(axis=0)
        found += self._density(trajectory, points) * used
        found /= namespace(points).maximum(namespace(points).tile(sharing, trajectory.spokes[0]), 1)
        return density.given(found)

    def _density(self, trajectory: Trajectory, points: Any) -> Any:
        asked = self._parameters.density
        if trajectory.given is not None:
            return density.given(beside(trajectory.given, points))
        # Samples of a grid are even already; pipe-menon is the default.
        if asked == "none" or (asked == "pipe-menon" and self._source.header.cartesian):
            return density.even(len(trajectory.points), points)
        if asked == "ramp":
            try:
                spokes = beside(trajectory.nominal, points).reshape(*trajectory.spokes, -1)
                return density.ramp(spokes).reshape(-1)
            except ValueError as error:
                raise ParameterError(f"--density ramp: {self._source.path}: {error}") from error
        return density.pipe_menon(points, self._source.grid.shape, workers=self.workers)

    def _calibration(self, image: Image, samples: Any, trajectory: Trajectory, geometry: Geometry) -> Calibration:
        """From all readouts of the image's time and slice, of which a frame has only some."""
        time, slice_ = image.readouts.time, image.readouts.slice
        readouts = self._source.whole(time, slice_)
        if image.readouts == readouts:
            return self.maps_of(slice_, samples, beside(trajectory.points, samples), geometry.weights)

        def make() -> Calibration:
            whole = self._source.trajectory(readouts)
            points = beside(whole.points, samples)
            weights = self.weights(whole, points)
            return self.maps_of(slice_, beside(self._source.samples(readouts), samples), points, weights)

        return self._calibrations.get((time, slice_), make)

    def maps_of(self, slice_: int, samples: Any, points: Any, weights: Any) -> Calibration:
        """The coils of a slice from samples (coils, …) at points (m, dimensions), and their weights (m,)."""
        asked, shape = self._parameters, self._source.grid.shape
        flat = samples.reshape(samples.shape[0], -1)
        mixing = self._source.white
        if asked.compress is not None:
            white = flat if mixing is None else mixed(flat, mixing)
            virtual, _ = compression(white, asked.compress)
            mixing = virtual if mixing is None else virtual @ mixing
        given = self._source.sensitivities(slice_)
        if given is not None:
            maps = beside(given, samples)
            return Calibration(mixing=mixing, maps=sensitivities.given(maps if mixing is None else mixed(maps, mixing)))
        white = flat if mixing is None else mixed(flat, mixing)
        tapered = asked.sensitivities == "walsh"
        try:
            centre = centre_images(
                white, points, weights, shape, width=asked.calibration, taper=tapered, workers=self.workers
            )
            maps = (sensitivities.walsh if tapered else sensitivities.espirit)(centre, shape)
        except ValueError as error:
            raise cannot_calibrate(asked, self._source, error) from error
        return Calibration(mixing=mixing, maps=maps)

    def corrected(self, image: Image, trajectory: Trajectory, geometry: Geometry, like: Any) -> tuple[Transform, float]:
        """The transform, with the slice's field map if there is one, and the segments' error."""
        if self._parameters.field_map is None:
            return geometry.transform, 0.0
        slice_ = image.readouts.slice

        def make() -> tuple[OffResonance, float]:
            field = self._source.field_map(slice_)
            assert field is not None, "there is a field map"
            try:
                segments = Segments(field, sample_times(self._source, trajectory), segments=self._parameters.segments)
            except ValueError as error:
                raise InputError(f"--field-map {self._parameters.field_map}: slice {slice_}: {error}") from error
            if segments.error > _WORST_SEGMENTS:
                raise ParameterError(
                    f"--segments {self._parameters.segments}: so few leave an error of {segments.error:.2g} in slice "
                    f"{slice_} (tolerated: {_WORST_SEGMENTS:g}); give more, or leave it out to use as many as needed"
                )
            return OffResonance(geometry.transform, beside(field, like), segments), segments.error

        return self._segments.get((trajectory.digest, slice_), make)


def cannot_calibrate(asked: MriParameters, source: ImageSource, error: ValueError) -> ParameterError:
    return ParameterError(
        f"--calibration {asked.calibration}: {source.path}: {error}; choose another, or --sensitivities"
    )


def most_cached(shape: tuple[int, ...]) -> int:
    """Trajectories, and slices' maps, that are kept."""
    return _CACHED_2D if len(shape) == 2 else _CACHED_3D


def threads_for(source: ImageSource, side_by_side: int) -> int:
    """CPU threads per image if `side_by_side` images are computed at once; one if images are small.

    OMP_NUM_THREADS limits them, as it does those of FINUFFT.
    """
    if source.channels * math.prod(source.grid.shape) < _SHARED_PIXELS:
        return 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores // side_by_side, int(limit) if limit.isdecimal() and int(limit) > 0 else cores))


def sample_times(source: ImageSource, trajectory: Trajectory) -> NDArray[np.float64]:
    """Seconds from the first sample of its readout to each sample, (m,)."""
    spokes, samples = trajectory.spokes
    return np.tile(source.sample_times_s(samples), spokes)


def beside(array: NDArray[Any], like: Any) -> Any:
    """A host array on the device of `like`."""
    return namespace(like).asarray(array)
