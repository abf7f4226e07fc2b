"""Programmatic dependent launch, by the CUDA driver's cuLaunchKernelEx, which CuPy does not bind: a kernel's blocks may
start while those of the previous kernel finish."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

MIN_MAJOR = 9  # compute capability
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_…


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),  # grid, block, bytes of shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_ATTRIBUTE = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1,))


@cache
def _launch_kernel_ex() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return function


def launch(function: int, sizes: Sequence[int], stream: int, pointers: Any) -> int:
    """Launches a loaded kernel that synchronizes with the previous ones itself: kernels/include/pdl.cuh.

    sizes    : three of the grid, three of a block, bytes of shared memory
    pointers : a ctypes array of the arguments' addresses

    Returns the driver's result, a CUresult.
    """
    config = _Config(sizes=tuple(sizes), stream=stream, attributes=ctypes.pointer(_ATTRIBUTE), count=1)
    return int(_launch_kernel_ex()(ctypes.byref(config), function, pointers, None))
