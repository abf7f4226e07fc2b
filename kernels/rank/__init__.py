"""Rank filters of images and volumes, on NumPy arrays (CPU) and CuPy arrays (CUDA): the sample of a given rank among
those of the window around each place.

The parameters are those of scipy.ndimage. Every result is one of the samples, so results are exact: the same bits on
every device, with any number of threads, and however the image is cut into chunks. Samples are ordered as numbers, with
-0.0 before 0.0. Of an even number of samples the median is the upper one, as in scipy.ndimage.

A window of even size reaches one sample farther to the left. A window may be larger than the image: the border mode
gives the samples beyond, as often as it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, TypedDict, Unpack

import numpy as np

from kernels.rank.footprint import MAX_RADIUS, SHAPES, ball, checked_footprint, cross, disk, footprint_named
from kernels.rank.task import MAX_AXES, MAX_SAMPLES, Axis, Difference, Rank, Task, axis_of, folded, is_foldable
from kernels.runtime.arrays import check_array, check_out, check_workers, on_stream
from kernels.runtime.filtering import DTYPES, NAN_POLICIES, check_cval, filtered_axes, per_axis
from kernels.smoothing.borders import MODES

__all__ = [
    "DTYPES", "MAX_RADIUS", "MAX_SAMPLES", "MODES", "SHAPES", "ball", "cross", "disk", "footprint_named",
    "maximum_filter", "median_filter", "minimum_filter", "percentile_filter", "rank_filter",
]  # fmt: skip


class Options(TypedDict, total=False):
    """Options of every rank filter: see `median_filter`."""

    footprint: Any
    mode: str | Sequence[str]
    cval: float
    origin: int | Sequence[int]
    axes: int | Sequence[int] | None
    channel_axis: int | None
    nan_policy: str
    nodata: float | None
    out: Any
    workers: int | None
    stream: Any
    difference: Difference  # of kernels.morphology


def median_filter(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The median of each window: of n samples the one of rank n // 2.

    image        : NumPy or CuPy array, one of `DTYPES`, at least one sample
    size         : samples along each filtered axis, 1 or more; at most `MAX_SAMPLES` in all
    footprint    : instead of `size`: boolean array over the filtered axes, of odd sizes, that is True for the samples
                   that count, such as `disk(3)`, `ball(2)` or `cross(4, ndim=3)`; at most 31 samples wide
    mode         : border mode, one for all axes or one per axis; "valid" keeps only whole windows (the axis shrinks)
    cval         : value beyond the edge for mode "constant", which the dtype can hold; a sample like any other
    origin       : samples by which the window is moved to the left, along each filtered axis; its centre stays within
                   it. Mode "valid" does not look at it
    axes         : axes to filter, at most three; default all but `channel_axis`
    channel_axis : the axis of the channels, never filtered (as in scikit-image)
    nan_policy   : float images: "propagate" (a window with a NaN gives NaN), "omit" (the rank among the others; NaN if
                   there are none) or "raise"
    nodata       : a value that marks missing samples, which are left out; a window of missing samples gives it
    out          : array for the result, C-contiguous, in native byte order, not overlapping `image`
    workers      : CPU threads; default one per core
    stream       : CUDA stream to launch on; default CuPy's current stream

    Returns an array of the image's kind, dtype (native byte order) and shape, except along "valid" axes.
    Raises ValueError or TypeError with a line that names the parameter.
    """
    return _filtered(image, size, Rank(percentile=50.0), **options)


def percentile_filter(
    image: Any, percentile: float, size: int | Sequence[int] | None = None, **options: Unpack[Options]
) -> Any:
    """A percentile of each window: of n samples the one of rank floor(n percentile / 100), for 100 the largest.

    percentile : 0 … 100

    Everything else is as in `median_filter`.
    """
    number: Any = percentile
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) <= 100:
        raise ValueError(f"percentile must lie in 0 … 100; got {percentile!r}")
    return _filtered(image, size, Rank(percentile=float(percentile)), **options)


