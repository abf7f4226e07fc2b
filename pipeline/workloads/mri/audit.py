"""Audits a reconstruction: k-space samples of each image by the float64 definition of the forward model.

For a few random samples m of each image the definition Σ_r ρ(r) e^{−2πi f(r) t_m} e^{−2πi k_m·r/N} is summed in float64
and compared with the image's transform, as the reconstruction computes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import AuditError
from pipeline.workloads.protocol import Audit

SAMPLES = 6  # of each image
_AROUND = 1 / 16  # of the matrix
# The transform's bound on a single sample's error is 4 eps × the image's 1-norm; complex64 is accurate to 1e-6.
_TIMES_EPS = 4.0
_FLOOR = 1e-6
# The segments' error is a root mean square over the field map.
_WORST_OF_SEGMENTS = 8.0
MOST_CURVES = 16
# Relative change of a regularised image in its last iteration; one that has converged changes by 1e-4 or so.
_NOT_CONVERGED = 5e-3


class MriAudit:
    """The `Reference` of a reconstruction: worst error, residual and curve of each image, by number.

    `note` compares k-space samples before an image is written, so the audit needs no places of the output.
    `note` may be called from several threads.
    """

    places = np.empty((0, 4), np.int64)

    def __init__(self, eps: float, refuse_changed: Callable[[], None]) -> None:
        """`refuse_changed` raises InputError if a file beside the input has changed."""
        self._eps = max(eps, _FLOOR)
        self._refuse_changed = refuse_changed
        self._lock = threading.Lock()
        self._images: dict[int, dict[str, Any]] = {}

    @staticmethod
    def chosen(number: int, points: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Indices of the audited samples of image `number`: the one nearest to the centre of k-space, some around it
        where most of the signal is, some anywhere. `points`: (m, dimensions), cycles per field of view of `shape`."""
        rng = np.random.default_rng(number)
        away = np.abs(points / np.array(shape)).max(axis=1)
        around = np.flatnonzero(away <= max(_AROUND, float(away.min())))
        found = [int(away.argmin()), *rng.choice(around, SAMPLES // 2), *rng.integers(0, len(points), SAMPLES)]
        return np.array(found[:SAMPLES])

    def note(
        self,
        number: int,
        series: Sequence[NDArray[Any]],
        points: NDArray[np.float64],
        transformed: NDArray[Any],
        curve: NDArray[Any],
        *,
        method: str,
        segment_error: float,
        notes: Mapping[str, str] | None = None,
        field_hz: NDArray[np.float64] | None = None,
        times_s: NDArray[np.float64] | None = None,
    ) -> dict[str, Any]:
        """series: complex (*matrix) of each time; points: (times, n, dimensions), cycles per field of view;
        transformed: complex (times × n,); curve: relative residuals, or rows of objective, misfit and change; notes:
        further remarks for the receipt."""
        errors = []
        for time, (image, seen) in enumerate(zip(series, transformed.reshape(len(series), -1), strict=True)):
            expected = definition(image, points[time], field_hz, None if times_s is None else times_s[time])
            size = np.abs(image).sum(dtype=np.float64)
            apart = np.abs(seen - expected)
            errors.append(float(apart.max() / size) if size > 0 else float(apart.max()))
        error = float(np.max(errors))
        rows = curve[np.isfinite(curve.reshape(len(curve), -1)).all(axis=1)]
        values = rows[:, 0] if rows.ndim == 2 else rows  # objectives, or residuals
        note: dict[str, Any] = {
            "error": error if np.isfinite(error) else None,
            "samples": points.shape[0] * points.shape[1],
            "segment_error": segment_error,
            "method": method,
            "iterations": len(rows) if rows.ndim == 2 else max(len(rows) - 1, 0),
            "residual": None if not len(rows) else float(rows[-1, 1] if rows.ndim == 2 else rows[-1]),
        }
        if rows.ndim == 2 and len(rows):
            note |= {"objective": float(rows[-1, 0]), "change": float(rows[-1, 2])}
        if notes:
            note["notes"] = dict(notes)
        if number < MOST_CURVES and len(values):
            note["curve"] = [float(f"{value:.6g}") for value in values]
        with self._lock:
            self._images[number] = note
        return note

    def add_note(self, number: int, note: Mapping[str, Any]) -> None:
        """Take over what `note` returned in another process."""
        with self._lock:
            self._images[number] = {name: value for name, value in note.items() if name != "preview"}

    def convergence(self, *, settles: bool) -> Mapping[str, Any]:
        """For the receipt: the residuals of the first image after each iteration, and the last ones of all.

        settles : whether images rest once they have converged: not with penalties that shift them randomly
        """
        with self._lock:
            images = dict(sorted(self._images.items()))
        if not images:
            return {}
        found: dict[str, Any] = {"transform": ", ".join(sorted({note["method"] for note in images.values()}))}
        for name in ("split", "coil_maps", "solver", "strengths"):
            remarks = sorted({note["notes"][name] for note in images.values() if name in note.get("notes", {})})
            if remarks:
                found[name] = "; ".join(remarks)
        residuals = [note["residual"] for note in images.values() if note["residual"] is not None]
        curves = {number: note["curve"] for number, note in images.items() if "curve" in note}
        if residuals:
            counts = [note["iterations"] for note in images.values()]
            found["iterations"] = counts[0] if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
            for name in ("residual", "objective", "change"):
                values = [note[name] for note in images.values() if note.get(name) is not None]
                if values:
                    ends = f"{min(values):.4g} to {max(values):.4g}"
                    found[name] = float(f"{values[0]:.4g}") if len(values) == 1 else ends
            change = max(note.get("change", 0.0) for note in images.values())
            if settles and change > _NOT_CONVERGED:
                found["not_converged"] = (
                    f"the last iteration still changed an image by {100 * change:.2g} %: raise --iterations, or lower "
                    "--strength"
                )
        if curves:
            found["convergence"] = curves[min(curves)]
        return found

    def audit(self, which: Sequence[int], written: NDArray[np.float64]) -> Audit:
        """AuditError if the error of a k-space sample exceeds the tolerance or is not finite."""
        self._refuse_changed()
        with self._lock:
            images = dict(sorted(self._images.items()))
        worst, tolerance = 0.0, self._tolerance(max((each["segment_error"] for each in images.values()), default=0.0))
        for number, note in images.items():
            allowed = self._tolerance(note["segment_error"])
            if note["error"] is None or not note["error"] <= allowed:
                found = "no finite number" if note["error"] is None else f"off by {note['error']:.3g}"
                raise AuditError(
                    f"audit failed: a k-space sample of image {number} by the transform ({note['method']}) is {found} "
                    f"of the image's sum (tolerated: {allowed:.3g}); nothing was published; please report this",
                    worst_error=float("nan") if note["error"] is None else note["error"],
                    tolerance=allowed,
                )
            worst = max(worst, note["error"])
        return Audit(
            samples=sum(note["samples"] for note in images.values()),
            worst_error=worst,
            tolerance=tolerance,
            unit="k-space samples, relative to the sum of the pixels' magnitudes",
        )

    def _tolerance(self, segment_error: float) -> float:
        return _TIMES_EPS * self._eps + _WORST_OF_SEGMENTS * segment_error


def definition(
    image: NDArray[Any],
    points: NDArray[np.float64],
    field_hz: NDArray[np.float64] | None = None,
    times_s: NDArray[np.float64] | None = None,
) -> NDArray[np.complex128]:
    """The forward model of one coil in float64, one sample at a time.

    image : complex (*matrix); points: (n, dimensions), cycles per field of view
    field_hz, times_s : off resonance (*matrix) in hertz, and the time (n,) of each sample in seconds
    """
    values = image.astype(np.complex128)
    found = np.empty(len(points), np.complex128)
    for number, point in enumerate(points):
        summed = values
        if field_hz is not None and times_s is not None:
            summed = values * np.exp(-2j * np.pi * times_s[number] * field_hz)
        for k, n in zip(point[::-1], image.shape[::-1], strict=True):
            summed = summed @ np.exp(-2j * np.pi * (k / n) * (np.arange(n) - n // 2))
        found[number] = summed
    return found
