"""Electrostatic potential maps of molecules: `millrace run coulomb MOLECULE OUT`.

A chunk is a slab of the grid. Its input is the atoms of the first frame; of further frames, which one chunk may need
thousands of, each is brought when its turn comes, and the slab's maps are combined one by one: memory holds one frame
and one map at a time, however long the trajectory. Every frame is so read once for each slab, but for those that the
memory has room to keep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import Cell, potential
from pipeline.config import format_bytes
from pipeline.errors import InputError, OutputError, ParameterError
from pipeline.formats.base import ImageWriter, Region
from pipeline.formats.grid_map import DTYPE
from pipeline.formats.maps import create_map, map_format_for_output
from pipeline.formats.partial import Opening
from pipeline.formats.preview import write_pixels
from pipeline.workloads.base import ArraySpec, Chunk, JobSpec, Plan, Workload, refuse_same_file
from pipeline.workloads.coulomb_audit import CoulombAudit
from pipeline.workloads.coulomb_frames import ChosenFrames, combine, scratch_bytes
from pipeline.workloads.coulomb_grid import cut_extents, grid_header, part_of, refuse_too_large, regions
from pipeline.workloads.coulomb_parameters import CoulombParameters
from pipeline.workloads.coulomb_slices import MiddleSlices

NO_HALO = ((0, 0),) * 3


class Coulomb(Workload):
    """Each slab of the grid is computed on its own from all atoms: map, no communication."""

    name = "coulomb"
    summary = "Map the electrostatic potential of a molecule's charges on a regular grid."
    unit = "points"
    Parameters = CoulombParameters

    def __init__(self, spec: JobSpec) -> None:
        assert isinstance(spec.parameters, CoulombParameters)
        self.spec = spec
        self.parameters = spec.parameters
        self._scheme = self.parameters.formula
        self._writer: ImageWriter | None = None
        form = map_format_for_output(spec.output)
        for source in (spec.input, self.parameters.trajectory):
            if source is not None:
                refuse_same_file(replace(spec, input=source))
        self._trajectory_version = self._version_of_trajectory()
        self._frames = ChosenFrames(spec.input, self.parameters)
        try:
            self._check_combination()
            self.header = grid_header(spec, self.parameters, self._frames.box)
            refusal = form.refusal(self.header, spec.output)
            if refusal is not None:
                raise OutputError(refusal)
            refuse_too_large(spec, self.header, form)
            self.job_bytes = len(self._frames) * self._frames.nbytes + self.header.nbytes
            self._audit = CoulombAudit(self.header, self._scheme, self.parameters.combine, self._frames)
            self._slices = MiddleSlices(self.header.shape)
        except BaseException:
            self._frames.close()
            raise

    def _check_combination(self) -> None:
        how, count = self.parameters.combine, len(self._frames)
        if how == "none" and count > 1:
            raise ParameterError(
                f"--combine none: {count:,} frames are chosen, and a map file (.dx, .mrc, .cube, .zarr, .npy) holds "
                "one: choose one with --frames, or --combine avg, min, max or std"
            )
        if how == "std" and count == 1:
            raise ParameterError("--combine std: one frame has no deviation; choose several with --frames")

    # The plan

    def plan(self, budget_bytes: int, target_bytes: int) -> Plan:
        atoms_bytes = self._frames.nbytes
        per_point = DTYPE.itemsize + scratch_bytes(self.parameters.combine, len(self._frames))
        most = (budget_bytes - atoms_bytes) // per_point
        if most < 1:
            raise ParameterError(
                f"--memory is too small: each chunk of {self.spec.input} takes {format_bytes(atoms_bytes)} for its "
                f"{self._frames.n_atoms:,} atoms, and {format_bytes(budget_bytes)} are there for one; raise it"
            )
        extents = cut_extents(
            self.header.shape,
            most=most,
            # Where the atoms alone fill the target, the map's part shall not be less than they are.
            wanted=max(target_bytes - atoms_bytes, atoms_bytes) // per_point,
            pairs_per_point=self._pairs_per_point(),
        )
        pieces = enumerate(regions(self.header.shape, extents))
        return Plan(chunks=tuple(self._chunk(index, region) for index, region in pieces))

    def _pairs_per_point(self) -> float:
        """Atoms that a point adds up: all, or as many as the mean density puts into a sphere of the cutoff."""
        count = self._frames.n_atoms
        if self._scheme.name == "direct":
            return count
        lowest, highest = self._frames.box
        sphere = 4 / 3 * math.pi * self._scheme.cutoff_angstrom**3
        return min(count, count * sphere / max(float(np.prod(highest - lowest)), sphere))

    def _chunk(self, index: int, region: Region) -> Chunk:
        return Chunk(
            index=index,
            region=region,
            halo=NO_HALO,
            inputs=(ArraySpec((self._frames.n_atoms, 4), np.dtype(np.float64)),),
            outputs=(ArraySpec(region.shape, DTYPE),),
            work=math.prod(region.shape) * len(self._frames),
        )

    def hold_at_most(self, budget_bytes: int) -> int:
        return self._frames.keep(budget_bytes)

    # One chunk

    def start(self, opening: Opening = Opening.NEW) -> None:
        shown = replace(self.header, atoms=self._frames.first_atoms())
        self._writer = create_map(self.spec.output, shown, opening)

    def read(self, chunk: Chunk, inputs: Sequence[NDArray[Any]]) -> None:
        self._frames.fill(0, inputs[0])

    def compute(self, chunk: Chunk, inputs: Sequence[Any], outputs: Sequence[Any], stream: Any) -> None:
        grid = part_of(self.header, chunk.region)

        def map_of(number: int, out: Any) -> None:
            atoms = inputs[0] if number == 0 else self._brought(number, inputs[0], stream)
            self._potential(atoms, grid, self._frames.cells[number], out, stream)

        combine(self.parameters.combine, len(self._frames), map_of, outputs[0])

    def _brought(self, number: int, room: Any, stream: Any) -> Any:
        """The atoms of a later frame, on the device; in the place of the one before, which the stream has done with."""
        atoms = self._frames.atoms(number)
        if stream is None:
            return atoms
        room.set(atoms, stream=stream)
        stream.synchronize()  # the host's array may go; reading it has overlapped the frame before
        return room

    def _potential(self, atoms: Any, grid: Any, cell: Cell | None, out: Any, stream: Any) -> None:
        try:
            potential(atoms, grid, self._scheme, cell=cell, out=out, workers=1, stream=stream)
        except ValueError as error:
            raise InputError(f"{self.spec.input}: {error}") from error

    def write(self, chunk: Chunk, outputs: Sequence[NDArray[Any]]) -> None:
        assert self._writer is not None, "start comes before write"
        self._audit.note(chunk.region, outputs[0])
        self._slices.note(chunk.region, outputs[0])
        self._writer.write(chunk.region, outputs[0])

    def flush(self) -> None:
        assert self._writer is not None, "start comes before flush"
        self._writer.flush()

    # The end

    def audit_notes(self) -> Mapping[str, Any]:
        return self._audit.notes()

    def add_audit_notes(self, notes: Mapping[str, Any]) -> None:
        self._audit.add_notes(notes)

    def audit(self) -> Mapping[str, Any]:
        if self._version_of_trajectory() != self._trajectory_version:
            raise InputError(
                f"{self.parameters.trajectory}: changed while it was read; nothing was published; run again"
            )
        return self._audit.verdict()

    def publish(self) -> None:
        assert self._writer is not None, "start comes before publish"
        self._writer.publish()

    def keep(self) -> None:
        if self._writer is not None:
            self._writer.keep()
        self._frames.close()

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        self._frames.close()

    def describe(self) -> Mapping[str, Any]:
        cells = {None if cell is None else cell.vectors for cell in self._frames.cells}
        return {
            "shape": list(self.header.shape),
            "axes": self.header.image.axes,
            "dtype": DTYPE.name,
            "origin_angstrom": list(self.header.origin),
            "spacing_angstrom": list(self.header.spacing),
            "units": self.header.units,
            "atoms": self._frames.n_atoms,
            "charge_e": round(self._frames.total_charge, 6),
            "frames": len(self._frames),
            "periodic": cells != {None},
        }

    def write_preview(self, preview: Path) -> None:
        slices = self._slices
        if not slices.is_complete:  # other processes wrote parts of the map, or an earlier run did
            self._frames = ChosenFrames(self.spec.input, self.parameters)  # they were closed
            try:
                slices = self._computed_slices()
            finally:
                self._frames.close()
        write_pixels(preview, slices.pixels())

    def _computed_slices(self) -> MiddleSlices:
        """The slices alone, on the CPU."""
        slices = MiddleSlices(self.header.shape)
        for region in slices.regions():
            values = np.empty(region.shape, DTYPE)
            chunk = self._chunk(0, region)
            self.compute(chunk, [self._frames.atoms(0)], [values], None)
            slices.note(region, values)
        return slices

    def _version_of_trajectory(self) -> tuple[int, ...] | None:
        path = self.parameters.trajectory
        if path is None or not path.exists():
            return None
        found = path.stat()
        return (found.st_ino, found.st_size, found.st_mtime_ns)
