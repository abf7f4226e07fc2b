"""Density compensation: the share of k-space that each sample represents.

All weights are float32, finite, at least 0, and add up to 1: with samples s_m of an image ρ the weighted adjoint
Σ w_m s_m e^{+2πi k_m·r/N} then has the scale of ρ, and the normal operator's diagonal is 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.nufft import Nufft
from kernels.runtime.arrays import namespace
from kernels.runtime.threads import check_wanted

# Relative error of the convolutions: images change by about as much between devices.
_EPS = 1e-4
# The transform's period exceeds the trajectory's range by this many cycles per field of view, so that samples at
# opposite edges of k-space are not neighbours.
_APART = 8


def pipe_menon(trajectory: Any, shape: tuple[int, ...], *, iterations: int = 10, workers: int | None = None) -> Any:
    """Weights w that make the sampling, convolved with a kernel, uniform: iterates w ← w / (w ∗ kernel).

    trajectory : (m, dimensions) in cycles per field of view, NumPy or CuPy
    shape      : the image's pixels along each axis
    iterations : after 10 the sums at spokes' or spirals' samples vary by less than 1 % (standard deviation)
    workers    : CPU threads; default one per core

    The kernel is a Gaussian, as wide as the field of view allows (its transform falls to e⁻³ at the edges), so that a
    convolution is one adjoint and one forward transform. Samples at the rim of k-space, without neighbours beyond, get
    up to 50 % more weight. Returns float32 (m,), on the trajectory's device.
    Source: Pipe, Menon, "Sampling density compensation in MRI: rationale and an iterative numerical solution", Magn.
    Reson. Med. 41 (1999).
    """
    xp = namespace(trajectory)
    from scipy.fft import next_fast_len  # takes a fifth of a second to import

    grid = tuple(int(next_fast_len(n + _APART)) for n in shape)
    transform = Nufft(trajectory, grid, eps=_EPS, coils=1, workers=workers)
    window = _window(xp, grid)
    weights = xp.ones(trajectory.shape[0], np.float32)
    for _ in range(iterations):
        check_wanted()
        image = transform.adjoint(weights.astype(np.complex64))
        convolved = xp.abs(transform.forward(image * window))
        # Never near 0, since each sample's own kernel is 1 at its position.
        weights = weights / xp.maximum(convolved, np.float32(1e-20))
        weights /= xp.max(weights)
    return _normalised(weights)


def ramp(trajectory: Any) -> Any:
    """|k| in two dimensions, |k|² in three: the weights of straight, evenly spaced spokes through the centre.

    trajectory : (spokes, samples, dimensions) in any unit, NumPy or CuPy. A sample at the centre gets its share of the
    disc (ball) of half a step's radius: a quarter of a step (a twelfth of its square).

    Returns float32 (spokes, samples). Raises ValueError if the spokes are not straight lines through the centre.
    Source: the Jacobian of polar coordinates; Bernstein, King, Zhou, "Handbook of MRI Pulse Sequences" (2004), 13.2.
    """
    xp = namespace(trajectory)
    if trajectory.ndim != 3 or trajectory.shape[2] not in (2, 3) or trajectory.shape[1] < 2:
        raise ValueError(f"ramp weights take spokes (spokes, samples, 2 or 3), not {tuple(trajectory.shape)}")
    points = trajectory.astype(np.float64)
    radius = xp.sqrt(xp.sum(points**2, axis=2))
    step = xp.sqrt(xp.sum((points[:, 1:] - points[:, :-1]) ** 2, axis=2))
    reach = float(radius.max())
    direction = points[:, -1] - points[:, 0]
    direction = direction / xp.maximum(xp.sqrt(xp.sum(direction**2, axis=1, keepdims=True)), 1e-300)
    along = xp.einsum("sid,sd->si", points, direction)
    aside = xp.sqrt(xp.maximum(radius**2 - along**2, 0))
    if not float(aside.max()) <= 0.02 * reach:
        raise ValueError(
            "ramp weights take straight spokes through the centre of k-space; this trajectory has none: use pipe-menon"
        )
    spacing = xp.median(step)
    if trajectory.shape[2] == 2:
        weights = xp.maximum(radius, spacing / 4)
    else:
        weights = xp.maximum(radius**2, spacing**2 / 12)
    return _normalised(weights)


def even(count: int, like: Any) -> Any:
    """Equal weights for `count` samples, on the device of `like`."""
    return namespace(like).full(count, 1.0 / count, np.float32)


def given(weights: Any) -> Any:
    """Weights from elsewhere, scaled to add up to 1. Raises ValueError unless they are finite, ≥ 0 and not all 0."""
    xp = namespace(weights)
    if not bool(xp.isfinite(weights).all()) or bool((weights < 0).any()) or not bool((weights > 0).any()):
        raise ValueError("density weights must be finite and at least 0, and some above 0")
    return _normalised(weights)


def _normalised(weights: Any) -> Any:
    xp = namespace(weights)
    return (weights / xp.sum(weights, dtype=np.float64)).astype(np.float32)


def _window(xp: Any, shape: tuple[int, ...]) -> Any:
    """The kernel's transform: 1 at the image's centre, e⁻³ at half the field of view along each axis."""
    product = xp.ones((), np.float32)
    for axis, n in enumerate(shape):
        away = (xp.arange(n, dtype=np.float32) - n // 2) / np.float32(n / 2)
        product = product * xp.exp(np.float32(-3) * away**2).reshape((-1,) + (1,) * (len(shape) - 1 - axis))
    return product
