"""Histograms, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    histogram(values)                 uint8: 256 bins, uint16: 65536 bins, one per value
    histogram(values, edges)          float32, float64: bin b counts edges[b] <= x < edges[b + 1]; the last one also
                                      x = edges[-1]. NaNs and values outside the edges are not counted.
    histogram(values, channel_axis=k) one histogram for each index along that axis

Input : array of any shape and strides.
Result: counts [bins], or [channels, bins], int64, of the input's library. Counts are exact for any number of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_workers

__all__ = ["INTEGER_BINS", "histogram"]

INTEGER_BINS = {"uint8": 256, "uint16": 65536}
FLOATS = ("float32", "float64")
MAX_BINS = (1 << 31) - 1


def histogram(
    values: Any,
    edges: Any = None,
    *,
    channel_axis: int | None = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """The number of values in each bin.

    values       : NumPy or CuPy array of uint8, uint16, float32 or float64
    edges        : for floats: ascending numbers, one more than there are bins (NumPy array or sequence, not on a GPU)
    channel_axis : the axis of channels, each of which has its own histogram
    workers      : CPU threads; default one per core
    stream       : CUDA: the stream to launch on; default CuPy's current one. The call does not wait for the device.

    Raises ValueError or TypeError; the message names the parameter.
    """
    check_array("values", values)
    dtype = values.dtype.newbyteorder("=")
    if dtype.name not in (*INTEGER_BINS, *FLOATS):
        raise TypeError(f"values has dtype {values.dtype}; supported are {', '.join((*INTEGER_BINS, *FLOATS))}")
    check_workers(workers)
    checked = _checked_edges(edges, dtype)
    channels = 1
    if channel_axis is not None:
        if not -values.ndim <= channel_axis < values.ndim:
            raise ValueError(f"channel_axis is {channel_axis}, but values has {values.ndim} axes")
        channels = values.shape[channel_axis]
        if channels == 0:
            raise ValueError(f"values has no channels: axis {channel_axis} of shape {values.shape}")
    bins = INTEGER_BINS[dtype.name] if checked is None else len(checked) - 1
    if bins * channels > MAX_BINS:
        raise ValueError(f"{channels} channels of {bins} bins are more than {MAX_BINS} counts")
    options: dict[str, Any] = {"channel_axis": channel_axis, "channels": channels, "bins": bins}
    if isinstance(values, np.ndarray):
        from kernels.classic.histogram import cpu

        counts = cpu.histogram(values, checked, workers=workers, **options)
    else:
        from kernels.classic.histogram import cuda

        counts = cuda.histogram(values, checked, stream=stream, **options)
    return counts.reshape(bins) if channel_axis is None else counts


def _checked_edges(edges: Any, dtype: np.dtype[Any]) -> Any:
    """The edges as float64; None for integers, which have one bin per value."""
    if dtype.name in INTEGER_BINS:
        if edges is not None:
            raise ValueError(f"edges: values of {dtype} have a bin each; convert them to float32 to have others")
        return None
    if edges is None:
        raise ValueError(f"edges: values of {dtype} need them: ascending numbers, one more than there are bins")
    if not isinstance(edges, np.ndarray | list | tuple):
        raise TypeError(f"edges must be a NumPy array or a sequence of numbers; got {type(edges).__name__}")
    if isinstance(edges, np.ndarray):
        check_array("edges", edges)
    exact = np.asarray(edges, np.float64)
    if exact.ndim != 1 or exact.size < 2:
        raise ValueError(f"edges must be two numbers or more in a row; got shape {exact.shape}")
    if np.isnan(exact).any() or not (exact[1:] > exact[:-1]).all():
        raise ValueError("edges must ascend, each larger than the one before")
    return exact
