"""Exact Gaussians of images with more channels than a block has room for: on a copy whose channels are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.smoothing.window import Window


def applies(by: Callable[..., bool], shape: tuple[int, ...], dtype: np.dtype[Any], windows: Sequence[Window]) -> bool:
    """`by` : the `applies` of the kernel that smooths the copy"""
    if len(windows) != 2:
        return False
    y = windows[0].axis
    return by((*shape[:y], math.prod(shape[y + 2 :]), *shape[y : y + 2]), dtype, _behind_channels(windows))


def run(by: Callable[..., None], image: Any, windows: Sequence[Window], cval: float, out: Any, stream: Any) -> None:
    """`by` : the `run` of the kernel that smooths the copy"""
    import cupy

    y = windows[0].axis

    def apart(array: Any) -> Any:
        return cupy.moveaxis(array.reshape(*array.shape[: y + 2], -1), -1, y)

    samples, results = cupy.ascontiguousarray(apart(image)), apart(out)
    smoothed = cupy.empty(results.shape, out.dtype)
    by(samples, _behind_channels(windows), cval, smoothed, stream)
    results[...] = smoothed


def _behind_channels(windows: Sequence[Window]) -> list[Window]:
    return [replace(window, axis=window.axis + 1) for window in windows]
