"""Receiver channels: noise prewhitening, and compression to a few virtual channels.

Sources. Prewhitening: Pruessmann, Weiger, Börnert, Boesiger, "Advances in sensitivity encoding with arbitrary k-space
trajectories", Magn. Reson. Med. 46 (2001), appendix A; Roemer et al., Magn. Reson. Med. 16 (1990).
Compression: Buehrer, Pruessmann, Boesiger, Kozerke, "Array compression for MRI with large coil arrays", Magn. Reson.
Med. 57 (2007); Huang, Vijayakumar, Li, Hertel, Duensing, "A software channel compression technique", Magn. Reson.
Imaging 26 (2008): the singular value decomposition of the (prewhitened) k-space samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.arrays import namespace
from kernels.sense.arrays import to_host

# Eigenvalues below this share of the largest: two channels carry the same noise to working precision.
_SINGULAR = 1e-12


def covariance(noise: NDArray[Any]) -> NDArray[np.complex128]:
    """Ψ = E[n nᴴ], (coils, coils), of complex noise samples (coils, n) after subtracting their mean.

    The variance includes real and imaginary part. Raises ValueError if there are no more samples than coils, or if
    one is not finite.
    """
    samples = np.asarray(noise, np.complex128)
    if samples.ndim != 2 or samples.shape[1] <= samples.shape[0]:
        raise ValueError(f"noise has the shape {samples.shape}; (coils, n) with more samples than coils is needed")
    if not np.isfinite(samples).all():
        raise ValueError("a noise sample is not finite")
    samples = samples - samples.mean(axis=1, keepdims=True)
    return np.asarray(samples @ samples.conj().T / (samples.shape[1] - 1))


def whitening(psi: NDArray[Any]) -> NDArray[np.complex128]:
    """L⁻¹ of Ψ = L Lᴴ, (coils, coils), lower triangular: L⁻¹ n has unit covariance.

    Raises ValueError if Ψ is singular: a channel is dead, or two carry the same signal.
    """
    psi = np.asarray(psi, np.complex128)
    values = np.linalg.eigvalsh(psi)
    if not values[0] > _SINGULAR * values[-1]:
        raise ValueError("the noise covariance is singular: a channel is dead, or two carry the same signal")
    return np.asarray(np.linalg.inv(np.linalg.cholesky(psi)))


def mixed(samples: Any, matrix: NDArray[Any]) -> Any:
    """The product of `matrix` and channels (coils, ...): (rows of `matrix`, ...), complex64, on the samples' device."""
    xp = namespace(samples)
    factors = xp.asarray(np.ascontiguousarray(matrix, np.complex64))
    flat = samples.reshape(samples.shape[0], -1)
    return xp.matmul(factors, flat).reshape(len(matrix), *samples.shape[1:])


def compression(samples: Any, channels: int) -> tuple[NDArray[np.complex128], float]:
    """The orthonormal compression matrix to `channels` virtual coils that keeps most of the samples' energy.

    samples : complex (coils, ...), NumPy or CuPy, prewhitened

    Returns the matrix (channels, coils) for `mixed`, strongest channel first, and the share of the energy it keeps,
    0 to 1. Raises ValueError unless 1 ≤ channels ≤ coils.
    """
    coils = samples.shape[0]
    if not 1 <= channels <= coils:
        raise ValueError(f"{channels} virtual channels of {coils} coils; choose 1 to {coils}")
    xp = namespace(samples)
    flat = samples.reshape(coils, -1)
    return strongest_channels(to_host(xp.matmul(flat, flat.conj().T)), channels)


def strongest_channels(gram: NDArray[Any], channels: int) -> tuple[NDArray[np.complex128], float]:
    """`compression` from the coils' correlations Σ s sᴴ, (coils, coils), on the host."""
    values, vectors = np.linalg.eigh(gram.astype(np.complex128))
    kept = vectors[:, ::-1][:, :channels]
    total = float(values.sum())
    return np.asarray(kept.conj().T), float(values[::-1][:channels].sum() / total) if total > 0 else 1.0
