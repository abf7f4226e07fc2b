"""One axis's share of a separable filter: how far it reaches, its weights, and what it sees beyond the edge."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.smoothing.borders import MODES

MAX_TAPS = 255
# Integer images take weights in units of 2**-24: each is exact in float32 and together they are exactly one.
WEIGHT_ONE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Window:
    """The taps along one axis: output i is computed from input i - before … i + after.

    With mode "valid" output 0 is the first whose window lies inside, and the axis shrinks by `taps - 1`.
    """

    axis: int
    before: int
    after: int
    mode: str
    half_weights: tuple[float, ...] | None = None  # Gaussian: weight at distance 0 … radius; None: a box (all equal)

    @property
    def taps(self) -> int:
        return self.before + self.after + 1

    def output_length(self, input_length: int) -> int:
        return input_length - (self.taps - 1) if self.mode == "valid" else input_length


def box_window(axis: int, size: int, mode: str) -> Window:
    """A box of `size` samples; an even size reaches one farther to the left, as scipy.ndimage's does."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise TypeError(f"size must be a whole number of samples; got {size!r}")
    if not 1 <= size <= MAX_TAPS:
        raise ValueError(f"size must lie in 1 … {MAX_TAPS}; got {size}")
    before = int(size) // 2
    return Window(axis=axis, before=before, after=int(size) - 1 - before, mode=_known(mode))


def gaussian_window(
    axis: int, sigma: float, mode: str, dtype: np.dtype, *, truncate: float = 4.0, radius: int | None = None
) -> Window:
    """A Gaussian of standard deviation `sigma` samples, cut at `radius` (default: round(truncate * sigma))."""
    reach = gaussian_radius(sigma, truncate=truncate, radius=radius)
    half_weights = _half_weights(float(sigma), reach, np.dtype(dtype))
    return Window(axis=axis, before=reach, after=reach, mode=_known(mode), half_weights=half_weights)


def gaussian_radius(sigma: float, *, truncate: float = 4.0, radius: int | None = None) -> int:
    """Samples on each side of the centre; ValueError where sigma, truncate or the reach is out of range."""
    if not _is_positive(sigma):
        raise ValueError(f"sigma must be a positive number of samples; got {sigma!r}")
    if radius is None:
        if not _is_positive(truncate):
            raise ValueError(f"truncate must be a positive number of standard deviations; got {truncate!r}")
        reach = int(min(truncate * float(sigma) + 0.5, 1e9))
    elif isinstance(radius, bool) or not isinstance(radius, int | np.integer) or radius < 0:
        raise ValueError(f"radius must be a whole number of samples, 0 or more; got {radius!r}")
    else:
        reach = int(radius)
    if 2 * reach + 1 > MAX_TAPS:
        raise ValueError(
            f"a Gaussian of sigma {sigma:g} reaches {reach} samples to each side; at most {MAX_TAPS // 2} are "
            f"supported: choose a smaller sigma, truncate or radius"
        )
    return reach


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(float(value)) and float(value) > 0


@functools.lru_cache(maxsize=64)
def _half_weights(sigma: float, radius: int, dtype: np.dtype) -> tuple[float, ...]:
    return _quantised(_gaussian_half(sigma, radius), dtype)


def _gaussian_half(sigma: float, radius: int) -> NDArray[np.float64]:
    distance = np.arange(radius + 1, dtype=np.float64)
    half = np.exp(-0.5 * (distance / sigma) ** 2)
    normalised: NDArray[np.float64] = half / (half[0] + 2 * half[1:].sum())
    return normalised


def _quantised(half: NDArray[np.float64], dtype: np.dtype) -> tuple[float, ...]:
    if dtype.kind == "f":
        return tuple(float(weight) for weight in half.astype(dtype))
    units = np.rint(half * WEIGHT_ONE).astype(np.int64)
    units[0] = WEIGHT_ONE - 2 * units[1:].sum()  # the centre takes the rounding left over, so that they sum to one
    return tuple(float(unit) / WEIGHT_ONE for unit in units)


def _known(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    return mode