def rank_filter(image: Any, rank: int, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The sample of a given rank in each window, from 0; of a negative rank, counted from the largest.

    rank : less than the samples of a whole window. In a window with n of `whole` samples the rank taken is
           floor(rank n / whole); the last stays the last.

    Everything else is as in `median_filter`.
    """
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"rank must be a whole number; got {rank!r}")
    return _filtered(image, size, int(rank), **options)


def minimum_filter(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The smallest sample of each window. Everything is as in `median_filter`."""
    return _filtered(image, size, Rank(percentile=0.0), **options)


def maximum_filter(image: Any, size: int | Sequence[int] | None = None, **options: Unpack[Options]) -> Any:
    """The largest sample of each window. Everything is as in `median_filter`."""
    return _filtered(image, size, Rank(percentile=100.0), **options)


def _filtered(
    image: Any,
    size: Any,
    rank: Rank | int,
    *,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
    difference: Difference | None = None,
    **options: Any,
) -> Any:
    if not hasattr(image, "dtype") or not hasattr(image, "ndim"):
        raise TypeError(f"image must be a NumPy or CuPy array; got {type(image).__name__}")
    check_workers(workers)
    check_array("image", image)
    # Checks and tasks are made once: a stream of chunks repeats calls, and some kernels take less time than they do.
    key = None
    steps = 1 if difference is None or not difference.opens else 2
    if options.get("footprint") is None:
        key = repr((image.shape, image.dtype.str, size, rank, steps, options))
    found = _plans.get(key)
    if found is None:
        found = _planned(image.shape, image.dtype, size, rank, steps=steps, **options)
        if key is not None:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = found
    task, shape, order, refuses_nan = found
    if refuses_nan and bool((image != image).any()):  # noqa: PLR0124 - true only for NaN
        raise ValueError('image contains NaN (nan_policy "raise")')
    check_out(out, shape, task.dtype, apart_from={"image": image})
    if order is None:
        further = {} if difference is None else {"difference": difference}
        result = _body(image, task, out, workers, stream, **further)
        return None if result is None else result.reshape(shape)
    if difference is not None and difference.opens:
        return None
    # Axes that are too far apart are moved together.
    with on_stream(image, stream):
        result = _body(image.transpose(order), task, None, workers, stream)
        result = result.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
        if out is None:
            return result.copy(order="C")
        out[...] = result
    return out


# Task, shape of the result, order of the axes if they are moved, and whether an image with NaN is refused.
Plan = tuple[Task, tuple[int, ...], list[int] | None, bool]
MAX_PLANS = 256
_plans: dict[str | None, Plan] = {}


def _planned(
    image_shape: tuple[int, ...],
    image_dtype: np.dtype[Any],
    size: Any,
    rank: Rank | int,
    *,
    footprint: Any = None,
    mode: str | Sequence[str] = "reflect",
    cval: float = 0,
    origin: int | Sequence[int] = 0,
    axes: int | Sequence[int] | None = None,
    channel_axis: int | None = None,
    nan_policy: str = "propagate",
    nodata: float | None = None,
    steps: int = 1,
) -> Plan:
    chosen = filtered_axes(image_shape, image_dtype, axes, channel_axis)
    sizes, mask = _window(size, footprint, chosen)
    modes = per_axis("mode", mode, chosen)
    check_cval(image_dtype, cval)
    if nan_policy not in NAN_POLICIES:
        raise ValueError(f"nan_policy must be one of {', '.join(NAN_POLICIES)}; got {nan_policy!r}")
    if nodata is not None:
        check_cval(image_dtype, nodata, "nodata")
        if math.isnan(nodata):
            nan_policy, nodata = "omit", None
    samples = math.prod(sizes) if mask is None else int(mask.sum())
    if samples > MAX_SAMPLES:
        raise ValueError(f"size makes a window of {samples:,} samples; at most {MAX_SAMPLES:,} are supported")
    windows = {
        axis: (taps, of, shift, steps)
        for axis, taps, of, shift in zip(chosen, sizes, modes, _origins(origin, sizes, chosen), strict=True)
        if taps > 1 or mask is not None
    }
    mask = None if mask is None else mask.transpose(np.argsort(chosen))
    if len(windows) > MAX_AXES:
        raise ValueError(f"size filters {len(windows)} axes; at most {MAX_AXES} are supported: give 1 for the others")
    shape = [*image_shape]
    for axis, window in windows.items():
        shape[axis] = axis_of(shape[axis], *window).out_length
    if isinstance(rank, int):
        if not -samples <= rank < samples:
            raise ValueError(f"rank must lie in {-samples} … {samples - 1} for {samples} samples; got {rank}")
        rank = Rank(rank=rank % samples, whole=samples)
    order = [*range(len(shape))]
    if not is_foldable(windows, image_shape):
        order = [*(axis for axis in order if axis not in windows), *sorted(windows)]
    moved = {order.index(axis): window for axis, window in windows.items()}
    planes, spans, inner = folded([image_shape[axis] for axis in order], moved)
    task = Task(
        dtype=np.dtype(image_dtype).newbyteorder("="), planes=planes, axes=spans, inner=inner,
        footprint=_reshaped(mask, spans), rank=rank, samples=samples, omit_nan=nan_policy == "omit", nodata=nodata,
        cval=cval,
    )  # fmt: skip
    is_moved = order != sorted(order)
    return task, tuple(shape), order if is_moved else None, nan_policy == "raise" and image_dtype.kind == "f"


def _body(image: Any, task: Task, out: Any, workers: int | None, stream: Any, **further: Any) -> Any:
    if isinstance(image, np.ndarray):
        from kernels.rank import cpu

        return cpu.filtered(image, task, out, workers=workers)
    from kernels.rank import cuda

    return cuda.filtered(image, task, out, stream=stream, **further)


def _origins(origin: Any, sizes: Sequence[int], axes: tuple[int, ...]) -> tuple[int, ...]:
    origins = per_axis("origin", origin, axes)
    for each, size in zip(origins, sizes, strict=True):
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise TypeError(f"origin must be a whole number of samples; got {each!r}")
        if not -(size // 2) <= each <= (size - 1) // 2:
            raise ValueError(f"origin must lie in {-(size // 2)} … {(size - 1) // 2} for a size of {size}; got {each}")
    return tuple(map(int, origins))


def _reshaped(mask: Any, axes: Sequence[Axis]) -> Any:
    """The footprint over all three axes of a task."""
    return None if mask is None else mask.reshape([axis.taps for axis in axes])


def _window(size: Any, footprint: Any, axes: tuple[int, ...]) -> tuple[tuple[int, ...], Any]:
    """The samples of the window along each axis, and which of them count; None: all."""
    if (size is None) == (footprint is None):
        raise ValueError("give either size or footprint")
    if footprint is not None:
        mask = checked_footprint(footprint, len(axes))
        return mask.shape, None if mask.all() else mask
    sizes = per_axis("size", size, axes)
    for each in sizes:
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise TypeError(f"size must be a whole number of samples; got {each!r}")
        if each < 1:
            raise ValueError(f"size must be 1 or more; got {each}")
    return tuple(map(int, sizes)), None
