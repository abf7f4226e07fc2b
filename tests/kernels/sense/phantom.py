"""An analytic phantom: ellipses with k-space in closed form, seen by coils made of a few plane waves.

A coil Σ_q a_q e^{2πi κ_q·r/N} shifts k-space by κ_q, so that its samples are exact too, for any trajectory and without
any pixels. Lengths are shares of the field of view.
"""

from __future__ import annotations

import numpy as np
from scipy.special import j1

# Intensity, middle x and y, semi-axes, angle in radians.
ELLIPSES = (
    (1.0, 0.0, 0.0, 0.36, 0.43, 0.0),
    (-0.5, 0.02, -0.03, 0.31, 0.37, 0.1),
    (0.35, 0.11, 0.05, 0.08, 0.16, -0.4),
    (0.45, -0.13, 0.02, 0.1, 0.07, 0.7),
    (0.6, 0.03, -0.2, 0.06, 0.04, 0.0),
)
_WAVES = np.array([(0.0, 0.0), (0.45, 0.0), (0.0, 0.45), (-0.45, 0.0), (0.0, -0.45), (0.4, 0.4), (-0.4, 0.4)])


def waves(coils, seed=5):
    """Amplitudes (coils, waves), complex."""
    rng = np.random.default_rng(seed)
    amplitudes = rng.normal(size=(coils, len(_WAVES))) + 1j * rng.normal(size=(coils, len(_WAVES)))
    amplitudes[:, 0] *= 2
    return amplitudes / np.linalg.norm(amplitudes, axis=1, keepdims=True)


def coil_maps(coils, n, seed=5):
    """complex128 (coils, n, n), by the closed form."""
    r = (np.arange(n) - n // 2) / n
    phase = np.exp(2j * np.pi * (_WAVES[:, 0, None, None] * r[:, None] + _WAVES[:, 1, None, None] * r))
    return np.tensordot(waves(coils, seed), phase, axes=1)


def image(n, finer=8):
    """float64 (n, n): the mean of the phantom over each pixel."""
    r = (np.arange(n * finer) - (n // 2) * finer + 0.5) / (n * finer) - 0.5 / n
    found = np.zeros((n * finer, n * finer))
    for value, x, y, a, b, angle in ELLIPSES:
        dx, dy = r[:, None] - x, r[None, :] - y
        along, across = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
        found += value * ((along / a) ** 2 + (across / b) ** 2 <= 1)
    return found.reshape(n, finer, n, finer).mean(axis=(1, 3))


def object_samples(points):
    """∫ ρ(r) e^{−2πi k·r} dr over the field of view as unit square, (m,) complex128, k (m, 2) in cycles per FOV."""
    found = np.zeros(len(points), np.complex128)
    for value, x, y, a, b, angle in ELLIPSES:
        kx, ky = points[:, 0], points[:, 1]
        along, across = kx * np.cos(angle) + ky * np.sin(angle), ky * np.cos(angle) - kx * np.sin(angle)
        rho = np.hypot(a * along, b * across)
        near = rho < 1e-9
        size = np.where(near, np.pi * a * b, a * b * j1(2 * np.pi * rho) / np.where(near, 1, rho))
        found += value * size * np.exp(-2j * np.pi * (kx * x + ky * y))
    return found


def samples(points, coils, n, seed=5):
    """complex128 (coils, m) as `kernels.nufft` scales them: the sum over n² pixels, not the integral."""
    shifted = np.stack([object_samples(points - wave) for wave in _WAVES])
    return waves(coils, seed) @ shifted * n**2


def radial(spokes, count, n):
    """(spokes, count, 2) in cycles per FOV: golden angles, |k| up to n / 2."""
    angle = np.arange(spokes) * np.pi * (np.sqrt(5) - 1) / 2
    radius = (np.arange(count) - count // 2) * (n / count)
    return radius[None, :, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)[:, None, :]


def spiral(interleaves, count, n):
    """(interleaves, count, 2) in cycles per FOV: Archimedean, from the centre to n / 2."""
    t = np.linspace(0, 1, count)
    turns = n / 2 / interleaves
    turn = 2 * np.pi * turns * t + 2 * np.pi * np.arange(interleaves)[:, None] / interleaves
    return (n / 2 * t)[None, :, None] * np.stack([np.cos(turn), np.sin(turn)], axis=2)


def definition(images, points):
    """Σ_r image(r) e^{−2πi k·r/N}: complex128 (..., m) of (..., *shape), the sum itself."""
    values = np.asarray(images, np.complex128)
    dimensions = points.shape[1]
    letters = "xyz"[:dimensions]
    factors = [
        np.exp(-2j * np.pi * np.outer(points[:, axis], np.arange(n) - n // 2) / n)
        for axis, n in enumerate(values.shape[-dimensions:])
    ]
    return np.einsum(
        f"...{letters},{','.join('m' + letter for letter in letters)}->...m", values, *factors, optimize=True
    )


def random_complex(shape, seed):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)


def normalised_error(got, expected):
    """‖got − expected‖ / ‖expected‖; NaN stays NaN."""
    return float(np.linalg.norm(np.asarray(got) - expected) / np.linalg.norm(expected))
