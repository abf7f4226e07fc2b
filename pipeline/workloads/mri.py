"""Images from raw MRI data: `millrace run mri RAW OUT`.

A chunk is one image: a slice or a volume, of one contrast, repetition and frame. Its input is its samples; what its
trajectory and its coils decide is worked out by the first chunk that needs it and kept for those after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.sense import namespace
from pipeline.config import format_bytes
from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats.base import ImageWriter, Region
from pipeline.formats.image_series import AXES, series_format_for_output
from pipeline.formats.partial import Opening
from pipeline.formats.preview import write_pixels
from pipeline.workloads.base import ArraySpec, Chunk, JobSpec, Plan, Workload, refuse_same_file
from pipeline.workloads.mri_audit import SAMPLES, MriAudit
from pipeline.workloads.mri_images import Image, ImageSource, Trajectory
from pipeline.workloads.mri_parameters import MriParameters, version_of
from pipeline.workloads.mri_reconstruction import Reconstruction, sample_times
from pipeline.workloads.mri_series import series_header, uneven

NO_HALO = ((0, 0),) * 4
COMPLEX, DOUBLE = np.dtype(np.complex64), np.dtype(np.float64)
_BRIGHTEST = 99.7  # percent of the pixels that a preview tells apart


class Mri(Workload):
    """Each image is reconstructed on its own: map, no communication."""

    name = "mri"
    summary = "Reconstruct images from non-Cartesian multi-coil MRI raw data."
    unit = "samples"
    Parameters = MriParameters

    def __init__(self, spec: JobSpec) -> None:
        assert isinstance(spec.parameters, MriParameters)
        self.spec = spec
        self.parameters = spec.parameters
        self._writer: ImageWriter | None = None
        self._form = series_format_for_output(spec.output)
        for output in (spec.output, *self._form.also_written(spec.output)):
            for source in self._inputs():
                refuse_same_file(replace(spec, input=source, output=output))
        self._versions = self._further_versions()
        self._source = ImageSource(spec.input, self.parameters)
        try:
            self.header = series_header(self._source, self.parameters)
            refusal = self._form.refusal(self.header, spec.output)
            if refusal is not None:
                raise OutputError(refusal)
        except BaseException:
            self._source.close()
            raise
        self._reconstruction = Reconstruction(self._source, self.parameters)
        self._audit = MriAudit(self.parameters.eps)
        self._images = self._source.images
        self.job_bytes = sum(self._source.coils * image.points for image in self._images) * COMPLEX.itemsize
        self.job_bytes += self.header.nbytes
        # Of chunks between two stages, by number: what travels in no slot.
        self._trajectories: dict[int, Trajectory] = {}
        self._checked: dict[int, dict[str, Any]] = {}
        self._shown: NDArray[np.float32] | None = None
        self._latest = ""
        self._lock = threading.Lock()

    def _inputs(self) -> Iterator[Path]:
        """Every file that is read."""
        for path in (self.spec.input, *self.parameters.further_files):
            yield path
            if path.suffix.lower() in (".cfl", ".hdr"):
                yield path.with_suffix(".hdr" if path.suffix.lower() == ".cfl" else ".cfl")

    def _further_versions(self) -> list[str]:
        return [version_of(path) for path in self._inputs() if path != self.spec.input]

    # The plan

    def plan(self, budget_bytes: int, target_bytes: int) -> Plan:
        chunks = tuple(self._chunk(number, image) for number, image in enumerate(self._images))
        largest = max(chunk.input_bytes + chunk.output_bytes for chunk in chunks)
        if largest > budget_bytes:
            raise ParameterError(
                f"--memory is too small: an image of {self.spec.input} takes {format_bytes(largest)} with its samples, "
                f"and {format_bytes(budget_bytes)} are there for each; raise it"
            )
        return Plan(chunks=chunks)

    def _chunk(self, number: int, image: Image) -> Chunk:
        _, planes, rows, columns = self.header.shape
        first, last = (0, planes) if self.header.is_volume else (image.slice, image.slice + 1)
        residuals = self.parameters.iterations + 1 if self.parameters.method == "cg-sense" else 1
        return Chunk(
            index=number,
            region=Region((image.time, first, 0, 0), (image.time + 1, last, rows, columns)),
            halo=NO_HALO,
            inputs=(ArraySpec((self._source.coils, image.readouts.count, image.samples), COMPLEX),),
            outputs=(
                ArraySpec((1, last - first, rows, columns), COMPLEX),
                ArraySpec((residuals,), DOUBLE),
                ArraySpec((SAMPLES,), COMPLEX),
            ),
            work=self._source.coils * image.points,
        )

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._source.hold_at_most(budget_bytes)

    # One chunk

    def start(self, opening: Opening = Opening.NEW) -> None:
        self._writer = self._form.create(self.spec.output, self.header, opening)

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        readouts = self._images[chunk.index].readouts
        trajectory = self._source.trajectory(readouts)
        self._source.read(readouts, inputs[0])
        with self._lock:
            self._trajectories[chunk.index] = trajectory

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        image = self._images[chunk.index]
        with self._lock:
            trajectory = self._trajectories.pop(chunk.index)
        followed = self._follower(chunk.index) if stream is None else None
        try:
            found = self._reconstruction.image(image, inputs[0], trajectory, followed)
        except ValueError as error:
            raise InputError(f"{self._where(image)}: {error}") from error
        pixels, residuals, transformed = outputs
        pixels[...] = found.image.T.reshape(pixels.shape)
        residuals[...] = np.nan
        if found.curve is not None:
            residuals[: len(found.curve)] = found.curve
        chosen = MriAudit.chosen(chunk.index, trajectory.points, self._source.grid.shape)
        xp = namespace(pixels)
        transformed[...] = found.transform.forward(xp.ascontiguousarray(found.image))[xp.asarray(chosen)]
        checked: dict[str, Any] = {
            "points": trajectory.points[chosen],
            "method": found.method,
            "segment_error": found.segment_error,
        }
        if self.parameters.field_map is not None:
            checked["times_s"] = sample_times(self._source, trajectory)[chosen]
        with self._lock:
            self._checked[chunk.index] = checked

    def write(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> None:
        pixels, residuals, transformed = outputs
        with self._lock:
            checked = self._checked.pop(chunk.index)
        self._store(chunk, pixels, residuals, transformed, checked)

    def write_image(
        self, number: int, image: NDArray[Any], curve: NDArray[Any], transformed: NDArray[Any], method: str
    ) -> None:
        """Store an image (*matrix) that ranks have made together; the audit gets what `compute` would have told it."""
        chunk = self._chunk(number, self._images[number])
        trajectory = self._source.trajectory(self._images[number].readouts)
        chosen = trajectory.points[MriAudit.chosen(number, trajectory.points, self._source.grid.shape)]
        pixels = np.ascontiguousarray(image.T).reshape(chunk.region.shape)
        self._store(chunk, pixels, curve, transformed, {"points": chosen, "method": method, "segment_error": 0.0})

    def _store(
        self,
        chunk: Chunk,
        pixels: NDArray[Any],
        residuals: NDArray[Any],
        transformed: NDArray[Any],
        checked: dict[str, Any],
    ) -> None:
        assert self._writer is not None, "start comes before write"
        if not np.isfinite(pixels).all():
            where = self._where(self._images[chunk.index])
            raise InputError(f"{where}: the image is not finite: are samples beyond the range of float32?")
        if self.parameters.field_map is not None:
            checked["field_hz"] = self._source.field_map(self._images[chunk.index].readouts.slice)
        image = pixels.reshape(self._source.grid.shape[::-1]).T
        self._audit.note(chunk.index, image, checked.pop("points"), transformed, residuals, **checked)
        shown = np.abs(pixels)
        if chunk.index == self._preview_chunk():
            self._shown = shown[0, shown.shape[1] // 2]
        self._follow(chunk.index, residuals[np.isfinite(residuals)])
        self._writer.write(chunk.region, pixels if self.header.dtype == COMPLEX else shown)

    def flush(self) -> None:
        assert self._writer is not None, "start comes before flush"
        self._writer.flush()

    def _where(self, image: Image) -> str:
        return f"{self.spec.input}, slice {image.readouts.slice}, time {image.readouts.time}"

    # Convergence, as it goes

    def progress_note(self) -> str:
        """What is worth knowing while the job runs: how far the iterations have come."""
        return self._latest

    def _follower(self, number: int) -> Any:
        def follow(iteration: int, residual: Any) -> None:
            self._latest = f"image {number + 1}, iteration {iteration}: residual {float(residual):.2g}"

        return follow

    def _follow(self, number: int, residuals: NDArray[Any]) -> None:
        if residuals.size:
            self._latest = f"image {number + 1}, {residuals.size - 1} iterations: residual {float(residuals[-1]):.2g}"

    # The end

    def audit_notes(self) -> Mapping[str, Any]:
        return self._audit.notes()

    def add_audit_notes(self, notes: Mapping[str, Any]) -> None:
        self._audit.add_notes(notes)

    def audit(self) -> Mapping[str, Any]:
        if self._further_versions() != self._versions:
            raise InputError(
                "a file named beside the input (trajectory, maps, weights or field) changed while it was read; nothing "
                "was published; run again"
            )
        return self._audit.verdict()

    def publish(self) -> None:
        assert self._writer is not None, "start comes before publish"
        self._writer.publish()

    def keep(self) -> None:
        if self._writer is not None:
            self._writer.keep()
        self._source.close()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        self._source.close()

    def describe(self) -> Mapping[str, Any]:
        source, header = self._source, self._source.header
        found: dict[str, Any] = {
            "shape": list(self.header.shape),
            "axes": AXES,
            "dtype": self.header.dtype.name,
            "coils": source.coils,
            "channels": source.channels,
            "readouts": self._images[0].readouts.count,
            "samples": self._images[0].samples,
            "traj_units": source.grid.units,
            "prewhitened": source.white is not None,
        }
        if self.header.voxel_mm is not None:
            found["voxel_mm"] = [round(length, 6) for length in self.header.voxel_mm]
        if uneven(source):
            found["slices"] = "not evenly apart: the affine is a mean one"
        if source.frames > 1:
            found["frames"] = source.frames
        if header.times > 1:
            found["times"] = list(header.time_names)
        return found | dict(self._audit.convergence())

    # The preview

    def _preview_chunk(self) -> int:
        """The first time of the middle slice."""
        middle = 0 if self.header.is_volume else len(self._source.slices) // 2
        return next(n for n, image in enumerate(self._images) if image.slice == middle and image.time == 0)

    def write_preview(self, preview: Path) -> None:
        shown = self._shown if self._shown is not None else self._computed_plane()
        brightest = float(np.percentile(shown, _BRIGHTEST)) or float(shown.max()) or 1.0
        write_pixels(preview, np.rint(np.clip(shown / brightest, 0, 1) * 255).astype(np.uint8))

    def _computed_plane(self) -> NDArray[np.float32]:
        """Made again, on the CPU: another process wrote it, or an earlier run did."""
        self._source = ImageSource(self.spec.input, self.parameters)  # it was closed
        try:
            self._reconstruction = Reconstruction(self._source, self.parameters)
            chunk = self._chunk(self._preview_chunk(), self._images[self._preview_chunk()])
            inputs = [np.empty(spec.shape, spec.dtype) for spec in chunk.inputs]
            outputs = [np.empty(spec.shape, spec.dtype) for spec in chunk.outputs]
            self.read(chunk, inputs)
            self.compute(chunk, inputs, outputs, None)
        finally:
            self._source.close()
        return np.asarray(np.abs(outputs[0][0, outputs[0].shape[1] // 2]), np.float32)
