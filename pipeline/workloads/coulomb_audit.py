"""A potential map checks itself: random points, computed again in float64 by the plain definition."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.compiled import compiled
from kernels.coulomb import SCHEMES, SOFTENING_ANGSTROM, Cell, Scheme
from pipeline.errors import AuditError
from pipeline.formats.grid_map import GridHeader
from pipeline.formats.molecule import Array
from pipeline.workloads.audited_places import AuditedPlaces
from pipeline.workloads.coulomb_frames import ChosenFrames
from pipeline.workloads.coulomb_parameters import Combination

SAMPLES, FEWEST_SAMPLES = 300, 8
# Atoms that are looked at in all: a few seconds on one core.
MOST_PAIRS = 1 << 30
# Frames times places that ranks tell each other of, 32 bytes each.
MOST_LOOKS = 1 << 18
# Frames that wait to be looked at, at most.
MOST_WAITING = 32
# What makes another thread worth its while: 0.05 s.
PAIRS_A_THREAD = 1 << 24
# Each term carries the rounding of a position, 1/sqrt and a polynomial; each of n additions half a step of its own, and
# such steps add up like a random walk. The kernels promise 25 steps in all where n is some hundred.
STEPS_A_TERM = 26
STEP = float(np.finfo(np.float32).eps)
# Positions are float32 within a tile: a term's relative error grows towards the atom, and doubles here.
NEAR_ANGSTROM = 0.2
# Rounding decides on which side of a sharp cutoff, or of the exclusion, a pair this close to it lies (relative).
DOUBTFUL = 2e-6


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What the definition says of the audited points, one entry each.

    sizes    : sum of the terms' sizes |q|/r, which the error is relative to, larger near atoms
    doubtful : what rounding may add or leave out besides
    counted  : how many atoms were added up
    """

    values: Array
    sizes: Array
    doubtful: Array
    counted: Array


class CoulombAudit(AuditedPlaces):
    """Keeps the written values at a few random points, and afterwards compares each with the definition."""

    def __init__(self, header: GridHeader, scheme: Scheme, how: Combination, frames: ChosenFrames) -> None:
        self._header = header
        self._scheme = scheme
        self._how = how
        self._frames = frames
        affordable = MOST_PAIRS // (frames.n_atoms * len(frames))
        count = min(SAMPLES, max(FEWEST_SAMPLES, affordable))
        super().__init__(header.shape, count)
        # Frames that ranks have looked at as they came by: what the definition says of all places, (4, places).
        self._looks: dict[int, Array] = {}
        self._seen: set[int] = set()
        self._lookers: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._waiting = threading.Semaphore(MOST_WAITING)

    def look(self, number: int, coordinates: Array) -> None:
        """Work out what the definition says of one frame while it is there, aside, on threads of the audit's own.

        Each frame once, and only as long as all of them together are little; otherwise `verdict` reads it again.
        """
        with self._lock:
            if number in self._seen or len(self._frames) * len(self._places) > MOST_LOOKS:
                return
            if self._lookers is None:
                self._lookers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="look")
            self._seen.add(number)
        self._waiting.acquire()  # frames wait in memory: not too many
        self._pending.append(self._lookers.submit(self._look, number, coordinates))

    def _look(self, number: int, coordinates: Array) -> None:
        try:
            atoms = np.column_stack([coordinates, self._frames.charges])
            found = expectation(atoms, self._points(self._places), self._scheme, self._frames.cells[number])
            self._looks[number] = np.array([found.values, found.sizes, found.doubtful, found.counted])
        finally:
            self._waiting.release()

    def _end_looking(self) -> None:
        while self._pending:
            self._pending.pop().result()
        with self._lock:
            lookers, self._lookers = self._lookers, None
        if lookers is not None:
            lookers.shutdown()

    def looked_at(self) -> Mapping[str, Any]:
        """What `look` has found since the last call, ready for JSON."""
        self._end_looking()
        looks, self._looks = self._looks, {}
        return {str(number): found.tolist() for number, found in looks.items()}

    def add_looks(self, notes: Mapping[str, Any]) -> None:
        """Take over what another process has found."""
        self._looks.update({int(number): np.array(found) for number, found in notes.items()})

    def verdict(self) -> Mapping[str, Any]:
        """Worst and rms error; AuditError where the worst passes the tolerance."""
        self._end_looking()
        which = sorted(self._written)
        places, written = self._places[which], np.array([self._written[each] for each in which])
        expected = self._expectation(which)
        errors = relative_errors(written, expected)
        tolerance = STEP * (STEPS_A_TERM + math.sqrt(float(expected.counted.max(initial=0))))
        passed = errors <= tolerance  # NaN is not
        if not passed.all():
            worst = int(np.argmin(passed))
            raise AuditError(
                f"audit failed at grid point {tuple(places[worst].tolist())}: wrote {written[worst]:g}, "
                f"{expected.values[worst]:g} is right; off by {errors[worst]:.3g} of its terms' sum (tolerated: "
                f"{tolerance:.3g}); nothing was published; please report this"
            )
        return {
            "samples": len(which),
            "worst_error": float(errors.max(initial=0.0)),
            "rms_error": float(np.sqrt(np.mean(errors**2))) if len(errors) else 0.0,
            "tolerance": tolerance,
            "unit": "relative to the sum of the terms' sizes",
        }

    def _points(self, places: NDArray[np.int64]) -> Array:
        return np.asarray(np.array(self._header.origin) + places * np.array(self._header.spacing))

    def _expectation(self, which: list[int]) -> Expectation:
        points, found = self._points(self._places[which]), []
        for number, cell in enumerate(self._frames.cells):
            look = self._looks.get(number)
            if look is None:
                found.append(expectation(self._frames.atoms(number), points, self._scheme, cell))
            else:
                values, sizes, doubtful, counted = look[:, which]
                found.append(Expectation(values=values, sizes=sizes, doubtful=doubtful, counted=counted))
        return combined(self._how, found)


