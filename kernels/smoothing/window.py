"""A separable filter along one axis: its reach, weights and border mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from kernels.smoothing import byte_sums, words
from kernels.smoothing.borders import MODES
from kernels.smoothing.decimation import Decimation, decimation
from kernels.smoothing.weights import derivative_weights, half_weights

MAX_TAPS = 1 << 20
MAX_SAMPLES = 1 << 40  # of a box over all axes: sums of 16-bit samples fit 64 bits
# Gaussians that reach farther are decimated without `truncate` and `radius`; the second holds for two or more
# neighbouring axes, if all are so far, except for uint8, float64 and derivatives.
DIRECT_RADIUS, DIRECT_PLANE_RADIUS = 30, 23
TRUNCATE = 4.0
MOST_DOUBLED = 64  # samples of a box of floats; with more it is summed in runs
RUN = 16  # samples of a run
MAX_ORDER = 3  # of derivatives


@dataclass(frozen=True, kw_only=True)
class Window:
    """The taps along one axis: output i is computed from inputs i - before … i + after.

    With mode "valid" output 0 is the first whose window lies inside the image, and the axis shrinks by `taps - 1`.
    A decimated Gaussian has the largest reach of any output; `half_weights` are those of its coarse samples.
    """

    axis: int
    before: int
    after: int
    mode: str
    half_weights: tuple[float, ...] | None = None  # Gaussian: weights at distance 0 … radius; None: a box
    exact: bool = False  # Gaussian of uint8 whose sums are exact in any order: see kernels.smoothing.byte_sums
    words: bool = False  # Gaussian of 16-bit samples whose sums are exact in any order: see kernels.smoothing.words
    derivative: tuple[float, ...] | None = None  # of a Gaussian: weights of all taps, of coarse samples if decimated
    decimation: Decimation | None = None  # Gaussian: computed on a coarse grid
    offset: int = 0  # absolute coordinate of the image's first sample, modulo `step`

    @property
    def taps(self) -> int:
        return self.before + self.after + 1

    @property
    def is_long_box(self) -> bool:
        """Whether a box of floats is summed in runs."""
        return self.half_weights is None and self.taps > MOST_DOUBLED

    @property
    def step(self) -> int:
        """Results depend on absolute coordinates modulo this."""
        return self.decimation.factor if self.decimation is not None else RUN if self.is_long_box else 1

    @property
    def lead(self) -> int:
        """Long boxes: samples of a run before the first window's first sample."""
        return (self.offset - (0 if self.mode == "valid" else self.before)) % RUN

    def output_length(self, input_length: int) -> int:
        return input_length - (self.taps - 1) if self.mode == "valid" else input_length


