"""The far fields of a job's frames: solved once a frame on each device, and added to every chunk.

The mean of frames in one cell is linear in the charges: the frames of a shard are spread to one mesh, solved once.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.coulomb import Cell, Grid
from kernels.ewald import FarField, Method, box_of, dipole, mesh_of
from pipeline.errors import ParameterError
from pipeline.workloads.coulomb.combine import frames_of, shard_count
from pipeline.workloads.coulomb.frames import ChosenFrames
from pipeline.workloads.coulomb.parameters import Combination, CoulombParameters

# Chunks of one frame that run at once share its field; on a CPU they may be at different frames.
_MOST_SOLVED = 4
# Of a point of the mesh: at most, while the influence function is made or a mesh transformed (charges, their transform,
# and its own work space); and of a solved mesh.
_WORK_BYTES, _SOLVED_BYTES = 32, 4


def fitted(parameters: CoulombParameters, cells: Sequence[Cell | None]) -> Method | None:
    """The method for these cells, whose near part by default reaches at most half of the narrowest; None for a scheme
    that has no far part."""
    method, known = parameters.method, [cell for cell in cells if cell is not None]
    if method is None or parameters.cutoff is not None or not known:
        return method
    widest = math.floor(min(float(cell.widths.min()) for cell in known) * 500) / 1000
    return replace(method, cutoff_angstrom=min(method.cutoff_angstrom, widest))


class FarFields:
    """The far fields of the chosen frames on one device. `add`, `take` and `add_shard` are thread-safe."""

    def __init__(self, method: Method, frames: ChosenFrames, grid: Grid, how: Combination) -> None:
        """Raises ParameterError if a mesh has too many points."""
        self._method = method
        self._frames = frames
        self._total = float(np.abs(frames.charges).sum()) * len(frames)
        self._vacuum = method.boundary == "vacuum"
        self._box = box_of(np.array(frames.box), grid)
        self._lock = threading.Lock()
        self._fields: OrderedDict[Cell | None, FarField] = OrderedDict()
        self._solved: OrderedDict[int, tuple[Any, Any]] = OrderedDict()  # by frame, with its dipole
        self._meshes: dict[int, Any] = {}  # charges, by shard
        self._taken: set[int] = set()
        self._shards: dict[int, Any] = {}  # solved
        # Points near an atom are excluded in that frame alone, and a dipole belongs to it.
        self.is_linear = (
            how == "avg" and len(frames) > 1 and len(set(frames.cells)) == 1
            and not self._vacuum and method.exclude_radius_angstrom == 0
        )  # fmt: skip
        try:
            self.mesh = mesh_of(method, frames.cells[0], *self._box)
        except ValueError as error:
            raise ParameterError(f"--scheme {'ewald' if frames.cells[0] else 'full'}: {error}") from error

    @property
    def nbytes(self) -> int:
        """The memory that all of it takes at most."""
        kept = shard_count(len(self._frames)) if self.is_linear else min(len(self._frames), _MOST_SOLVED)
        return self.mesh.size * (_WORK_BYTES + (kept - 1) * _SOLVED_BYTES)

    def _field(self, number: int) -> FarField:
        cell = self._frames.cells[number]
        if cell not in self._fields:
            while len(self._fields) >= _MOST_SOLVED:
                self._fields.popitem(last=False)
            mesh = mesh_of(self._method, cell, *self._box)
            self._fields[cell] = FarField(mesh, self._total, vacuum=self._vacuum)
        return self._fields[cell]

    def add(self, number: int, atoms: Any, grid: Grid, out: Any, stream: Any = None, workers: int = 1) -> None:
        """Add a frame's far field to the map `out`. atoms: all of the frame's, where `out` is; None: read them."""
        with self._lock:
            field = self._field(number)
            if number not in self._solved:
                if atoms is None:
                    atoms = self._read(number, out, stream)
                solved = field.solve(field.spread(atoms, stream=stream), stream=stream)
                while len(self._solved) >= _MOST_SOLVED:
                    self._solved.popitem(last=False)
                self._solved[number] = solved, dipole(atoms) if self._vacuum else None
            solved, moments = self._solved[number]
        field.add(solved, grid, out, moments, workers=workers, stream=stream)

    def _read(self, number: int, like: Any, stream: Any) -> Any:
        atoms = self._frames.atoms(number)
        if stream is None:
            return atoms
        on_device: Any = np.empty_like(like, shape=atoms.shape, dtype=atoms.dtype)
        on_device.set(atoms, stream=stream)
        stream.synchronize()  # before the host array is freed
        return on_device

    def take(self, number: int, shard: int, atoms: Any, stream: Any = None) -> None:
        """Spread a frame's atoms to its shard's mesh, unless that has been done."""
        with self._lock:
            if number not in self._taken:
                self._meshes[shard] = self._field(number).spread(atoms, self._meshes.get(shard), stream=stream)
                self._taken.add(number)

    def add_shard(self, shard: int, grid: Grid, total: Any, room: Any, stream: Any = None, workers: int = 1) -> None:
        """Add the sum of the far fields of a shard's frames, all of them taken, to its sum. room: float32 scratch."""
        with self._lock:
            field = self._field(frames_of(shard, len(self._frames))[0])
            if shard not in self._shards:
                self._shards[shard] = field.solve(self._meshes.pop(shard), stream=stream)
            solved = self._shards[shard]
        room[...] = 0
        field.add(solved, grid, room, workers=workers, stream=stream)
        total += room
