"""The chosen frames of a trajectory as the kernels take them, and what becomes of several maps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import Cell, Scheme
from kernels.coulomb.geometry import check_cell
from pipeline.errors import InputError, ParameterError
from pipeline.formats.molecule import Array, Frame
from pipeline.formats.point_charges import open_point_charges
from pipeline.workloads.coulomb_parameters import FARTHEST_ANGSTROM, Combination, CoulombParameters
from pipeline.workloads.units import per_e_per_angstrom

ATOM_BYTES = 4 * np.dtype(np.float64).itemsize
# Some terms of larger ones leave the range of float32.
LARGEST_CHARGE = 1e12


class ChosenFrames:
    """Atoms and cells of the frames that count, numbered from 0 in the order in which they are combined.

    All frames are read once at the start: for the box of the atoms, the cells, and so that what is wrong with a file is
    told before any work. Afterwards `atoms` reads each frame when it is asked for; `keep` lets some stay in memory.
    """

    def __init__(self, path: Path, parameters: CoulombParameters) -> None:
        """InputError or ParameterError, in one line that names the file or the option."""
        self._source = parameters.trajectory or path
        self._trajectory = open_point_charges(path, trajectory=parameters.trajectory, select=parameters.select)
        try:
            self._frames = parameters.frame_range.of(self._trajectory.n_frames, self._source)
            factor = per_e_per_angstrom(parameters.units, parameters.temperature_kelvin)
            # As the files' units are to be: the kernels then need no constant.
            self._charges: Array = self._trajectory.charges * factor
            if np.abs(self._trajectory.charges).max() > LARGEST_CHARGE:
                raise InputError(f"{path}: a charge passes {LARGEST_CHARGE:g} e; check the file")
            self.cells: list[Cell | None] = []
            self._lowest, self._highest = np.full(3, np.inf), np.full(3, -np.inf)
            for number in range(len(self._frames)):
                self._survey(number, self._frame(number), parameters)
        except BaseException:
            self._trajectory.close()
            raise
        self._kept: dict[int, Array] = {}
        self._keep_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def n_atoms(self) -> int:
        return self._trajectory.n_atoms

    @property
    def total_charge(self) -> float:
        return float(self._trajectory.charges.sum())

    @property
    def nbytes(self) -> int:
        """Of the atoms of one frame."""
        return self.n_atoms * ATOM_BYTES

    @property
    def box(self) -> tuple[Array, Array]:
        """Corners of the box around all atoms of all frames, in angstrom."""
        return self._lowest, self._highest

    def keep(self, budget_bytes: int) -> int:
        """Let frames stay in memory once they are read, within this many bytes; returns what may be held in all."""
        molecule = 2 * self.nbytes
        room = max(budget_bytes - molecule, 0) // self.nbytes
        self._keep_bytes = min(room, len(self)) * self.nbytes if len(self) > 1 else 0
        return molecule + self._keep_bytes

    def atoms(self, number: int) -> Array:
        """x, y, z in angstrom and the charge times the units' factor: (n, 4) float64, not to be changed."""
        with self._lock:
            found = self._kept.get(number)
        if found is None:
            found = np.empty((self.n_atoms, 4))
            self.fill(number, found)
            with self._lock:
                if (len(self._kept) + 1) * self.nbytes <= self._keep_bytes:
                    self._kept[number] = found
        return found

    def fill(self, number: int, atoms: NDArray[np.float64]) -> None:
        """`atoms` into an array that is there."""
        atoms[:, :3] = self._frame(number).coordinates
        atoms[:, 3] = self._charges

    def first_atoms(self) -> Array:
        """Coordinates of the first frame and the charges in e, (n, 4): what some files show beside the map."""
        return np.column_stack([self._frame(0).coordinates, self._trajectory.charges])

    def close(self) -> None:
        self._trajectory.close()

    def _frame(self, number: int) -> Frame:
        return self._trajectory.frame(self._frames[number])

    def _survey(self, number: int, frame: Frame, parameters: CoulombParameters) -> None:
        lowest, highest = frame.coordinates.min(axis=0), frame.coordinates.max(axis=0)
        farthest = max(np.abs(lowest).max(), np.abs(highest).max())
        if not farthest <= FARTHEST_ANGSTROM:
            raise InputError(f"{self._where(number)}: an atom lies {farthest:.3g} Å from the origin; check the file")
        self._lowest, self._highest = np.minimum(self._lowest, lowest), np.maximum(self._highest, highest)
        vectors = frame.cell if parameters.is_periodic_where_stated else parameters.given_cell
        self.cells.append(None if vectors is None else self._cell(number, vectors, parameters.formula))

    def _cell(self, number: int, vectors: Array, scheme: Scheme) -> Cell:
        try:
            cell = Cell(vectors=tuple(tuple(row) for row in vectors.tolist()))
        except ValueError as error:
            raise InputError(f"{self._where(number)}: {error}; --cell none does without") from error
        try:
            check_cell(cell, scheme)
        except ValueError as error:
            option = "--exclude-radius" if str(error).startswith("exclude") else "--cutoff"
            raise ParameterError(f"{option}: {self._where(number)}: {error}, or --cell none") from error
        return cell

    def _where(self, number: int) -> str:
        return str(self._source) if self._trajectory.n_frames == 1 else f"{self._source}, frame {self._frames[number]}"


def scratch_bytes(how: Combination, frames: int) -> int:
    """Bytes a point that `combine` takes besides the result."""
    if frames == 1:
        return 0
    return {"none": 0, "min": 4, "max": 4, "avg": 4 + 2 * 8, "std": 4 + 5 * 8}[how]


def combine(how: Combination, frames: int, compute: Callable[[int, Any], None], out: Any) -> None:
    """The maps of all frames, one after another, into one: mean, least, greatest or standard deviation at each point.

    compute : fills an array like `out` with the map of a frame
    out     : float32, NumPy or CuPy; sums are float64, in the order of the frames, so that a point's value does not
              depend on what else is in the array

    The deviation is that of the frames themselves (divided by their number, not by one less). Source of its running
    form: Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4 (1962).
    """
    compute(0, out)
    if frames == 1:
        return
    found = out.copy()
    if how in ("min", "max"):
        fold = np.minimum if how == "min" else np.maximum
        for number in range(1, frames):
            compute(number, found)
            fold(out, found, out=out)
        return
    if how == "avg":
        total = out.astype(np.float64)
        for number in range(1, frames):
            compute(number, found)
            total += found
        out[...] = total / frames
        return
    mean = out.astype(np.float64)
    squares = mean * 0
    for number in range(1, frames):
        compute(number, found)
        apart = found - mean
        mean += apart / (number + 1)
        squares += apart * (found - mean)
    out[...] = (squares / frames) ** 0.5
