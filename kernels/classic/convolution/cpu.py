"""Convolution of NumPy arrays: lines and images in strips, by our own threads and Numba-compiled code; layers as one
matrix product per filter position, by NumPy's BLAS."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.classic.gemm.cpu import gemm
from kernels.runtime.compiled import compiled

Array = NDArray[Any]

LINE_RUN = 1 << 12  # results whose sums stay in a core's cache for all weights of the mask
MIN_RESULTS_A_WORKER = 1 << 16  # below this a thread costs more than it saves


def convolve(samples: Array, mask: Array, out: Array | None, *, workers: int | None = None) -> Array:
    """The convolution of a line or an image; see kernels.classic.convolution. A line is an image of one row."""
    if out is None:
        out = np.empty(samples.shape, np.float32)
    if not out.size:
        return out
    image = np.ascontiguousarray(np.atleast_2d(samples), np.float32)
    turned = np.ascontiguousarray(np.flip(np.atleast_2d(mask)), np.float32)
    result = out.reshape(image.shape)
    rows, columns = image.shape
    runs = -(-columns // LINE_RUN)
    count = min(workers or len(os.sched_getaffinity(0)), -(-out.size // MIN_RESULTS_A_WORKER), rows * runs)
    ends = [rows * runs * i // count for i in range(count + 1)]
    if count == 1:
        _strip(image, turned, result, LINE_RUN, 0, rows * runs)
    else:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda i: _strip(image, turned, result, LINE_RUN, ends[i], ends[i + 1]), range(count)))
    return out


@compiled
def _strip(image: Array, mask: Array, result: Array, run: int, first: int, end: int) -> None:
    """Runs first … end - 1 of the result, counted along its rows."""
    rows, columns = image.shape
    runs = (columns + run - 1) // run
    for number in range(first, end):
        row, begin = number // runs, number % runs * run
        stop = min(begin + run, columns)
        sums = result[row]
        for x in range(begin, stop):
            sums[x] = 0
        for v in range(mask.shape[0]):
            y = row + v - mask.shape[0] // 2
            if y < 0 or y >= rows:
                continue
            for u in range(mask.shape[1]):
                shift, weight = u - mask.shape[1] // 2, mask[v, u]
                for x in range(max(begin, -shift), min(stop, columns - shift)):
                    sums[x] += weight * image[y, x + shift]


def layer(images: Array, filters: Array, out: Array | None, shape: tuple[int, ...]) -> Array:
    """A convolution layer; see kernels.classic.convolution."""
    if out is None:
        out = np.empty(shape, np.float32)
    out[...] = 0
    if not out.size:
        return out
    rows, columns = shape[2:]
    weights = np.ascontiguousarray(filters.transpose(2, 3, 0, 1), np.float32)
    for image, maps in zip(images, out, strict=True):
        flat = maps.reshape(shape[1], rows * columns)
        for v, u in np.ndindex(weights.shape[:2]):
            window = np.ascontiguousarray(image[:, v : v + rows, u : u + columns], np.float32)
            flat += gemm(weights[v, u], window.reshape(len(image), rows * columns), None)
    return out
