"""Transposes of matrices and batches of matrices, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    transpose(a)[..., j, i] = a[..., i, j]

Elements : any dtype of 1 to 16 bytes; bits are copied unchanged. (CuPy's own dtypes have 1, 2, 4, 8 or 16 bytes.)
Input    : array [..., rows, columns] of any strides. On CUDA there may be gaps between rows and between matrices, as in
           a slice of a larger array; other layouts are copied first.
Result   : array [..., columns, rows], C-contiguous, of the input's dtype and library.

Source: Ruetsch and Micikevicius, "Optimizing matrix transpose in CUDA" (NVIDIA, 2009).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out, check_workers

__all__ = ["MAX_ITEMSIZE", "transpose"]

MAX_ITEMSIZE = 16


def transpose(array: Any, *, out: Any = None, workers: int | None = None, stream: Any = None) -> Any:
    """The array with its last two axes exchanged, as a new array.

    array   : NumPy or CuPy array [..., rows, columns], two axes or more, any strides
    out     : C-contiguous array [..., columns, rows] of the same library and dtype; must not share memory with `array`
    workers : CPU threads; default one per core
    stream  : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Raises ValueError or TypeError; the message names the parameter.
    """
    check_array("array", array)
    if array.dtype.hasobject or not 1 <= array.dtype.itemsize <= MAX_ITEMSIZE:
        raise TypeError(f"array has dtype {array.dtype}; elements must be of 1 to {MAX_ITEMSIZE} bytes")
    if array.ndim < 2:
        raise ValueError(f"array must have two axes or more; got shape {array.shape}")
    check_workers(workers)
    shape = (*array.shape[:-2], array.shape[-1], array.shape[-2])
    check_out(out, shape, array.dtype, apart_from={"array": array})
    if isinstance(array, np.ndarray):
        from kernels.classic.transpose import cpu

        return cpu.transpose(array, out, workers=workers)
    from kernels.classic.transpose import cuda

    return cuda.transpose(array, out, stream=stream)
