"""Box and Gaussian smoothing of images and volumes, on NumPy arrays (CPU) and CuPy arrays (CUDA).

The parameters are those of scipy.ndimage. The arithmetic is our own contract, so results have the same bits on every
device, with any number of threads, and however the image is cut into chunks.

Box, integer images: the integer sum over the whole window, then one rounding to nearest: floor(sum / n + 1/2).
Box, float images: along each axis in turn the window sum W(taps) is built by doubling, in the image's own precision:
    W(1)[i] = x[i];  W(2m)[i] = W(m)[i] + W(m)[i + m];  W(2m+1)[i] = W(2m)[i] + x[i + 2m]
  Windows of more than 64 samples are summed in runs of 16, which begin at multiples of 16 in the whole image. With
    head: the first sample's run from that sample on, added from the run's end backwards
    tail: the last sample's run up to that sample, added forwards
    T: each whole run in between, added forwards; there are q - 1 or q of them, q = (taps - 1) // 16
  the sum is (head + tail) + M, where M is W(q - 1) of the first of these T, plus the last if there are q.
  The last axis's sum is multiplied by 1/n rounded to that precision (samples within a factor n of the type's
  largest value may become infinite). Nothing is subtracted: an infinity or NaN affects only the windows that contain
  it, and with `offset` results do not depend on where a chunk begins.
Gaussian, uint8 images, along one axis or two that are neighbours, if no radius exceeds 32 and no weight is larger than
  0.998 (sigma from 0.27 on): exact sums (kernels/smoothing/byte_sums.py), within 0.6 of a step. An axis with a window
  of one tap does not count.
Gaussian of standard deviation above 7.6, or of uint16, int16 and float32 images above 5.8 along two or more axes, which
  are neighbours, if neither `truncate` nor `radius` is given and no sample is left out: decimated
  (kernels/smoothing/decimation.py), within 0.6 of a step for integer images (of 16 bits along up to three axes), and
  1e-5 of the largest magnitude for floats.
Derivatives of a Gaussian: along each axis a = w[0] x[i - radius]; a = fma(w[k], x[i - radius + k], a) in ascending
  order, in float32 (float64 for float64 images); derivatives of integer images are float32. Decimated alike.
Gaussian, uint16 and int16 images, along exactly two axes, which are neighbours, if both radii are 4 … 30 and one is at
  least 5: exact sums (kernels/smoothing/words.py), within 0.6 of a step.
Gaussian, all other images: along each axis in turn, with weights w[k] at distance k,
    a = w[0] * x[i];  for k = 1 … radius: a = fma(w[k], x[i - k] + x[i + k], a)
  in float32 for integer and float32 images, in float64 for float64 images. For integer images the weights are integer
  multiples of 2**-24 that sum to exactly one, and results are rounded once, at the end, to nearest (ties to even); a
  constant image stays constant. In addition to the rounding's 0.5, the weights of the widest kernel move a 16-bit
  result by up to 0.29 and the float32 sums by slightly more: within 1 of the exact Gaussian (worst found by search:
  0.573), and within 0.51 for bytes.
Axes are taken in ascending order; the image is first extended beyond its edges along all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from kernels.runtime.arrays import check_array, check_out, check_workers, on_stream
from kernels.runtime.filtering import DTYPES, NAN_POLICIES, check_cval, filtered_axes, per_axis
from kernels.smoothing.borders import BORDER_MODES, MODES, border_indices
from kernels.smoothing.window import (
    MAX_SAMPLES,
    MAX_TAPS,
    Window,
    box_window,
    check_lengths,
    gaussian_windows,
    output_shape,
    result_dtype,
)

__all__ = ["BORDER_MODES", "DTYPES", "MAX_TAPS", "MODES", "border_indices", "gaussian_filter", "uniform_filter"]


def uniform_filter(
    image: Any,
    size: int | Sequence[int] = 3,
    *,
    mode: str | Sequence[str] = "reflect",
    cval: float = 0,
    axes: int | Sequence[int] | None = None,
    channel_axis: int | None = None,
    offset: int | Sequence[int] = 0,
    nan_policy: str = "propagate",
    mask: Any = None,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """Mean over a box around each sample (scipy.ndimage.uniform_filter's parameters).

    image        : NumPy or CuPy array, one of `DTYPES`, at least one sample
    size         : samples along each filtered axis, 1 … 2**20; an even size reaches one sample farther to the left
    mode         : border mode, one for all axes or one per axis; "valid" keeps only whole windows (the axis shrinks)
    cval         : value beyond the edge for mode "constant"; for integer images an integer that the dtype can hold
    axes         : axes to filter; default all but `channel_axis`
    channel_axis : the axis of the channels, never filtered (as in scikit-image)
    offset       : place of the image's first sample in a larger image, along each filtered axis: with it, pieces have
                   the same bits as the whole. It matters to floats and sizes of more than 255 only
    nan_policy   : float images: "propagate", "omit" (mean over the samples that are not NaN) or "raise"
    mask         : float images: boolean array of the image's shape, True where a sample counts; the mean is over those
                   samples, NaN if a window has none. The border of mode "constant" counts.
    out          : array for the result, C-contiguous, in native byte order, not overlapping `image` or `mask`
    workers      : CPU threads; default one per core
    stream       : CUDA stream to launch on; default CuPy's current stream

    Returns an array of the image's kind, dtype (native byte order) and shape, except along "valid" axes.
    Raises ValueError or TypeError with a line that names the parameter.
    """
    request = _request(image, _box_windows, (axes, channel_axis, size, mode, offset))
    return _smooth(image, request, cval, nan_policy, mask, out, workers, stream)


def gaussian_filter(
    image: Any,
    sigma: float | Sequence[float],
    *,
    order: int | Sequence[int] = 0,
    mode: str | Sequence[str] = "reflect",
    cval: float = 0,
    truncate: float | None = None,
    radius: int | Sequence[int] | None = None,
    axes: int | Sequence[int] | None = None,
    channel_axis: int | None = None,
    offset: int | Sequence[int] = 0,
    nan_policy: str = "propagate",
    mask: Any = None,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """Gaussian smoothing, or derivatives of the smoothed image (scipy.ndimage.gaussian_filter's parameters).

    sigma    : standard deviation in samples along each filtered axis; 0 leaves an axis as it is
    order    : derivative along each filtered axis, 0 (smoothing) … 3, per sample; derivatives of integer images are
               float32, since they are negative and fractional
    truncate : the kernel ends at round(truncate * sigma) samples; default 4, and wide kernels are decimated
    radius   : samples on each side instead of `truncate`
    offset   : as in `uniform_filter`; it matters to decimated Gaussians

    Everything else is as in `uniform_filter`.
    """
    direct = mask is not None or nan_policy == "omit"
    parameters = (axes, channel_axis, sigma, mode, truncate, radius, offset, order, direct)
    request = _request(image, _gaussian_windows, parameters)
    if direct and any(window.derivative for window in request.windows):
        raise ValueError("order: the derivative of a mean over some samples is not defined; leave out mask and omit")
    return _smooth(image, request, cval, nan_policy, mask, out, workers, stream)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The checked parameters of a call, apart from its arrays."""

    windows: tuple[Window, ...]  # sorted by axis, without those of one tap
    dtype: np.dtype[Any]  # of the result
    shape: tuple[int, ...]  # of the result


def _request(image: Any, make_windows: Callable[..., list[Window]], parameters: tuple[Any, ...]) -> _Request:
    """Checked once for each shape, dtype and parameters, since a stream of chunks repeats them."""
    if not hasattr(image, "dtype") or not hasattr(image, "ndim"):
        raise TypeError(f"image must be a NumPy or CuPy array; got {type(image).__name__}")
    # The key includes types: 1, 1.0 and True are equal, but not all are valid sizes.
    types = tuple(tuple(map(type, value)) if type(value) is tuple else type(value) for value in parameters)
    try:
        return _known_request(image.shape, image.dtype, make_windows, parameters, types)
    except TypeError:  # a parameter that is not hashable, such as a list, or invalid
        pass
    return _checked_request(image.shape, image.dtype, make_windows, parameters)


def _checked_request(
    shape: tuple[int, ...], dtype: Any, make_windows: Callable[..., list[Window]], parameters: tuple[Any, ...]
) -> _Request:
    axes, channel_axis, *rest = parameters
    windows = make_windows(dtype, filtered_axes(shape, dtype, axes, channel_axis), *rest)
    windows = sorted((w for w in windows if w.taps > 1), key=lambda window: window.axis)
    check_lengths(shape, windows)
    samples = math.prod(window.taps for window in windows if window.half_weights is None)
    if samples > MAX_SAMPLES:
        raise ValueError(f"size makes a box of {samples:,} samples; at most {MAX_SAMPLES:,} are supported")
    of_result = result_dtype(np.dtype(dtype).newbyteorder("="), windows)
    return _Request(windows=tuple(windows), dtype=of_result, shape=output_shape(shape, windows))


@lru_cache(maxsize=256)
def _known_request(
    shape: tuple[int, ...], dtype: Any, make_windows: Callable[..., list[Window]], parameters: Any, types: Any
) -> _Request:
    return _checked_request(shape, dtype, make_windows, parameters)


def _box_windows(dtype: Any, axes: tuple[int, ...], size: Any, mode: Any, offset: Any) -> list[Window]:
    sizes, modes, offsets = per_axis("size", size, axes), per_axis("mode", mode, axes), _offsets(offset, axes)
    if np.dtype(dtype).kind != "f":
        offsets = (0,) * len(axes)
    return [box_window(axis, *asked) for axis, *asked in zip(axes, sizes, modes, offsets, strict=True)]


def _offsets(offset: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    offsets = per_axis("offset", offset, axes)
    for each in offsets:
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise TypeError(f"offset must be a whole number of samples; got {each!r}")
    return offsets


def _gaussian_windows(
    dtype: Any,
    axes: tuple[int, ...],
    sigma: Any,
    mode: Any,
    truncate: float | None,
    radius: Any,
    offset: Any,
    order: Any,
    direct: bool,
) -> list[Window]:
    sigmas, modes = per_axis("sigma", sigma, axes), per_axis("mode", mode, axes)
    radii, offsets = per_axis("radius", radius, axes), _offsets(offset, axes)
    return gaussian_windows(
        axes, sigmas, modes, np.dtype(dtype), truncate=truncate, radii=radii, offsets=offsets, direct=direct,
        orders=per_axis("order", order, axes),
    )  # fmt: skip


def _smooth(
    image: Any,
    request: _Request,
    cval: float,
    nan_policy: str,
    mask: Any,
    out: Any,
    workers: int | None,
    stream: Any,
) -> Any:
    windows = request.windows
    check_cval(image.dtype, cval)
    body = _body(image, workers, stream)
    check_out(out, request.shape, request.dtype, apart_from={"image": image, "mask": mask})
    if nan_policy == "propagate" and mask is None:
        return body(image, windows, cval, out)
    # 0 / 0 is the NaN that a window without samples gives.
    with on_stream(image, stream), np.errstate(divide="ignore", invalid="ignore"):
        counted = _counted(image, nan_policy, mask)
        if counted is None:
            return body(image, windows, cval, out)
        filled = image.copy()
        filled[~counted] = 0
        total = body(filled, windows, cval, out)
        total /= body(counted.astype(image.dtype), windows, 1, None)
    return total


def _counted(image: Any, nan_policy: str, mask: Any) -> Any:
    """Boolean array of the samples that count, or None if all do."""
    if nan_policy not in NAN_POLICIES:
        raise ValueError(f"nan_policy must be one of {', '.join(NAN_POLICIES)}; got {nan_policy!r}")
    if np.dtype(image.dtype).kind != "f":
        if mask is not None:
            raise TypeError(f"mask needs a float image; got {image.dtype}: convert it first")
        return None
    if nan_policy == "raise" and bool((image != image).any()):  # noqa: PLR0124 - true only for NaN
        raise ValueError('image contains NaN (nan_policy "raise")')
    counted = None if mask is None else _checked_mask(image, mask)
    if nan_policy == "omit":
        present = image == image  # noqa: PLR0124 - false only for NaN
        counted = present if counted is None else counted & present
    return counted


def _checked_mask(image: Any, mask: Any) -> Any:
    if getattr(mask, "shape", None) != image.shape or mask.dtype != bool:
        raise ValueError(f"mask must be a boolean array of the image's shape {image.shape}")
    check_array("mask", mask)
    return mask


def _body(image: Any, workers: int | None, stream: Any) -> Any:
    check_workers(workers)
    check_array("image", image)
    if isinstance(image, np.ndarray):
        from kernels.smoothing import cpu

        return lambda image, windows, cval, out: cpu.smooth(image, windows, cval, out, workers=workers)
    from kernels.smoothing import cuda

    return lambda image, windows, cval, out: cuda.smooth(image, windows, cval, out, stream=stream)
