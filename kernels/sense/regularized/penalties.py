"""Penalties of images: their values, and their proximal operators.

A penalty is R(x) = r(K x) with a linear K, which is 1 for all but total variation, and a proximal operator of r. Series
are complex [frames, *shape]. Weights and thresholds are numbers, or 0-d arrays of the device, so that a CUDA graph can
repeat an iteration. Random shifts come from a table on the device: wavelets and blocks then leave no pattern.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from kernels.proximal import (
    MOST_FRAMES,
    differences,
    differences_adjoint,
    low_rank,
    magnitudes,
    next_shift,
    rank_scale,
    soft_threshold,
)
from kernels.wavelet import Wavelet

_SHIFTS = 64  # different ones; then they repeat


class Penalty(ABC):
    """`strength` is λ in units of the largest magnitude of the right-hand side."""

    simple = True  # K = 1
    wipes = True  # R(x) = 0 is no image
    captured = True  # a CUDA graph can hold its operations
    key: Hashable = None  # names the kernels of its operations, for `Captured`; None: a first step is plain

    def __init__(self, strength: float) -> None:
        if not (np.isfinite(strength) and strength >= 0):
            raise ValueError(f"a strength must be a number of 0 or more; got {strength}")
        self.strength = strength

    def apply(self, series: Any) -> Any:
        """K x."""
        return series

    def adjoint(self, values: Any) -> Any:
        """The adjoint of K."""
        return values

    @abstractmethod
    def shrink(self, values: Any, threshold: Any) -> tuple[Any, Any]:
        """The proximal operator of threshold · r at K x, and r of its result, 0-d float64."""

    def value(self, series: Any) -> Any:
        """R(x), 0-d float64."""
        return self.shrink(self.apply(series), 0.0)[1]

    def turn(self) -> None:  # noqa: B027 - most have none
        """Take the next random shift, if there are any."""

    def state(self) -> Mapping[str, Any]:
        """The arrays that `turn` changes, by name."""
        return {}


class _Shifted(Penalty):
    """Takes shifts from a table of the device; without a seed there are none."""

    def __init__(self, strength: float, shape: Sequence[int], reach: Sequence[int], seed: int | None, xp: Any) -> None:
        super().__init__(strength)
        self._table = None
        self.shift = None
        if seed is not None:
            rng = np.random.default_rng(seed)
            limits = [max(min(r, n), 1) for r, n in zip(reach, shape, strict=True)]
            self._table = xp.asarray(rng.integers(0, limits, (_SHIFTS, len(shape))), np.int32)
            self._row = xp.zeros(1, np.int32)
            self.shift = self._table[0].copy()

    def turn(self) -> None:
        if self._table is not None and self.shift is not None:
            next_shift(self._table, self._row, self.shift)

    def state(self) -> Mapping[str, Any]:
        return {} if self.shift is None else {"row": self._row, "shift": self.shift}


class L1Wavelet(_Shifted):
    """Σ |Ψ x| of each frame; Ψ is an orthonormal wavelet transform, rotated by a random shift in each iteration."""

    def __init__(
        self, strength: float, shape: Sequence[int], *, xp: Any, family: str = "db2", seed: int | None = 0
    ) -> None:
        super().__init__(strength, shape, shape, seed, xp)
        self._wavelet = Wavelet(shape, family)
        self.key = (family, self.shift is None)

    def shrink(self, values: Any, threshold: Any) -> tuple[Any, Any]:
        coefficients = self._wavelet.forward(values, shift=self.shift, threshold=threshold)
        size = magnitudes(coefficients)
        return self._wavelet.inverse(coefficients, shift=self.shift, overwrite=True), size


class LowRank(_Shifted):
    """Σ over blocks of the nuclear norm of (pixels × frames), in units of `rank_scale`; blocks are shifted randomly."""

    def __init__(
        self, strength: float, shape: Sequence[int], *, xp: Any, frames: int, block: int = 8, seed: int | None = 0
    ) -> None:
        self._block = tuple(min(block, n) for n in shape)
        self._scale = rank_scale(frames, self._block)
        self.captured = frames <= MOST_FRAMES  # CuPy refuses to capture cuBLAS, which more frames take
        super().__init__(strength, shape, self._block, seed, xp)

    def shrink(self, values: Any, threshold: Any) -> tuple[Any, Any]:
        found, nuclear = low_rank(values, threshold * self._scale, self._block, self.shift)
        return found, nuclear * self._scale


class TotalVariation(Penalty):
    """Σ √(Σ_axis |x[i + 1] − x[i]|²) along the given axes of [frames, *shape]: isotropic total variation."""

    simple = False

    def __init__(self, strength: float, axes: Sequence[int]) -> None:
        super().__init__(strength)
        self.axes = tuple(axes)
        self.wipes = max(self.axes) > 0  # frames may be the same

    def apply(self, series: Any) -> Any:
        return differences(series, self.axes)

    def adjoint(self, values: Any) -> Any:
        return differences_adjoint(values, self.axes)

    def shrink(self, values: Any, threshold: Any) -> tuple[Any, Any]:
        shrunk = soft_threshold(values, threshold, vectors=True)
        return shrunk, magnitudes(shrunk, vectors=True)

    def value(self, series: Any) -> Any:
        return magnitudes(self.apply(series), vectors=True)
