"""The chosen frames of a trajectory as the kernels take them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import Cell, Scheme
from kernels.coulomb.geometry import check_cell
from pipeline.errors import InputError, ParameterError
from pipeline.formats.charges import open_point_charges
from pipeline.formats.charges.base import Array, Frame
from pipeline.workloads.coulomb.parameters import FARTHEST_ANGSTROM, LEAST_CUTOFF_ANGSTROM, CoulombParameters
from pipeline.workloads.coulomb.units import per_e_per_angstrom
from pipeline.workloads.gang_protocols import Rank, Room
from pipeline.workloads.protocol import ArraySpec

ATOM_BYTES = 4 * np.dtype(np.float64).itemsize
# Some terms of larger charges overflow float32; if all charges are smaller, all terms underflow.
LARGEST_CHARGE, SMALLEST_CHARGE = 1e12, 1e-12
# One frame is in use, one on its way to the device, one or two are read ahead.
_BUFFERS = 4


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What reading every frame has shown: the corners of the box around all atoms, in angstrom, and the cells."""

    lowest: Array
    highest: Array
    cells: tuple[Cell | None, ...]


class ChosenFrames:
    """Atoms and cells of the frames that --frames chooses, numbered from 0 in the order of combination.

    All frames are read once at the start, for the box of the atoms, the cells, and to report a damaged file before any
    work. Afterwards `atoms` reads a frame on demand; `cache_at_most` lets some stay in memory.
    """

    def __init__(
        self,
        path: Path,
        parameters: CoulombParameters,
        survey: Survey | None = None,
        *,
        cancelled: threading.Event | None = None,
    ) -> None:
        """`survey`: another process's, instead of reading every frame here; `cancelled`: ends the reading.

        Raises InputError or ParameterError, which name the file or the option.
        """
        self._trajectory_file = parameters.trajectory
        self._source = parameters.trajectory or path
        self._cancelled = cancelled or threading.Event()
        self._version = self._version_now()
        self._trajectory = open_point_charges(path, trajectory=parameters.trajectory, select=parameters.select)
        try:
            self._frames = parameters.frame_range.of(self._trajectory.n_frames, "--frames", self._source)
            factor = per_e_per_angstrom(parameters.units, parameters.temperature_kelvin)
            # In the units of the output, so that the kernels need no constant.
            self._charges: Array = self._trajectory.charges * factor
            largest = np.abs(self._trajectory.charges).max()
            if largest > LARGEST_CHARGE:
                raise InputError(f"{path}: a charge passes {LARGEST_CHARGE:g} e; check the file")
            if largest < SMALLEST_CHARGE:
                raise InputError(
                    f"{path}: its largest charge is {largest:.3g} e; charges are counted in elementary charges "
                    "(1.6e-19 C): convert them"
                )
            self.survey = survey or self._surveyed(parameters)
        except BaseException:
            self._trajectory.close()
            raise
        self._cache: dict[int, Array] = {}
        self._cache_bytes = 0
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
        """Bytes of the atoms of one frame."""
        return self.n_atoms * ATOM_BYTES

    @property
    def cells(self) -> tuple[Cell | None, ...]:
        return self.survey.cells

    @property
    def box(self) -> tuple[Array, Array]:
        """Corners of the box around all atoms of all frames, in angstrom."""
        return self.survey.lowest, self.survey.highest

    @property
    def charges(self) -> Array:
        """(n,) float64, times the factor of the units."""
        return self._charges

    def cache_at_most(self, budget_bytes: int) -> int:
        """Cache frames once they are read, within this many bytes; returns the bytes that all atoms may take."""
        molecule = 2 * self.nbytes
        room = max(budget_bytes - molecule, 0) // self.nbytes
        self._cache_bytes = min(room, len(self)) * self.nbytes if len(self) > 1 else 0
        return molecule + self._cache_bytes

    def atoms(self, number: int) -> Array:
        """x, y, z in angstrom and the charge times the factor of the units: (n, 4) float64; do not change it."""
        with self._lock:
            found = self._cache.get(number)
        if found is None:
            found = np.empty((self.n_atoms, 4))
            self.fill(number, found)
            with self._lock:
                if (len(self._cache) + 1) * self.nbytes <= self._cache_bytes:
                    self._cache[number] = found
        return found

    def fill(self, number: int, atoms: NDArray[np.float64], chosen: NDArray[np.int64] | slice = slice(None)) -> None:
        """Write `atoms`, or the chosen ones, to an array."""
        atoms[:, :3] = self.frame(number).coordinates[chosen]
        atoms[:, 3] = self._charges[chosen]

    def frame(self, number: int) -> Frame:
        """As it is in the file."""
        return self._trajectory.frame(self._frames[number])

    @property
    def coordinates(self) -> ArraySpec:
        """The coordinates of one frame, in the precision of the file."""
        return ArraySpec((self.n_atoms, 3), self._trajectory.coordinate_dtype)

    def first_atoms(self) -> Array:
        """Coordinates of the first frame and the charges in e, (n, 4), for the formats that list atoms."""
        return np.column_stack([self.frame(0).coordinates, self._trajectory.charges])

    def refuse_changed(self) -> None:
        """InputError if the trajectory is not the file that was opened."""
        if self._trajectory_file is not None and self._version_now() != self._version:
            raise InputError(f"{self._trajectory_file}: changed while it was read; nothing was published; run again")

    def close(self) -> None:
        self._trajectory.close()

    def _version_now(self) -> tuple[int, ...] | None:
        try:
            found = self._source.stat()
        except OSError:
            return None  # opening it raises the error
        return (found.st_ino, found.st_size, found.st_mtime_ns)

    def _surveyed(self, parameters: CoulombParameters) -> Survey:
        formula = parameters.formula
        if parameters.method is not None and parameters.cutoff is None:
            formula = replace(formula, cutoff_angstrom=LEAST_CUTOFF_ANGSTROM)  # the default shrinks with the cell
        lowest, highest = np.full(3, np.inf), np.full(3, -np.inf)
        cells = []
        for number in range(len(self._frames)):
            if self._cancelled.is_set():
                raise InputError(f"{self._source}: reading was cancelled")
            frame = self.frame(number)
            low, high = _corners(frame.coordinates)
            farthest = max(np.abs(low).max(), np.abs(high).max())
            if not farthest <= FARTHEST_ANGSTROM:
                what = f"an atom lies {farthest:.3g} Å from the origin; check the file"
                raise InputError(f"{self._where(number)}: {what}")
            lowest, highest = np.minimum(lowest, low), np.maximum(highest, high)
            vectors = frame.cell if parameters.uses_frame_cells else parameters.given_cell
            if vectors is None and parameters.scheme == "ewald":
                raise ParameterError(
                    f"--scheme ewald: {self._where(number)} states no periodic cell: pass --cell, or choose full"
                )
            cells.append(None if vectors is None else self._cell(number, vectors, formula))
        return Survey(lowest=lowest, highest=highest, cells=tuple(cells))

    def _cell(self, number: int, vectors: Array, scheme: Scheme) -> Cell:
        try:
            cell = Cell(vectors=tuple(tuple(row) for row in vectors.tolist()))
        except ValueError as error:
            raise InputError(f"{self._where(number)}: {error}; --cell none does without") from error
        narrowest = float(cell.widths.min())
        if narrowest < 2 * LEAST_CUTOFF_ANGSTROM:
            raise ParameterError(
                f"--cell: {self._where(number)}: a cell of {narrowest:.3g} Å between opposite faces is too narrow for "
                "any --cutoff: check that lengths are in ångström, or pass --cell none"
            )
        try:
            check_cell(cell, scheme)
        except ValueError as error:
            option = "--exclude-radius" if str(error).startswith("exclude") else "--cutoff"
            raise ParameterError(f"{option}: {self._where(number)}: {error}, or pass --cell none") from error
        return cell

    def _where(self, number: int) -> str:
        return str(self._source) if self._trajectory.n_frames == 1 else f"{self._source}, frame {self._frames[number]}"


