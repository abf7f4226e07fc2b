"""The exact transforms of NumPy arrays (CPU) and CuPy arrays (CUDA): every sample with every pixel.

Parameters are not validated here but in kernels.nufft.

    forward   s_m    = sum over r of image(r) exp(−2πi k_m·r/N)          r = index − N // 2 on each axis
    adjoint   img(r) = sum over m of w_m s_m exp(+2πi k_m·r/N)

The exponential has period N in k: samples beyond ±N/2 are folded back exactly. Values must be finite.

Precision on CUDA, ‖result − definition‖ / ‖definition‖ for random data, for any number of samples:
    terms = 1   fp16 factors                                              3e-4
    terms = 3   each factor as two fp16 numbers, three of four products   5e-6
For any data a single value is within four times that of the 1-norm of its sum's input.
Each coil is scaled separately; its samples keep their relative precision down to 2⁻²⁷ of its largest. Fixed-point
phases add N × 2e-10: 2e-7 at N = 1024. Below compute capability 8.0 (tensor cores for fp16) the sums are float32 for
either number of terms, with sines and cosines from the special-function unit. On the CPU they have the samples' own
precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

__all__ = ["PRECISIONS", "exact_adjoint", "exact_forward", "exact_point_spread"]

PRECISIONS = {1: 3e-4, 3: 5e-6}  # by number of terms


def exact_forward(images: Any, trajectory: Any, *, terms: Literal[1, 3] = 3, stream: Any = None) -> Any:
    """Samples [..., M] of images [..., *shape] along a trajectory [M, d], d = 2 or 3, in cycles per field of view."""
    points, axes = trajectory.shape
    leading, shape = images.shape[:-axes], images.shape[-axes:]
    if isinstance(images, np.ndarray):
        from kernels.nufft.exact import cpu

        result = np.empty((*leading, points), images.dtype)
        flat = images.reshape(math.prod(leading), *shape)
        cpu.forward(trajectory.astype(np.float64), flat, result.reshape(len(flat), points))
        return result
    from kernels.nufft.exact import cuda

    return cuda.forward(images, trajectory, terms, stream)


def exact_adjoint(
    samples: Any,
    trajectory: Any,
    shape: Sequence[int],
    *,
    weights: Any = None,
    terms: Literal[1, 3] = 3,
    stream: Any = None,
) -> Any:
    """Images [..., *shape] of samples [..., M] times real weights [M] along a trajectory [M, d] in cycles per FOV."""
    leading, points = samples.shape[:-1], samples.shape[-1]
    if isinstance(samples, np.ndarray):
        from kernels.nufft.exact import cpu

        result = np.empty((*leading, *shape), samples.dtype)
        flat = samples.reshape(math.prod(leading), points)
        if weights is not None:
            flat = flat * weights.astype(flat.real.dtype)
        cpu.adjoint(trajectory.astype(np.float64), flat, result.reshape(len(flat), *shape))
        return result
    from kernels.nufft.exact import cuda

    return cuda.adjoint(samples, trajectory, tuple(shape), weights, terms, stream)


def exact_point_spread(
    trajectory: Any, shape: Sequence[int], *, weights: Any, terms: Literal[1, 3] = 3, stream: Any = None
) -> Any:
    """Q: the adjoint of the weights alone on a grid of twice the size (r from −N to N − 1), complex64 [*2 shape].

    The normal operator with these weights is the convolution with Q.
    """
    doubled = tuple(2 * size for size in shape)
    ones = weights.astype(np.complex64)
    return exact_adjoint(ones, 2 * trajectory, doubled, terms=terms, stream=stream)
