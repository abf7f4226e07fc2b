"""One axis of an image, as kernels of smoothing.cu take it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from kernels.smoothing.borders import MODES
from kernels.smoothing.window import Window


class Axis(ctypes.Structure):
    """struct Axis of smoothing.cu."""

    _fields_ = (
        *((name, ctypes.c_longlong) for name in ("outer", "length", "inner", "out_length")),
        *((name, ctypes.c_int) for name in ("before", "taps", "mode", "columns")),
    )


def axis_of(shape: Sequence[int], window: Window) -> Axis:
    axis = window.axis
    return Axis(
        outer=math.prod(shape[:axis]), length=shape[axis], inner=math.prod(shape[axis + 1 :]),
        out_length=window.output_length(shape[axis]), before=window.before, taps=window.taps,
        mode=MODES.index(window.mode), columns=0,
    )  # fmt: skip
