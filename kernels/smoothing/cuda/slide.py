"""Boxes of integers past 255 samples along an axis, kernels of slide.cuh: when they apply, and their launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.runtime.launch import kernel, multiprocessors, shared_bytes_a_block
from kernels.smoothing.borders import MODES
from kernels.smoothing.cuda.fused import View, view_of
from kernels.smoothing.cuda.passes import Axis
from kernels.smoothing.window import Window

THREADS = 256
C_TYPES = {"uint8": "unsigned char", "uint16": "unsigned short", "int16": "short"}
ENTRIES = tuple(
    f"{each}<{a}, {b}>"
    for c in C_TYPES.values()
    for each, a, b in (
        ("slide_columns", c, c), ("slide_columns", c, "unsigned"), ("slide_rows", c, c), ("slide_rows", "unsigned", c),
    )
)  # fmt: skip
MOST_ROWS_TAPS = 1 << 16  # whose sums of 16-bit samples fit 32 bits
SHARED_BYTES = 96 << 10  # of a block of slide_rows, if its results are then as many as the window's samples
SUM_BYTES = 8
MAX_BLOCKS = (1 << 31) - 1
ROUNDS = 4  # blocks of slide_columns that a multiprocessor gets, if windows are short


class Quotient(ctypes.Structure):
    """struct Quotient of slide.cuh."""

    _fields_ = (("half", ctypes.c_ulonglong), ("multiplier", ctypes.c_ulonglong), ("shift", ctypes.c_int))

    @classmethod
    def of(cls, samples: int) -> Quotient:
        """For sums of `samples` samples of 16 bits, at most 2**40: the multiplier exceeds 2**(64 + shift) / samples by
        less than 1, so the product by less than (samples << 16) / 2**(64 + shift) < 1 / samples, as division needs."""
        shift = samples.bit_length() - 1
        multiplier = -(-(1 << 64 + shift) // samples)
        if multiplier == 1 << 64:  # a power of two
            shift, multiplier = shift - 1, 1 << 63
        return cls(half=samples // 2, multiplier=multiplier, shift=max(shift, 0))


def applies(shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    view = view_of(shape, windows)
    if view is None or dtype.name not in C_TYPES or any(window.half_weights is not None for window in windows):
        return False
    if view.down is not None and view.down.taps > MOST_ROWS_TAPS:
        return False
    if view.across is not None and _outputs(view.across.taps, view.channels) < max(view.across.taps // 8, 1):
        return False
    return view.planes * view.rows * view.columns * view.channels <= MAX_BLOCKS


def run(image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    import cupy

    view, fill = view_of(image.shape, windows), int(cval) + (32768 if image.dtype == np.int16 else 0)
    assert view is not None
    quotient = Quotient.of(math.prod(window.taps for window in windows))
    source, rows = image, view.rows
    if view.down is not None:
        rows = view.down.output_length(view.rows)
        sums = out if view.across is None else cupy.empty((view.planes, rows, view.columns, view.channels), "uint32")
        _columns(view, image, sums, fill, quotient, stream)
        source, fill = sums, fill * view.down.taps
    if view.across is not None:
        _rows(view, rows, source, out, fill, quotient, stream)


def _columns(view: View, source: Any, target: Any, fill: int, quotient: Quotient, stream: Any) -> None:
    window = view.down
    assert window is not None
    out_rows, inner = window.output_length(view.rows), view.columns * view.channels
    axis = Axis(
        outer=view.planes, length=view.rows, inner=inner, out_length=out_rows, before=window.before, taps=window.taps,
        mode=MODES.index(window.mode),
    )  # fmt: skip
    tiles = view.planes * -(-inner // THREADS)
    # Tall bands, since each also reads a window, but enough to fill the device.
    bands = max(min(ROUNDS * 8 * multiprocessors() // tiles, out_rows // window.taps), 1)
    band_rows = -(-out_rows // bands)
    blocks = tiles * -(-out_rows // band_rows)
    to = "unsigned" if target.dtype == np.uint32 else C_TYPES[target.dtype.name]
    args = (source, target, axis, ctypes.c_uint(fill), quotient, ctypes.c_longlong(band_rows))
    kernel("smoothing", f"slide_columns<{C_TYPES[source.dtype.name]}, {to}>").launch(
        (blocks,), (THREADS,), args, stream=stream
    )


def _rows(view: View, rows: int, source: Any, target: Any, fill: int, quotient: Quotient, stream: Any) -> None:
    window = view.across
    assert window is not None
    out_columns = window.output_length(view.columns)
    most = _outputs(window.taps, view.channels)
    outputs = -(-out_columns // -(-out_columns // most))
    axis = Axis(
        outer=view.planes * rows, length=view.columns, inner=view.channels, out_length=out_columns,
        before=window.before, taps=window.taps, mode=MODES.index(window.mode),
    )  # fmt: skip
    blocks = axis.outer * -(-out_columns // outputs)
    shared_bytes = (outputs + window.taps) * view.channels * SUM_BYTES
    of = "unsigned" if source.dtype == np.uint32 else C_TYPES[source.dtype.name]
    args = (source, target, axis, ctypes.c_uint(fill), quotient, ctypes.c_int(outputs))
    kernel("smoothing", f"slide_rows<{of}, {C_TYPES[target.dtype.name]}>").launch(
        (blocks,), (THREADS,), args, shared_bytes=shared_bytes, stream=stream
    )


def _outputs(taps: int, channels: int) -> int:
    """The most results of a block of slide_rows."""
    most = shared_bytes_a_block() - 1024
    few = min(SHARED_BYTES, most) // (SUM_BYTES * channels) - taps
    return few if few >= taps else most // (SUM_BYTES * channels) - taps
