"""NPP's filters of images in device memory, called through ctypes. Beyond the edges they repeat the last sample."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

REPLICATE = 2
TYPES = {"uint8": "8u", "uint16": "16u", "float32": "32f"}


class Pair(ctypes.Structure):
    """NppiSize and NppiPoint."""

    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int))


class _StreamContext(ctypes.Structure):
    """NppStreamContext."""

    _fields_ = (
        ("stream", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("device", "multiprocessors", "threads_multiprocessor", "threads_block")),
        ("shared_bytes_block", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("major", "minor")),
        ("stream_flags", ctypes.c_uint),
        ("reserved", ctypes.c_int),
    )


def filtering(name: str, image: Any, *arguments: Any) -> Callable[[], object] | None:
    """A call such as "nppiFilterBoxBorder" for `image`, with the arguments between the result's size and the border.

    None if NPP or its function for this type is absent; a status other than 0 raises a RuntimeError.
    """
    function = _function(f"{name}_{TYPES[image.dtype.name]}_C{image.shape[2] if image.ndim == 3 else 1}R_Ctx")
    if function is None:
        return None
    import cupy

    out, context = cupy.ones_like(image), _context()
    size, step = Pair(image.shape[1], image.shape[0]), image.strides[0]

    def run() -> Any:
        status = function(
            pointer(image), step, size, Pair(0, 0), pointer(out), step, size, *map(_passed, arguments), REPLICATE,
            context,
        )  # fmt: skip
        if status != 0:
            raise RuntimeError(f"NPP returned {status}")
        return out

    return run


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.data.ptr)


def window(size: int) -> tuple[Pair, Pair]:
    """A square window and its centre."""
    return Pair(size, size), Pair(size // 2, size // 2)


def _passed(argument: Any) -> Any:
    """Arrays, which `run` keeps alive, as pointers."""
    return pointer(argument) if hasattr(argument, "data") else argument


def _context() -> _StreamContext:
    import cupy

    found = cupy.cuda.runtime.getDeviceProperties(0)
    return _StreamContext(
        device=0, multiprocessors=found["multiProcessorCount"], major=found["major"], minor=found["minor"],
        threads_multiprocessor=found["maxThreadsPerMultiProcessor"], threads_block=found["maxThreadsPerBlock"],
        shared_bytes_block=found["sharedMemPerBlock"],
    )  # fmt: skip


def _function(name: str) -> Any:
    return next((getattr(library, name) for library in _libraries() if hasattr(library, name)), None)


@cache
def _libraries() -> list[Any]:
    """Those of filters and of morphology, of the first CUDA that has them."""
    found = []
    for part in ("if", "im"):
        for name in (f"libnpp{part}.so.13", f"libnpp{part}.so.12", f"/usr/local/cuda/lib64/libnpp{part}.so"):
            try:
                found.append(ctypes.CDLL(name))
                break
            except OSError:
                continue
    return found
