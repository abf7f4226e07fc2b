"""Large volumes by a gang: the coils are split over its ranks, and each iteration adds up one image over all of them.

Every rank reads the file, keeps its own channels, and works out weights and kernel itself. What needs all coils goes
round once: the compression's correlations, the coarse images that the sensitivities come from, and the sum of the maps'
squares. In each iteration a rank applies its coils' part of the normal operator, and one all-reduce of the image gives
the whole; all ranks then take the same step, with the same bits. Rank 0 writes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.sense import CentreImages, centre_images, cg_sense, gridded, mixed, sensitivities, to_host
from kernels.sense.compression import strongest_channels
from pipeline.errors import ParameterError
from pipeline.formats.kspace import Readouts
from pipeline.formats.partial import Opening
from pipeline.workloads.base import JobSpec
from pipeline.workloads.mri import Mri
from pipeline.workloads.mri_audit import MriAudit
from pipeline.workloads.mri_images import Image, ImageSource, Trajectory
from pipeline.workloads.mri_parameters import MriParameters
from pipeline.workloads.mri_reconstruction import threads_for, weights_of

# Samples of all coils that are on the host at a time.
_BLOCK_BYTES = 64 << 20


class Communicator(Protocol):
    """What `pipeline.cluster.communicator.Communicator` offers of it."""

    def allreduce(self, array: Any, /) -> Any: ...


class Member(Protocol):
    """What `pipeline.cluster.member.Member` offers of it: shards are channels."""

    rank: int
    shards: tuple[int, ...]
    communicator: Communicator
    control: Communicator

    def check(self) -> None: ...


def shards_of(spec: JobSpec) -> int:
    """Into how many parts the job falls: its channels. Raises what the workload does, before a gang is started."""
    workload = Mri(spec)
    workload.discard()
    assert isinstance(spec.parameters, MriParameters)
    if spec.parameters.field_map is not None:
        raise ParameterError("--field-map: a volume with its coils split over GPUs has no off-resonance correction")
    return spec.parameters.compress or workload.describe()["coils"]


def reconstruct_shared(
    member: Member, spec: JobSpec, place: Callable[[Any], Any] | None = None
) -> dict[str, Any] | None:
    """The function for `run_gang`: all images of a job, one after another, each by all ranks.

    place : brings a host array to this rank's device; None: it stays, on the CPU

    Returns on rank 0, which has published the output, the audit's verdict and the curves of convergence by image; None
    on the others.
    """
    parameters = spec.parameters
    assert isinstance(parameters, MriParameters)
    workload = Mri(spec) if member.rank == 0 else None
    source = ImageSource(spec.input, parameters)
    try:
        if workload is not None:
            workload.start(Opening.NEW)
        for number, image in enumerate(source.images):
            found, curve, sampled, method = _SharedImage(member, source, parameters, image, place).reconstructed(number)
            if workload is not None:
                workload.write_image(number, to_host(found), to_host(curve), to_host(sampled), method)
        if workload is None:
            return None
        audit = workload.audit()
        workload.publish()
        return {"audit": dict(audit), "image": dict(workload.describe())}
    finally:
        source.close()
        if workload is not None:
            workload.discard()


class _SharedImage:
    """One image's way through a rank."""

    def __init__(
        self,
        member: Member,
        source: ImageSource,
        parameters: MriParameters,
        image: Image,
        place: Callable[[Any], Any] | None,
    ) -> None:
        self._member = member
        self._source = source
        self._asked = parameters
        self._image = image
        self._place = place or (lambda array: array)
        self._threads = threads_for(source, 1)

    def reconstructed(self, number: int) -> tuple[Any, Any, Any, str]:
        """The image, its curve, the samples that the audit asks for, the transform's method; alike on all ranks."""
        asked, shape, own = self._asked, self._source.grid.shape, list(self._member.shards)
        trajectory = self._source.trajectory(self._image.readouts)
        points = self._place(trajectory.points)
        weights = self._weights(trajectory, points)
        mixing = self._mixing()
        data = self._place(self._own_samples(self._image.readouts, mixing))
        transform = Nufft(points, shape, eps=asked.eps, method=asked.transform, coils=len(own), workers=self._threads)
        maps = self._maps(mixing, data, points, weights)
        total = self._member.communicator.allreduce
        right = total(gridded(transform, data, maps, weights))
        found, curve = right, np.empty(0)
        if asked.method == "cg-sense":
            toeplitz = Toeplitz(
                toeplitz_kernel(points, weights, shape, asked.eps, workers=self._threads), shape, workers=self._threads
            )

            def normal(picture: Any) -> Any:
                self._member.check()
                return total(toeplitz.apply_sense(picture, maps))

            found, curve = cg_sense(
                normal, right, iterations=asked.iterations, damping=asked.lamda, tolerance=asked.tolerance
            )
        chosen = self._place(MriAudit.chosen(number, trajectory.points, shape))
        return found, curve, transform.forward(found)[chosen], transform.method

    def _weights(self, trajectory: Trajectory, points: Any) -> Any:
        return weights_of(self._asked, self._source, trajectory, points, workers=self._threads)

    def _mixing(self) -> NDArray[np.complex128]:
        """(channels, coils): prewhitening and compression; the compression's correlations are shared work."""
        white = self._source.white
        whole = np.eye(self._source.coils, dtype=np.complex128) if white is None else white
        if self._asked.compress is None:
            return whole
        member, readouts = self._member, self._image.readouts
        gram = np.zeros((self._source.coils,) * 2, np.complex128)
        for number, block in enumerate(self._blocks(readouts)):
            if number % self._ranks() == member.rank:
                samples = mixed(self._source.samples(block), whole).reshape(len(whole), -1)
                gram += samples @ samples.conj().T
        return strongest_channels(member.control.allreduce(gram), self._asked.compress)[0] @ whole

    def _ranks(self) -> int:
        return int(getattr(self._member, "size", 1))

    def _own_samples(self, readouts: Readouts, mixing: NDArray[np.complex128]) -> NDArray[np.complex64]:
        """(own channels, m): all coils come by in blocks of readouts, and what is kept are this rank's channels."""
        own = mixing[list(self._member.shards)]
        parts = [mixed(self._source.samples(block), own) for block in self._blocks(readouts)]
        return np.ascontiguousarray(np.concatenate(parts, axis=1).reshape(len(own), -1))

    def _blocks(self, readouts: Readouts) -> Sequence[Readouts]:
        a_readout = self._source.coils * self._image.samples * 8
        step = max(_BLOCK_BYTES // a_readout, 1)
        return [
            Readouts(readouts.time, readouts.slice, first, min(first + step, readouts.stop))
            for first in range(readouts.first, readouts.stop, step)
        ]

    def _maps(self, mixing: NDArray[np.complex128], data: Any, points: Any, weights: Any) -> Any:
        """(own channels, *matrix)."""
        asked, member, shape = self._asked, self._member, self._source.grid.shape
        own = list(member.shards)
        given = self._source.sensitivities(self._image.readouts.slice)
        if given is not None:
            return sensitivities.given(self._place(mixed(given, mixing[own])), add=self._added)
        tapered = asked.sensitivities == "walsh"
        try:
            mine = centre_images(
                data, points, weights, shape, width=asked.calibration, taper=tapered, workers=self._threads
            )
        except ValueError as error:
            raise ParameterError(f"--calibration {asked.calibration}: {self._source.path}: {error}") from error
        images = np.zeros((len(mixing), *mine.images.shape[1:]), np.complex64)
        images[own] = to_host(mine.images)
        centre = CentreImages(images=self._place(member.control.allreduce(images)), width=mine.width)
        find = sensitivities.walsh if tapered else sensitivities.espirit
        return find(centre, shape, own=own, add=self._added)

    def _added(self, squares: Any) -> Any:
        return self._member.communicator.allreduce(squares)
