"""Reductions of a whole array to one value, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    total, minimum, maximum, argmax, mean_variance

Input  : array of any shape and strides; int8 … int64, uint8 … uint64, float32, float64; read in C order.
Results: zero-dimensional arrays (mean_variance: [2]) of the input's library. total: int64, uint64 (both modulo 2⁶⁴) or
         float64; minimum and maximum: the input's dtype; argmax: int64; mean_variance: float64.
Floats : float32 is summed in float64. Infinities and NaNs propagate as in IEEE arithmetic. If there is a NaN, it is the
         minimum and the maximum, and argmax is the index of the first one.
Order  : depends on the number of values and their dtype alone. The bits do not depend on the grid, the stream, the
         number of workers or the device (except for the payload of a NaN, and the sign of a zero minimum or maximum of
         zeros of both signs).
Moments: Welford's algorithm down each column of a tile, Chan's between columns and tiles; float64.

Sources: Harris, "Optimizing parallel reduction in CUDA" (NVIDIA, 2007); Welford, "Note on a method for calculating
corrected sums of squares and products", Technometrics 4 (1962); Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_workers

__all__ = ["DTYPES", "OPERATIONS", "argmax", "maximum", "mean_variance", "minimum", "total"]

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
OPERATIONS = ("total", "minimum", "maximum", "argmax", "mean_variance")


def total(values: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """The sum; 0 for an empty array.

    values  : NumPy or CuPy array of one of DTYPES
    workers : CPU threads; default one per core
    stream  : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Raises ValueError or TypeError; the message names the parameter.
    """
    return _reduced("total", values, 0, workers, stream)


def minimum(values: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """The smallest value, or NaN if there is one; parameters as for `total`. Raises ValueError for an empty array."""
    return _reduced("minimum", values, 0, workers, stream)


def maximum(values: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """The largest value, or NaN if there is one; parameters as for `total`. Raises ValueError for an empty array."""
    return _reduced("maximum", values, 0, workers, stream)


def argmax(values: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """The first index, in C order, of the largest value or of a NaN; parameters as for `total`.

    Raises ValueError for an empty array.
    """
    return _reduced("argmax", values, 0, workers, stream)


def mean_variance(values: Any, *, ddof: int = 0, workers: int | None = None, stream: Any = None) -> Any:
    """[mean, variance]: the variance is the sum of squared differences from the mean over n - ddof.

    Parameters as for `total`. Raises ValueError unless there are more than `ddof` values.
    """
    if isinstance(ddof, bool) or not isinstance(ddof, int) or ddof < 0:
        raise ValueError(f"ddof must be a whole number, 0 or more; got {ddof!r}")
    return _reduced("mean_variance", values, ddof, workers, stream)


def _reduced(operation: str, values: Any, ddof: int, workers: int | None, stream: Any) -> Any:
    check_array("values", values)
    if values.dtype.newbyteorder("=").name not in DTYPES:
        raise TypeError(f"values has dtype {values.dtype}; supported are {', '.join(DTYPES)}")
    if operation != "total" and values.size <= ddof:
        raise ValueError(f"values must have more than {ddof} elements for {operation}; got shape {values.shape}")
    check_workers(workers)
    if isinstance(values, np.ndarray):
        from kernels.classic.reduce import cpu

        return cpu.reduced(operation, values, ddof, workers=workers)
    from kernels.classic.reduce import cuda

    return cuda.reduced(operation, values, ddof, stream=stream)
