"""Images from raw MRI data: `millrace run mri RAW OUT`.

A chunk is one image: a slice or a volume, of one contrast, repetition and frame; or all times of a slice, if a penalty
joins them. Its input is its samples. The first
chunk that needs a trajectory's or a slice's operators computes and caches them. The samples of a large volume bypass
the ring's slots: `compute` reads them, a few coils at a time, and several ranks may share the coils.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.sense import namespace, to_host
from kernels.sense.resumption import Resumption
from pipeline import metrics
from pipeline.config import format_bytes
from pipeline.errors import InputError, OutputError, ParameterError, counted
from pipeline.formats.cfl import files_of, pair_of
from pipeline.formats.image.base import Region
from pipeline.formats.image.preview import write_pixels
from pipeline.formats.series import open_series, series_format_for_output
from pipeline.formats.series.base import AXES
from pipeline.formats.series.dicom import DicomReader
from pipeline.storage.partial import Opening
from pipeline.workloads.gang_protocols import Alone, Peers, Rank
from pipeline.workloads.mri.audit import SAMPLES, MriAudit
from pipeline.workloads.mri.parameters import MriParameters
from pipeline.workloads.mri.reconstruction.image import Reconstructed, Reconstruction, sample_times, threads_for
from pipeline.workloads.mri.reconstruction.memory import Problem, device_bytes, largest_problem, least_bytes
from pipeline.workloads.mri.reconstruction.regularized import regularized
from pipeline.workloads.mri.reconstruction.subspace import SubspaceReconstruction, pooled, read_basis
from pipeline.workloads.mri.reconstruction.volume import VolumeReconstruction, maps_bytes, samples_bytes
from pipeline.workloads.mri.series.header import MagnitudeSink, series_header
from pipeline.workloads.mri.series.preview import Plane
from pipeline.workloads.mri.series.remarks import remarks
from pipeline.workloads.mri.source.images import Image, ImageSource, Trajectory, groups_of
from pipeline.workloads.paths import refuse_same_file, version_of
from pipeline.workloads.protocol import ArraySpec, Budget, Chunk, IterateStore, JobSpec, JobSummary, Plan, Result, Sink

NO_HALO = ((0, 0),) * 4
COMPLEX, DOUBLE = np.dtype(np.complex64), np.dtype(np.float64)
# Samples of a volume from which they bypass the slots and ranks may share its coils.
LARGE_BYTES = 64 << 20
# Share of the largest pixel by which iterations may differ with threads, devices, and how coils are split.
TOLERANCE = 1e-3


class Mri:
    """Reconstruction of MRI raw data, as a `Workload`."""

    name = "mri"
    summary = "Reconstruct images from multi-coil MRI raw data, Cartesian or not."
    unit = "samples"
    examples = ("heart.h5 heart.nii.gz", "heart.h5 heart.nii.gz --frames 25 --regularizer tv-time --preview heart.png")
    Parameters = MriParameters

    def check_output(self, path: Path) -> None:
        series_format_for_output(path)

    def open(self, spec: JobSpec) -> MriJob:
        return MriJob(spec)


class MriJob:
    """Reconstructs each image on its own; or ranks share the coils of each."""

    def __init__(self, spec: JobSpec) -> None:
        assert isinstance(spec.parameters, MriParameters)
        self.parameters = spec.parameters
        # The input is the pair's file of samples; BART names pairs without a suffix.
        bare = spec.input.suffix == "" and not spec.input.exists() and pair_of(spec.input)[0].exists()
        if bare or spec.input.suffix.lower() == ".hdr":
            spec = replace(spec, input=pair_of(spec.input)[0])
        self.spec = spec
        self._form = series_format_for_output(spec.output)
        if self.parameters.window_limits is not None and not self._form.windowed:
            raise ParameterError(f"--window belongs to .png and .dcm, not to {spec.output.name}: leave it out")
        for output in (spec.output, *self._form.also_written(spec.output)):
            for source in self._inputs():
                refuse_same_file(replace(spec, input=source, output=output))
        self._versions = self._further_versions()
        self._source = ImageSource(spec.input, self.parameters)
        try:
            basis = self.parameters.basis
            self._basis = None if basis is None else read_basis(basis, self._source.times, spec.input)
            times = self._source.times if self._basis is None else self._basis.shape[1]
            self.header = series_header(self._source, self.parameters, times)
            refusal = self._form.refusal(self.header, spec.output)
            if refusal is not None:
                raise OutputError(refusal)
            self._reconstruction = Reconstruction(self._source, self.parameters)
            self._subspace = (
                None
                if self._basis is None
                else SubspaceReconstruction(self._reconstruction, self.parameters, self._basis)
            )
            self._images = self._source.images
            joined = self.parameters.joins_times
            self._groups = groups_of(self._images) if joined else [(image,) for image in self._images]
            if joined and self._basis is None:
                self._refuse_unjoined()
        except BaseException:
            self._source.close()  # if an HDF5 file is still open when Python ends, it crashes
            raise
        self._audit = MriAudit(self.parameters.eps, self._refuse_changed)
        # By chunk, between two stages: data that no slot holds.
        self._trajectories: dict[int, list[Trajectory]] = {}
        self._checked: dict[int, dict[str, Any]] = {}
        self._shown: Plane | None = None
        self._latest = ""
        self._iterates: IterateStore | None = None
        self._host_bytes = 0  # for maps that do not fit the GPU
        self._lock = threading.Lock()
        self._one_volume = threading.Lock()  # each takes the whole device

    def _inputs(self) -> Iterator[Path]:
        """Every file that is read."""
        for path in (self.spec.input, *self.parameters.further_files):
            yield from files_of(path)

    def _further_versions(self) -> list[str]:
        return [version_of(path) for path in self._inputs() if path != self.spec.input]

    # The plan

    def plan(self, budget: Budget) -> Plan:
        chunks = tuple(self._chunk(number, images) for number, images in enumerate(self._groups))
        largest = max(chunk.input_bytes + chunk.output_bytes for chunk in chunks)
        if largest > budget.budget_bytes:
            what = "the joined images of a slice" if self.parameters.joins_times else "an image"
            raise ParameterError(
                f"--memory is too small: {what} of {self.spec.input} takes {format_bytes(largest)} with its samples, "
                f"and {format_bytes(budget.budget_bytes)} are available for each; raise it"
            )
        return Plan(chunks=chunks, read_bytes=sum(samples_bytes(self._source, image) for image in self._images))

    @cached_property
    def _in_parts(self) -> bool:
        """Whether `compute` reads the samples, a few coils at a time, instead of `read`."""
        largest = max(self._samples_bytes)
        return self.parameters.split == "coils" or (self.header.is_volume and largest >= LARGE_BYTES)

    @cached_property
    def _samples_bytes(self) -> list[int]:
        """Bytes of each chunk's samples."""
        return [sum(samples_bytes(self._source, image) for image in images) for images in self._groups]

    def _refuse_unjoined(self) -> None:
        names = " and ".join(name for name in self.parameters.penalty_names if name in ("llr", "tv-time"))
        if self._source.times < 2:
            raise ParameterError(
                f"--regularizer {names}: {self.spec.input} holds one time, and {names} joins several: give --frames "
                "or --sorting"
            )

    def _chunk(self, number: int, images: Sequence[Image]) -> Chunk:
        _, planes, rows, columns = self.header.shape
        image, times = images[0], len(images) if self._basis is None else self._basis.shape[1]
        first, last = (0, planes) if self.header.is_volume else (image.slice, image.slice + 1)
        curve: tuple[int, ...] = (1,)
        if self.parameters.method == "cg-sense":
            most = self.parameters.most_iterations
            curve = (most, 3) if self.parameters.has_penalties else (most + 1,)
        inputs = [ArraySpec((self._source.coils, each.readouts.count, each.samples), COMPLEX) for each in images]
        return Chunk(
            index=number,
            region=Region((image.time, first, 0, 0), (image.time + times, last, rows, columns)),
            halo=NO_HALO,
            inputs=() if self._in_parts else tuple(inputs),
            outputs=(
                ArraySpec((times, last - first, rows, columns), COMPLEX),
                ArraySpec(curve, DOUBLE),
                ArraySpec((times * SAMPLES,), COMPLEX),
            ),
            work=self._source.coils * sum(each.points for each in images),
        )

    def hold_at_most(self, budget_bytes: int) -> int:
        held = self._source.hold_at_most(budget_bytes)
        if self._in_parts:
            held += max(self._samples_bytes)
            maps = maps_bytes(self._source)
            self._host_bytes = maps if held + maps <= budget_bytes else 0
            held += self._host_bytes
        return held

    def keep_iterates(self, store: IterateStore) -> None:
        self._iterates = store

    def _resumption(self, chunk: int) -> Resumption | None:
        store = self._iterates
        if store is None or self.parameters.method != "cg-sense":
            return None
        return Resumption(saved=store.saved(chunk), due=partial(store.due, chunk), save=partial(store.save, chunk))

    # One chunk

    def sink(self, opening: Opening) -> Sink:
        writer = self._form.create(self.spec.output, self.header, opening)
        return writer if self.header.dtype == COMPLEX else MagnitudeSink(writer)

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        if not inputs:
            return
        images = self._groups[chunk.index]
        trajectories = [self._source.trajectory(image.readouts) for image in images]
        for image, samples in zip(images, inputs, strict=True):
            self._source.read(image.readouts, samples)
        with self._lock:
            self._trajectories[chunk.index] = trajectories

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        if not inputs:
            with self._one_volume:
                self._reconstruction.workers = threads_for(self._source, 1)
                self._make(chunk, Alone(self._source.channels), outputs[0], outputs)
            return
        images = self._groups[chunk.index]
        with self._lock:
            trajectories = self._trajectories.pop(chunk.index)
        # On a GPU, reporting residuals would synchronise; with a tolerance the iterations do anyway.
        followed = self._follower(chunk.index) if stream is None or self.parameters.tolerance > 0 else None
        try:
            if self._subspace is not None:
                found, whole = self._subspace.coefficients(
                    images,
                    inputs,
                    trajectories,
                    follow=followed,
                    follow_status=self._penalty_follower(chunk.index),
                    seed=chunk.index,
                    resumption=self._resumption(chunk.index),
                )
                trajectories = [whole] * len(found.image)
            elif self.parameters.has_penalties:
                found = regularized(
                    self._reconstruction,
                    self.parameters,
                    images,
                    inputs,
                    trajectories,
                    self._penalty_follower(chunk.index),
                    seed=chunk.index,
                    resumption=self._resumption(chunk.index),
                )
            else:
                found = self._reconstruction.image(
                    images[0], inputs[0], trajectories[0], followed, self._resumption(chunk.index)
                )
        except ValueError as error:
            raise InputError(f"{self._where(images[0])}: {error}") from error
        self._fill(chunk, trajectories, found, outputs)

    def _make(
        self,
        chunk: Chunk,
        peers: Peers,
        like: Any,
        outputs: Sequence[Any] | None,
        note_read: Callable[[float, int], None] = lambda seconds, nbytes: None,
    ) -> None:
        """Reconstruct an image with the peers, and fill the outputs if there are any."""
        images = self._groups[chunk.index]
        trajectories = [self._source.trajectory(image.readouts) for image in images]
        volume = VolumeReconstruction(
            self._source,
            self.parameters,
            self._reconstruction,
            images,
            peers,
            like,
            problem=self._problem,
            host_bytes=self._host_bytes,
            follow=self._follower(chunk.index),
            follow_status=self._penalty_follower(chunk.index),
            note_read=note_read,
            resumption=self._resumption(chunk.index),
        )
        try:
            found = volume.reconstructed(trajectories, None if self._subspace is None else self._subspace.encoding)
        except ValueError as error:
            raise InputError(f"{self._where(images[0])}: {error}") from error
        if self._subspace is not None:
            trajectories = [pooled(trajectories)] * len(found.transforms)
        if outputs is not None:
            self._fill(chunk, trajectories, found, outputs)

    def _fill(
        self, chunk: Chunk, trajectories: Sequence[Trajectory], found: Reconstructed, outputs: Sequence[Any]
    ) -> None:
        pixels, residuals, transformed = outputs
        xp, shape = namespace(found.image), self._source.grid.shape
        series = found.image.reshape(len(trajectories), *shape)
        residuals[...] = np.nan
        if found.curve is not None:
            residuals[: len(found.curve)] = xp.asarray(found.curve)
        chosen = []
        for time, (trajectory, transform) in enumerate(zip(trajectories, found.transforms, strict=True)):
            pixels[time] = series[time].T.reshape(pixels.shape[1:])
            number = self._groups[chunk.index][0].time + time
            chosen.append(MriAudit.chosen(number, trajectory.points, shape))
            samples = transform.forward(xp.ascontiguousarray(series[time]))[xp.asarray(chosen[-1])]
            transformed[time * SAMPLES : (time + 1) * SAMPLES] = samples
        checked: dict[str, Any] = {
            "points": np.stack([each.points[which] for each, which in zip(trajectories, chosen, strict=True)]),
            "method": found.method,
            "segment_error": found.segment_error,
            "notes": found.notes,
        }
        if self.parameters.field_map is not None:
            times = [sample_times(self._source, each)[which] for each, which in zip(trajectories, chosen, strict=True)]
            checked["times_s"] = np.stack(times)
        with self._lock:
            self._checked[chunk.index] = checked

    # All ranks at one chunk

    def joint_parts(self, chunks: Sequence[Chunk], ranks: int) -> int:
        asked, channels = self.parameters.split, self._source.channels
        # With as many images as ranks, each has its own work and needs no communication.
        worthwhile = self._in_parts and len(chunks) < ranks < channels
        return channels if asked == "coils" or (asked == "auto" and worthwhile) else 0

    def compute_jointly(self, chunk: Chunk, peers: Peers, rank: Rank) -> Sequence[NDArray[Any]] | None:
        self._reconstruction.workers = rank.threads
        outputs = None
        if peers.rank == 0:
            xp = namespace(rank.like)
            outputs = [xp.empty(spec.shape, spec.dtype) for spec in chunk.outputs]
        self._make(chunk, peers, rank.like, outputs, rank.note_read)
        return None if outputs is None else [to_host(each) for each in outputs]

    def note(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> Callable[[], Any]:
        pixels, residuals, transformed = outputs
        images = self._groups[chunk.index]
        with self._lock:
            checked = self._checked.pop(chunk.index)
        if not np.isfinite(pixels).all():
            where = self._where(images[0])
            raise InputError(f"{where}: the image is not finite: are samples beyond the range of float32?")
        if self.parameters.field_map is not None:
            checked["field_hz"] = self._source.field_map(images[0].readouts.slice)
        series = [each.reshape(self._source.grid.shape[::-1]).T for each in pixels]
        note = self._audit.note(chunk.index, series, checked.pop("points"), transformed, residuals, **checked)
        if chunk.index == self._preview_chunk():
            self._shown = Plane.of(pixels[0, pixels.shape[1] // 2])
            if self._in_parts:  # recomputing it takes too long
                note = {**note, "preview": self._shown.packed()}
        if note["residual"] is not None:
            self._report(chunk.index, note)
            metrics.solver_iterations.labels(Mri.name).inc(note["iterations"])
            metrics.solver_residual.labels(Mri.name).set(note["residual"])
            if "objective" in note:
                metrics.solver_objective.labels(Mri.name).set(note["objective"])
        return lambda: note

    def add_note(self, chunk: int, note: Any) -> None:
        self._audit.add_note(chunk, note)
        if "preview" in note:
            self._shown = Plane.unpacked(note["preview"])
        if note["residual"] is not None:
            self._report(chunk, note)

    def _where(self, image: Image) -> str:
        return f"{self.spec.input}, slice {image.readouts.slice}, time {image.readouts.time}"

    # Convergence

    def progress_note(self) -> str:
        return self._latest

    def take_progress(self, note: str) -> None:
        self._latest = note or self._latest

    def _follower(self, number: int) -> Any:
        def follow(iteration: int, residual: Any) -> None:
            self._latest = f"iteration {iteration}, residual {float(residual):.2g}, image {number + 1}"

        return follow

    def _penalty_follower(self, number: int) -> Callable[[int, NDArray[np.float64]], None]:
        def follow(iteration: int, status: NDArray[np.float64]) -> None:
            objective, misfit, _ = status
            self._latest = (
                f"iteration {iteration}, residual {misfit:.2g}, objective {objective:.4g}, image {number + 1}"
            )

        return follow

    def _report(self, number: int, note: Mapping[str, Any]) -> None:
        iterations = counted(note["iterations"], "iteration")
        objective = f"objective {note['objective']:.4g}, " if "objective" in note else ""
        self._latest = f"{iterations}, residual {note['residual']:.2g}, {objective}image {number + 1}"

    # The end

    def _refuse_changed(self) -> None:
        if self._further_versions() != self._versions:
            raise InputError(
                "a file named beside the input (trajectory, maps, weights or field) changed while it was read; nothing "
                "was published; run again"
            )

    def reference(self) -> MriAudit:
        return self._audit

    def result(self) -> Result:
        reader = open_series(self.spec.output, self.header)

        def stored(samples: NDArray[Any]) -> NDArray[Any]:
            held = samples if self.header.dtype == COMPLEX else np.abs(samples)
            return held.astype(reader.header.dtype, copy=False)

        rounded = reader.half_unit if isinstance(reader, DicomReader) else None
        half_unit = None if rounded is None else lambda values: np.full(values.shape, rounded)
        return Result(reader=reader, stored=stored, half_unit=half_unit, tolerance=TOLERANCE)

    def close(self) -> None:
        self._source.close()

    @property
    def summary(self) -> JobSummary:
        least = least_bytes(self._problem, self.parameters) if self._in_parts else None
        found = remarks(self._source, self.parameters, self.header, self.device_bytes, least)
        if self._basis is not None:
            found["coefficients"] = self._basis.shape[1]
        samples = sum(self._source.coils * image.points for image in self._images)
        return JobSummary(
            shape=self.header.shape,
            axes=AXES,
            dtype=self.header.dtype.name,
            nbytes=samples * COMPLEX.itemsize + self.header.nbytes,
            remarks=found | dict(self._audit.convergence(settles=not self.parameters.has_random_shifts)),
        )

    @cached_property
    def _problem(self) -> Problem:
        """The one that needs the most memory on a GPU."""
        return largest_problem(self._source, self.parameters, self._groups, self._basis, in_parts=self._in_parts)

    @property
    def device_bytes(self) -> int:
        return device_bytes(self._problem, self.parameters)

    # The preview

    def _preview_chunk(self) -> int:
        """The first time of the middle slice."""
        middle = 0 if self.header.is_volume else len(self._source.slices) // 2
        return next(n for n, (image, *_) in enumerate(self._groups) if image.slice == middle and image.time == 0)

    def write_preview(self, preview: Path) -> None:
        shown = self._shown if self._shown is not None else self._computed_plane()
        write_pixels(preview, shown.drawn(self.header, is_placed=bool(self._source.header.placements)))

    def _computed_plane(self) -> Plane:
        """Recomputed on the CPU, if another process or an earlier run wrote it."""
        self._source = ImageSource(self.spec.input, self.parameters)  # `close` has closed it
        try:
            self._reconstruction = Reconstruction(self._source, self.parameters)
            chunk = self._chunk(self._preview_chunk(), self._groups[self._preview_chunk()])
            inputs = [np.empty(spec.shape, spec.dtype) for spec in chunk.inputs]
            outputs = [np.empty(spec.shape, spec.dtype) for spec in chunk.outputs]
            self.read(chunk, inputs)
            self.compute(chunk, inputs, outputs, None)
        finally:
            self._source.close()
        return Plane.of(outputs[0][0, outputs[0].shape[1] // 2])