def _corners(points: Array) -> tuple[Array, Array]:
    """Corners of the box around points (n, 3). Rows of 256 points, since NumPy reduces rows of 3 numbers slowly."""
    whole = len(points) // 256 * 256
    sides, rest = points[:whole].reshape(-1, 3 * 256), points[whole:]
    if whole:
        low, high = (np.vstack([extreme(sides, axis=0).reshape(256, 3), rest]) for extreme in (np.min, np.max))
    else:
        low = high = rest
    return low.min(axis=0), high.max(axis=0)


_prefetches: dict[tuple[Path, CoulombParameters], Future[ChosenFrames]] = {}


@contextmanager
def prefetched_frames(path: Path, parameters: CoulombParameters) -> Iterator[None]:
    """Open the frames on a thread, for the first `open_frames` of the same arguments; cancel it if there is none."""
    cancelled, found = threading.Event(), Future[ChosenFrames]()

    def work() -> None:
        try:
            found.set_result(ChosenFrames(path, parameters, cancelled=cancelled))
        except BaseException as error:
            found.set_exception(error)

    _prefetches[path, parameters] = found
    opener = threading.Thread(target=work, name="prefetch-frames", daemon=True)
    opener.start()
    try:
        yield
    finally:
        if _prefetches.pop((path, parameters), None) is not None:
            cancelled.set()
            opener.join()
            with suppress(Exception):  # the frames were not needed, nor are their errors
                found.result().close()


