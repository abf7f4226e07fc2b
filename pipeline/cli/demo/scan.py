"""Raw MRI data: a head of ellipses on a radial trajectory, with k-space in closed form.

The transform of an ellipse is a Bessel function. A coil sensitivity that is a sum of plane waves only shifts it, so every
sample is exact, without pixels in between; then noise is added.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import j1

from pipeline.storage.partial import PartialFile, behind_link

# Brightness, middle, semi-axes (shares of the field of view) and angle: scalp, skull, brain, ventricles, spots.
ELLIPSES = (
    (0.9, 0.00, 0.00, 0.42, 0.34, 0.0),
    (-0.7, 0.00, 0.00, 0.40, 0.32, 0.0),
    (0.4, 0.00, 0.00, 0.37, 0.29, 0.0),
    (-0.3, 0.02, 0.08, 0.15, 0.04, 0.25),
    (-0.3, 0.02, -0.08, 0.15, 0.04, -0.25),
    (0.25, -0.18, 0.00, 0.07, 0.09, 0.0),
    (0.35, 0.24, 0.05, 0.022, 0.022, 0.0),
    (0.35, 0.24, -0.03, 0.015, 0.015, 0.0),
    (-0.2, -0.27, 0.06, 0.03, 0.05, 0.5),
)
# Each coil is bright on one side of the head: its sensitivity is 1 plus this much of a wave across the field of view.
SLOPE = 0.45
FOV_MM = (240.0, 240.0, 5.0)
# Standard deviation of the noise relative to the samples' root mean square.
NOISE = 0.02


def make_scan(path: Path, pixels: int, spokes: int, coils: int, seed: int) -> None:
    """Write `spokes` radial readouts of twice as many samples as the image has pixels, golden angles apart, as npz."""
    samples = 2 * pixels
    angle = np.arange(spokes) * np.pi * (np.sqrt(5) - 1) / 2
    radius = (np.arange(samples) - pixels) / samples  # cycles per pixel: -1/2 … 1/2
    trajectory = radius[None, :, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)[:, None, :]
    kspace = np.stack([_seen(pixels * trajectory, 2 * np.pi * coil / coils, pixels) for coil in range(coils)])
    generator = np.random.default_rng(seed)
    sigma = NOISE * np.sqrt(np.mean(np.abs(kspace) ** 2) / 2)
    kspace += sigma * (generator.normal(size=kspace.shape) + 1j * generator.normal(size=kspace.shape))
    buffer = io.BytesIO()
    np.savez(
        buffer, kspace=kspace.astype(np.complex64), traj=trajectory.astype(np.float32), units="cycles/pixel",
        matrix=np.array([pixels, pixels]), fov_mm=np.array(FOV_MM),
    )  # fmt: skip
    file = PartialFile(behind_link(path), len(buffer.getvalue()))
    try:
        file.write_at(0, buffer.getvalue())
        file.publish()
    finally:
        file.discard()


def _seen(k: NDArray[np.float64], direction: float, pixels: int) -> NDArray[np.complex128]:
    """What a coil at that side of the head receives at k (…, 2) in cycles per field of view, summed over the pixels."""
    wave = 0.5 * np.array([np.cos(direction), np.sin(direction)])
    # 1 + SLOPE sin(2π wave·r): bright where the sine is positive.
    shifted = (_head(k - wave) - _head(k + wave)) / 2j
    return (_head(k) + SLOPE * shifted) * pixels**2


def _head(k: NDArray[np.float64]) -> NDArray[np.complex128]:
    """∫ brightness(r) e^{-2πi k·r} dr over the field of view as unit square."""
    found = np.zeros(k.shape[:-1], np.complex128)
    for brightness, x, y, a, b, angle in ELLIPSES:
        along = a * (k[..., 0] * np.cos(angle) + k[..., 1] * np.sin(angle))
        across = b * (k[..., 1] * np.cos(angle) - k[..., 0] * np.sin(angle))
        rho = np.maximum(np.hypot(along, across), 1e-9)
        found += brightness * a * b * j1(2 * np.pi * rho) / rho * np.exp(-2j * np.pi * (k[..., 0] * x + k[..., 1] * y))
    return found
