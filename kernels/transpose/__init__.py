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
    if not isinstance(array, np.ndarray) and type(array).__module__.partition(".")[0] != "cupy":
        raise TypeError(f"array must be a NumPy or CuPy array; got {type(array).__name__}")
    if array.dtype.hasobject or not 1 <= array.dtype.itemsize <= MAX_ITEMSIZE:
        raise TypeError(f"array has dtype {array.dtype}; elements must be of 1 to {MAX_ITEMSIZE} bytes")
    if array.ndim < 2:
        raise ValueError(f"array must have two axes or more; got shape {array.shape}")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a whole number of threads, 1 or more; got {workers!r}")
    _check_out(array, out)
    if isinstance(array, np.ndarray):
        from kernels.transpose import cpu

        return cpu.transpose(array, out, workers=workers)
    from kernels.transpose import cuda

    return cuda.transpose(array, out, stream=stream)


def _check_out(array: Any, out: Any) -> None:
    if out is None:
        return
    kind = np.ndarray if isinstance(array, np.ndarray) else type(array)
    shape = (*array.shape[:-2], array.shape[-1], array.shape[-2])
    if not isinstance(out, kind) or out.shape != shape or out.dtype != array.dtype or not out.flags.c_contiguous:
        raise ValueError(f"out must be a C-contiguous {kind.__name__} of shape {shape} and dtype {array.dtype}")
    if isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        if np.may_share_memory(array, out):
            raise ValueError("out must not share memory with array")
    elif _span(array)[0] < _span(out)[1] and _span(out)[0] < _span(array)[1]:
        raise ValueError("out must not share memory with array")


def _span(array: Any) -> tuple[int, int]:
    """The addresses between which a CuPy array's elements lie."""
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    if array.size == 0:
        return 0, 0
    first = int(array.data.ptr) + sum(step for step in reach if step < 0)
    return first, first + sum(abs(step) for step in reach) + int(array.dtype.itemsize)
