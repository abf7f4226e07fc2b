"""Convolution of float32 lines and images with small masks, and convolution layers, on NumPy and CuPy arrays.

    convolve: result[i] = Σₖ mask[k] f[i − k + K // 2], likewise along both axes of an image
    layer   : result[n, m, y, x] = Σ over c, v, u of filters[m, c, v, u] images[n, c, y + v, x + u]

convolve : samples [n] or [rows, columns], zero beyond their edges; the result has the same shape. Masks have as many
           axes, odd sides, and at most 961 weights for lines or 31 × 31 for images; the device keeps them in constant
           memory.
layer    : images [images, channels, rows, columns], filters [maps, channels, mask rows, mask columns], not flipped, as
           usual in neural networks; no padding, so the result is [images, maps, rows − mask rows + 1,
           columns − mask columns + 1].
Precision: float32 throughout. The error of a result with K terms is at most (K + 2) 2⁻²⁴ times the sum of their
           magnitudes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out, check_workers

__all__ = ["DTYPE", "MAX_LINE_WEIGHTS", "MAX_SIDE", "convolve", "layer"]

DTYPE = "float32"
MAX_LINE_WEIGHTS = 961
MAX_SIDE = 31  # of an image's mask
MAX_SIZE = (1 << 31) - 1 - 1024  # rows, columns and a map's weights are counted in 32 bits, up to a tile beyond them


def convolve(samples: Any, mask: Any, *, out: Any = None, workers: int | None = None, stream: Any = None) -> Any:
    """The convolution of a line or an image with a mask, in the same shape, with zeros beyond the edges.

    samples : NumPy or CuPy array [n] or [rows, columns], float32, any strides
    mask    : NumPy array with as many axes, float32, odd sides, all weights finite
    out     : array for the result, from the samples' library and in their shape: float32, C-contiguous; must not share
              memory with the inputs
    workers : CPU threads; default one per core
    stream  : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Returns the result: float32, an array of the samples' library.
    Raises ValueError or TypeError; the message names the parameter.
    """
    _check_array("samples", samples, (1, 2))
    _check_mask(mask, samples.ndim)
    if samples.ndim == 2 and max(samples.shape) > MAX_SIZE:
        raise ValueError(f"samples must have at most {MAX_SIZE} rows and columns; got shape {samples.shape}")
    check_workers(workers)
    check_out(out, samples.shape, np.float32, apart_from={"samples": samples, "mask": mask})
    if isinstance(samples, np.ndarray):
        from kernels.classic.convolution import cpu

        return cpu.convolve(samples, mask, out, workers=workers)
    from kernels.classic.convolution import cuda

    return cuda.convolve(samples, mask, out, stream=stream)


def layer(images: Any, filters: Any, *, out: Any = None, stream: Any = None) -> Any:
    """The maps that a convolution layer computes from images.

    images  : NumPy or CuPy array [images, channels, rows, columns], float32, any strides
    filters : array of the same library [maps, channels, mask rows, mask columns], float32; no larger than the images,
              with at most 2³¹ − 1025 weights per map
    out     : array of the same library for the result: float32, C-contiguous; must not share memory with the inputs
    stream  : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Returns the maps: float32 [images, maps, rows − mask rows + 1, columns − mask columns + 1], of the same library.
    Raises ValueError or TypeError; the message names the parameter.
    """
    _check_array("images", images, (4,))
    _check_array("filters", filters, (4,))
    if type(images) is not type(filters):
        kinds = type(images).__module__, type(filters).__module__
        raise TypeError(f"images and filters must be arrays of one kind; got {kinds[0]} and {kinds[1]}")
    if images.shape[1] != filters.shape[1]:
        raise ValueError(f"images have {images.shape[1]} channels and filters {filters.shape[1]}: they must be as many")
    sides = list(zip(images.shape[2:], filters.shape[2:], strict=True))
    if any(not 1 <= mask <= side for side, mask in sides) or max(images.shape[2:]) > MAX_SIZE:
        raise ValueError(
            f"filters of {filters.shape[2]} × {filters.shape[3]} do not fit into images of "
            f"{images.shape[2]} × {images.shape[3]}"
        )
    weights = math.prod(filters.shape[1:])
    if weights > MAX_SIZE:
        raise ValueError(f"filters must have at most {MAX_SIZE} weights a map; got {weights}, of shape {filters.shape}")
    shape = (images.shape[0], filters.shape[0], *(side - mask + 1 for side, mask in sides))
    check_out(out, shape, np.float32, apart_from={"images": images, "filters": filters})
    if isinstance(images, np.ndarray):
        from kernels.classic.convolution import cpu

        return cpu.layer(images, filters, out, shape)
    from kernels.classic.convolution import cuda

    return cuda.layer(images, filters, out, shape, stream=stream)


def _check_array(name: str, array: Any, axes: tuple[int, ...]) -> None:
    check_array(name, array)
    if np.dtype(array.dtype).newbyteorder("=").name != DTYPE:
        raise TypeError(f"{name} has dtype {array.dtype}; supported is {DTYPE}")
    if array.ndim not in axes:
        raise ValueError(f"{name} must have {' or '.join(map(str, axes))} axes; got shape {array.shape}")


def _check_mask(mask: Any, axes: int) -> None:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"mask must be a NumPy array, for it becomes a launch's parameter; got {type(mask).__name__}")
    check_array("mask", mask)
    if np.dtype(mask.dtype).newbyteorder("=").name != DTYPE:
        raise TypeError(f"mask has dtype {mask.dtype}; supported is {DTYPE}")
    limit = MAX_LINE_WEIGHTS if axes == 1 else MAX_SIDE
    if mask.ndim != axes or any(side % 2 == 0 or side > limit for side in mask.shape):
        raise ValueError(f"mask must have as many axes as samples ({axes}), odd sides up to {limit}; got {mask.shape}")
    if not np.isfinite(mask).all():
        raise ValueError(f"mask has a weight that is not finite: {mask[~np.isfinite(mask)][0]}")
