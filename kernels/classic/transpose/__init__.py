"""Transposes of matrices and of batches of them, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    transpose(a)[..., j, i] = a[..., i, j]

Elements : any dtype of 1 to 16 bytes; only bits are moved. (CuPy's own dtypes have 1, 2, 4, 8 or 16.)
Input    : array [..., rows, columns] of any strides. On CUDA rows may lie apart, as in a part of a larger matrix, and
           so may matrices; other layouts are copied first.
Result   : array [..., columns, rows], C-contiguous, of the input's dtype and kind.

Source: Ruetsch and Micikevicius, "Optimizing matrix transpose in CUDA" (NVIDIA, 2009).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out, check_workers

__all__ = ["MAX_ITEMSIZE", "transpose"]

MAX_ITEMSIZE = 16


def transpose(array: Any, *, out: Any = None, workers: int | None = None, stream: Any = None) -> Any:
    """The last two axes exchanged, as an array of its own.

    array   : NumPy or CuPy array [..., rows, columns], two axes or more, any strides
    out     : C-contiguous array [..., columns, rows] of the same kind and dtype, apart from `array` in memory
    workers : CPU threads; default one a core
    stream  : CUDA: the stream to launch on; default CuPy's current one. Nothing waits for the device.

    Raises ValueError or TypeError, in one line that names the parameter.
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
