"""A potential map checks itself: random points, computed again in float64 by the plain definition."""

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
from pipeline.errors import AuditError
from pipeline.formats.charges.base import Array
from pipeline.formats.grid.base import GridHeader
from pipeline.workloads.coulomb.definition import Expectation, expectation
from pipeline.workloads.coulomb.frames import ChosenFrames
from pipeline.workloads.coulomb.parameters import Combination
from pipeline.workloads.protocol import Audit, random_places

SAMPLES, FEWEST_SAMPLES = 300, 8
# Pairs of a point and an atom in all: 1 s on one core where few are near each other, 20 s where all count.
MOST_PAIRS = 1 << 30
# Frames times places that ranks tell each other of, 32 bytes each.
MOST_LOOKS = 1 << 18
# Frames that wait to be looked at, at most.
MOST_WAITING = 32
# Each term carries the rounding of a position, 1/sqrt and a polynomial; each of n additions half a step of its own, and
# such steps add up like a random walk. The kernels promise 25 steps in all where n is some hundred.
STEPS_A_TERM = 26
STEP = float(np.finfo(np.float32).eps)


class CoulombAudit:
    """The `Reference` of a potential map: the plain definition at a few random points."""

    def __init__(self, header: GridHeader, scheme: Scheme, how: Combination, frames: ChosenFrames) -> None:
        self._header = header
        self._scheme = scheme
        self._how = how
        self._frames = frames
        self._lock = threading.Lock()
        affordable = MOST_PAIRS // (frames.n_atoms * len(frames))
        self.places = random_places(header.shape, min(SAMPLES, max(FEWEST_SAMPLES, affordable)))
        # Frames that ranks have looked at as they came by: what the definition says of all places, (4, places).
        self._looks: dict[int, Array] = {}
        self._seen: set[int] = set()
        self._lookers: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []
        self._waiting = threading.Semaphore(MOST_WAITING)

    def at(self, places: NDArray[np.int64]) -> CoulombAudit:
        other = CoulombAudit(self._header, self._scheme, self._how, self._frames)
        other.places = places
        return other

    def look(self, number: int, coordinates: Array) -> None:
        """Work out what the definition says of one frame, in angstrom, aside: on threads of the audit's own.

        Each frame once, and only as long as all of them together are little; otherwise `audit` reads it again.
        """
        with self._lock:
            if number in self._seen or len(self._frames) * len(self.places) > MOST_LOOKS:
                return
            if self._lookers is None:
                self._lookers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="look")
            self._seen.add(number)
        self._waiting.acquire()  # frames wait in memory: not too many
        self._pending.append(self._lookers.submit(self._look, number, coordinates))

    def _look(self, number: int, coordinates: Array) -> None:
        try:
            atoms = np.column_stack([coordinates, self._frames.charges])
            found = self._expected(atoms, self._points(self.places), self._frames.cells[number])
            self._looks[number] = np.array([found.values, found.sizes, found.doubtful, found.counted])
        finally:
            self._waiting.release()

    def _expected(self, atoms: Array, points: Array, cell: Cell | None) -> Expectation:
        if len(self._frames) == 1:
            return expectation(atoms, points, self._scheme, cell)
        from pipeline.workloads.coulomb import lazy_definition  # with Numba, which takes longer to load than one frame

        return lazy_definition.expectation(atoms, points, self._scheme, cell)

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

    def audit(self, which: Sequence[int], written: Array) -> Audit:
        """InputError if the trajectory has changed since the job began."""
        self._frames.refuse_changed()
        self._end_looking()
        places = self.places[which]
        expected = self._expectation(which)
        errors = relative_errors(written, expected)
        tolerance = STEP * (STEPS_A_TERM + math.sqrt(float(expected.counted.max(initial=0))))
        passed = errors <= tolerance  # NaN is not
        if not passed.all():
            worst = int(np.argmin(passed))
            raise AuditError(
                f"audit failed at grid point {tuple(places[worst].tolist())}: wrote {written[worst]:g}, "
                f"{expected.values[worst]:g} is right; off by {errors[worst]:.3g} of its terms' sum (tolerated: "
                f"{tolerance:.3g}); nothing was published; please report this",
                worst_error=float(errors[worst]),
                tolerance=tolerance,
            )
        return Audit(
            samples=len(which),
            worst_error=float(errors.max(initial=0.0)),
            rms_error=float(np.sqrt(np.mean(errors**2))) if len(errors) else 0.0,
            tolerance=tolerance,
            unit="relative to the sum of the terms' sizes",
        )

    def _points(self, places: NDArray[np.int64]) -> Array:
        return np.asarray(np.array(self._header.origin) + places * np.array(self._header.spacing))

    def _expectation(self, which: Sequence[int]) -> Expectation:
        points, found = self._points(self.places[which]), []
        for number, cell in enumerate(self._frames.cells):
            look = self._looks.get(number)
            if look is None:
                found.append(self._expected(self._frames.atoms(number), points, cell))
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
    counted = np.array([each.counted for each in found]).max(axis=0)
    if how in ("avg", "none"):
        values, sizes, doubtful = (np.mean(each, axis=0) for each in (values, sizes, doubtful))
    else:
        values = np.std(values, axis=0) if how == "std" else getattr(np, how)(values, axis=0)
        sizes, doubtful = sizes.max(axis=0), doubtful.max(axis=0)
    return Expectation(values=values, sizes=sizes, doubtful=doubtful, counted=counted)
