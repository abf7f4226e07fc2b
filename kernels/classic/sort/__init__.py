"""Sorting keys, with or without values, and merging sorted arrays, on NumPy arrays (CPU) and CuPy arrays (CUDA).

Keys   : one axis, uint32, int32, uint64, int64, float32 or float64.
Values : move with their keys; any dtype but objects. On CUDA fewer than 2³² keys can have values or positions.
Order  : ascending and stable: equal keys keep their order. Floating-point keys have a total order, so results have the
         same bits on every device: −inf < … < −0 < +0 < … < +inf < NaN; NaNs of positive sign come before those of
         negative sign, the former by ascending and the latter by descending bits.

On CUDA `sort` is a radix sort, one pass per byte, which moves a third of the bytes of a merge sort for 2²⁶ keys of
4 bytes. The merge sorts are earlier rungs of its ladder; merging is still the fastest way to join sorted arrays.

Sources: Green, McColl, Bader, "GPU merge path: a GPU merging algorithm" (2012); Adinets, Merrill, "Onesweep: a faster
least significant digit radix sort for GPUs" (2022).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_workers

__all__ = ["DTYPES", "argsort", "merge", "sort"]

DTYPES = ("uint32", "int32", "uint64", "int64", "float32", "float64")


def sort(keys: Any, values: Any = None, *, workers: int | None = None, stream: Any = None) -> Any:
    """The keys in ascending order.

    keys    : NumPy or CuPy array [n], any strides
    values  : array [n] of the same library, moved with the keys
    workers : CPU threads; default one per core
    stream  : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Returns the sorted keys; with values (keys, values). New arrays, in native byte order.
    Raises ValueError or TypeError; the message names the parameter.
    """
    _check_keys("keys", keys)
    if values is not None:
        _check_values(values, keys)
    check_workers(workers)
    if isinstance(keys, np.ndarray):
        from kernels.classic.sort import cpu

        return cpu.sort(keys, values, workers=workers)
    from kernels.classic.sort import cuda

    return cuda.sort(keys, values, stream=stream)


def argsort(keys: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """The indices that sort `keys`: int64 [n], such that keys[argsort(keys)] is sort(keys).

    Parameters and errors as in `sort`.
    """
    _check_keys("keys", keys)
    check_workers(workers)
    if isinstance(keys, np.ndarray):
        from kernels.classic.sort import cpu

        return cpu.argsort(keys, workers=workers)
    from kernels.classic.sort import cuda

    return cuda.argsort(keys, stream=stream)


def merge(first: Any, second: Any, *, workers: int | None = None, stream: Any = None) -> Any:
    """Merges two sorted arrays; equal keys of `first` come first.

    first, second : arrays [n] and [m] of the same library and dtype, each sorted in the order of `sort`; not checked.
                    If they are not sorted, the result has n + m keys in unspecified order.

    Other parameters and errors as in `sort`.
    """
    _check_keys("first", first)
    _check_keys("second", second)
    if type(first) is not type(second) or first.dtype.newbyteorder("=") != second.dtype.newbyteorder("="):
        raise TypeError(
            f"first and second must be of one library and dtype; got {type(first).__name__} of {first.dtype} and "
            f"{type(second).__name__} of {second.dtype}"
        )
    check_workers(workers)
    if isinstance(first, np.ndarray):
        from kernels.classic.sort import cpu

        return cpu.merge(first, second, workers=workers)
    from kernels.classic.sort import cuda

    return cuda.merge(first, second, stream=stream)


def _check_keys(name: str, keys: Any) -> None:
    check_array(name, keys)
    if keys.dtype.newbyteorder("=").name not in DTYPES:
        raise TypeError(f"{name} has dtype {keys.dtype}; supported are {', '.join(DTYPES)}")
    if keys.ndim != 1:
        raise ValueError(f"{name} must have one axis; got shape {keys.shape}: ravel it, or sort row by row")


def _check_values(values: Any, keys: Any) -> None:
    if type(values) is not type(keys):
        raise TypeError(f"values must be a {type(keys).__name__}, as keys is; got {type(values).__name__}")
    if values.dtype.hasobject:
        raise TypeError(f"values has dtype {values.dtype}: sort positions instead (argsort), and take")
    if values.shape != keys.shape:
        raise ValueError(f"values must have the shape of keys, {keys.shape}; got {values.shape}")
