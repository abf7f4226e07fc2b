"""Noise prewhitening: channels mixed so that their noise is uncorrelated and of unit variance.

Source: Pruessmann, Weiger, Börnert, Boesiger, "Advances in sensitivity encoding with arbitrary k-space trajectories",
Magn. Reson. Med. 46 (2001), appendix A; Roemer et al., Magn. Reson. Med. 16 (1990).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.sense.arrays import namespace

# Of the largest eigenvalue: below this, two channels carry the same noise to working precision.
_SINGULAR = 1e-12


def covariance(noise: NDArray[Any]) -> NDArray[np.complex128]:
    """Ψ = E[n nᴴ], (coils, coils), of complex noise samples (coils, n) with their mean taken off.

    Variance counts real and imaginary part together. Raises ValueError where there are not more samples than coils,
    or one is not finite.
    """
    samples = np.asarray(noise, np.complex128)
    if samples.ndim != 2 or samples.shape[1] <= samples.shape[0]:
        raise ValueError(f"noise has the shape {samples.shape}; (coils, n) with more samples than coils is needed")
    if not np.isfinite(samples).all():
        raise ValueError("a noise sample is not finite")
    samples = samples - samples.mean(axis=1, keepdims=True)
    return np.asarray(samples @ samples.conj().T / (samples.shape[1] - 1))


def whitening(psi: NDArray[Any]) -> NDArray[np.complex128]:
    """L⁻¹ of Ψ = L Lᴴ, (coils, coils), lower triangular: L⁻¹ n has the covariance 1.

    Raises ValueError where Ψ is no covariance of independent channels (a dead channel, two that are one).
    """
    psi = np.asarray(psi, np.complex128)
    values = np.linalg.eigvalsh(psi)
    if not values[0] > _SINGULAR * values[-1]:
        raise ValueError("the noise covariance is singular: a channel is dead, or two carry the same signal")
    return np.asarray(np.linalg.inv(np.linalg.cholesky(psi)))


def mixed(samples: Any, matrix: NDArray[Any]) -> Any:
    """Channels (coils, ...) turned into (rows of `matrix`, ...), complex64, where the samples live."""
    xp = namespace(samples)
    factors = xp.asarray(np.ascontiguousarray(matrix, np.complex64))
    flat = samples.reshape(samples.shape[0], -1)
    return xp.matmul(factors, flat).reshape(len(matrix), *samples.shape[1:])
