"""The driver's calls that send a chunk on its way, made without letting go of the interpreter's lock, and the name by
which it knows a device.

CuPy lets go of the lock in every call and takes it again. None of these waits for anything, and each takes about a
microsecond; but while reader and writer threads are about, coming by the lock again takes longer than all the calls of
a chunk together (200 µs a chunk on the host of an H200, against 100).
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
    """The event happens when all before it on the stream is done. Both are CuPy's, here and below."""
    return _driver().cuEventRecord, (_handle(event), _handle(stream))


def wait(stream: Any, event: Any) -> Call:
    """What comes after on the stream begins when the event has happened."""
    return _driver().cuStreamWaitEvent, (_handle(stream), _handle(event), ctypes.c_uint(0))


def copy_in(target: int, source: int, nbytes: int, stream: Any) -> Call:
    """From pinned memory at `source` to device memory at `target`."""
    return _driver().cuMemcpyHtoDAsync_v2, (*_pointers(target, source), ctypes.c_size_t(nbytes), _handle(stream))


def copy_out(target: int, source: int, nbytes: int, stream: Any) -> Call:
    """From device memory at `source` to pinned memory at `target`."""
    return _driver().cuMemcpyDtoHAsync_v2, (*_pointers(target, source), ctypes.c_size_t(nbytes), _handle(stream))


def make(calls: Iterable[Call]) -> None:
    """Makes the calls in order. DeviceError where the driver refuses one."""
    for function, arguments in calls:
        status = function(*arguments)
        if status != 0:
            raise DeviceError(_said(function.__name__, status))


def seconds(began: Any, done: Any) -> float:
    """Between two events that have happened. DeviceError where they have not, or the device has failed."""
    milliseconds = ctypes.c_float()
    function = _driver().cuEventElapsedTime
    status = function(ctypes.byref(milliseconds), _handle(began), _handle(done))
    if status != 0:
        raise DeviceError(_said(function.__name__, status))
    return milliseconds.value / 1e3


def device_uuid(ordinal: int) -> bytes:
    """The 16 bytes that tell a GPU, or a part of one, from all others. DeviceError where the driver refuses.

    CuPy's device properties hold them up to the first that is zero.
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
