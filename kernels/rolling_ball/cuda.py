"""The rolling ball on CUDA. Launches on one stream; nothing waits for it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kernels.runtime.ladder import Variant
from kernels.runtime.launch import kernel, on_stream

OPTIONS: tuple[str, ...] = ()
ACROSS, DOWN, SIDE, BAND = 32, 8, 32, 16  # of rolling_ball.cu
MAX_BLOCKS = (1 << 31) - 1
TYPES = {"float32": "float", "float64": "double"}


class BallTask(ctypes.Structure):
    """struct BallTask of rolling_ball.cu."""

    _fields_ = (
        *((name, ctypes.c_int * 3) for name in ("lengths", "taps")),
        *((name, ctypes.c_longlong) for name in ("tiles_y", "tiles_x", "blocks")),
        *((name, ctypes.c_int) for name in ("sign", "unused")),
    )


def touched(heights: Any, shape: Sequence[int], caps: Any, sign: int, *, stream: Any = None) -> Any:
    """As `kernels.rolling_ball.cpu.touched`."""
    import cupy

    with on_stream(heights, stream) as current:
        source = cupy.ascontiguousarray(heights).reshape(shape)
        planes, *lengths = source.shape
        outs = [n - taps + 1 for n, taps in zip(lengths, caps.shape, strict=True)]
        out = cupy.empty((planes, *outs), source.dtype)
        tiles_y, tiles_x = -(-outs[1] // SIDE), -(-outs[2] // ACROSS)
        blocks = planes * outs[0] * tiles_y * tiles_x
        task = BallTask(
            lengths=(ctypes.c_int * 3)(*lengths), taps=(ctypes.c_int * 3)(*caps.shape), tiles_y=tiles_y,
            tiles_x=tiles_x, blocks=blocks, sign=sign,
        )  # fmt: skip
        rows = SIDE + min(BAND, caps.shape[1]) - 1
        kernel("rolling_ball", f"ball_tiles<{TYPES[source.dtype.name]}>").launch(
            (min(blocks, MAX_BLOCKS),), (ACROSS, DOWN), (source, out, cupy.asarray(caps), task),
            shared_bytes=rows * (ACROSS + caps.shape[2] - 1) * source.itemsize, stream=current,
        )  # fmt: skip
    return out


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "tiles": Variant(
            summary="tiles in shared memory, some rows of the window at a time",
            entries=tuple(f"ball_tiles<{name}>" for name in TYPES.values()),
            run=lambda task: touched(*task),
        )
    }
)
