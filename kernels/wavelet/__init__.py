"""Orthonormal wavelet transforms of complex images, decimated and periodic, on NumPy (CPU) and CuPy arrays (CUDA).

    forward   coefficients = Ψ image      inverse   image = Ψᵀ coefficients      Ψᵀ Ψ = Ψ Ψᵀ = 1 for every size

Images are complex64 (on the CPU complex128 too) [..., *shape] with 1 to 3 axes in `shape`; leading axes are batches.
Coefficients have the image's shape: along each axis the approximation comes first, then the details, finest last. A
level halves an axis if half of it has 16 samples or more; the first level halves every axis of two or more. The last
sample of an odd line passes to the approximation unchanged, which keeps the transform orthonormal.

Source: Daubechies, "Orthonormal bases of compactly supported wavelets", Comm. Pure Appl. Math. 41 (1988); Mallat, IEEE
Trans. Pattern Anal. 11 (1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.runtime.arrays import check_array, check_out
from kernels.wavelet.levels import Level, levels_of

__all__ = ["FAMILIES", "Wavelet", "low_pass"]

FAMILIES = {"haar": 1, "db2": 2, "db3": 3, "db4": 4}  # and their vanishing moments


@cache
def low_pass(family: str) -> NDArray[np.float64]:
    """The scaling filter h, 2 × moments taps of unit norm, with its sum √2. KeyError for an unknown family."""
    moments = FAMILIES[family]
    # Daubechies' polynomial in y = (2 − z − 1/z) / 4; the roots inside the unit circle give the shortest filter.
    binomials = [math.comb(moments - 1 + k, k) for k in range(moments)]
    filtered = np.ones(1)
    for root in np.roots(binomials[::-1]):
        both = np.roots([1, 4 * root - 2, 1])
        filtered = np.convolve(filtered, [1, -both[np.argmin(np.abs(both))]])
    for _ in range(moments):
        filtered = np.convolve(filtered, [1, 1])
    taps = np.real(filtered)
    return np.asarray(taps * (math.sqrt(2) / taps.sum()), np.float64)


class Wavelet:
    """The transform of one shape and family: "haar", or Daubechies' "db2", "db3" and "db4".

    Raises ValueError for another family, or a shape that is not 1 to 3 sizes of 1 or more.
    """

    def __init__(self, shape: Sequence[int], family: str = "db2") -> None:
        if family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {family!r}")
        if not 1 <= len(shape) <= 3 or min(shape) < 1:
            raise ValueError(f"shape must be 1 to 3 sizes of 1 or more; got {tuple(shape)}")
        self.shape, self.family = tuple(int(n) for n in shape), family
        x, y, z = (1,) * (3 - len(self.shape)) + self.shape
        self._three = (x, y, z)
        self._levels: tuple[Level, ...] = levels_of(self._three)

    def forward(self, image: Any, *, shift: Any = None, threshold: Any = None, out: Any = None) -> Any:
        """The coefficients.

        shift     : whole numbers, one for each axis of `shape`, NumPy's or on CUDA an int32 device array; the image is
                    rotated by −shift first
        threshold : shrink each coefficient's magnitude by this, to 0 at least; a number, or a 0-d array of the device
        out       : array for the result, C-contiguous, apart from the image
        """
        image = self._checked("image", image)
        check_out(out, image.shape, image.dtype, apart_from={"image": image})
        out = _empty_like(image) if out is None else out
        self._body(image).forward(self._flat(image), self._flat(out), self._levels, self._lags(shift), threshold)
        return out

    def inverse(self, coefficients: Any, *, shift: Any = None, out: Any = None, overwrite: bool = False) -> Any:
        """The image, rotated by `shift` at the end: the inverse of `forward` with the same shift.

        overwrite : the coefficients may be used as work space
        """
        given = self._checked("coefficients", coefficients)
        check_out(out, given.shape, given.dtype, apart_from={"coefficients": given})
        out = _empty_like(given) if out is None else out
        work = given if overwrite else given.copy()
        self._body(given).inverse(self._flat(work), self._flat(out), self._levels, self._lags(shift))
        return out

    def _body(self, array: Any) -> Any:
        if isinstance(array, np.ndarray):
            from kernels.wavelet import cpu

            return cpu.Body(low_pass(self.family), array.real.dtype)
        from kernels.wavelet import cuda

        return cuda.Body(low_pass(self.family), array)

    def _checked(self, name: str, array: Any) -> Any:
        check_array(name, array)
        allowed = ("complex64", "complex128") if isinstance(array, np.ndarray) else ("complex64",)
        if array.dtype.name not in allowed or array.shape[-len(self.shape) :] != self.shape:
            raise ValueError(
                f"{name} must be {' or '.join(allowed)} [..., {', '.join(map(str, self.shape))}]; got {array.dtype} "
                f"{array.shape}"
            )
        return array if array.flags.c_contiguous else array.copy(order="C")

    def _flat(self, array: Any) -> Any:
        return array.reshape(-1, *self._three)

    def _lags(self, shift: Any) -> Any:
        """Three numbers on the host, or a device array of as many as there are axes."""
        if shift is None or not isinstance(shift, np.ndarray | tuple | list):
            return shift
        return (0,) * (3 - len(self.shape)) + tuple(int(lag) for lag in shift)


def _empty_like(array: Any) -> Any:
    from sys import modules

    return modules[type(array).__module__.partition(".")[0]].empty(array.shape, array.dtype)
