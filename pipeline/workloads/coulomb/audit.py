"""Audits a potential map: recomputes random points in float64 by the plain definition."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.coulomb import Cell, Scheme
from kernels.ewald import Method
from pipeline.errors import AuditError
from pipeline.formats.charges.base import Array
from pipeline.formats.grid.base import GridHeader
from pipeline.workloads.coulomb.definition import Expectation, expectation
from pipeline.workloads.coulomb.frames import ChosenFrames
from pipeline.workloads.coulomb.full_definition import full_expectation
from pipeline.workloads.coulomb.parameters import Combination
from pipeline.workloads.protocol import Audit, random_places

SAMPLES, FEWEST_SAMPLES = 300, 8
# Pairs of a point and an atom in all: 1 s on one core with a cutoff, 20 s if all pairs count.
MOST_PAIRS = 1 << 30
# Frames times places that are prepared and sent between ranks, 32 bytes each.
MOST_PREPARED = 1 << 18
# Frames in memory that wait to be prepared.
MOST_WAITING = 32
# Each term carries the rounding of a position, 1/sqrt and a polynomial; each of n additions adds half a step, and these
# accumulate like a random walk. The kernels promise 25 steps in all for n of some hundred.
STEPS_A_TERM = 26
STEP = float(np.finfo(np.float32).eps)
# Of a scheme with a far part: its accuracy is a root mean square over the map, and a single place is judged here. Of
# 300 normal errors that just meet it, one passes 4 in 2 % of all maps; those of the levels are half as large.
ACCURACIES = 4


class CoulombAudit:
    """The `Reference` of a potential map: the plain definition at a few random points.

    `prepare` computes a frame's expected values in the background while the job has the frame in memory; `audit`
    reads the other frames again.
    """

    def __init__(
        self, header: GridHeader, scheme: Scheme, how: Combination, frames: ChosenFrames, method: Method | None = None
    ) -> None:
        """`method`: of the schemes with a far part."""
        self._header = header
        self._scheme = scheme
        self._how = how
        self._frames = frames
        self._method = method
        self._lock = threading.Lock()
        affordable = MOST_PAIRS // (frames.n_atoms * len(frames))
        self.places = random_places(header.shape, min(SAMPLES, max(FEWEST_SAMPLES, affordable)))
        self._prepared: dict[int, Array] = {}  # by frame: the fields of its `Expectation` for all places, (4, places)
        self._begun: set[int] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._waiting = threading.Semaphore(MOST_WAITING)

    def at(self, places: NDArray[np.int64]) -> CoulombAudit:
        other = CoulombAudit(self._header, self._scheme, self._how, self._frames, self._method)
        other.places = places
        return other

    def prepare(self, number: int, coordinates: Array) -> None:
        """Compute a frame's expected values on the audit's own threads. coordinates: (n, 3) in angstrom.

        Each frame is prepared once, and none if all together would take too much memory.
        """
        with self._lock:
            if number in self._begun or len(self._frames) * len(self.places) > MOST_PREPARED:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="prepare")
            self._begun.add(number)
        self._waiting.acquire()  # limits the frames that wait in memory
        self._pending.append(self._pool.submit(self._prepare, number, coordinates))

    def _prepare(self, number: int, coordinates: Array) -> None:
        try:
            atoms = np.column_stack([coordinates, self._frames.charges])
            found = self._expected(atoms, self._points(self.places), self._frames.cells[number])
            self._prepared[number] = np.array([found.values, found.sizes, found.doubtful, found.counted])
        finally:
            self._waiting.release()

    def _expected(self, atoms: Array, points: Array, cell: Cell | None) -> Expectation:
        if self._method is not None:
            return full_expectation(atoms, points, self._method, cell)
        if len(self._frames) == 1:
            return expectation(atoms, points, self._scheme, cell)
        from pipeline.workloads.coulomb import lazy_definition  # loads LLVM or Numba, which takes longer than one frame

        return lazy_definition.expectation(atoms, points, self._scheme, cell)

    def _wait(self) -> None:
        while self._pending:
            self._pending.pop().result()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def take_prepared(self) -> Mapping[str, Any]:
        """The values that `prepare` has computed since the last call, ready for JSON."""
        self._wait()
        prepared, self._prepared = self._prepared, {}
        return {str(number): found.tolist() for number, found in prepared.items()}

    def add_prepared(self, notes: Mapping[str, Any]) -> None:
        """Take over what another process has prepared."""
        self._prepared.update({int(number): np.array(found) for number, found in notes.items()})

    def potential_at(self, points: Array, own_angstrom: float) -> Array:
        """The definition at points (m, 3) in angstrom, frames combined, without atoms closer to a point than that."""
        found = []
        for number, cell in enumerate(self._frames.cells):
            atoms = self._frames.atoms(number)
            if self._method is not None:
                found.append(full_expectation(atoms, points, self._method, cell, own_angstrom))
            else:
                found.append(expectation(atoms, points, self._scheme, cell, own_angstrom))
        return combined(self._how, found).values

    def audit(self, which: Sequence[int], written: Array) -> Audit:
        """InputError if the trajectory has changed since the job began."""
        self._frames.refuse_changed()
        self._wait()
        places = self.places[which]
        expected = self._expectation(which)
        errors = relative_errors(written, expected)
        tolerance = STEP * (STEPS_A_TERM + math.sqrt(float(expected.counted.max(initial=0))))
        unit = "relative to the sum of the terms' sizes"
        if self._method is not None:
            tolerance, unit = (
                ACCURACIES * self._method.accuracy,
                "relative to the RMS potential of uncorrelated charges",
            )
        passed = errors <= tolerance  # NaN is not
        if not passed.all():
            worst = int(np.argmin(passed))
            raise AuditError(
                f"audit failed at grid point {tuple(places[worst].tolist())}: wrote {written[worst]:g}, "
                f"{expected.values[worst]:g} is right; off by {errors[worst]:.3g}, {unit} (tolerated: "
                f"{tolerance:.3g}); nothing was published; please report this",
                worst_error=float(errors[worst]),
                tolerance=tolerance,
            )
        return Audit(
            samples=len(which),
            worst_error=float(errors.max(initial=0.0)),
            rms_error=float(np.sqrt(np.mean(errors**2))) if len(errors) else 0.0,
            tolerance=tolerance,
            unit=unit,
        )

    def _points(self, places: NDArray[np.int64]) -> Array:
        return np.asarray(np.array(self._header.origin) + places * np.array(self._header.spacing))

    def _expectation(self, which: Sequence[int]) -> Expectation:
        points, found = self._points(self.places[which]), []
        for number, cell in enumerate(self._frames.cells):
            prepared = self._prepared.get(number)
            if prepared is None:
                found.append(self._expected(self._frames.atoms(number), points, cell))
            else:
                values, sizes, doubtful, counted = prepared[:, which]
                found.append(Expectation(values=values, sizes=sizes, doubtful=doubtful, counted=counted))
        return combined(self._how, found)


def relative_errors(written: Array, expected: Expectation) -> Array:
    """Differences beyond the doubtful part, relative to the terms' sizes; infinite if there are no terms."""
    apart = np.maximum(np.abs(written - expected.values) - expected.doubtful, 0.0)
    apart[np.isnan(written)] = np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(apart == 0, 0.0, apart / expected.sizes)


def combined(how: Combination, found: list[Expectation]) -> Expectation:
    """The expectation of several frames. The error of a mean is the mean error; of the others, at most the largest."""
    values = np.array([each.values for each in found])
    sizes, doubtful = (np.array([getattr(each, name) for each in found]) for name in ("sizes", "doubtful"))
    counted = np.array([each.counted for each in found]).max(axis=0)
    if how in ("avg", "none"):
        values, sizes, doubtful = (np.mean(each, axis=0) for each in (values, sizes, doubtful))
    else:
        values = np.std(values, axis=0) if how == "std" else getattr(np, how)(values, axis=0)
        sizes, doubtful = sizes.max(axis=0), doubtful.max(axis=0)
    return Expectation(values=values, sizes=sizes, doubtful=doubtful, counted=counted)
