"""Coil compression: as few virtual channels as carry the signal.

Source: Buehrer, Pruessmann, Boesiger, Kozerke, "Array compression for MRI with large coil arrays", Magn. Reson. Med. 57
(2007); Huang, Vijayakumar, Li, Hertel, Duensing, "A software channel compression technique", Magn. Reson. Imaging 26
(2008): the singular value decomposition of the (prewhitened) k-space samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.sense.arrays import namespace, to_host


def compression(samples: Any, channels: int) -> tuple[NDArray[np.complex128], float]:
    """The orthonormal mixing of coils into `channels` virtual ones that keeps most of the samples' energy.

    samples : complex (coils, ...), NumPy or CuPy, prewhitened

    Returns the matrix (channels, coils), strongest channel first, for `noise.mixed`, and the share of the energy that
    it keeps, 0 to 1. Raises ValueError unless 1 ≤ channels ≤ coils.
    """
    coils = samples.shape[0]
    if not 1 <= channels <= coils:
        raise ValueError(f"{channels} virtual channels of {coils} coils; choose 1 to {coils}")
    xp = namespace(samples)
    flat = samples.reshape(coils, -1)
    return strongest_channels(to_host(xp.matmul(flat, flat.conj().T)), channels)


def strongest_channels(gram: NDArray[Any], channels: int) -> tuple[NDArray[np.complex128], float]:
    """The same from the coils' correlations Σ s sᴴ, (coils, coils), on the host."""
    values, vectors = np.linalg.eigh(gram.astype(np.complex128))
    kept = vectors[:, ::-1][:, :channels]
    total = float(values.sum())
    return np.asarray(kept.conj().T), float(values[::-1][:channels].sum() / total) if total > 0 else 1.0
