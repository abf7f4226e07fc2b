"""nvCOMP's batched codecs of raw LZ4, Zstandard and deflate streams, through its C library.

The library enqueues its work on a CUDA stream and knows nothing of files. Its functions take arrays of device pointers.

Source: nvCOMP 6, nvcomp/lz4.h, zstd.h, deflate.h.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import DeviceError

_LIBRARY = "libnvcomp.so.6"
_NAMES = {"lz4": "LZ4", "zstd": "Zstd", "deflate": "Deflate"}
_OPTIONS_BYTES = 64


class _Options(ctypes.Structure):
    """Of every codec, in either direction; zero: bytes, without further steps."""

    _fields_ = (("first", ctypes.c_int), ("reserved", ctypes.c_char * (_OPTIONS_BYTES - 4)))


# Of decoding: never the decompression engine of newer GPUs, whose behaviour is undefined for damaged streams.
_BY_CUDA = _Options(first=2)
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


def is_trusted() -> bool:
    """Whether it may decode: the user trusts the files, since damaged ones make it read and write out of bounds."""
    return os.environ.get("MILLRACE_GPU_CODECS") == "1" and load() is not None


@cache
def version() -> str | None:
    """The library's version; None without it."""
    library = load()
    if library is None:
        return None
    found = (ctypes.c_uint32 * 2)()
    library.nvcompGetProperties(ctypes.byref(found))
    return f"{found[0] // 1000}.{found[0] % 1000 // 100}.{found[0] % 100}"


def decode_temporary_bytes(codec: str, count: int, longest: int, total: int) -> int:
    """Device memory that `decode` takes for `count` streams of at most `longest` decoded bytes, `total` in all.

    Of the current device. DeviceError if nvCOMP fails.
    """
    found = _Size()
    _call(
        f"nvcompBatched{_NAMES[codec]}DecompressGetTempSize", _Size(count), _Size(longest), _BY_CUDA,
        ctypes.byref(found), _Size(total), _Pointer(),
    )  # fmt: skip
    return found.value


def decode(
    codec: str,
    streams: Any,
    count: int,
    *,
    temporary: tuple[int, int],
    decoded: int,
    statuses: int,
    stream: Any,
) -> None:
    """Enqueue the decoding of `count` streams.

    streams   : `kernels.blocks.cuda.Streams`, whose addresses are of the device
    temporary : address and bytes of device memory, see `decode_temporary_bytes`
    decoded   : address of `count` uint64, which become the decoded bytes
    statuses  : address of `count` int32, which become 0 where all is well
    stream    : a CUDA stream of CuPy's

    DeviceError if nvCOMP refuses.
    """
    _call(
        f"nvcompBatched{_NAMES[codec]}DecompressAsync", _Pointer(streams.sources), _Pointer(streams.source_bytes),
        _Pointer(streams.target_bytes), _Pointer(decoded), _Size(count), _Pointer(temporary[0]), _Size(temporary[1]),
        _Pointer(streams.targets), _BY_CUDA, _Pointer(statuses), _Pointer(stream.ptr),
    )  # fmt: skip


def encode_sizes(codec: str, count: int, longest: int, total: int) -> tuple[int, int]:
    """Bytes of the room of an encoded stream, and of the device memory that `encode` takes; see
    `decode_temporary_bytes`."""
    room, temporary = _Size(), _Size()
    start = f"nvcompBatched{_NAMES[codec]}CompressGet"
    _call(f"{start}MaxOutputChunkSize", _Size(longest), _Options(), ctypes.byref(room))
    _call(
        f"{start}TempSize", _Size(count), _Size(longest), _Options(), ctypes.byref(temporary), _Size(total), _Pointer()
    )
    return room.value, temporary.value


def encode(
    codec: str, streams: Any, count: int, longest: int, *, temporary: tuple[int, int], statuses: int, stream: Any
) -> None:
    """Enqueue the encoding of `count` streams of at most `longest` bytes; see `decode`.

    streams : their `target_bytes` become the encoded bytes
    """
    _call(
        f"nvcompBatched{_NAMES[codec]}CompressAsync", _Pointer(streams.sources), _Pointer(streams.source_bytes),
        _Size(longest), _Size(count), _Pointer(temporary[0]), _Size(temporary[1]), _Pointer(streams.targets),
        _Pointer(streams.target_bytes), _Options(), _Pointer(statuses), _Pointer(stream.ptr),
    )  # fmt: skip


def _call(function: str, *arguments: Any) -> None:
    status = getattr(load(), function)(*arguments)
    if status != 0:
        raise DeviceError(f"{function} of nvCOMP {version()} fails ({status})")
