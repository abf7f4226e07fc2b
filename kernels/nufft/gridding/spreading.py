"""The oversampled grid and the spreading kernel of a gridding transform, chosen for a relative error."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SMALLEST_GRID = 16  # cells per axis: no kernel then overlaps itself across the periodic edge
QUADRATURE = 120
FACTORS = (2, 3, 5, 7)


def fast_size(least: int, multiple: int = 2) -> int:
    """The smallest multiple of `multiple`, at least `least`, without prime factors above 7: a fast size for FFTs."""
    size = -(-least // multiple) * multiple
    while True:
        rest = size
        for factor in FACTORS:
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return size
        size += multiple


@dataclass(frozen=True, kw_only=True)
class Spreading:
    """One kernel: phi(t) = sum of coefficients[i] (1 − (2 t / width)²)^i for |t| ≤ width / 2 cells."""

    oversampling: float  # least number of cells per pixel
    width: int  # cells
    error: float  # relative, root mean square over the image, on one axis, for the worst position between two cells
    coefficients: tuple[float, ...]

    def transform(self, frequency: Array) -> Array:
        """∫ phi(t) cos(2π t f) dt for frequencies in cycles per cell."""
        nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE)
        kept = np.array(self.coefficients, np.float32).astype(np.float64)  # as the device has them
        values = np.polynomial.polynomial.polyval(1 - nodes**2, kept) * weights * self.width / 2
        return np.asarray(np.cos(np.pi * self.width * np.multiply.outer(frequency, nodes)) @ values)


# Minimax polynomials of their degree: they minimise, over the positions of a point between two cells, the largest root
# mean square over |f| ≤ 1 / (2 oversampling) of the relative difference between the sum over the cells and phi^(f).
# They were found by iteratively reweighted least squares: the denominator is the previous solution's, and positions
# with a larger error get more weight. Kernels with the least mean error end in a higher step and have twice the error
# for points exactly on cells, as all points of a Cartesian scan are.
_WIDTH_7 = (
    *(2.52384e-07, 4.8024225e-05, 0.00082940128, 0.0067762045, 0.033472519, 0.10110749),
    *(-0.11724679, 1.2243946, -1.9555405, 2.7364911, -1.6366797, 0.60634742),
)
KERNELS = {
    2: (
        Spreading(
            oversampling=2.0,
            width=3,
            error=4.59e-3,
            coefficients=(0.0039612959, 0.10780031, 0.24256314, 0.071864335, 0.57381091),
        ),
        Spreading(
            oversampling=2.0,
            width=4,
            error=4.68e-4,
            coefficients=(
                *(0.00054156912, -0.0016314444, 0.32491072, -0.76827658),
                *(2.1604335, -1.583813, 0.86783528),
            ),
        ),
        Spreading(
            oversampling=2.0,
            width=5,
            error=4.48e-5,
            coefficients=(
                *(4.1294511e-05, 0.002963497, -0.0057429817, 0.33799304),
                *(-0.81873093, 2.2146884, -1.822059, 1.0908467),
            ),
        ),
        Spreading(
            oversampling=2.0,
            width=6,
            error=4.65e-6,
            coefficients=(
                *(4.6126386e-06, 0.00088006564, -0.00737358, 0.16198132, -0.60648147),
                *(2.2536558, -3.648202, 4.5683527, -2.7157149, 0.99289744),
            ),
        ),
        Spreading(oversampling=2.0, width=7, error=4.38e-7, coefficients=_WIDTH_7),
    ),
    3: (
        Spreading(
            oversampling=1.25,
            width=4,
            error=4.90e-3,
            coefficients=(
                *(0.0015888683, 0.11022105, -0.13249862),
                *(1.3093997, -1.0324138, 0.74370278),
            ),
        ),
        Spreading(
            oversampling=1.375,
            width=5,
            error=4.22e-4,
            coefficients=(
                *(0.00023261425, 0.01294785, 0.052622987, 0.17582479),
                *(0.4874353, -0.31172589, 0.58266235),
            ),
        ),
        Spreading(
            oversampling=1.5,
            width=6,
            error=3.43e-5,
            coefficients=(
                *(2.2729698e-05, 0.00030232282, 0.034222159, -0.11388186, 0.89085334),
                *(-1.5718471, 2.7134115, -1.7752207, 0.82213764),
            ),
        ),
        Spreading(
            oversampling=1.5,
            width=7,
            error=4.51e-6,
            coefficients=(
                *(3.0518875e-06, 0.00038968816, -0.0025621237, 0.099809525, -0.41313573),
                *(1.8408869, -3.3461305, 4.6648052, -3.0269121, 1.1828461),
            ),
        ),
        Spreading(oversampling=2.0, width=7, error=4.38e-7, coefficients=_WIDTH_7),
    ),
}


def kernel_for(eps: float, axes: int) -> Spreading:
    """The narrowest kernel whose error is within eps; the errors of the axes add up as squares."""
    for found in KERNELS[axes]:
        if found.error * math.sqrt(axes) <= eps:
            return found
    return KERNELS[axes][-1]


def grid_shape(shape: tuple[int, ...], oversampling: float) -> tuple[int, ...]:
    """Sizes of the grid: multiples of the kernels' tiles that are fast for FFTs."""
    return tuple(fast_size(max(math.ceil(oversampling * n), SMALLEST_GRID), 4) for n in shape)


@functools.lru_cache(maxsize=64)
def deapodisation(size: int, grid: int, spreading: Spreading) -> Array:
    """The deapodisation factor of each pixel of an axis: 1 / the kernel's transform there."""
    return 1 / spreading.transform((np.arange(size) - size // 2) / grid)


def lanes_for(coils: int, most: int = 32) -> int:
    """The number of coils a warp computes side by side: a power of two."""
    lanes = 1
    while lanes < min(coils, most):
        lanes *= 2
    return lanes
