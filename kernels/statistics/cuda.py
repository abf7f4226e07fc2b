"""Partials on CUDA: launches the kernels of statistics.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kernels.runtime.launch import kernel, multiprocessors, on_stream
from kernels.statistics.totals import LAYOUTS

OPTIONS: tuple[str, ...] = ()

THREADS = 256
# Blocks per multiprocessor: enough to hide the latency of reading, few enough that their final additions cost nothing.
BLOCKS_EACH = 8
TYPES = {
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "int16": "short",
    "float32": "float",
    "float64": "double",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant: its summary, and its kernel by kind of dtype."""

    summary: str
    integers: str
    floats: str

    def entry(self, dtype: str) -> str:
        return f"{self.floats if LAYOUTS[dtype].is_float else self.integers}<{TYPES[dtype]}>"

    @property
    def entries(self) -> tuple[str, ...]:
        return tuple(self.entry(dtype) for dtype in LAYOUTS)


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "atomic": Variant(
            summary="every sample adds to global memory", integers="integers_atomic", floats="floats_atomic"
        ),
        "gathered": Variant(
            summary="sums in registers, histograms in shared memory",
            integers="integers_shared",
            floats="floats_slotted",
        ),
    }
)


def summarise(
    image: Any, blocks: tuple[int, int, int], out: Any, *, stream: Any = None, variant: str | None = None
) -> Any:
    """The partial of a CuPy array, viewed as [outer, channels, inner]; see kernels.statistics.

    variant : a name in `VARIANTS`; default the fastest
    """
    import cupy

    outer, channels, inner = blocks
    dtype = image.dtype.name
    with on_stream(image, stream) as current:
        if out is None:
            out = cupy.empty((channels, LAYOUTS[dtype].words), cupy.int64)
        cupy.cuda.runtime.memsetAsync(out.data.ptr, 0, out.nbytes, current.ptr)
        count = outer * inner
        if count:
            grid = (min(-(-count // THREADS), BLOCKS_EACH * multiprocessors()), channels)
            entry = VARIANTS[variant or "gathered"].entry(dtype)
            args = (
                image, ctypes.c_int64(count), ctypes.c_int(channels), ctypes.c_int64(inner), out,
                ctypes.c_int64(LAYOUTS[dtype].words),
            )  # fmt: skip
            kernel("statistics", entry).launch(grid, (THREADS,), args, stream=current)
    return out