def box_window(axis: int, size: int, mode: str, offset: int = 0) -> Window:
    """A box of `size` samples; an even size reaches one farther to the left, as in scipy.ndimage."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(f"size must be a whole number of samples; got {size!r}")
    if not 1 <= size <= MAX_TAPS:
        raise ValueError(f"size must lie in 1 … {MAX_TAPS}; got {size}")
    before = int(size) // 2
    window = Window(axis=axis, before=before, after=int(size) - 1 - before, mode=_known(mode))
    return replace(window, offset=int(offset) % window.step)


def extended(image: Any, windows: Sequence[Window], cval: float, module: Any) -> tuple[Any, Sequence[Window]]:
    """The image, extended by `cval` along the axes after a long box of floats whose border mode is "constant", and the
    windows on it: sums of that constant depend on where runs begin, so no single value beyond the edge could stand for
    them. module: numpy or cupy."""
    first = next((place for place, window in enumerate(windows) if window.is_long_box), len(windows))
    later = [window for window in windows[first + 1 :] if window.mode == "constant"]
    if image.dtype.kind != "f" or cval == 0 or not later:
        return image, windows
    margins = [(0, 0)] * image.ndim
    for window in later:
        margins[window.axis] = (window.before, window.after)
    inside = {
        window: replace(window, mode="valid", offset=(window.offset - window.before) % window.step) for window in later
    }
    return module.pad(image, margins, constant_values=cval), [inside.get(window, window) for window in windows]


def gaussian_windows(
    axes: Sequence[int],
    sigmas: Sequence[float],
    modes: Sequence[str],
    dtype: np.dtype,
    *,
    truncate: float | None = None,
    radii: Sequence[int | None] | None = None,
    offsets: Sequence[int] | None = None,
    direct: bool = False,
    orders: Sequence[int] | None = None,
) -> list[Window]:
    """Gaussians of standard deviation `sigmas` samples along `axes`, which end at `radii` or round(truncate * sigma).
    Takes all axes at once: whether sums are exact depends on all of them, and so do the weights.

    Without radius and truncate, those that reach more than `DIRECT_RADIUS` samples at 4 sigma are decimated; or
    `DIRECT_PLANE_RADIUS`, if they do along two or more neighbouring axes, and no other.
    offsets : absolute coordinates of the image's first sample along `axes`; default 0
    direct  : decimate none
    orders  : derivatives along `axes`, 0 … 3; default 0
    """
    dtype = np.dtype(dtype)
    each_radius = [None] * len(axes) if radii is None else radii
    reaches = [
        gaussian_radius(sigma, truncate=truncate, radius=radius)
        for sigma, radius in zip(sigmas, each_radius, strict=True)
    ]
    derivatives = [0] * len(axes) if orders is None else orders
    filtered = [axis for axis, reach in zip(axes, reaches, strict=True) if reach > 0]
    plane = len(filtered) > 1 and max(filtered) - min(filtered) == len(filtered) - 1
    plane = plane and dtype not in (np.uint8, np.float64) and not any(derivatives)
    far = DIRECT_PLANE_RADIUS if plane and min(filter(None, reaches)) > DIRECT_PLANE_RADIUS else DIRECT_RADIUS
    coarse = [
        not direct and truncate is None and radius is None and reach > far
        for radius, reach in zip(each_radius, reaches, strict=True)
    ]
    for sigma, reach, order in zip(sigmas, reaches, derivatives, strict=True):
        check_order(order, reach, sigma)
    windows = []
    for place, (axis, sigma, mode, reach) in enumerate(zip(axes, sigmas, modes, reaches, strict=True)):
        if coarse[place]:
            offset = 0 if offsets is None else offsets[place]
            # Grids of integers err by up to 0.05 of a step along each of two axes, on top of 0.5.
            rounded, several = dtype.kind != "f" and not any(derivatives), sum(coarse) > 2
            coarse_grid = decimation(
                float(sigma),
                _precision(dtype),
                int(derivatives[place]),
                bytewise=rounded and dtype == np.uint8 and not several,
                volume=rounded and dtype != np.uint8 and several,
            )
            windows.append(_decimated_window(axis, mode, coarse_grid, offset))
            continue
        if derivatives[place]:
            taps = derivative_weights(float(sigma), reach, int(derivatives[place]), _precision(dtype))
            windows.append(
                Window(axis=axis, before=reach, after=reach, mode=_known(mode), half_weights=(), derivative=taps)
            )
            continue
        half = half_weights(float(sigma), reach, dtype)
        windows.append(Window(axis=axis, before=reach, after=reach, mode=_known(mode), half_weights=half))
    return _in_exact_sums(windows, dict(zip(axes, sigmas, strict=True)), dtype) if dtype.kind != "f" else windows


def _in_exact_sums(windows: list[Window], sigmas: dict[int, float], dtype: np.dtype) -> list[Window]:
    """The windows with weights for exact sums of samples of 8 or 16 bits, if they are computed so."""
    filtered = sorted((window for window in windows if window.taps > 1), key=lambda window: window.axis)
    if any(after.axis != before.axis + 1 for before, after in pairwise(filtered)):
        return windows
    if any(window.decimation or window.derivative for window in filtered):
        return windows
    in_bytes = dtype == np.uint8
    gaussians = ((float(sigmas[window.axis]), window.after) for window in filtered)
    halves = (byte_sums if in_bytes else words).halves(*gaussians)
    if halves is None:
        return windows
    found = dict(zip((window.axis for window in filtered), halves, strict=True))
    return [
        replace(window, exact=in_bytes, words=not in_bytes, half_weights=found.get(window.axis, window.half_weights))
        for window in windows
    ]


def output_shape(shape: Sequence[int], windows: Sequence[Window]) -> tuple[int, ...]:
    lengths = list(shape)
    for window in windows:
        lengths[window.axis] = window.output_length(lengths[window.axis])
    return tuple(lengths)


def check_lengths(shape: Sequence[int], windows: Sequence[Window]) -> None:
    """ValueError if mode "valid" leaves nothing along an axis."""
    for window in windows:
        if window.output_length(shape[window.axis]) < 1:
            raise ValueError(
                f"axis {window.axis} has {shape[window.axis]} samples, fewer than the window's {window.taps}: "
                f'mode "valid" leaves nothing'
            )


def result_dtype(dtype: np.dtype, windows: Sequence[Window]) -> np.dtype:
    """Derivatives of integer images are float32; all else has the image's dtype."""
    derived = any(window.derivative for window in windows)
    return np.dtype(np.float32) if derived and dtype.kind != "f" else np.dtype(dtype)


def _precision(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def check_order(order: Any, reach: int, sigma: float) -> None:
    """ValueError unless a Gaussian that reaches so many samples has a derivative of that order."""
    if isinstance(order, bool) or not isinstance(order, int | np.integer) or not 0 <= order <= MAX_ORDER:
        raise ValueError(f"order must be a whole number, 0 … {MAX_ORDER}; got {order!r}")
    if order > 0 and reach == 0:
        raise ValueError(f"sigma {sigma:g} reaches no neighbour, from which a derivative is computed: raise sigma")


def _decimated_window(axis: int, mode: str, coarse: Decimation, offset: int) -> Window:
    before, after = coarse.extent
    return Window(
        axis=axis, before=before, after=after, mode=_known(mode), half_weights=coarse.half_weights, decimation=coarse,
        offset=offset % coarse.factor, derivative=coarse.derivative,
    )  # fmt: skip


def gaussian_radius(sigma: float, *, truncate: float | None = None, radius: int | None = None) -> int:
    """Samples on each side of the centre; ValueError if sigma, truncate or the reach is out of range."""
    if not (_is_finite(sigma) and float(sigma) >= 0):
        raise ValueError(f"sigma must be a number of samples, 0 (no smoothing) or more; got {sigma!r}")
    if radius is None:
        if truncate is not None and not (_is_finite(truncate) and float(truncate) > 0):
            raise ValueError(f"truncate must be a positive number of standard deviations; got {truncate!r}")
        reach = int(min((TRUNCATE if truncate is None else truncate) * float(sigma) + 0.5, 1e9))
    elif isinstance(radius, bool) or not isinstance(radius, int | np.integer) or radius < 0:
        raise ValueError(f"radius must be a whole number of samples, 0 or more; got {radius!r}")
    else:
        reach = int(radius)
    if 2 * reach + 1 > MAX_TAPS:
        raise ValueError(
            f"a Gaussian of sigma {sigma:g} reaches {reach} samples to each side; at most {(MAX_TAPS - 1) // 2} are "
            f"supported: choose a smaller sigma, truncate or radius"
        )
    return reach if sigma > 0 else 0


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(float(value))


def _known(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    return mode
