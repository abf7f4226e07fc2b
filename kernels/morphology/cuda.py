"""The difference that ends a top-hat on CUDA: CuPy's own would flush the smallest floats to zero."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kernels.runtime.ladder import Variant
from kernels.runtime.launch import blocks_of, kernel, on_stream

OPTIONS: tuple[str, ...] = ()
THREADS, MAX_BLOCKS = 256, 1 << 16  # threads loop
TYPES = {
    "uint8": ("unsigned char", ctypes.c_uint8),
    "uint16": ("unsigned short", ctypes.c_uint16),
    "int16": ("short", ctypes.c_int16),
    "float32": ("float", ctypes.c_float),
    "float64": ("double", ctypes.c_double),
}


def _entry(dtype: str) -> str:
    return f"saturated_difference<{TYPES[dtype][0]}>"


def difference(image: Any, subtracted: Any, out: Any, nodata: float | None, *, stream: Any = None) -> None:
    """As `kernels.morphology.difference`; `out` is C-contiguous."""
    import cupy

    with on_stream(image, stream) as current:
        dtype = out.dtype
        image, subtracted = (cupy.ascontiguousarray(each, dtype) for each in (image, subtracted))
        has_nodata = nodata is not None and not math.isnan(nodata)  # NaN spreads by itself
        value = TYPES[dtype.name][1](dtype.type(nodata if has_nodata else 0).item())
        kernel("morphology", _entry(dtype.name)).launch(
            (min(blocks_of(out.size, THREADS), MAX_BLOCKS),), (THREADS,),
            (image, subtracted, out, ctypes.c_longlong(out.size), value, ctypes.c_int(has_nodata)), stream=current,
        )  # fmt: skip


def in_turn(image: Any, first: Callable[..., Any], second: Callable[..., Any], *, stream: Any) -> Any:
    """The second filter of the first's result, in an array of ours: launches into given arrays are repeated."""
    import cupy

    with on_stream(image, stream):
        between = cupy.empty(image.shape, image.dtype)
        return second(first(image, out=between))


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "difference": Variant(
            summary="a saturating difference",
            entries=tuple(_entry(dtype) for dtype in TYPES),
            run=lambda task: difference(*task),
        )
    }
)
