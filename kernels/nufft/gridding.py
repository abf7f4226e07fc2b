"""The finer grid and the spreading kernel of a gridding transform: sizes, width and constants for a relative error."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.nufft.toeplitz import fast_size

Array = NDArray[np.float64]

SMALLEST_GRID = 16  # cells an axis: no kernel then meets itself round the other end
QUADRATURE = 120


@dataclass(frozen=True, kw_only=True)
class Spreading:
    """One kernel: phi(t) = sum of coefficients[i] (1 − (2 t / width)²)^i for |t| ≤ width / 2 cells."""

    oversampling: float  # cells a pixel, at least
    width: int  # cells
    error: float  # root mean square of the aliased part over the image, relative, on one axis
    coefficients: tuple[float, ...]

    def transform(self, frequency: Array) -> Array:
        """∫ phi(t) cos(2π t f) dt for frequencies in cycles a cell."""
        nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE)
        kept = np.array(self.coefficients, np.float32).astype(np.float64)  # as the device has them
        values = np.polynomial.polynomial.polyval(1 - nodes**2, kept) * weights * self.width / 2
        return np.asarray(np.cos(np.pi * self.width * np.multiply.outer(frequency, nodes)) @ values)


# Of all polynomials of a degree these have the least aliasing: they minimise the mean over |f| ≤ 1 / (2 oversampling)
# of the sum over j ≠ 0 of (phi^(f + j) / phi^(f))², which is a least-squares problem where the denominator is that of
# the solution before; twelve rounds from an exponential of semicircle, whose best errors are some 1.6 times these.
_WIDTH_7 = (
    *(1.399749e-06, 6.2947278e-05, 0.0015679479, 0.0035415248, 0.061943278, 0.018336359),
    *(0.088119045, 0.89888895, -1.582541, 2.43379, -1.488974, 0.56526357),
)
KERNELS = {
    2: (
        Spreading(
            oversampling=2.0,
            width=3,
            error=3.35e-3,
            coefficients=(0.0077087702, 0.10472129, 0.33268291, -0.043202702, 0.59808975),
        ),
        Spreading(
            oversampling=2.0,
            width=4,
            error=3.59e-4,
            coefficients=(0.0016968788, 0.0036889277, 0.25808609, -0.41122231, 1.4795743, -1.0099686, 0.67814475),
        ),
        Spreading(
            oversampling=2.0,
            width=5,
            error=3.54e-5,
            coefficients=(
                *(0.0001245718, 0.0044006538, -0.00041286965, 0.33365658),
                *(-0.72449332, 2.018769, -1.618403, 0.98635834),
            ),
        ),
        Spreading(
            oversampling=2.0,
            width=6,
            error=3.85e-6,
            coefficients=(
                *(1.1151833e-05, 0.00093924737, -0.0021760231, 0.12544052, -0.42202652),
                *(1.7971512, -2.9446626, 3.9190443, -2.3828909, 0.90916967),
            ),
        ),
        Spreading(oversampling=2.0, width=7, error=3.67e-7, coefficients=_WIDTH_7),
    ),
    3: (
        Spreading(
            oversampling=1.25,
            width=4,
            error=3.88e-3,
            coefficients=(0.0041730916, 0.10348389, 0.12642889, 0.56185895, -0.17724599, 0.38130119),
        ),
        Spreading(
            oversampling=1.375,
            width=5,
            error=3.40e-4,
            coefficients=(0.00060676993, 0.013754521, 0.092300735, 0.064424202, 0.67987978, -0.45298687, 0.60202092),
        ),
        Spreading(
            oversampling=1.5,
            width=6,
            error=2.70e-5,
            coefficients=(
                *(9.7447744e-05, 0.00025491478, 0.045335662, -0.13214955, 0.95162618),
                *(-1.6079518, 2.6842585, -1.7167627, 0.77529114),
            ),
        ),
        Spreading(
            oversampling=1.5,
            width=7,
            error=3.85e-6,
            coefficients=(
                *(9.0872945e-06, 0.00040185277, 0.0017793967, 0.068750337, -0.2289145),
                *(1.3236079, -2.4353061, 3.7217603, -2.4889891, 1.0369011),
            ),
        ),
        Spreading(oversampling=2.0, width=7, error=3.67e-7, coefficients=_WIDTH_7),
    ),
}


def kernel_for(eps: float, axes: int) -> Spreading:
    """The narrowest kernel whose error is within eps; the errors of the axes add up as squares."""
    for found in KERNELS[axes]:
        if found.error * math.sqrt(axes) <= eps:
            return found
    return KERNELS[axes][-1]


def grid_shape(shape: tuple[int, ...], oversampling: float) -> tuple[int, ...]:
    """Sizes that the tiles of the kernels divide and that FFTs like."""
    return tuple(fast_size(max(math.ceil(oversampling * n), SMALLEST_GRID), 4) for n in shape)


@functools.lru_cache(maxsize=64)
def deapodisation(size: int, grid: int, spreading: Spreading) -> Array:
    """What each pixel of an axis is multiplied by: the inverse of the kernel's transform there."""
    return 1 / spreading.transform((np.arange(size) - size // 2) / grid)


def lanes_for(coils: int, most: int = 32) -> int:
    """Coils that a warp takes side by side: a power of two."""
    lanes = 1
    while lanes < min(coils, most):
        lanes *= 2
    return lanes
