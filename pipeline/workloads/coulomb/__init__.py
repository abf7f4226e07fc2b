"""Electrostatic potential maps of molecules: `millrace run coulomb MOLECULE OUT`.

A chunk is a slab of the grid. If there is one frame, its input is the atoms within reach. Of a trajectory, the chunk
loads one frame after another and combines their maps: memory holds one frame and a few maps at a time, however long
the trajectory. Each frame is read once per slab, unless memory has room to cache it. Several processes share the
frames instead: each reads its own, and their sums are combined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import Grid, Reach, exclude, potential
from kernels.ewald import near, refuse_charged
from kernels.runtime.threads import check_wanted
from pipeline.config import format_bytes
from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats.grid import create_map, map_format_for_output, open_map
from pipeline.formats.grid.base import DTYPE, GridHeader
from pipeline.formats.image.base import ImageWriter, Region
from pipeline.formats.image.preview import write_pixels
from pipeline.storage.partial import Opening
from pipeline.workloads.coulomb.audit import CoulombAudit
from pipeline.workloads.coulomb.combine import (
    add_map,
    combine,
    finish_sum,
    frames_of,
    reduction,
    scratch_bytes,
    shard_count,
    shard_of,
    sum_bytes,
    temporary_bytes,
)
from pipeline.workloads.coulomb.far import FarFields, fitted
from pipeline.workloads.coulomb.frames import ChosenFrames, Survey, open_frames, prefetched_frames, stream_frames
from pipeline.workloads.coulomb.grid import (
    cut_extents,
    grid_header,
    part_of,
    refuse_too_large,
    refuse_too_many_cells,
    regions,
)
from pipeline.workloads.coulomb.parameters import CoulombParameters
from pipeline.workloads.coulomb.slices import MiddleSlices
from pipeline.workloads.coulomb.tables import (
    OWN_ANGSTROM,
    WriterWithTables,
    read_points,
    table_path,
    write_points,
    write_profile,
)
from pipeline.workloads.gang_protocols import Rank
from pipeline.workloads.paths import refuse_same_file
from pipeline.workloads.protocol import ArraySpec, Budget, Chunk, JobSpec, JobSummary, Plan, Result

NO_HALO = ((0, 0),) * 3
ATOM_DTYPE = np.dtype(np.float64)


class Coulomb:
    """Maps of the electrostatic potential, as a `Workload`."""

    name = "coulomb"
    summary = "Map the electrostatic potential of a molecule's charges on a regular grid."
    unit = "pairs"
    examples = (
        "protein.pqr map.dx --scheme full",
        "water.pqr map.mrc --trajectory water.xtc --scheme ewald --profile z",
    )
    Parameters = CoulombParameters

    def check_output(self, path: Path) -> None:
        map_format_for_output(path)

    def open(self, spec: JobSpec) -> CoulombJob:
        return CoulombJob(spec)

    def join(self, spec: JobSpec, facts: Survey) -> CoulombJob:
        return CoulombJob(spec, facts)

    def prefetch(self, spec: JobSpec) -> AbstractContextManager[None]:
        assert isinstance(spec.parameters, CoulombParameters)
        if spec.parameters.trajectory is None:
            return nullcontext()
        return prefetched_frames(spec.input, spec.parameters)

    def modules(self, spec: JobSpec) -> Sequence[str]:
        assert isinstance(spec.parameters, CoulombParameters)
        return () if spec.parameters.trajectory is None else ("MDAnalysis",)


class CoulombJob:
    """Computes each slab of the grid from all atoms; or ranks share the frames of a trajectory."""

    def __init__(self, spec: JobSpec, survey: Survey | None = None) -> None:
        assert isinstance(spec.parameters, CoulombParameters)
        self.spec = spec
        self.parameters = spec.parameters
        self._scheme = self.parameters.formula
        self._audits_here = False  # else the process that started this one audits
        form = map_format_for_output(spec.output)
        for source in (spec.input, self.parameters.trajectory, self.parameters.at):
            if source is not None:
                refuse_same_file(replace(spec, input=source))
        self._points = None if self.parameters.at is None else read_points(self.parameters.at)
        self._frames = open_frames(spec.input, self.parameters, survey)
        self.reduction = reduction(self.parameters.combine)
        try:
            self._check_combination()
            self._method = fitted(self.parameters, self._frames.cells)
            if self._method is not None:
                self._scheme = replace(self._scheme, cutoff_angstrom=self._method.cutoff_angstrom)
            self._check_boundary()
            self.header = grid_header(spec, self.parameters, self._frames.box)
            refusal = form.refusal(self.header, spec.output)
            if refusal is not None:
                raise OutputError(refusal)
            refuse_too_large(spec, self.header, form)
            refuse_too_many_cells(spec, self.header, self._scheme, self._frames.cells)
            self._audit = CoulombAudit(self.header, self._scheme, self.parameters.combine, self._frames, self._method)
            self._far = self._far_fields()
            self._slices = MiddleSlices(self.header)
        except BaseException:
            self._frames.close()
            raise

    @property
    def summary(self) -> JobSummary:
        cells = {None if cell is None else cell.vectors for cell in self._frames.cells}
        return JobSummary(
            shape=self.header.shape,
            axes=self.header.image.axes,
            dtype=DTYPE.name,
            nbytes=len(self._frames) * self._frames.nbytes + self.header.nbytes,
            remarks={
                "origin_angstrom": list(self.header.origin),
                "spacing_angstrom": list(self.header.spacing),
                "units": self.header.units,
                "atoms": self._frames.n_atoms,
                "charge_e": round(self._frames.total_charge, 6) + 0.0,  # no -0
                "frames": len(self._frames),
                "periodic": cells != {None},
                **self._file_remarks(),
                **self._far_remarks(),
            },
        )

    def _file_remarks(self) -> dict[str, Any]:
        """The size of a file of text, which is known before: three to four times its samples'."""
        form, output = map_format_for_output(self.spec.output), self.spec.output
        is_text = form.style is not None and output.suffix.lower() != ".gz"
        return {"file_bytes": form.file_bytes(self._shown)} if is_text else {}

    @cached_property
    def _shown(self) -> GridHeader:
        """The header, with atoms for formats that list them."""
        if not map_format_for_output(self.spec.output).shows_atoms:
            return self.header
        return replace(self.header, atoms=self._frames.first_atoms())

    def _check_combination(self) -> None:
        how, count = self.parameters.combine, len(self._frames)
        if how == "none" and count > 1:
            raise ParameterError(
                f"--combine none: {count:,} frames are chosen, and a map file (.dx, .mrc, .cube, .zarr, .npy) holds "
                "one: choose one with --frames, or --combine avg, min, max or std"
            )
        if how == "std" and count == 1:
            raise ParameterError("--combine std: one frame has no deviation; choose several with --frames")

    def _check_boundary(self) -> None:
        if self._method is not None and self._method.boundary == "vacuum":
            try:
                refuse_charged(self._frames.first_atoms()[:, 3])
            except ValueError as error:
                raise ParameterError(f"--boundary: {self.spec.input}: {error}") from error

    def _far_fields(self) -> FarFields | None:
        if self._method is None:
            return None
        grid = part_of(self.header, Region.whole(self.header.shape))
        return FarFields(self._method, self._frames, grid, self.parameters.combine)

    def _far_remarks(self) -> dict[str, Any]:
        """For schemes with a far part: the mesh of the first frame, and the assumed surroundings."""
        if self._far is None or self._method is None:
            return {}
        found: dict[str, Any] = {"mesh": list(self._far.mesh.shape), "accuracy": self._method.accuracy}
        if self._method.smear_per_angstrom is None:
            found["near_angstrom"] = self._method.cutoff_angstrom
        if self._frames.cells[0] is not None:
            charge = round(self._frames.total_charge, 6) + 0.0
            found["boundary"] = self._method.boundary
            found["background"] = f"uniform, {-charge:g} e a cell" if charge else "none"
        return found

    # The plan

    def plan(self, budget: Budget) -> Plan:
        budget_bytes, target_bytes = budget.budget_bytes, budget.target_bytes
        per_point = DTYPE.itemsize + scratch_bytes(self.parameters.combine, len(self._frames))
        points = max(1, min(budget_bytes, target_bytes) // per_point)
        while True:  # the atoms that reach a chunk are known only once its region is
            extents = cut_extents(
                self.header.shape, most=points, wanted=points, pairs_per_point=self._pairs_per_point()
            )
            chunks, map_bytes = [], math.prod(extents) * per_point
            for index, region in enumerate(regions(self.header.shape, extents)):
                chunks.append(self._chunk(index, region))
                if chunks[-1].input_bytes + map_bytes > budget_bytes:
                    break  # too large; do not cut the others
            atoms_bytes = max(chunk.input_bytes for chunk in chunks)
            # If the atoms alone fill the target, let the map take as much memory as they do.
            most_bytes = min(budget_bytes, max(target_bytes, 2 * atoms_bytes))
            if atoms_bytes + map_bytes <= most_bytes:
                return Plan(chunks=tuple(chunks), read_bytes=len(self._frames) * self._frames.nbytes)
            if math.prod(extents) == 1:
                raise ParameterError(
                    f"--memory is too small: a single point of {self.spec.output} takes {format_bytes(atoms_bytes)} "
                    f"for the atoms that reach it, and {format_bytes(budget_bytes)} are available for a chunk; raise it"
                )
            points = max(1, math.prod(extents) * 3 // 4)

    def _pairs_per_point(self) -> float:
        """Atoms that a point sums over: all, or those within the cutoff at the mean density."""
        count = self._frames.n_atoms
        if self._scheme.name == "direct":
            return count
        lowest, highest = self._frames.box
        sphere = 4 / 3 * math.pi * self._scheme.cutoff_angstrom**3
        return min(count, count * sphere / max(float(np.prod(highest - lowest)), sphere))

    def _chunk(self, index: int, region: Region) -> Chunk:
        grid = part_of(self.header, region)
        return Chunk(
            index=index,
            region=region,
            halo=NO_HALO,
            inputs=() if len(self._frames) > 1 else (ArraySpec((self._reach.count(grid), 4), ATOM_DTYPE),),
            outputs=(ArraySpec(region.shape, DTYPE),),
            work=round(math.prod(region.shape) * len(self._frames) * self._pairs_per_point()),
        )

    @cached_property
    def _reach(self) -> Reach:
        """The reach of a single frame."""
        return Reach(self._frames.frame(0).coordinates, self._scheme, self._frames.cells[0])

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._frames.cache_at_most(budget_bytes)

    def workspace_bytes(self, memory_bytes: int) -> int:
        # A mesh larger than that is not refused: on a GPU it is not in the host's memory.
        return 0 if self._far is None else min(self._far.nbytes, memory_bytes - memory_bytes // 8)

    def sink(self, opening: Opening) -> ImageWriter:
        self._audits_here = opening is not Opening.JOIN
        if self._audits_here:
            self._slices.outline(self._frames.frame(0).coordinates)
        if self._audits_here and len(self._frames) == 1:
            self._audit.prepare(0, self._frames.frame(0).coordinates)  # while the map is computed
        writer = create_map(self.spec.output, self._shown, opening)
        if self._audits_here and (self.parameters.profile or self._points is not None):
            return WriterWithTables(writer, self._write_tables)
        return writer

    def _write_tables(self) -> None:
        output = self.spec.output
        if self.parameters.profile is not None:
            write_profile(output, self.header, self.parameters.profile)
        if self._points is not None:
            values = self._audit.potential_at(self._points, OWN_ANGSTROM)
            write_points(table_path(output, "at"), self._points, values, self.header.units)

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        if inputs:
            self._frames.fill(0, inputs[0], self._reach.atoms(part_of(self.header, chunk.region)))

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        grid = part_of(self.header, chunk.region)
        # With several frames the slot has no atoms: each frame is loaded in turn.
        room = inputs[0] if inputs else np.empty_like(outputs[0], shape=(self._frames.n_atoms, 4), dtype=ATOM_DTYPE)

        def map_of(number: int, out: Any) -> None:
            check_wanted()
            atoms = room if inputs else self._loaded(number, room, stream)
            self._potential(number, atoms, grid, out, stream)

        combine(self.parameters.combine, len(self._frames), map_of, outputs[0], self._finish_shard(grid, stream))

    def _loaded(self, number: int, room: Any, stream: Any) -> Any:
        """A frame's atoms on the device, in place of the previous frame's, on which the stream has finished."""
        atoms = self._frames.atoms(number)
        if self._audits_here:
            self._audit.prepare(number, atoms[:, :3])
        if stream is None:
            return atoms
        room.set(atoms, stream=stream)
        stream.synchronize()  # the host array may be freed; reading it overlapped the previous frame
        return room

    def _potential(self, number: int, atoms: Any, grid: Grid, out: Any, stream: Any = None, workers: int = 1) -> None:
        """A frame's map; of a mean that is linear in the far field, the near part only. atoms: those near the grid."""
        cell = self._frames.cells[number]
        try:
            if self._method is None or self._far is None:
                potential(atoms, grid, self._scheme, cell=cell, out=out, workers=workers, stream=stream)
                return
            near(atoms, grid, self._method, cell, out, workers=workers, stream=stream)
            every = atoms if len(atoms) == self._frames.n_atoms else None
            if self._far.is_linear:
                self._far.take(number, shard_of(number, len(self._frames)), every, stream)
            else:
                self._far.add(number, every, grid, out, stream, workers)
            if self._method.exclude_radius_angstrom > 0:
                radius = self._method.exclude_radius_angstrom
                exclude(atoms, grid, radius, cell=cell, out=out, workers=workers, stream=stream)
        except ValueError as error:
            raise InputError(f"{self.spec.input}: {error}") from error

    def _finish_shard(self, grid: Grid, stream: Any, workers: int = 1) -> Callable[[int, Any, Any], None] | None:
        far = self._far
        if far is None or not far.is_linear:
            return None
        return lambda shard, total, room: far.add_shard(shard, grid, total, room, stream, workers)

    # Many frames, shared by ranks

    @property
    def shards(self) -> int:
        return shard_count(len(self._frames))

    def share_bytes(self, shards: int) -> int:
        # Combining them takes two more sums, and the result.
        how = self.parameters.combine
        return (shards + 2) * sum_bytes(how) + temporary_bytes(how) + DTYPE.itemsize

    def facts(self) -> Survey:
        return self._frames.survey

    def share(self, region: Region, shard: int, rank: Rank) -> Any:
        grid, how = part_of(self.header, region), self.parameters.combine
        atoms = rank.room([ArraySpec((self._frames.n_atoms, 4), ATOM_DTYPE)])
        atoms.host[0][:, 3] = self._frames.charges
        atoms.upload()
        on_device = atoms.device[0]
        found = np.empty_like(on_device, shape=region.shape, dtype=DTYPE)
        first = total = None
        numbers = list(frames_of(shard, len(self._frames)))
        if how == "std" and numbers[0] != 0:
            numbers.insert(0, 0)  # deviations are taken about it
        for number, room in stream_frames(self._frames, numbers, rank, self._audit.prepare):
            on_device[:, :3] = room.device[0]
            self._potential(number, on_device, grid, found, workers=rank.threads)
            if how == "std" and first is None:
                first = found.astype(np.float64)
                if len(numbers) > len(frames_of(shard, len(self._frames))):
                    continue
            total = add_map(how, total, found, first)
        finish = self._finish_shard(grid, None, rank.threads)
        if finish is not None:
            finish(shard, total, found)
        atoms.wait()  # before their memory is freed
        return total

    def whole(self, region: Region, total: Any) -> NDArray[Any]:
        found = finish_sum(self.parameters.combine, total, len(self._frames)).astype(DTYPE)
        on_host: NDArray[Any] = found.get() if hasattr(found, "get") else found
        return on_host

    def share_notes(self) -> Mapping[str, Any]:
        return self._audit.take_prepared()

    def add_share_notes(self, notes: Mapping[str, Any]) -> None:
        self._audit.add_prepared(notes)

    # The end

    def note(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> None:
        self._slices.note(chunk.region, outputs[0])

    def add_note(self, chunk: int, note: Any) -> None:
        """Ignored: `write_preview` recomputes the slices of other processes."""

    def reference(self) -> CoulombAudit:
        return self._audit

    def result(self) -> Result:
        style = map_format_for_output(self.spec.output).style
        return Result(
            reader=open_map(self.spec.output, self.header), half_unit=None if style is None else style.half_unit
        )

    def close(self) -> None:
        self._frames.close()

    def write_preview(self, preview: Path) -> None:
        slices = self._slices
        if not slices.is_complete:  # other processes or an earlier run wrote parts of the map
            self._frames = ChosenFrames(self.spec.input, self.parameters)  # `close` has closed them
            try:
                slices = self._computed_slices()
            finally:
                self._frames.close()
        write_pixels(preview, slices.pixels())

    def _computed_slices(self) -> MiddleSlices:
        """Only the slices, on the CPU."""
        slices, self._far = MiddleSlices(self.header), self._far_fields()
        slices.outline(self._frames.frame(0).coordinates)
        for region in slices.regions():
            values = np.empty(region.shape, DTYPE)
            chunk = self._chunk(0, region)
            inputs = [np.empty(spec.shape, spec.dtype) for spec in chunk.inputs]
            self.read(chunk, inputs)
            self.compute(chunk, inputs, [values], None)
            slices.note(region, values)
        return slices
