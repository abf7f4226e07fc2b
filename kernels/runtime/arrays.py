"""Checks that the public functions of all operations share: arrays, arrays for results, numbers of threads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_array", "check_out", "check_workers", "namespace", "native", "on_stream"]


def check_array(name: str, array: Any) -> None:
    """TypeError unless `array` is a NumPy or CuPy array without a numpy.ma mask, which would be ignored."""
    if _is_masked(array):
        raise TypeError(
            f"{name} is a numpy.ma array, whose mask would be ignored: give {name}.filled(…) or {name}.data"
        )
    if not isinstance(array, np.ndarray) and type(array).__module__.partition(".")[0] != "cupy":
        raise TypeError(f"{name} must be a NumPy or CuPy array; got {type(array).__name__}")


def _is_masked(array: Any) -> bool:
    """Without loading numpy.ma, which every start would wait for."""
    return isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


def namespace(array: Any) -> Any:
    """The module `numpy` or `cupy`, by the array's type. TypeError for anything else."""
    if isinstance(array, np.ndarray):
        return np
    if type(array).__module__.partition(".")[0] != "cupy":
        raise TypeError(f"a NumPy or CuPy array is needed; got {type(array).__name__}")
    return sys.modules["cupy"]


def on_stream(array: Any, stream: Any) -> AbstractContextManager[Any]:
    """`kernels.runtime.launch.on_stream` for a CuPy array; nothing for a NumPy array."""
    if isinstance(array, np.ndarray):
        return nullcontext()
    from kernels.runtime import launch

    return launch.on_stream(array, stream)


def check_workers(workers: Any) -> None:
    """ValueError unless `workers` is None or a positive int."""
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a whole number of threads, 1 or more; got {workers!r}")


def check_out(
    out: Any, shape: tuple[int, ...], dtype: Any, *, apart_from: Mapping[str, Any], may_be: str | None = None
) -> None:
    """ValueError unless `out` is None, or can be written while the inputs are still read.

    shape, dtype : of the result, which is C-contiguous and of the same library as the first array in `apart_from`
    apart_from   : the arrays that are read, by parameter name; None for one that was not passed. NumPy and CuPy arrays
                   never overlap. An array covers every byte from its first to its last, including those that its
                   strides skip.
    may_be       : the name of an input that `out` may equal: the same elements in the same order
    """
    if out is None:
        return
    first = next(iter(apart_from.values()))
    on_host = isinstance(first, np.ndarray)
    kind = np.ndarray if on_host else type(first)
    wrong = not isinstance(out, kind) or _is_masked(out)
    if wrong or out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        raise ValueError(f"out must be a C-contiguous {kind.__name__} of shape {shape} and dtype {np.dtype(dtype)}")
    if on_host and not out.flags.writeable:
        raise ValueError("out is read-only")
    for name, array in apart_from.items():
        if array is None or isinstance(array, np.ndarray) != on_host or (name == may_be and _are_same(array, out)):
            continue
        if np.may_share_memory(array, out) if on_host else _may_share_device_memory(array, out):
            raise ValueError(f"out shares memory with {name}, which would be overwritten before it is read")


def native(image: NDArray[Any]) -> NDArray[Any]:
    """The image, C-contiguous, in native byte order, and as writable, since Numba would compile again for read-only."""
    image = np.ascontiguousarray(image, image.dtype.newbyteorder("="))
    if image.flags.writeable:
        return np.asarray(image)
    memory: Any = (ctypes.c_char * image.nbytes).from_address(image.ctypes.data)
    view: NDArray[Any] = np.frombuffer(memory, image.dtype).reshape(image.shape)
    return view


def _are_same(one: Any, other: Any) -> bool:
    return (_address(one), one.shape, one.strides) == (_address(other), other.shape, other.strides)


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _may_share_device_memory(one: Any, other: Any) -> bool:
    """`np.may_share_memory` for CuPy arrays."""
    (low, high), (begin, end) = _span(one), _span(other)
    return low < end and begin < high


def _span(array: Any) -> tuple[int, int]:
    """The addresses of an array's first byte and of the one after its last."""
    if array.size == 0:
        return 0, 0
    first = _address(array)
    if array.flags.c_contiguous:
        return first, first + int(array.nbytes)
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    last = first + sum(step for step in reach if step > 0)
    return first + sum(step for step in reach if step < 0), last + int(array.dtype.itemsize)
