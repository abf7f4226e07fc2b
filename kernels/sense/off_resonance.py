"""Off-resonance correction by time segmentation: transforms of spins that precess at position-dependent frequencies.

    s_m = Σ_r ρ(r) e^{−2πi f(r) t_m} e^{−2πi k_m·r/N},    e^{−2πi f t} ≈ Σ_l b_l(t) e^{−2πi f τ_l}

with segment times τ_l evenly spaced over the readout and the b_l of least squares over the field map's histogram, so
that the transform is one ordinary transform per segment.

Source: Sutton, Noll, Fessler, "Fast, iterative image reconstruction for MRI in the presence of field inhomogeneities",
IEEE Trans. Med. Imaging 22 (2003); Man, Pauly, Macovski, Magn. Reson. Med. 37 (1997).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft import Nufft
from kernels.runtime.arrays import namespace
from kernels.sense.arrays import to_host

MOST_SEGMENTS = 64
_BINS = 1000


class Segments:
    """Interpolators in time for a field map.

    times_s : (l,) the segments' times in seconds
    shares  : complex64 (l, m), the weight of each segment for each sample
    error   : the root-mean-square error of the approximated e^{−2πi f t}, over the histogram, at the worst time
    """

    def __init__(self, field_hz: Any, sample_times_s: Any, *, segments: int | None = None, error: float = 1e-3) -> None:
        """field_hz       : real, any shape, NumPy or CuPy; the frequency off resonance of each pixel in Hz
        sample_times_s : (m,) seconds, NumPy, or CuPy like the field map
        segments       : number of segments; default the fewest that keep to `error`

        Raises ValueError if a value is not finite, or if spins dephase by too many turns during the readout.
        """
        field, times = to_host(field_hz).astype(np.float64), to_host(sample_times_s).astype(np.float64)
        if not (np.isfinite(field).all() and np.isfinite(times).all()):
            raise ValueError("a value of the field map, or a sample's time, is not finite")
        frequencies, counts = _histogram(field)
        unique, place = np.unique(times, return_inverse=True)
        turns = (frequencies[-1] - frequencies[0]) * (unique[-1] - unique[0])
        if turns > MOST_SEGMENTS:
            raise ValueError(
                f"the field map turns spins apart {turns:.3g} times during the readout: too often to correct"
            )
        # Fewer segments than turns cannot suffice.
        wanted = [segments] if segments is not None else list(range(max(int(turns), 1), MOST_SEGMENTS + 1))
        for count in wanted:
            self.times_s = np.linspace(unique[0], unique[-1], count) if count > 1 else np.array([unique.mean()])
            shares, self.error = _best_shares(frequencies, counts, self.times_s, unique)
            if self.error <= error:
                break
        if segments is None and self.error > error:
            raise ValueError(
                f"{MOST_SEGMENTS} time segments leave an error of {self.error:.2g}: the field map is too wide"
            )
        self.shares: NDArray[np.complex64] = shares[:, place.reshape(-1)].astype(np.complex64)


class OffResonance:
    """The transforms of a `Nufft` with a field map: `forward` and its adjoint, like those of `Nufft`."""

    def __init__(self, transform: Nufft, field_hz: Any, segments: Segments) -> None:
        """field_hz: real (*shape) in Hz, NumPy or CuPy like the transform's trajectory."""
        xp = namespace(field_hz)
        self.transform = transform
        turns = field_hz.astype(np.float64) * (-2 * np.pi)
        self._turned = xp.stack([xp.exp(1j * turns * time).astype(np.complex64) for time in segments.times_s])
        self._shares = xp.asarray(segments.shares)

    def forward(self, images: Any) -> Any:
        """Samples (..., m) of images (..., *shape), complex64."""
        total: Any = 0
        for turned, share in zip(self._turned, self._shares, strict=True):
            total = total + share * self.transform.forward(images * turned)
        return total

    def adjoint(self, samples: Any, weights: Any = None) -> Any:
        """Images of weights × samples: the conjugate transpose of `forward`."""
        total: Any = 0
        for turned, share in zip(self._turned, self._shares, strict=True):
            total = total + turned.conj() * self.transform.adjoint(samples * share.conj(), weights)
        return total


def _histogram(field: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Frequencies (Hz), and the share of the map at each."""
    low, high = float(field.min()), float(field.max())
    if high - low < 1e-9:
        return np.array([low]), np.ones(1)
    counts, edges = np.histogram(field, bins=_BINS, range=(low, high))
    used = counts > 0
    # Half evenly, so that rare frequencies are approximated as well.
    shares = counts[used] / counts.sum() + 1 / used.sum()
    return (edges[:-1] + edges[1:])[used] / 2, shares / shares.sum()


def _best_shares(
    frequencies: NDArray[np.float64], counts: NDArray[np.float64], segments_s: NDArray[np.float64], times: Any
) -> tuple[NDArray[np.complex128], float]:
    """The least-squares b (l, times) over the histogram, and their worst rms error."""
    root = np.sqrt(counts)[:, None]
    basis = root * np.exp(-2j * np.pi * np.outer(frequencies, segments_s))
    wanted = root * np.exp(-2j * np.pi * np.outer(frequencies, times))
    shares = np.linalg.lstsq(basis, wanted, rcond=1e-7)[0]
    errors = np.sqrt((np.abs(basis @ shares - wanted) ** 2).sum(axis=0))
    return shares, float(errors.max())
