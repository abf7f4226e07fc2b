"""Driver calls that launch a chunk's copies and events without releasing the GIL, and a device's UUID.

CuPy releases the GIL in every call. None of these calls blocks, and each takes about a microsecond; but beside reader
and writer threads, reacquiring the GIL takes longer than all calls of a chunk together (200 µs a chunk on the host of
an H200, against 100).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

from pipeline.errors import DeviceError

# A function of the driver and its arguments.
Call = tuple[Any, tuple[Any, ...]]


def record(event: Any, stream: Any) -> Call:
    """Record the event on the stream. Both are CuPy's, here and below."""
    return _driver().cuEventRecord, (_handle(event), _handle(stream))


def wait(stream: Any, event: Any) -> Call:
    """Make later work on the stream wait for the event."""
    return _driver().cuStreamWaitEvent, (_handle(stream), _handle(event), ctypes.c_uint(0))


def copy_in(target: int, source: int, nbytes: int, stream: Any) -> Call:
    """Copy from pinned memory at `source` to device memory at `target`."""
    return _driver().cuMemcpyHtoDAsync_v2, (*_pointers(target, source), ctypes.c_size_t(nbytes), _handle(stream))


def copy_out(target: int, source: int, nbytes: int, stream: Any) -> Call:
    """Copy from device memory at `source` to pinned memory at `target`."""
    return _driver().cuMemcpyDtoHAsync_v2, (*_pointers(target, source), ctypes.c_size_t(nbytes), _handle(stream))


def make(calls: Iterable[Call]) -> None:
    """Make the calls in order. DeviceError if one fails."""
    for function, arguments in calls:
        status = function(*arguments)
        if status != 0:
            raise DeviceError(_said(function.__name__, status))


def seconds(began: Any, done: Any) -> float:
    """The seconds between two completed events. DeviceError if one is not complete, or the device has failed."""
    milliseconds = ctypes.c_float()
    function = _driver().cuEventElapsedTime
    status = function(ctypes.byref(milliseconds), _handle(began), _handle(done))
    if status != 0:
        raise DeviceError(_said(function.__name__, status))
    return milliseconds.value / 1e3


def device_uuid(ordinal: int) -> bytes:
    """The 16 bytes of the UUID of a GPU or MIG instance. DeviceError if the driver fails.

    CuPy's device properties cut it at its first zero byte.
    """
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver = _driver()
    make(
        (
            (driver.cuInit, (ctypes.c_uint(0),)),
            (driver.cuDeviceGet, (ctypes.byref(device), ctypes.c_int(ordinal))),
            (driver.cuDeviceGetUuid_v2, (ctypes.byref(uuid), device)),
        )
    )
    return bytes(uuid)


def _handle(of: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(of.ptr)


def _pointers(target: int, source: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    return ctypes.c_void_p(target), ctypes.c_void_p(source)


def _said(function: str, status: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    return f"{function}: {(name.value or b'unknown error').decode()} ({status})"


@cache
def _driver() -> Any:
    return ctypes.PyDLL("libcuda.so.1")
