"""How 1/r is split into a near part, zero beyond a cutoff, and a smooth far part for a mesh.

    1/r = S(r) + L(r),    S(r) = 1/r - P(1 - (r/rc)²) / rc  within the cutoff rc, zero beyond it

P is a polynomial with P(0) = 1, so S needs no special function: an inverse root and some multiply-adds. L is the
potential of a charge whose density, projected on a line, is φ(r/rc)/2 with φ(ρ) = d/dρ [ρ P(1 - ρ²)], whose integral
over 0 … 1 is one:

    L̂(k) = 4π/k² φ̂(k rc),    φ̂(κ) = ∫ φ(ρ) cos(κρ) dρ over 0 … 1

Of all polynomials of its degree, φ holds the largest share of its energy in the mesh's band. Without a limit of the
degree that is the prolate spheroidal function of Liang, Jiang, Barnett and Greengard ("ESP", arXiv 2505.09727). With
six taps an accuracy of 1e-4 allows a spacing of 0.20 cutoffs, and a Gaussian one of 0.17. The far part is that of the
rounded coefficients themselves, so their number limits the decay of L̂ but adds no error of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial
from numpy.polynomial.legendre import Legendre, leggauss
from numpy.typing import NDArray

from kernels.coulomb.geometry import SPLIT_TERMS

ROUNDED = 2.0**-20  # coefficients are multiples of it, so that they have the same bits on every machine
_NODES = 64
_TABLE, _TABLE_END = 1 << 16, 90.0


@dataclass(frozen=True, kw_only=True)
class Level:
    """What an accuracy takes, measured on water and on a protein in it (relative L2 error beyond 1 Å of any atom: at
    most three quarters of it).

    spacing : of the mesh, in cutoffs; taps: of the window that spreads a charge and reads the mesh, along each axis
    shape   : parameter β of the window (a Kaiser-Bessel function), per tap
    """

    accuracy: float
    spacing: float
    taps: int
    shape: float


LEVELS = (
    Level(accuracy=1e-4, spacing=0.20, taps=6, shape=2.4),
    Level(accuracy=1e-5, spacing=0.175, taps=8, shape=2.25),
    Level(accuracy=1e-6, spacing=0.14, taps=10, shape=2.3),
)
# Without a cell the mesh is doubled, so that a transform costs more than a spread: a wider window pays. H200, 96,603
# atoms: 1.13 ms; with six taps at 0.20 cutoffs 1.27 ms, and up to 1.5e-4 for a protein in water.
FREE_LEVELS = (Level(accuracy=1e-4, spacing=0.22, taps=7, shape=2.35), *LEVELS[1:])


def level_of(accuracy: float, *, free: bool = False) -> Level:
    """The cheapest level that is accurate enough; `free`: without a cell. ValueError if there is none."""
    for level in FREE_LEVELS if free else LEVELS:
        if level.accuracy <= accuracy * (1 + 1e-9):
            return level
    raise ValueError(f"accuracy {accuracy:g} is finer than float32 maps can be: choose {LEVELS[-1].accuracy:g} or more")


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """The near part's polynomial P in powers of 1 - ρ², and the far part's spectrum. Lengths in cutoffs."""

    terms: tuple[float, ...]

    @cached_property
    def _density(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Nodes in 0 … 1, and weights that hold φ."""
        nodes, weights = _gauss(0.0, 1.0)
        inside = Polynomial([1.0, 0.0, -1.0])
        product = Polynomial([0.0, 1.0]) * sum((c * inside**k for k, c in enumerate(self.terms)), Polynomial([0.0]))
        return nodes, weights * product.deriv()(nodes)

    def spectrum(self, wavenumbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """φ̂ at wavenumbers [n] in radians per cutoff."""
        nodes, weights = self._density
        return np.asarray(np.cos(np.multiply.outer(wavenumbers, nodes)) @ weights)

    @cached_property
    def table(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Wavenumbers from 0 to beyond the corners of a mesh's band, and the spectrum there, for interpolation."""
        wavenumbers = np.linspace(0, _TABLE_END, _TABLE)
        return wavenumbers, self.spectrum(wavenumbers)

    @property
    def near_integral(self) -> float:
        """∫ S over space, in squared cutoffs."""
        nodes, weights = self._density
        return float(2 * math.pi * (weights @ nodes**2))

    def far(self, squares: Any) -> Any:
        """L at squared distances, an array: P(1 - ρ²) within the cutoff, 1/ρ beyond."""
        inside, sum_ = np.maximum(1 - squares, 0), 0.0
        for term in self.terms[::-1]:
            sum_ = sum_ * inside + term
        return sum_ / np.sqrt(np.maximum(squares, 1))


@lru_cache(maxsize=len(LEVELS) + 1)
def splitting_of(level: Level) -> Splitting:
    """The splitting for a level's mesh."""
    band = math.pi / level.spacing
    nodes, weights = _gauss(0.0, 1.0)
    # Even Legendre polynomials, orthonormal over 0 … 1.
    basis = [math.sqrt(4 * j + 1) * Legendre.basis(2 * j) for j in range(SPLIT_TERMS)]
    samples = np.array([each(nodes) for each in basis])
    wavenumbers, steps = _gauss(0.0, band)
    spectra = np.cos(np.multiply.outer(wavenumbers, nodes)) * weights @ samples.T
    _, vectors = np.linalg.eigh(spectra.T * steps @ spectra)
    density = sum((c * each for c, each in zip(vectors[:, -1], basis, strict=True)), 0 * basis[0])
    product = density.convert(kind=Polynomial).integ()
    even = (product / product(1.0)).coef[1::2]  # of P in powers of ρ²
    terms = Polynomial(even)(Polynomial([1.0, -1.0])).coef
    return Splitting(terms=(1.0, *(round(float(c) / ROUNDED) * ROUNDED for c in terms[1:])))


def _gauss(low: float, high: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes, weights = leggauss(_NODES)
    return low + (nodes + 1) * (high - low) / 2, weights * (high - low) / 2
