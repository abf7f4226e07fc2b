"""Launches of limits.cu, and random inputs in device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from kernels.runtime.ladder import Variant
from kernels.runtime.launch import kernel, multiprocessors

OPTIONS: tuple[str, ...] = ()

THREADS, CHAINS = 256, 8
COPY_VECTORS, READ_VECTORS = THREADS, 8 * THREADS  # 16 bytes each, a block
ROUNDS = 4096
BLOCKS_A_MULTIPROCESSOR = 32  # four times what is resident


@dataclass(frozen=True, kw_only=True)
class Task:
    """The arrays that limits are measured on."""

    source: Any  # CuPy bytes, a multiple of 16
    target: Any  # as many
    stream: Any

    def launch(self, entry: str, blocks: int, *args: Any) -> None:
        kernel("limits", entry).launch((blocks,), (THREADS,), args, stream=self.stream)


def chained() -> int:
    """Operations of one launch of multiply_add or inverse_root."""
    return BLOCKS_A_MULTIPROCESSOR * multiprocessors() * THREADS * CHAINS * ROUNDS


def torch_stream() -> Any:
    """CuPy's current stream as a PyTorch stream, for ladders that also measure PyTorch."""
    import cupy

    torch = import_module("torch")
    handle = cupy.cuda.get_current_stream().ptr
    return torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()


def random_values(count: int, dtype: Any, *, seed: int = 1) -> Any:
    """CuPy array [count]: integers of all values, or floats in [0, 1). The same seed gives the same values."""
    import cupy

    dtype = np.dtype(dtype)
    words = -(-count * dtype.itemsize // 8)
    bits = cupy.empty(words, cupy.uint64)
    args = (bits, ctypes.c_longlong(words), ctypes.c_ulonglong(seed << 32))
    stream = cupy.cuda.get_current_stream()
    kernel("limits", "fill_random").launch((-(-words // THREADS),), (THREADS,), args, stream=stream)
    if dtype.kind != "f":
        return bits.view(dtype)[:count]
    whole = bits.view(f"u{dtype.itemsize}")[:count]
    digits = np.finfo(dtype).nmant + 1
    whole >>= whole.dtype.type(8 * dtype.itemsize - digits)
    values = whole.view(dtype)
    cupy.multiply(whole, dtype.type(2.0**-digits), out=values, casting="unsafe", dtype=dtype)
    return values


def _vectors(task: Task) -> int:
    return int(task.source.nbytes) // 16


def _copy(task: Task) -> None:
    blocks = -(-_vectors(task) // COPY_VECTORS)
    task.launch("copy_bytes", blocks, task.source, task.target, ctypes.c_longlong(_vectors(task)))


def _read(task: Task) -> None:
    blocks = -(-_vectors(task) // READ_VECTORS)
    task.launch("read_bytes", blocks, task.source, task.target, ctypes.c_longlong(_vectors(task)))


def _chains(entry: str, constants: tuple[float, ...], task: Task) -> None:
    blocks = BLOCKS_A_MULTIPROCESSOR * multiprocessors()
    task.launch(entry, blocks, task.target, ctypes.c_int(ROUNDS), *map(ctypes.c_float, constants))


def _limit(summary: str, entry: str, run: Callable[[Task], None]) -> Variant:
    return Variant(summary=summary, entries=(entry,), run=run)


# By the names of kernels.runtime.ladder.Limit; "random" makes inputs.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "copy": _limit("bytes read and written", "copy_bytes", _copy),
        "read": _limit("bytes read", "read_bytes", _read),
        "fma": _limit("float32 fused multiply-adds", "multiply_add", partial(_chains, "multiply_add", (0.999, 0.5))),
        "roots": _limit("float32 inverse roots", "inverse_root", partial(_chains, "inverse_root", ())),
        "random": _limit("inputs", "fill_random", lambda task: None),
    }
)
