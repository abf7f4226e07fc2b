"""Which definition of a Gaussian holds and how far it may err, in words for the plan and the receipt: see
docs/gaussians.md and `kernels.smoothing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.smoothing.window import Window

NARROW_ERROR = 0.6  # of a step
# How far the weights of bytes that are decimated along an axis can move a result, and how far float32 sums of bytes can
# for each sample of reach: the weights of two taps and the centre err by 2**-23 in all, and a sum is rounded once.
BYTES_DECIMATED_ERROR, BYTES_ERROR = 0.043, 255 * 2.0**-24 + 2.0**-17


def definition_of(
    windows: Sequence[Window], letters: Sequence[str], within: np.dtype[Any], result: np.dtype[Any]
) -> str:
    """How Gaussians along axes of these letters are computed, and their largest error.

    within : the dtype of the samples that the kernel gets; its results are rounded to `result`
    """
    methods: dict[str, list[str]] = {}
    for window, letter in zip(windows, letters, strict=True):
        if window.taps > 1:
            methods.setdefault(_method(window, within), []).append(letter)
    if not methods:
        return "none, since sigma is 0"
    along = [f"{method} along {','.join(axes)}" for method, axes in methods.items()]
    return f"{' and '.join(along if len(methods) > 1 else methods)}, within {_bound(windows, within, result)}"


def _method(window: Window, within: np.dtype[Any]) -> str:
    if window.decimation is not None:
        return "decimated"
    if window.exact or window.words:
        return "exact sums of fixed-point weights"
    return "float64 sums" if within == np.float64 else "float32 sums"


def _bound(windows: Sequence[Window], within: np.dtype[Any], result: np.dtype[Any]) -> str:
    active = [window for window in windows if window.taps > 1]
    decimated = [window.decimation is not None for window in active]
    if any(window.derivative for window in active):
        return "1e-5 of the largest value that the weights could give"
    if within.kind == "f":
        roundings = f"{sum(window.taps for window in active)} roundings of the largest magnitude to {within.name}"
        found = "1e-5 of the largest magnitude" if any(decimated) else roundings
        if result == within:
            return found
        return f"{'one rounding to float16' if result.kind == 'f' else '0.5 of a step'} and {found}"
    return f"{NARROW_ERROR} of a step" if is_narrow(windows, within) else "1 step"


def is_narrow(windows: Sequence[Window], within: np.dtype[Any]) -> bool:
    """Whether integer results are certain to be within `NARROW_ERROR` of a step."""
    active = [window for window in windows if window.taps > 1]
    decimated = [window for window in active if window.decimation is not None]
    if len(decimated) == len(active):  # 16-bit results move by up to 0.1 along three axes, bytes hardly
        return within == np.uint8 or len(active) <= 3
    if active[0].words or active[0].exact:
        return True
    if within != np.uint8:
        return False
    reach = sum(window.after for window in active if window.decimation is None)
    return 0.5 + BYTES_DECIMATED_ERROR * len(decimated) + BYTES_ERROR * reach <= NARROW_ERROR
