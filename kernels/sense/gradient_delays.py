"""Gradient delays of radial data, from the intersections of spokes.

Delays move each spoke by a constant vector: a sample at k on a spoke with the unit direction n is at k + S n, with one
symmetric matrix S for all spokes; a delay of the x gradient by d samples makes S_xx = −d steps. Two spokes cross where
their samples agree, at the nominal positions a_1 and a_2 along them, which gives S (n_1 − n_2) = a_2 n_2 − a_1 n_1.

Source: Rosenzweig, Holme, Uecker, "Simple auto-calibrated gradient delay estimation from few spokes using radial
intersections (RING)", Magn. Reson. Med. 81 (2019).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FARTHEST = 4.0  # samples from the nominal centre where crossings are looked for
_FINER, _STEPS = 4, 4  # points a sample of the search, and Gauss-Newton steps that follow
ENOUGH_SPOKES = 64
_PARTNERS = 3
_STEEPEST = 0.5  # |cos| of the angle between two spokes; small angles tell little
_STRAIGHT = 1e-3  # of the reach


def spoke_steps(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The vectors from sample to sample (spokes, d), and the sample, as a fraction, that is nearest to the centre.

    points : (spokes, samples, d). Raises ValueError unless the spokes are straight, evenly sampled, and through 0.
    """
    if points.shape[1] < 2:
        raise ValueError("gradient delays take spokes of two samples or more")
    count = points.shape[1]
    steps = (points[:, -1] - points[:, 0]) / (count - 1)
    even = points[:, :1] + np.arange(count)[None, :, None] * steps[:, None]
    squares = np.maximum((steps**2).sum(axis=1), 1e-300)
    centre = -(points[:, 0] * steps).sum(axis=1) / squares
    missed = points[:, 0] + centre[:, None] * steps
    tolerance = _STRAIGHT * float(np.abs(points).max())
    if (
        not max(np.abs(points - even).max(), np.abs(missed).max()) <= tolerance
        or not squares.min() > tolerance**2 / 1e6
    ):
        raise ValueError("gradient delays take straight, evenly sampled spokes through the centre of k-space")
    return steps, centre


def delayed(points: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the samples of spokes (spokes, samples, d) really are. matrix: delays in samples, (d, d), symmetric.

    Raises ValueError as `spoke_steps`.
    """
    steps, _ = spoke_steps(points)
    return np.asarray(points - (steps @ matrix.T)[:, None])


def estimated_delays(samples: NDArray[Any], points: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The delays in samples, a symmetric (2, 2), and the median distance in samples by which crossings miss them.

    samples : complex (coils, spokes, samples); points: (spokes, samples, 2), nominal. `ENOUGH_SPOKES` are enough
    Raises ValueError as `spoke_steps`, or if too few spokes cross at steep angles.
    """
    steps, centre = spoke_steps(points)
    length = np.sqrt((steps**2).sum(axis=1))
    directions = steps / length[:, None]
    rows, values = [], []
    for one, other in _pairs(directions):
        found = _crossing(samples[:, one], samples[:, other], centre[one], centre[other])
        if found is not None:
            x, y = directions[one] - directions[other]
            rows += [[x, 0.0, y], [0.0, y, x]]
            values += [*(found[1] * directions[other] - found[0] * directions[one])]
    if len(rows) < 8:
        raise ValueError("too few spokes cross at steep angles: give the delays as numbers")
    a, b = np.array(rows), np.array(values)
    weights = np.ones(len(b))
    for _ in range(20):  # least absolute values: crossings in noise are outliers
        solution = np.linalg.lstsq(a * weights[:, None], b * weights, rcond=None)[0]
        missed = np.hypot(*(a @ solution - b).reshape(-1, 2).T)
        weights = np.repeat(1 / np.sqrt(np.maximum(missed, 1e-3)), 2)
    xx, yy, xy = -solution
    return np.array([[xx, xy], [xy, yy]]), float(np.median(missed))


def _pairs(directions: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Spokes at steep angles."""
    found = []
    for one, direction in enumerate(directions):
        cosines = np.abs(directions @ direction)
        cosines[: one + 1] = 1.0
        steep = np.flatnonzero(cosines < _STEEPEST)
        if len(steep):
            picked = steep[np.unique(np.linspace(0, len(steep) - 1, min(len(steep), _PARTNERS)).astype(int))]
            found += [(one, int(other)) for other in picked]
    return found


def _crossing(one: NDArray[Any], other: NDArray[Any], centre: float, other_centre: float) -> tuple[float, float] | None:
    """Where the samples (coils, n) of two spokes agree, in samples from their nominal centres; None if nowhere."""
    grid = np.arange(-FARTHEST, FARTHEST + 1e-9, 1 / _FINER)
    ours, theirs = _Line(one), _Line(other)
    first, second = ours.at(centre + grid), theirs.at(other_centre + grid)
    apart = (np.abs(first[:, :, None] - second[:, None]) ** 2).sum(axis=0)
    i, j = np.unravel_index(int(np.argmin(apart)), apart.shape)
    at = np.array([grid[i], grid[j]])
    for _ in range(_STEPS):
        p, q = np.array([centre + at[0]]), np.array([other_centre + at[1]])
        missing = (ours.at(p) - theirs.at(q))[:, 0]
        slopes = np.stack([ours.at(p, 1)[:, 0], -theirs.at(q, 1)[:, 0]], axis=1)
        system = np.concatenate([slopes.real, slopes.imag])
        step = np.linalg.lstsq(system, -np.concatenate([missing.real, missing.imag]), rcond=None)[0]
        at = at + np.clip(step, -1, 1)
    return (float(at[0]), float(at[1])) if (np.abs(at) < FARTHEST).all() else None


class _Line:
    """Band-limited interpolation of a readout's samples (coils, n)."""

    def __init__(self, samples: NDArray[Any]) -> None:
        n = samples.shape[-1]
        self._frequencies = np.fft.fftfreq(n)
        self._spectrum = np.fft.fft(samples.astype(np.complex128), axis=-1) / n

    def at(self, positions: NDArray[np.float64], derivative: int = 0) -> NDArray[np.complex128]:
        phase = 2j * np.pi * self._frequencies
        return np.asarray((self._spectrum * phase**derivative) @ np.exp(phase[:, None] * positions))
