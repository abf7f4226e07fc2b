"""One interface to NumPy and CuPy arrays: host copies, inner products and centred Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.arrays import namespace


def to_host(array: Any) -> NDArray[Any]:
    """The array as a NumPy array; waits for the device if it is CuPy's."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.get())


def inner_product(one: Any, other: Any) -> Any:
    """The real part of the sum of conj(one) × other, a 0-d array on the arrays' device.

    NumPy sums in float64. CuPy's sum is a float32 tree in one launch.
    """
    xp = namespace(one)
    if xp is np:
        parts = (array.reshape(-1).view(array.real.dtype) for array in (one, other))
        return np.einsum("i,i->", *parts, dtype=np.float64)
    return xp.vdot(one, other).real


def inner_products(one: Any, other: Any) -> Any:
    """`inner_product` for each index of the first axis: float64 (n, 1 …), with as many axes as the arrays."""
    xp = namespace(one)
    products = one.real * other.real + one.imag * other.imag
    return xp.sum(products, axis=tuple(range(1, one.ndim)), keepdims=True, dtype=np.float64)


def centred_fft(images: Any, axes: Sequence[int]) -> Any:
    """The unscaled discrete Fourier transform with index n // 2 as the origin on both sides, complex64."""
    xp = namespace(images)
    shifted = xp.fft.ifftshift(images, axes=axes)
    from scipy import fft as scipy_fft  # takes a fifth of a second to import

    transformed = scipy_fft.fftn(shifted, axes=axes) if xp is np else xp.fft.fftn(shifted, axes=axes)
    return xp.fft.fftshift(transformed, axes=axes).astype(np.complex64, copy=False)
