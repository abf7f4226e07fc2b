"""Calibration: images of the k-space centre, on a coarse grid over the whole field of view."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.nufft import Nufft, Toeplitz, toeplitz_kernel
from kernels.runtime.arrays import namespace
from kernels.sense.arrays import centred_fft, to_host
from kernels.sense.conjugate_gradient import conjugate_gradient

_EPS = 1e-3
# The coarse grid has twice the pixels that the centre of k-space resolves, so that interpolation is accurate.
_OVERSAMPLED = 2
_ITERATIONS, _DAMPING = 10, 1e-3
# Pixels with less than this share of the largest energy hold no signal.
_SIGNAL = 0.02
_CLIMBS, _NEAR_ZERO = 20, 1e-4


@dataclass(frozen=True, kw_only=True, eq=False)
class CentreImages:
    """Coil images of the k-space centre.

    images : complex64 (coils, *coarse shape), NumPy or CuPy; pixel index n // 2 is the middle of the field of view
    width  : of the centre, in cycles per field of view; |k| ≤ width / 2 along each axis
    """

    images: Any
    width: int


def centre_images(
    samples: Any,
    trajectory: Any,
    weights: Any,
    shape: Sequence[int],
    *,
    width: int,
    taper: bool,
    workers: int | None = None,
) -> CentreImages:
    """Least-squares images, coil by coil, of the samples with |k| ≤ width / 2 along each axis; unlike gridded images,
    they do not show the sampling pattern.

    samples    : complex64 (coils, m), NumPy or CuPy
    trajectory : (m, dimensions) in cycles per field of view, NumPy or CuPy like the samples
    weights    : density compensation (m,), float32
    shape      : of the final image; axes shorter than the width use their whole range
    taper      : apply a raised cosine over |k|, against ringing
    workers    : CPU threads; default one per core

    Raises ValueError if no sample lies in the centre.
    """
    xp = namespace(samples)
    widths = [min(width, n) for n in shape]
    where = in_centre(trajectory, shape, width)
    if where.size == 0:
        raise ValueError(f"no sample lies within {width / 2:g} cycles per field of view of the centre of k-space")
    share = weights[where].astype(np.float64)
    share = (share / xp.maximum(xp.sum(share), 1e-300)).astype(np.float32)
    from scipy.fft import next_fast_len  # takes a fifth of a second to import

    coarse = tuple(min(int(next_fast_len(_OVERSAMPLED * w)), n) for w, n in zip(widths, shape, strict=True))
    points = xp.ascontiguousarray(trajectory[where])
    transform = Nufft(points, coarse, eps=_EPS, coils=samples.shape[0], workers=workers)
    right = transform.adjoint(xp.ascontiguousarray(samples[:, where]), share)
    kernel = toeplitz_kernel(points, share, coarse, _EPS, workers=workers)
    normal = Toeplitz(kernel, coarse, workers=workers).apply
    images, _ = conjugate_gradient(normal, right, iterations=_ITERATIONS, damping=_DAMPING, separate=True)
    return CentreImages(images=_tapered(images, widths) if taper else images, width=width)


def in_centre(trajectory: Any, shape: Sequence[int], width: int) -> Any:
    """Indices of the samples of a trajectory (m, dimensions), in cycles per field of view, in the centre of k-space."""
    xp = namespace(trajectory)
    halves = xp.asarray([min(width, n) / 2 for n in shape], dtype=np.float32)
    return xp.flatnonzero(xp.all(xp.abs(trajectory.astype(np.float32)) <= halves, axis=1))


def _tapered(images: Any, widths: Sequence[int]) -> Any:
    """k-space times (1 + cos(π |k| / half the width)) / 2, and 0 beyond half the width."""
    xp = namespace(images)
    axes = tuple(range(1, images.ndim))
    squares = xp.zeros((), np.float32)
    for axis, (n, width) in enumerate(zip(images.shape[1:], widths, strict=True)):
        share = (xp.arange(n, dtype=np.float32) - n // 2) * np.float32(2 / width)
        squares = squares + (share**2).reshape((-1,) + (1,) * (images.ndim - 2 - axis))
    radius = xp.minimum(xp.sqrt(squares), np.float32(1))
    window = np.float32(0.5) + np.float32(0.5) * xp.cos(np.float32(np.pi) * radius)
    # The inverse transform by the forward one: conj F conj, divided by the number of pixels.
    back = centred_fft((centred_fft(images, axes) * window).conj(), axes).conj()
    return (back / np.float32(math.prod(images.shape[1:]))).astype(np.complex64, copy=False)


def reference_mixture(images: Any, maps: Any) -> NDArray[np.complex64]:
    """The unit mixture of coils (coils,) that defines the maps' phase; it vanishes nowhere in the object.

    At a zero the phase would wind around a point and maps could not be interpolated there. Starting from the strongest
    mixture, it maximises the geometric mean of its sensitivity over the pixels with signal.

    images, maps : complex (coils, *coarse shape); Σ |map|² = 1
    """
    flat = to_host(images).reshape(images.shape[0], -1).astype(np.complex128)
    energy = (np.abs(flat) ** 2).sum(axis=0)
    _, vectors = np.linalg.eigh(flat @ flat.conj().T)
    mixture = vectors[:, -1]
    # An eigenvector's phase is arbitrary and differs between libraries.
    largest = mixture[np.argmax(np.abs(mixture))]
    mixture = mixture * (largest.conj() / abs(largest))
    shown = to_host(maps).reshape(len(flat), -1)[:, energy > _SIGNAL * energy.max()].astype(np.complex128)
    for _ in range(_CLIMBS):
        if shown.shape[1] == 0:
            break
        seen = mixture.conj() @ shown
        mixture = (shown * (seen.conj() / np.maximum(np.abs(seen) ** 2, _NEAR_ZERO))).sum(axis=1)
        mixture /= np.linalg.norm(mixture)
    return np.asarray(mixture, np.complex64)


def with_reference_phase(maps: Any, reference: NDArray[np.complex64]) -> Any:
    """Maps (coils, ...) with the phase of each pixel chosen so that the reference mixture is real and positive."""
    xp = namespace(maps)
    mixture = xp.tensordot(xp.asarray(reference.conj()), maps, axes=1)
    size = xp.abs(mixture)
    turn = xp.where(size > 0, mixture.conj() / xp.maximum(size, np.float32(1e-30)), np.float32(1))
    return (maps * turn).astype(np.complex64, copy=False)


def refined(coarse: Any, shape: Sequence[int]) -> Any:
    """Smooth values on the coarse grid (..., *coarse), complex64 or float32, interpolated to the fine one (..., *shape)
    by cubics, axis by axis.

    Both grids cover the same field of view, with index n // 2 in its centre.
    """
    xp = namespace(coarse)
    found = xp.ascontiguousarray(coarse)
    # The last axis first, while the others are short; nothing is transposed, and matrices stay real.
    for axis in reversed(range(coarse.ndim - len(shape), coarse.ndim)):
        size, n = found.shape[axis], shape[axis - coarse.ndim]
        if size == n:
            continue
        matrix = xp.asarray(_interpolation(size, n))
        before, after = found.shape[:axis], found.shape[axis + 1 :]
        if after:
            lines = found.reshape(math.prod(before), size, math.prod(after)).view(np.float32)
            found = xp.ascontiguousarray(xp.matmul(matrix, lines)).view(coarse.dtype).reshape(*before, n, *after)
        else:
            found = xp.matmul(found, matrix.T.astype(coarse.dtype))
    return found


@functools.cache
def _interpolation(coarse: int, fine: int) -> NDArray[np.float32]:
    """(fine, coarse): cubic convolution with a = −1/2 (Keys, IEEE Trans. Acoust. 29, 1981); edges repeat."""
    places = (np.arange(fine) - fine // 2) * (coarse / fine) + coarse // 2
    first = np.floor(places).astype(int)
    t = places - first
    shares = np.stack(
        [
            ((-0.5 * t + 1) * t - 0.5) * t,
            (1.5 * t - 2.5) * t * t + 1,
            ((-1.5 * t + 2) * t + 0.5) * t,
            (0.5 * t - 0.5) * t * t,
        ]
    )
    matrix = np.zeros((fine, coarse))
    for offset in range(4):
        np.add.at(matrix, (np.arange(fine), np.clip(first - 1 + offset, 0, coarse - 1)), shares[offset])
    return matrix.astype(np.float32)
