"""nvCOMP's batched encoder of raw Zstandard streams, through its C library.

The library enqueues its work on a CUDA stream and knows nothing of files. Its functions take arrays of device pointers.
Its decoders read and write out of bounds if a stream is damaged, so they are not used.

Source: nvCOMP 6, nvcomp/zstd.h.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import DeviceError

_LIBRARY = "libnvcomp.so.6"
_OPTIONS_BYTES = 64


class _Options(ctypes.Structure):
    """Zero: bytes, without further steps."""

    _fields_ = (("first", ctypes.c_int), ("reserved", ctypes.c_char * (_OPTIONS_BYTES - 4)))


_Pointer, _Size = ctypes.c_void_p, ctypes.c_size_t


@cache
def load() -> Any | None:
    """The library, of the package nvidia-libnvcomp or of the system; None if it is not installed."""
    found = find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    packaged = [Path(folder) / "libnvcomp" / "lib64" / _LIBRARY for folder in folders]
    for path in (*(str(each) for each in packaged if each.is_file()), _LIBRARY):
        try:
            # Calls only enqueue work: giving up the interpreter's lock would cost more than they take.
            return ctypes.PyDLL(path)
        except OSError:
            continue
    return None


@cache
def version() -> str | None:
    """The library's version; None without it."""
    library = load()
    if library is None:
        return None
    found = (ctypes.c_uint32 * 2)()
    library.nvcompGetProperties(ctypes.byref(found))
    return f"{found[0] // 1000}.{found[0] % 1000 // 100}.{found[0] % 100}"


def encode_sizes(count: int, longest: int, total: int) -> tuple[int, int]:
    """Bytes of the room of an encoded stream, and of the device memory that `encode` takes, on the current device.

    `count` streams of at most `longest` bytes, `total` in all. DeviceError if nvCOMP fails.
    """
    room, temporary = _Size(), _Size()
    _call("CompressGetMaxOutputChunkSize", _Size(longest), _Options(), ctypes.byref(room))
    sizes = _Size(count), _Size(longest)
    _call("CompressGetTempSize", *sizes, _Options(), ctypes.byref(temporary), _Size(total), _Pointer())
    return room.value, temporary.value


def encode(streams: Any, count: int, longest: int, *, temporary: tuple[int, int], statuses: int, stream: Any) -> None:
    """Enqueue the encoding of `count` streams of at most `longest` bytes.

    streams   : `kernels.blocks.cuda.Streams` with addresses of the device; `target_bytes` become the encoded bytes
    temporary : address and bytes of device memory, see `encode_sizes`
    statuses  : address of `count` int32, which become 0 where all is well
    stream    : a CUDA stream of CuPy's

    DeviceError if nvCOMP refuses.
    """
    _call(
        "CompressAsync", _Pointer(streams.sources), _Pointer(streams.source_bytes), _Size(longest), _Size(count),
        _Pointer(temporary[0]), _Size(temporary[1]), _Pointer(streams.targets), _Pointer(streams.target_bytes),
        _Options(), _Pointer(statuses), _Pointer(stream.ptr),
    )  # fmt: skip


def _call(function: str, *arguments: Any) -> None:
    function = f"nvcompBatchedZstd{function}"
    status = getattr(load(), function)(*arguments)
    if status != 0:
        raise DeviceError(f"{function} of nvCOMP {version()} fails ({status})")
