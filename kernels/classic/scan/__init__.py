"""Prefix sums of one-dimensional arrays, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    inclusive   out[i] = a[0] + … + a[i]
    exclusive   out[i] = a[0] + … + a[i - 1],  out[0] = 0
    segmented   either, starting again at each i with heads[i] != 0

Input   : array [n] of any stride; int32, int64, uint32, uint64, float32, float64.
Result  : array [n] of the same library and dtype. Integer sums are modulo 2³² or 2⁶⁴.
Floats  : sums are float64, rounded once to the result: with s_i = |a[0]| + … + |a[i]| (of the segment) the error is at
          most 2⁻²⁴ |out[i]| + 2⁻⁴⁵ s_i for float32 and 2⁻⁴⁵ s_i for float64. Infinities and NaNs propagate as in
          addition.
Order   : fixed: on one kind of device the bits depend on the values alone, not on the grid, the order in which blocks
          run or the number of workers.

Source: Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back" (NVIDIA, 2016); here one block
does the look-back for all tiles, in a fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out, check_workers

__all__ = ["DTYPES", "exclusive", "inclusive", "segmented"]

DTYPES = ("int32", "int64", "uint32", "uint64", "float32", "float64")
HEAD_DTYPES = ("bool", "uint8", "int8")


def inclusive(values: Any, *, out: Any = None, workers: int | None = None, stream: Any = None) -> Any:
    """Sums up to and including each value.

    values  : NumPy or CuPy array [n] of one of DTYPES
    out     : contiguous array [n] of the same library and dtype; may be `values` itself, but must not overlap it
              otherwise
    workers : CPU threads; default one per core
    stream  : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Raises ValueError or TypeError; the message names the parameter.
    """
    return _scanned(values, None, False, out, workers, stream)


def exclusive(values: Any, *, out: Any = None, workers: int | None = None, stream: Any = None) -> Any:
    """Sums of the values before each value; parameters as for `inclusive`."""
    return _scanned(values, None, True, out, workers, stream)


def segmented(
    values: Any,
    heads: Any,
    *,
    exclusive: bool = False,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """Sums that start again at every head.

    heads     : array [n] of the values' library; bool, uint8 or int8: nonzero where a segment begins. (The first value
                always begins one.)
    exclusive : leave out the value itself; a segment's first sum is 0

    Other parameters as for `inclusive`.
    """
    check_array("values", values)
    kind = np.ndarray if isinstance(values, np.ndarray) else type(values)
    if not isinstance(heads, kind):
        raise TypeError(f"heads must be an array of the values' kind, {kind.__name__}; got {type(heads).__name__}")
    check_array("heads", heads)
    if heads.dtype.name not in HEAD_DTYPES:
        raise TypeError(f"heads has dtype {heads.dtype}; supported are {', '.join(HEAD_DTYPES)}")
    if heads.shape != values.shape:
        raise ValueError(f"heads must have the shape of values, {values.shape}; got {heads.shape}")
    return _scanned(values, heads, exclusive, out, workers, stream)


def _scanned(values: Any, heads: Any, without: bool, out: Any, workers: int | None, stream: Any) -> Any:
    check_array("values", values)
    if values.dtype.newbyteorder("=").name not in DTYPES:
        raise TypeError(f"values has dtype {values.dtype}; supported are {', '.join(DTYPES)}")
    if values.ndim != 1:
        raise ValueError(f"values must have one axis; got shape {values.shape}")
    check_workers(workers)
    native = values.dtype.newbyteorder("=")
    check_out(out, values.shape, native, apart_from={"values": values, "heads": heads}, may_be="values")
    if isinstance(values, np.ndarray):
        from kernels.classic.scan import cpu

        return cpu.scanned(values, heads, without, out, workers=workers)
    from kernels.classic.scan import cuda

    return cuda.scanned(values, heads, without, out, stream=stream)
