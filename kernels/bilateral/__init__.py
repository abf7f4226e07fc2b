"""The bilateral filter of images and volumes, on NumPy arrays (CPU) and CuPy arrays (CUDA).

    out(p) = sum over q of w(q) x(q) / sum over q of w(q),   w = exp(-|p - q|² / (2 sigma_spatial²)
                                                                     - (x(q) - x(p))² / (2 sigma_range²))

over a box around p: a mean over neighbours with similar values, which preserves edges.

It is computed as x(p) + sum w(q) (x(q) - x(p)) / sum w(q), in the order of memory, with w(p) = 1. Constant images
do not change.

float64 images are computed in float64, within 1e-14 of the definition. Images of integers and float32 are computed in
float32, with the same bits on CPU and GPU; integers are then rounded to nearest. Their weights are within WEIGHT_ERROR
of the definition, and 0 for differences above CUTOFF `sigma_range`. In noise, results are within 1e-4 `sigma_range` of
the definition. The largest error is 2.5e-5 `sigma_range` times the samples of the window; it occurs if all neighbours
differ from the centre by four or five `sigma_range`.

A window that contains a NaN, an infinity or (float32) a magnitude above 1e37 `sigma_range` gives NaN. `sigma_range` is
limited to 1e-20 … 1e30 (float64: 1e-150 … 1e150).

Source: Tomasi and Manduchi, "Bilateral filtering for gray and color images" (1998). Channels are filtered one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.rank.task import MAX_AXES, Axis, axis_of, folded, is_foldable
from kernels.runtime.arrays import check_array, check_out, check_workers, on_stream
from kernels.runtime.filtering import check_cval, filtered_axes, per_axis

__all__ = ["MAX_SIZE", "WEIGHT_ERROR", "bilateral", "default_sizes"]

MAX_SIZE = 31  # samples of the window along an axis
CUTOFF = math.sqrt(2 * 14.51580148368118)
GAUSSIAN = (  # of `tap_numbers`
    1.329513073201681, -1.0493911286116766, 0.5925703281737837, 1.1245251127711808, -0.1895147773846201,
    -0.010331446379084603, -0.00014798961595569016,
)  # fmt: skip
WEIGHT_ERROR = 5.5e-6  # with float32's own
NUMBERS = 8  # coefficients of a tap; the last is padding


@dataclass(frozen=True, kw_only=True)
class Task:
    """A filter of an array seen as [planes, three axes, inner].

    taps    : for each tap, in the order of memory, its `tap_numbers`; for float64 images, the binary exponent of its
              spatial weight, 0 or more
    scale   : factor of the samples
    """

    dtype: np.dtype[Any]
    planes: int
    axes: tuple[Axis, Axis, Axis]
    inner: int
    taps: NDArray[Any]
    scale: float
    cval: float

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.planes, *(axis.out_length for axis in self.axes), self.inner)


def default_sizes(sigma_spatial: Sequence[float]) -> tuple[int, ...]:
    """Windows that reach three standard deviations, as in scikit-image, but at most `MAX_SIZE`."""
    return tuple(min(2 * math.ceil(3 * sigma) + 1, MAX_SIZE) for sigma in sigma_spatial)


def bilateral(
    image: Any,
    sigma_range: float,
    sigma_spatial: float | Sequence[float] = 1.0,
    *,
    size: int | Sequence[int] | None = None,
    mode: str | Sequence[str] = "reflect",
    cval: float = 0,
    axes: int | Sequence[int] | None = None,
    channel_axis: int | None = None,
    out: Any = None,
    workers: int | None = None,
    stream: Any = None,
) -> Any:
    """The bilateral filter; see the module.

    image         : NumPy or CuPy array, one of `kernels.runtime.filtering.DTYPES`, at least one sample
    sigma_range   : standard deviation of sample values, above 0
    sigma_spatial : standard deviation of the distance in samples, along each filtered axis, above 0
    size          : samples of the window along each filtered axis, odd, at most `MAX_SIZE`; default `default_sizes`
    mode          : border mode, one for all axes or one per axis; "valid" keeps only whole windows (the axis shrinks)
    cval          : value beyond the edge for mode "constant"
    axes          : axes to filter, at most three; default all but `channel_axis`
    channel_axis  : the axis of the channels, never filtered
    out           : array for the result, C-contiguous, in native byte order, not overlapping `image`
    workers       : CPU threads; default one per core
    stream        : CUDA stream to launch on; default CuPy's current stream

    Returns an array of the image's kind, dtype and shape, except along "valid" axes.
    Raises ValueError or TypeError with a line that names the parameter.
    """
    if not hasattr(image, "dtype") or not hasattr(image, "ndim"):
        raise TypeError(f"image must be a NumPy or CuPy array; got {type(image).__name__}")
    check_workers(workers)
    check_array("image", image)
    chosen = filtered_axes(image.shape, image.dtype, axes, channel_axis)
    if len(chosen) > MAX_AXES:
        raise ValueError(f"axes: {len(chosen)} are filtered; at most {MAX_AXES} are supported")
    check_cval(image.dtype, cval)
    if not 0 < float(sigma_range) < math.inf:
        raise ValueError(f"sigma_range must be a difference of samples above 0; got {sigma_range!r}")
    sigmas = per_axis("sigma_spatial", sigma_spatial, chosen)
    if not all(0 < float(each) < math.inf for each in sigmas):
        raise ValueError(f"sigma_spatial must be a number of samples above 0; got {sigma_spatial!r}")
    sizes = default_sizes(sigmas) if size is None else per_axis("size", size, chosen)
    for each in sizes:
        if isinstance(each, bool) or not isinstance(each, int | np.integer):
            raise TypeError(f"size must be a whole number of samples; got {each!r}")
        if not (1 <= each <= MAX_SIZE and each % 2 == 1):
            raise ValueError(f"size must be odd, 1 … {MAX_SIZE}; got {each}")
    modes = per_axis("mode", mode, chosen)
    windows = {axis: (int(taps), of, 0, 1) for axis, taps, of in zip(chosen, sizes, modes, strict=True)}
    dtype, shape = np.dtype(image.dtype).newbyteorder("="), [*image.shape]
    for axis, window in windows.items():
        shape[axis] = axis_of(shape[axis], *window).out_length
    check_out(out, tuple(shape), dtype, apart_from={"image": image})
    while len(windows) > 1 and windows[min(windows)][0] == 1:
        del windows[min(windows)]  # planes that no window joins are filtered one by one
    # Axes that cannot be folded are moved to the end.
    others = [axis for axis in range(image.ndim) if axis not in windows]
    order = [*range(image.ndim)] if is_foldable(windows, image.shape) else [*others, *sorted(windows)]
    planes, spans, inner = folded(
        [image.shape[axis] for axis in order], {order.index(axis): window for axis, window in windows.items()}
    )
    exponents = np.zeros((), np.float64)
    for axis in sorted(windows):
        taps, sigma = windows[axis][0], float(sigmas[chosen.index(axis)])
        exponents = np.add.outer(exponents, (np.arange(taps) - taps // 2) ** 2 / (2 * sigma * sigma))
    if dtype == np.float64:
        sigma = min(max(float(sigma_range), 1e-150), 1e150)
        scale, numbers = 1 / (sigma * math.sqrt(2 * math.log(2))), exponents.ravel() / math.log(2)
    else:
        sigma = min(max(float(sigma_range), 1e-20), 1e30)
        scale, numbers = 1 / (sigma * CUTOFF), tap_numbers(exponents.ravel())
    task = Task(dtype=dtype, planes=planes, axes=spans, inner=inner, taps=numbers, scale=scale, cval=cval)
    with on_stream(image, stream):
        in_place = out is not None and order == [*range(image.ndim)]
        result = _body(image.transpose(order), task, out.reshape(task.out_shape) if in_place else None, workers, stream)
        if in_place:
            return out
        result = result.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
        if out is None:
            return result if result.flags.c_contiguous else result.copy(order="C")
        out[...] = result
    return out


def tap_numbers(exponents: NDArray[Any]) -> NDArray[Any]:
    """For each tap, the NUMBERS coefficients c (float32) of its weight as a function of s = max(1 - u² / CUTOFF², 0):

        v1 = c0 s + c1,  v2 = s v1 + c2,  v3 = v1 v2 + c3,  v4 = v2 v3 + c4,  v5 = v4² + c5,  w = max(v5² + c6, 0)

    With the coefficients GAUSSIAN, a minimax approximation, w is exp(-u² / 2) within 5.3e-6, at most 1, and 0 if s = 0.
    The spatial weight exp(-exponent) scales w, and a root of it scales each v.
    """
    roots = np.array([1, 1, 1, 2, 3, 6, 12, 0]) / 12
    return (np.exp(-exponents[:, None] * roots) * [*GAUSSIAN, 0]).astype(np.float32)


def _body(image: Any, task: Task, out: Any, workers: int | None, stream: Any) -> Any:
    if isinstance(image, np.ndarray):
        from kernels.bilateral import cpu

        return cpu.filtered(image, task, out, workers=workers)
    from kernels.bilateral import cuda

    return cuda.filtered(image, task, out, stream=stream)
