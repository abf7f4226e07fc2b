"""Reductions of all values of an array to one, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    total, minimum, maximum, argmax, mean_variance

Input  : array of any shape and strides; int8 … int64, uint8 … uint64, float32, float64. Taken in C order.
Results: arrays without axes (mean_variance: [2]) of the input's kind. total: int64, uint64 (both modulo 2⁶⁴) or
         float64; minimum and maximum: the input's dtype; argmax: int64; mean_variance: float64.
Floats : float32 is summed in float64. An infinity or a NaN goes where arithmetic takes it. To minimum, maximum and
         argmax a NaN is beyond every number: it is the result, or the first one's place is.
Order  : fixed by the number of values and their dtype alone. The bits depend neither on the grid, the stream or the
         number of workers, nor on whether a CPU or a GPU computes (but for which NaN, and for the sign of a zero that
         is the least or the largest of both kinds).
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
    """The sum; 0 of no values.

    values  : NumPy or CuPy array of one of DTYPES
    workers : CPU threads; default one a core
    stream  : CUDA: the stream to launch on; default CuPy's current one. Nothing waits for the device.

    Raises ValueError or TypeError, in one line that names the parameter.
    """
    return _reduced("total", values, 0, workers, stream)


def minimum(values: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """The smallest value, or NaN where there is one; parameters as for `total`. ValueError of no values."""
    return _reduced("minimum", values, 0, workers, stream)


def maximum(values: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """The largest value, or NaN where there is one; parameters as for `total`. ValueError of no values."""
    return _reduced("maximum", values, 0, workers, stream)


def argmax(values: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """The first index, in C order, of the largest value or of a NaN; parameters as for `total`. ValueError where there
    are no values."""
    return _reduced("argmax", values, 0, workers, stream)


def mean_variance(values: Any, *, ddof: int = 0, workers: int | None = None, stream: Any = None) -> Any:
    """[mean, variance]: the variance is the sum of squared differences from the mean over n - ddof.

    Parameters as for `total`. ValueError where there are not more than `ddof` values.
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
