"""Reconstructs large images, a few coils at a time; several ranks may share the coils.

They are one image, all times that a penalty joins, or the coefficients of a basis: see `Encoding`.

Every rank reads the file, keeps its own channels, and computes weights and kernel itself. Three results need all coils
and are communicated once: the correlations for compression, the coarse images for the sensitivities, and the sum of the
maps' squares. In each iteration a rank applies its coils' part of the normal operator, an all-reduce of the image
completes it, and all ranks take the same step. If a rank is lost, the others continue from the latest iteration that
any of them has: each keeps a checkpoint, with the coarse images, and they take over the lost coils. Regularised
iterations continue from the state that rank 0 saved last, and so does a job that is resumed.

A single rank communicates nothing. Maps that do not fit the device are streamed from the host.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.sense import (
    CentreImages,
    GroupedMaps,
    centre_images,
    cg_sense,
    in_centre,
    mixed,
    namespace,
    sensitivities,
    to_host,
)
from kernels.sense.channels import strongest_channels
from kernels.sense.coil_groups import Residency, group_parts, plan_residency
from kernels.sense.conjugate_gradient import Progress, initial_progress
from kernels.sense.resumption import Resumption
from pipeline.config import format_bytes
from pipeline.errors import OutOfDeviceMemory, ParameterError, counted
from pipeline.formats.kspace.base import Readouts
from pipeline.workloads.gang_protocols import Peers
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.reconstruction.encoding import Encoding, Times
from pipeline.workloads.mri.reconstruction.image import Reconstructed, Reconstruction, cannot_calibrate
from pipeline.workloads.mri.reconstruction.memory import Problem, bytes_besides_maps, iterates_bytes, least_bytes
from pipeline.workloads.mri.reconstruction.regularized import solved
from pipeline.workloads.mri.source.images import Image, ImageSource, Trajectory

# Samples of all coils that are read at a time, besides those that are kept.
_BLOCK_BYTES = 64 << 20
_USED = 0.9  # share of the device's free memory: the rest is for unpredictable needs
ITEM = np.dtype(np.complex64).itemsize


@dataclass(kw_only=True, eq=False)
class _Checkpoint:
    """What a rank keeps for a retry."""

    mixing: NDArray[np.complex128] | None = None
    centre: CentreImages | None = None
    progress: Progress | None = None

    @property
    def state(self) -> NDArray[np.int64]:
        """Whether there are mixing and coarse images, and the iteration (−1: not started)."""
        number = -1 if self.progress is None else self.progress.number
        return np.array([self.mixing is not None, self.centre is not None, number], np.int64)


def device_room(xp: Any) -> int | None:
    """Bytes of the current device that this job may take or has taken; None on a CPU, whose maps are in host memory."""
    if xp is np:
        return None
    pool = getattr(xp.cuda.get_allocator(), "__self__", None) or xp.get_default_memory_pool()
    free, _ = xp.cuda.runtime.memGetInfo()
    room = int(_USED * (free + pool.total_bytes()))
    return min(room, pool.get_limit() or room)


class VolumeReconstruction:
    """One rank's part in the reconstruction of images that are one problem."""

    def __init__(
        self,
        source: ImageSource,
        parameters: MriParameters,
        reconstruction: Reconstruction,
        images: Sequence[Image],
        peers: Peers,
        like: Any,
        *,
        problem: Problem,
        host_bytes: int,
        follow: Callable[[int, Any], None] | None,
        follow_status: Callable[[int, NDArray[np.float64]], None],
        note_read: Callable[[float, int], None],
        resumption: Resumption | None = None,
    ) -> None:
        """like: any array of the rank's device. problem: for the memory that all coils take. host_bytes: what maps
        may take on the host if they do not fit the GPU. note_read: called with the seconds and bytes of each read."""
        self._source = source
        self._asked = parameters
        self._reconstruction = reconstruction
        self._images = images
        self._problem = problem
        self._peers = peers
        self._xp = namespace(like)
        self._like = like
        self._host_bytes = host_bytes
        self._follow, self._follow_status = follow, follow_status
        self._solver_notes: Mapping[str, str] = {}
        self._note_read = note_read
        self._resumption = None if resumption is None else _shared(resumption, peers)
        self._made_again = False
        self._own = list(peers.shards)
        known = [peers.partials[shard] for shard in self._own if shard in peers.partials]
        self._checkpoint: _Checkpoint = known[0] if known else _Checkpoint()
        peers.partials.update(dict.fromkeys(self._own, self._checkpoint))

    def reconstructed(
        self, trajectories: Sequence[Trajectory], subspace: Callable[[Sequence[Trajectory], Any], Encoding] | None
    ) -> Reconstructed:
        """The images and their curve, the same on all ranks. Raises the errors of a collective if a rank is lost.

        trajectories : of each image; subspace: the encoding of coefficients instead of images
        """
        self._residency()  # refuses before anything is read
        encoding, method, error = self._encoding(trajectories, subspace)
        shape = (len(encoding.transforms), *self._source.grid.shape)
        self._restore_progress(shape)
        leader, states = self._states()
        mixing = self._mixing(bool(states[:, 0].all()))
        resumed = states[leader, 2] >= 0
        estimated = self._asked.sensitivities in ("walsh", "espirit")
        parts = group_parts(len(self._own), math.prod(self._source.grid.shape))
        needed = not resumed or (estimated and not states[:, 1].all())
        samples = self._own_samples(mixing, parts) if needed else []
        coarse = self._coarse(mixing, samples, encoding, bool(states[:, 1].all())) if estimated else None
        maps = self._maps(mixing, coarse)
        try:
            found, curve = self._solved(maps, samples, encoding, leader if resumed else None, shape)
        finally:
            maps.close()
        return Reconstructed(
            image=found,
            curve=curve,
            transforms=encoding.transforms,
            method=method,
            segment_error=error,
            notes=self._notes(maps.residency),
        )

    def _encoding(
        self, trajectories: Sequence[Trajectory], subspace: Callable[[Sequence[Trajectory], Any], Encoding] | None
    ) -> tuple[Encoding, str, float]:
        """With the transforms' method, and the error of the off-resonance correction."""
        if subspace is not None:
            encoding = subspace(trajectories, self._like)
            return encoding, encoding.transforms[0].method, 0.0  # type: ignore[attr-defined]
        geometries = [self._reconstruction.geometry(each, self._like) for each in trajectories]
        corrected = [
            self._reconstruction.corrected(image, trajectory, geometry, self._like)
            for image, trajectory, geometry in zip(self._images, trajectories, geometries, strict=True)
        ]
        method = ", ".join(sorted({each.transform.method for each in geometries}))
        times = Times(trajectories, geometries, [transform for transform, _ in corrected])
        return times, method, max(error for _, error in corrected)

    def _restore_progress(self, shape: tuple[int, ...]) -> None:
        """Start from the saved iteration of conjugate gradients, if there is one, and this rank has none."""
        asked, resumption = self._asked, self._resumption
        if self._checkpoint.progress is None and not asked.has_penalties and resumption is not None:
            progress = initial_progress(self._xp.zeros(shape, np.complex64), asked.most_iterations)
            if resumption.fits(progress.state()):
                assert resumption.saved is not None, "it fits"
                progress.restore(resumption.saved)
                self._checkpoint.progress = progress

    def _states(self) -> tuple[int, NDArray[np.int64]]:
        """The rank with the latest iteration, and the state of every rank's checkpoint."""
        states = self._peers.control.allgather(self._checkpoint.state)
        return int(np.argmax(states[:, 2])), states

    # Channels, samples and maps

    def _mixing(self, known: bool) -> NDArray[np.complex128]:
        """(channels, coils): prewhitening and compression; the ranks share the work of compression."""
        if known and self._checkpoint.mixing is not None:
            return self._checkpoint.mixing
        white = self._source.white
        whole = np.eye(self._source.coils, dtype=np.complex128) if white is None else white
        if self._asked.compress is not None:
            gram = np.zeros((self._source.coils,) * 2, np.complex128)
            for number, block in enumerate(self._blocks()):
                if number % self._peers.size == self._peers.rank:
                    samples = mixed(self._read(block), whole).reshape(len(whole), -1)
                    gram += samples @ samples.conj().T
            whole = strongest_channels(self._peers.control.allreduce(gram), self._asked.compress)[0] @ whole
        self._checkpoint.mixing = whole
        return whole

    def _blocks(self) -> Sequence[Readouts]:
        found = []
        for image in self._images:
            readouts = image.readouts
            step = max(_BLOCK_BYTES // (self._source.coils * image.samples * ITEM), 1)
            found += [
                Readouts(readouts.time, readouts.slice, first, min(first + step, readouts.stop))
                for first in range(readouts.first, readouts.stop, step)
            ]
        return found

    def _read(self, block: Readouts) -> NDArray[np.complex64]:
        began = time.perf_counter()
        samples = self._source.samples(block)
        self._note_read(time.perf_counter() - began, samples.nbytes)
        return samples

    def _own_samples(self, mixing: NDArray[np.complex128], parts: Sequence[slice]) -> list[NDArray[Any]]:
        """Of each group of own channels (channels, m), on the host: blocks of readouts are read with all coils."""
        points, done = sum(image.points for image in self._images), 0
        # Not pinned: pinning takes longer than copying them to the device once.
        kept = [np.empty((part.stop - part.start, points), np.complex64) for part in parts]
        rows = [mixing[self._own[part]] for part in parts]
        plain = self._source.white is None and self._asked.compress is None
        for block in self._blocks():
            self._peers.check()
            samples = self._read(block)
            there = slice(done, done + math.prod(samples.shape[1:]))
            done = there.stop
            for part, of_part, into in zip(parts, rows, kept, strict=True):
                chosen = samples[self._own[part]] if plain else mixed(samples, of_part)
                into[:, there] = chosen.reshape(len(into), -1)
        return kept

    def _coarse(
        self, mixing: NDArray[np.complex128], samples: Sequence[NDArray[Any]], encoding: Encoding, known: bool
    ) -> sensitivities.CoarseMaps:
        """Coarse sensitivities from the k-space centre of all channels."""
        asked = self._asked
        find = sensitivities.coarse_walsh if asked.sensitivities == "walsh" else sensitivities.coarse_espirit
        try:
            if not known or self._checkpoint.centre is None:
                self._checkpoint.centre = self._centre(len(mixing), samples, encoding)
            return find(self._checkpoint.centre)
        except ValueError as error:
            raise cannot_calibrate(asked, self._source, error) from error

    def _centre(self, channels: int, samples: Sequence[NDArray[Any]], encoding: Encoding) -> CentreImages:
        """The coarse images of all channels; each rank computes those of its own."""
        asked, shape, xp = self._asked, self._source.grid.shape, self._xp
        where = in_centre(encoding.points, shape, asked.calibration)
        central = np.concatenate([group[:, where] for group in samples])
        mine = centre_images(
            xp.asarray(central),
            xp.asarray(encoding.points[where]),
            encoding.weights[xp.asarray(where)],
            shape,
            width=asked.calibration,
            taper=asked.sensitivities == "walsh",
            workers=self._reconstruction.workers,
        )
        images = np.zeros((channels, *mine.images.shape[1:]), np.complex64)
        images[self._own] = to_host(mine.images)
        summed = self._peers.control.allreduce(images)
        return CentreImages(images=xp.asarray(summed), width=mine.width)

    def _maps(self, mixing: NDArray[np.complex128], coarse: sensitivities.CoarseMaps | None) -> GroupedMaps:
        """The maps of the rank's channels, on the device or the host."""
        shape = self._source.grid.shape
        residency = self._residency()
        self._made_again = self._refuse_or_make_again(residency, coarse is not None)
        maps = GroupedMaps(self._like, len(self._own), shape, residency, made_again=self._made_again)
        if coarse is not None:
            maps.make(lambda part: coarse.fine(self._own[part], shape), self._squares_sum, coarse.mask(shape))
            return maps
        given = self._source.sensitivities(self._images[0].readouts.slice)
        assert given is not None, "a file's"
        plain = self._source.white is None and self._asked.compress is None
        maps.make(
            lambda part: self._xp.asarray(given[self._own[part]] if plain else mixed(given, mixing[self._own[part]])),
            self._squares_sum,
        )
        return maps

    def _squares_sum(self, squares: Any) -> Any:
        return self._peers.communicator.allreduce(squares)

    def _residency(self) -> Residency:
        shape, coils = self._source.grid.shape, len(self._own)
        room = device_room(self._xp)
        if room is None:
            return plan_residency(coils, shape, None)
        group = group_parts(coils, math.prod(shape))[0].stop
        problem = replace(self._problem, channels=coils, at_once=group)
        try:
            found = plan_residency(coils, shape, max(room - bytes_besides_maps(problem, self._asked), 0))
        except ValueError as error:
            needed, iterates = least_bytes(problem, self._asked), iterates_bytes(problem, self._asked)
            fewer = f"choose fewer than {problem.images} frames or coefficients, " if problem.images > 1 else ""
            raise OutOfDeviceMemory(
                f"{self._source.path}: at least {format_bytes(needed)} of GPU memory are needed, "
                f"{format_bytes(iterates)} of them for the images of the iterations, and {format_bytes(room)} are "
                f"free: {fewer}use a GPU with more memory, or --device cpu"
            ) from error
        return found

    def _refuse_or_make_again(self, residency: Residency, estimated: bool) -> bool:
        """Whether maps that fit neither the device nor the host are recomputed in each pass.

        ParameterError if they come from a file: the host must hold those.
        """
        if residency.streamed <= self._host_bytes:
            return False
        if not estimated:
            raise ParameterError(
                f"--memory: the GPU has room for {format_bytes(residency.room or 0)} of coil maps, and "
                f"{format_bytes(residency.streamed)} of those of --sensitivities must stay on the host, more than it "
                f"leaves for them: {format_bytes(8 * residency.nbytes)} and twice the samples are enough"
            )
        return True

    # The image

    def _solved(
        self,
        maps: GroupedMaps,
        samples: list[NDArray[Any]],
        encoding: Encoding,
        leader: int | None,
        shape: tuple[int, ...],
    ) -> tuple[Any, Any]:
        """leader: the rank from whose iteration all continue; None: from the start."""
        asked, checkpoint = self._asked, self._checkpoint
        if leader is None:
            right = self._confirmed_sum(encoding.right(samples, maps))
            energy = self._energy(samples, encoding) if asked.has_penalties else 0.0
            samples.clear()
            if asked.method == "gridding":
                return right, None
            if not asked.has_penalties:
                checkpoint.progress = initial_progress(right, asked.most_iterations)
                del right
        else:
            self._follow_leader(leader, shape)
        inner = encoding.normal(maps)

        def normal(series: Any) -> Any:
            self._peers.check()
            return self._confirmed_sum(inner(series))

        if asked.has_penalties:
            solution, self._solver_notes = solved(
                asked,
                normal,
                right,
                energy=energy,
                capture=False,  # it exchanges data between ranks, and may copy maps from the host
                follow=self._follow_status,
                seed=0,
                agreed=self._agreed,
                resumption=self._resumption,
            )
            return solution.image, solution.status
        return cg_sense(
            normal,
            None,
            iterations=asked.most_iterations,
            damping=asked.penalty_strengths.get("l2") or asked.damping,
            tolerance=asked.tolerance,
            on_iteration=self._follow,
            progress=checkpoint.progress,
            agreed=self._agreed,
            resumption=self._resumption,
        )

    def _energy(self, samples: Sequence[NDArray[Any]], encoding: Encoding) -> float:
        """Σ W |s|² of all ranks' channels."""
        weights = to_host(encoding.weights).astype(np.float64)
        own = sum(float((np.abs(group) ** 2 @ weights).sum()) for group in samples)
        return float(self._peers.control.allreduce(np.array([own]))[0])

    def _confirmed_sum(self, part: Any) -> Any:
        """The sum of all ranks' parts, confirmed by all: the checkpoint must not keep an incomplete one."""
        whole = self._peers.communicator.allreduce(part)
        self._peers.communicator.confirm()
        return whole

    def _follow_leader(self, leader: int, shape: tuple[int, ...]) -> None:
        """Copy the leader's iteration to all ranks. A rank that receives only part of it loses its checkpoint."""
        mine, xp = self._checkpoint.progress, self._xp
        if self._peers.rank != leader:
            self._checkpoint.progress = None
        if mine is None:
            mine = initial_progress(xp.zeros(shape, np.complex64), self._asked.most_iterations)
        for name in ("solution", "residual", "direction"):
            self._peers.communicator.broadcast(getattr(mine, name), root=leader)
        squares = to_host(mine.squares).copy()
        scalars = np.array([float(mine.scale), float(mine.now), mine.number, *squares])
        self._peers.control.broadcast(scalars, root=leader)
        mine.scale = xp.asarray(scalars[0], np.float32)
        mine.now = xp.asarray(scalars[1], mine.now.dtype)
        mine.number = int(scalars[2])
        mine.squares = xp.asarray(scalars[3:])
        self._peers.communicator.confirm()
        self._checkpoint.progress = mine

    def _agreed(self, residual: float) -> float:
        """Rank 0's residual: processors may round differently, and all ranks must stop at the same iteration."""
        return float(self._peers.control.broadcast(np.array([residual]))[0])

    def _notes(self, residency: Residency) -> Mapping[str, str]:
        where = "on the device"
        if residency.streamed:
            away = residency.groups - len(residency.resident)
            how = "made again" if self._made_again else "streamed from the host"
            where = (
                f"{away} of {counted(residency.groups, 'group')} {how} in each iteration, "
                f"{format_bytes(residency.streamed)} of {format_bytes(residency.nbytes)}: the device has "
                f"{format_bytes(residency.room or 0)} for them"
            )
        found = {"coil_maps": where, **self._solver_notes}
        if self._peers.size > 1:
            found["split"] = f"{counted(self._source.channels, 'channel')} over {self._peers.size} ranks"
        return found


def _shared(resumption: Resumption, peers: Peers) -> Resumption:
    """Rank 0's for all ranks: they continue from its saved state, and it saves theirs when it is due there."""
    if peers.size == 1:
        return resumption
    mine, control = peers.rank == 0, peers.control
    packed = io.BytesIO()
    kept: Mapping[str, Any] = (resumption.saved or {}) if mine else {}
    np.savez(packed, **kept)
    size = control.broadcast(np.array([packed.tell()]))[0]
    packed = io.BytesIO(
        control.broadcast(np.frombuffer(packed.getvalue(), np.uint8).copy() if mine else np.empty(size, np.uint8))
    )
    with np.load(packed) as arrays:
        saved = dict(arrays)
    return Resumption(
        saved=saved or None,
        due=lambda: bool(control.broadcast(np.array([mine and resumption.due()]))[0]),
        save=resumption.save if mine else lambda state: None,
    )


def samples_bytes(source: ImageSource, image: Image) -> int:
    """Bytes of the samples of all coils of an image."""
    return source.coils * image.points * ITEM


def maps_bytes(source: ImageSource) -> int:
    """Bytes of the maps of all channels of an image."""
    return source.channels * math.prod(source.grid.shape) * ITEM
