"""The mesh of a far field: its place and size, the window that spreads charges, and the influence function.

Periodic: the mesh spans the cell, along its vectors. Free: it spans a box around the atoms and the points, doubled
along each axis, with zeros in the other half, so that the convolution with the Green's function does not wrap around
(Hockney and Eastwood, "Computer Simulation Using Particles", 1988, section 6-5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.polynomial.chebyshev import Chebyshev
from numpy.polynomial.polynomial import Polynomial
from numpy.typing import NDArray

from kernels.coulomb.geometry import Cell, Grid
from kernels.ewald.splitting import Level, Splitting, splitting_of

Array = NDArray[np.float64]

MAX_MESH_POINTS = (1 << 31) - 1
DOUBLE_BELOW = 1e-4  # finer accuracies are transformed in float64


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A mesh, and what a unit charge's far field is on it.

    origin : position of mesh point (0, 0, 0); vectors: the edges that it spans, in angstrom; shape: points along them
    level  : window and splitting; cutoff_angstrom: of the near part
    smear_per_angstrom : charges are Gaussians, all of whose potential is far; None: point charges
    free   : without images
    factor : of the potential, 1 / dielectric
    """

    origin: tuple[float, float, float]
    cell: Cell
    shape: tuple[int, int, int]
    level: Level
    cutoff_angstrom: float
    smear_per_angstrom: float | None = None
    free: bool = False
    factor: float = 1.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_axis_aligned(self) -> bool:
        """Whether the vectors lie along x, y and z, so that the window is a product over the grid's axes."""
        matrix = self.cell.matrix
        return bool((matrix[~np.eye(3, dtype=bool)] == 0).all() and (np.diag(matrix) > 0).all())

    @property
    def volume(self) -> float:
        return abs(float(np.linalg.det(self.cell.matrix)))

    @property
    def to_mesh(self) -> Array:
        """Matrix from positions relative to the origin, as rows, to mesh points."""
        return np.ascontiguousarray(self.cell.inverse * np.array(self.shape))

    @property
    def filled(self) -> tuple[int, ...]:
        """The points that hold charges and are read, along the axes: of a free mesh the first half."""
        return tuple(n // 2 for n in self.shape) if self.free else self.shape

    @cached_property
    def splitting(self) -> Splitting:
        return splitting_of(self.level)

    @cached_property
    def polynomials(self) -> Array:
        """The window's pieces [taps, degree + 1]: see `window_polynomials`."""
        return window_polynomials(self.level)

    def influence(self, xp: Any) -> Any:
        """From a mesh's discrete Fourier transform (last axis halved, as rfftn gives it) to that of the potential, with
        the window divided out twice. xp: NumPy or CuPy. Returns float64, of that array; for NumPy without images, the
        octant of frequencies up to half of each axis: it is even."""
        spectrum = self._free(xp) if self.free else self._periodic(xp)
        for axis, (n, kept) in enumerate(zip(self.shape, spectrum.shape, strict=True)):
            window = 1 / _window_spectrum(self.level, np.fft.fftfreq(n).astype(np.float64)[:kept]) ** 2
            spectrum *= xp.asarray(window).reshape([-1 if axis == other else 1 for other in range(3)])
        return spectrum

    def _periodic(self, xp: Any) -> Any:
        inverse = self.cell.inverse
        counts = [np.rint(np.fft.fftfreq(n) * n) for n in self.shape]
        counts[2] = np.abs(counts[2][: self.shape[2] // 2 + 1])
        a, b, c = (xp.asarray(n).reshape([-1 if axis == other else 1 for other in range(3)])
                   for axis, n in enumerate(counts))  # fmt: skip
        square: Any = 0.0
        for row in inverse * 2 * math.pi:
            square = square + (a * row[0] + b * row[1] + c * row[2]) ** 2
        square[0, 0, 0] = 1
        if self.smear_per_angstrom is not None:
            found = xp.exp(-square / (4 * self.smear_per_angstrom**2))
            zero = 0.0
        else:
            rc = self.cutoff_angstrom
            wavenumbers, values = map(xp.asarray, self.splitting.table)
            found = xp.interp(xp.sqrt(square) * rc, wavenumbers, values)
            # The near part of all charges has this mean, which the background takes away.
            zero = -self.splitting.near_integral * rc**2
        found *= 4 * math.pi / square
        found[0, 0, 0] = zero
        found *= self.factor * self.size / self.volume
        return found

    def _free(self, xp: Any) -> Any:
        lengths = np.diag(self.cell.matrix)
        steps = [_mirrored(n, 2 * self.level.taps) * side / n for n, side in zip(self.shape, lengths, strict=True)]
        # SciPy has the error function for NumPy arrays only.
        of = np if self.smear_per_angstrom is not None else xp
        x, y, z = (
            # One octant: the distances are even.
            of.asarray(step[: len(step) // 2 + 1] ** 2).reshape([-1 if axis == other else 1 for other in range(3)])
            for axis, step in enumerate(steps)
        )
        square = x + y + z
        if self.smear_per_angstrom is None:
            rc = self.cutoff_angstrom
            kernel = 1 / np.sqrt(np.maximum(square, rc**2))
            near = tuple(slice(math.ceil(rc * n / side) + 1) for n, side in zip(self.shape, lengths, strict=True))
            kernel[near] = self.splitting.far(square[near] / rc**2) / rc
        else:
            kernel = xp.asarray(_gaussian(square, self.smear_per_angstrom))
        if xp is np:
            from scipy.fft import dctn  # CuPy has none

            return dctn(kernel, type=1, overwrite_x=True) * self.factor
        for axis, n in enumerate(self.shape):
            kernel = kernel.take(xp.asarray(np.minimum(np.arange(n), n - np.arange(n))), axis=axis)
        return xp.ascontiguousarray(xp.fft.rfftn(kernel).real) * self.factor

    def taps(self, grid: Grid) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        """For each axis of an axis-aligned mesh, the mesh points that each grid point reads, and their weights: two
        arrays [points, taps]."""
        found = []
        for axis, positions in enumerate(grid.axes()):
            n = self.shape[axis]
            at = (positions - self.origin[axis]) / (self.cell.matrix[axis, axis] / n)
            first, rest = first_tap(at, self.level.taps)
            weights = np.zeros((len(at), self.level.taps))
            for coefficients in self.polynomials.T[::-1]:
                weights = weights * rest[:, None] + coefficients
            index = (first[:, None] + np.arange(self.level.taps)) % n
            found.append((index.astype(np.int32), weights.astype(np.float32)))
        return found


def first_tap(at: Array, taps: int) -> tuple[NDArray[np.int64], Array]:
    """The first of the `taps` mesh points around positions in units of the mesh, and the window's argument, 0 … 1."""
    first = np.floor(at - taps / 2) + 1
    return first.astype(np.int64), at - taps / 2 + 1 - first


def compacted(taps: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The mesh points that taps [points, taps] name, ascending, and the taps as indices of these."""
    rows, places = np.unique(taps, return_inverse=True)
    return rows, places.reshape(taps.shape).astype(np.int32)


@lru_cache(maxsize=8)
def window_polynomials(level: Level) -> Array:
    """The window at a charge's mesh points as polynomials [taps, degree + 1] of the rest, 0 … 1, constant first.

    It is the Kaiser-Bessel function I0(β √(1 - (2u/taps)²)) / I0(β), within the rounding of a level's accuracy.
    """
    taps, degree = level.taps, level.taps + 3
    beta = level.shape * taps
    pieces = []
    for tap in range(taps):
        # Tap t lies t + 1 - taps/2 - rest from the charge.
        def value(rest: Array, tap: int = tap) -> Array:
            away = 2 * (tap + 1 - taps / 2 - rest) / taps
            return np.asarray(np.i0(beta * np.sqrt(np.maximum(1 - away**2, 0))) / np.i0(beta))

        fitted = Chebyshev.interpolate(value, degree, domain=[0, 1]).convert(kind=Polynomial)
        pieces.append(np.pad(fitted.coef, (0, degree + 1 - len(fitted.coef))))
    return np.array(pieces)


def _window_spectrum(level: Level, frequencies: Array) -> Array:
    """The window's Fourier transform at frequencies in cycles per mesh point: sinh(s)/s, s² = β² - (π taps f)²."""
    beta = level.shape * level.taps
    s = np.sqrt(beta**2 - (math.pi * level.taps * frequencies) ** 2)
    return np.asarray(level.taps / np.i0(beta) * np.sinh(s) / s)


def _mirrored(count: int, width: int) -> Array:
    """Distances of mesh points from the first on a ring of `count`: n, then back to zero. Around the middle, where no
    pair is that far apart, `width` points turn smoothly: the window, divided out, would spread a kink over the mesh."""
    n, half = np.arange(count, dtype=np.float64), width / 2
    fine = np.linspace(-1, 1, 4097)
    bell = np.i0(2.3 * width * np.sqrt(1 - fine**2)) / np.i0(2.3 * width)
    slope = np.append(0, np.cumsum(bell[1:] + bell[:-1]))
    slope = 2 * slope / slope[-1] - 1
    height = np.append(0, np.cumsum(slope[1:] + slope[:-1])) * (fine[1] - fine[0]) / 2 + 1
    away = n - count / 2
    turned = count / 2 - half * np.interp(away / half, fine, height)
    return np.asarray(np.where(np.abs(away) < half, turned, np.minimum(n, count - n)))


def _gaussian(square: Array, smear: float) -> Array:
    """erf(α r)/r of squared distances."""
    from scipy.special import erf

    r = np.sqrt(np.maximum(square, 1e-16))
    return np.asarray(np.where(square > 1e-12, erf(smear * r) / r, 2 * smear / math.sqrt(math.pi)))


def smooth(count: float) -> int:
    """The smallest even number of at least `count` without prime factors above 7, of which FFTs are fast."""
    n = max(2, math.ceil(count - 1e-9))
    while True:
        rest = n
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1 and n % 2 == 0:
            return n
        n += 1
