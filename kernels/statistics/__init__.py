"""Image statistics per channel: extremes, exact sums and counts, which add up over the parts of an image.

    partial = summarise(part)            for each part, on any device, in any order
    totals.add(partial)                  sums them into `Totals`: minimum, maximum, mean, deviation, histogram

All arithmetic is on integers, so the totals are the same for any division into parts, any order and any device.
An integer sample is taken as u = sample − the type's minimum, and Σu, Σu² are exact. A float is m × 2^e with integer m;
Σm and Σm² are kept exactly for each e, in words wide enough that no sum of 2³⁰ terms overflows.

A partial is int64 [channels, words]; `LAYOUTS` defines the words. Its histogram has 256 bins of equal width over an
integer type's range, or for floats a bin for each sign and power of two.

Source: sums of floats by exponent, Malcolm, "On accurate floating-point summation", Comm. ACM 14 (1971).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out
from kernels.statistics.totals import LAYOUTS, MAX_SAMPLES, Layout, Totals

__all__ = ["DTYPES", "LAYOUTS", "MAX_SAMPLES", "Layout", "Totals", "partial_shape", "summarise"]

DTYPES = tuple(LAYOUTS)


def partial_shape(dtype: Any, channels: int) -> tuple[int, int]:
    """The shape of a partial of images of a dtype."""
    return channels, LAYOUTS[np.dtype(dtype).name].words


def summarise(image: Any, *, channel_axis: int | None = None, out: Any = None, stream: Any = None) -> Any:
    """The partial of one part of an image.

    image        : NumPy or CuPy array, C-contiguous, one of `DTYPES`, at most `MAX_SAMPLES` samples a channel
    channel_axis : the axis of channels; None for a single channel
    out          : array for the result, NumPy or CuPy like the image: int64, `partial_shape`, C-contiguous, sharing no
                   memory with the image
    stream       : CUDA stream to launch on; default CuPy's current one. The call does not wait for the device.

    Returns the partial: int64 [channels, words]. On the CPU one thread computes it without the GIL.
    Raises ValueError or TypeError with one line that names the parameter.
    """
    check_array("image", image)
    dtype = np.dtype(image.dtype)
    if dtype.name not in LAYOUTS or not dtype.isnative:
        raise TypeError(f"image has dtype {image.dtype.str}; supported are {', '.join(DTYPES)} in native byte order")
    if not image.flags.c_contiguous:
        raise ValueError("image must be C-contiguous")
    if channel_axis is not None and not 0 <= channel_axis < image.ndim:
        raise ValueError(f"channel_axis {channel_axis} is no axis of an image of shape {image.shape}")
    blocks = _blocks(image.shape, channel_axis)
    if blocks[0] * blocks[2] > MAX_SAMPLES:
        raise ValueError(
            f"image has {blocks[0] * blocks[2]} samples a channel: summarise at most {MAX_SAMPLES} at once"
        )
    shape = partial_shape(dtype, blocks[1])
    check_out(out, shape, np.int64, apart_from={"image": image})
    if isinstance(image, np.ndarray):
        from kernels.statistics import cpu

        return cpu.summarise(image.reshape(blocks), out)
    from kernels.statistics import cuda

    return cuda.summarise(image, blocks, out, stream=stream)


def _blocks(shape: tuple[int, ...], channel_axis: int | None) -> tuple[int, int, int]:
    """The image as [outer, channels, inner]."""
    count = int(np.prod(shape, dtype=np.int64))
    if channel_axis is None:
        return count, 1, 1
    inner = int(np.prod(shape[channel_axis + 1 :], dtype=np.int64))
    return int(np.prod(shape[:channel_axis], dtype=np.int64)), shape[channel_axis], inner