def relative_errors(written: Array, expected: Expectation) -> Array:
    """Differences beyond what is doubtful, relative to the terms' sizes; infinite where there are no terms at all."""
    apart = np.maximum(np.abs(written - expected.values) - expected.doubtful, 0.0)
    apart[np.isnan(written)] = np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(apart == 0, 0.0, apart / expected.sizes)


def combined(how: Combination, found: list[Expectation]) -> Expectation:
    """What becomes of several frames. A mean errs by the mean of the errors; the others by no more than the largest."""
    values = np.array([each.values for each in found])
    sizes, doubtful = (np.array([getattr(each, name) for each in found]) for name in ("sizes", "doubtful"))
    counted = np.max([each.counted for each in found], axis=0)
    if how in ("avg", "none"):
        values, sizes, doubtful = (np.mean(each, axis=0) for each in (values, sizes, doubtful))
    else:
        values = np.std(values, axis=0) if how == "std" else getattr(np, how)(values, axis=0)
        sizes, doubtful = sizes.max(axis=0), doubtful.max(axis=0)
    return Expectation(values=values, sizes=sizes, doubtful=doubtful, counted=counted)


def expectation(atoms: Array, points: Array, scheme: Scheme, cell: Cell | None) -> Expectation:
    """The definition for one frame. atoms: (n, 4) x, y, z, q; points: (m, 3) in angstrom."""
    cutoff = math.inf if scheme.name == "direct" else scheme.cutoff_angstrom
    matrix = np.zeros((3, 3)) if cell is None else cell.matrix
    inverse = np.zeros((3, 3)) if cell is None else np.linalg.inv(cell.matrix)
    found, places = np.empty((4, len(points))), np.ascontiguousarray(points, np.float64)
    atoms = np.ascontiguousarray(atoms)

    def add_up(first: int) -> None:
        part = np.empty((4, len(places[first::threads])))
        _add_up(
            atoms, np.ascontiguousarray(places[first::threads]), SCHEMES.index(scheme.name), cutoff,
            scheme.distance_dependent, scheme.exclude_radius_angstrom, matrix, inverse, part,
        )  # fmt: skip
        found[:, first::threads] = part

    threads = min(len(os.sched_getaffinity(0)), 1 + len(atoms) * len(points) // PAIRS_A_THREAD)
    with ThreadPoolExecutor(threads, thread_name_prefix="audit") as pool:
        list(pool.map(add_up, range(threads)))
    values, sizes, doubtful = found[:3] / scheme.dielectric
    return Expectation(values=values, sizes=sizes, doubtful=doubtful, counted=found[3])


@compiled
def _add_up(
    atoms: Any, points: Any, kind: int, cutoff: float, by_distance: bool, radius: float,
    matrix: Any, inverse: Any, found: Any,
) -> None:  # fmt: skip
    """found: (4, m) values, sizes, doubtful and counted of each point, to be divided by the dielectric."""
    for point in range(len(points)):
        value, size, doubtful, counted, nearest = 0.0, 0.0, 0.0, 0.0, np.inf
        for atom in range(len(atoms)):
            square = _square_distance(points[point], atoms[atom], matrix, inverse)
            nearest = min(nearest, square)
            # A little beyond a sharp edge, for the pairs in doubt.
            if square > cutoff * cutoff * (1 + DOUBTFUL):
                continue
            charge = atoms[atom, 3]
            r = math.sqrt(square + SOFTENING_ANGSTROM * SOFTENING_ANGSTROM)
            term, largest = _term(kind, r, cutoff), 1 / r
            if by_distance:
                term, largest = term / r, largest / r
            if square <= cutoff * cutoff:
                value += charge * term
                size += abs(charge) * largest * (1 + NEAR_ANGSTROM / r)
                counted += 1
            if kind == 2 and abs(square / (cutoff * cutoff) - 1) < DOUBTFUL:
                doubtful += abs(charge) * largest
        distance = math.sqrt(nearest)
        if radius > 0 and abs(distance - radius) < DOUBTFUL * radius:
            doubtful += abs(value)
        elif distance < radius:
            value, size, doubtful = 0.0, 0.0, 0.0
        found[0, point], found[1, point], found[2, point], found[3, point] = value, size, doubtful, counted


@compiled
def _term(kind: int, r: float, cutoff: float) -> float:
    """A unit charge's potential; kind: place of the scheme in SCHEMES."""
    rho = r / cutoff
    if kind == 0:
        return (1 - rho * rho) ** 2 / r
    if kind == 1:
        return 1 / r - (1.875 - 1.25 * rho**2 + 0.375 * rho**4) / cutoff
    return 1 / r


@compiled
def _square_distance(point: Any, atom: Any, matrix: Any, inverse: Any) -> Any:
    """To the image that can lie within half the cell's shortest width: that of the nearest fractions. A matrix of
    zeros stands for no cell."""
    apart = (point[0] - atom[0], point[1] - atom[1], point[2] - atom[2])
    if matrix[0, 0] == 0 and matrix[0, 1] == 0 and matrix[0, 2] == 0:
        return apart[0] * apart[0] + apart[1] * apart[1] + apart[2] * apart[2]
    square = 0.0
    steps = (
        np.rint(apart[0] * inverse[0, 0] + apart[1] * inverse[1, 0] + apart[2] * inverse[2, 0]),
        np.rint(apart[0] * inverse[0, 1] + apart[1] * inverse[1, 1] + apart[2] * inverse[2, 1]),
        np.rint(apart[0] * inverse[0, 2] + apart[1] * inverse[1, 2] + apart[2] * inverse[2, 2]),
    )
    for axis in range(3):
        moved = apart[axis] - (steps[0] * matrix[0, axis] + steps[1] * matrix[1, axis] + steps[2] * matrix[2, axis])
        square += moved * moved
    return square
