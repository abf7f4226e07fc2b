"""Automatic strengths, by Stein's unbiased risk estimate on the gridded image.

The right-hand side is the image plus noise and aliasing, whose deviation σ follows from the median magnitude of the
finest wavelet details. Of complex coefficients c, soft thresholding by λ has the estimated risk

    Σ over |c| < λ of (|c|² − σ²)  +  Σ over |c| ≥ λ of (λ² + σ² − σ² λ / |c|),

and the strength is the λ of the least risk. Total variation takes the same λ, and low rank does in units of
`kernels.proximal.rank_scale`.

Sources: Stein, Ann. Stat. 9 (1981); Donoho, Johnstone, "Adapting to unknown smoothness via wavelet shrinkage", J. Am.
Stat. Assoc. 90 (1995); for MRI Khare, Hardy, King, Turski, Marinelli, Magn. Reson. Med. 68 (2012).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.sense.arrays import to_host
from kernels.wavelet import Wavelet

_WEAKEST, _STRONGEST = 1e-4, 0.3


def automatic_strength(right: Any, family: str = "db2") -> float:
    """The strength for the right-hand side, complex [frames, *shape], in units of its largest magnitude.

    Waits for the device. The smallest strength if the image is 0.
    """
    shape = right.shape[1:]
    sizes = np.abs(to_host(Wavelet(shape, family).forward(right))).astype(np.float64)
    largest = float(np.abs(to_host(right)).max())
    if not largest > 0:
        return _WEAKEST
    finest = (slice(None), *(slice(-(-n // 2), None) if n > 1 else slice(None) for n in shape))
    variance = float(np.median(sizes[finest])) ** 2 / np.log(2)  # a complex Gaussian's |c|² has its median at ln 2 σ²
    found = np.sort(sizes.reshape(-1))
    squares = np.concatenate([[0.0], np.cumsum(found**2)])
    inverses = np.concatenate([np.cumsum((1 / np.maximum(found, 1e-300))[::-1])[::-1], [0.0]])
    candidates = np.geomspace(_WEAKEST, _STRONGEST, 200) * largest
    below = np.searchsorted(found, candidates)
    above = len(found) - below
    risk = squares[below] - below * variance + above * (candidates**2 + variance)
    risk -= variance * candidates * inverses[below]
    return float(candidates[int(np.argmin(risk))] / largest)