def open_frames(path: Path, parameters: CoulombParameters, survey: Survey | None = None) -> ChosenFrames:
    """`ChosenFrames`, from `prefetched_frames` of the same arguments if there are any."""
    prefetch = None if survey is not None else _prefetches.get((path, parameters))
    if prefetch is None:
        return ChosenFrames(path, parameters, survey)
    found = prefetch.result()
    del _prefetches[path, parameters]  # only now: if waiting is interrupted, `prefetched_frames` closes them
    return found


def stream_frames(
    frames: ChosenFrames, numbers: Sequence[int], rank: Rank, on_read: Callable[[int, Array], None]
) -> Iterator[tuple[int, Room]]:
    """Yields each frame's coordinates, on their way to the device, while a thread reads the next frames.

    A room is valid until the next one is requested. The reading thread calls `on_read` with each frame's coordinates.
    """
    free: queue.SimpleQueue[Room | None] = queue.SimpleQueue()
    filled: queue.SimpleQueue[tuple[int, Room] | BaseException] = queue.SimpleQueue()
    rooms = [rank.room([frames.coordinates]) for _ in range(min(_BUFFERS, len(numbers)))]
    for room in rooms:
        free.put(room)

    def read() -> None:
        try:
            rank.enter()
            for number in numbers:
                room = free.get()
                if room is None:
                    return
                room.wait()
                began = time.perf_counter()
                frame = frames.frame(number)
                room.host[0][...] = frame.coordinates
                rank.note_read(time.perf_counter() - began, room.host[0].nbytes)
                on_read(number, frame.coordinates)
                filled.put((number, room))
        except BaseException as error:
            filled.put(error)

    reader = threading.Thread(target=read, name="read-ahead", daemon=True)
    reader.start()
    try:
        for _ in numbers:
            item = filled.get()
            if isinstance(item, BaseException):
                raise item
            rank.check()
            item[1].upload()
            yield item
            item[1].computed()
            free.put(item[1])
    finally:
        free.put(None)
        reader.join()
        for room in rooms:
            room.wait()  # before its memory is freed
