"""The proximal operator of local low rank: singular values by the small Gram matrices of frames."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

# Frames up to which a CUDA block holds the matrices; the operator is then one launch, which a graph can hold.
MOST_FRAMES = 48


def rank_scale(frames: int, block: Sequence[int]) -> float:
    """√pixels + √frames: about the largest singular value of a block of independent noise of unit variance.

    Thresholds in units of it act like those of single pixels.
    """
    return math.sqrt(math.prod(block)) + math.sqrt(frames)


def low_rank(series: Any, threshold: Any, block: Sequence[int], shift: Any = None) -> tuple[Any, Any]:
    """Each block's singular values less the threshold, and 0 at least.

    series    : complex [frames, *shape], NumPy or CuPy
    threshold : a real number, or a 0-d array of the device
    block     : pixels of a block along each axis of `shape`; blocks at the end may be smaller
    shift     : whole numbers, an array of the device, one for each axis: the image is rotated by −shift first, and back
                at the end

    Returns the series and the sum of its blocks' singular values, 0-d float64. The Gram matrices square the singular
    values, so in complex64 those below 3·10⁻⁴ of a block's largest are inexact; useful thresholds exceed that.
    """
    xp = sys.modules[type(series).__module__.partition(".")[0]]
    frames, shape = series.shape[0], series.shape[1:]
    sizes = tuple(min(b, n) for b, n in zip(block, shape, strict=True))
    if xp is not np and frames <= MOST_FRAMES and len(shape) <= 3:
        from kernels.proximal import cuda

        return cuda.low_rank(series, threshold, sizes, shift)
    counts = tuple(-(-n // b) for n, b in zip(shape, sizes, strict=True))
    turned = _rotated(xp, series, shift, 1)
    padded = xp.zeros((frames, *(b * c for b, c in zip(sizes, counts, strict=True))), series.dtype)
    inside = (slice(None), *map(slice, shape))
    padded[inside] = turned
    split = padded.reshape(frames, *(n for pair in zip(counts, sizes, strict=True) for n in pair))
    dimensions = len(shape)
    order = (*range(1, 2 * dimensions, 2), *range(2, 2 * dimensions + 1, 2), 0)
    matrices = split.transpose(order).reshape(math.prod(counts), math.prod(sizes), frames)
    gram = xp.matmul(matrices.conj().swapaxes(1, 2), matrices)
    squares, vectors = xp.linalg.eigh(gram)
    values = xp.sqrt(xp.maximum(squares, 0))
    kept = xp.maximum(values - threshold, 0)
    factors = (kept / xp.maximum(values, np.finfo(values.dtype).tiny)).astype(values.dtype, copy=False)
    smoothing = xp.matmul(vectors * factors[:, None, :], vectors.conj().swapaxes(1, 2))
    matrices = xp.matmul(matrices, smoothing)
    back = matrices.reshape(*counts, *sizes, frames)
    order = (2 * dimensions, *(axis for pair in zip(range(dimensions), range(dimensions, 2 * dimensions), strict=True)
                               for axis in pair))  # fmt: skip
    padded = back.transpose(order).reshape(padded.shape)
    made = xp.ascontiguousarray(padded[inside])
    return _rotated(xp, made, shift, -1), xp.sum(kept, dtype=np.float64)


def _rotated(xp: Any, series: Any, shift: Any, sign: int) -> Any:
    if shift is None:
        return series
    for axis, n in enumerate(series.shape[1:]):
        series = xp.take(series, (xp.arange(n) + sign * shift[axis]) % n, axis=1 + axis)
    return series
