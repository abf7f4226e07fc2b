"""The rows of the table: filters on images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of the table: a filter on one kind of image. The border is SciPy's "mirror" (OpenCV's default)."""

    dtype: str
    channels: int
    size: int | None = None  # box
    sigma: int | None = None  # Gaussian, cut at 4 sigma

    @property
    def name(self) -> str:
        what = f"box {self.size}×{self.size}" if self.size else f"Gaussian σ={self.sigma}"
        return f"{what}, {self.dtype} {'RGB' if self.channels == 3 else 'grey'}"

    def image(self, side: int) -> Any:
        shape = (side, side, self.channels) if self.channels > 1 else (side, side)
        rng = np.random.default_rng(0)
        if np.dtype(self.dtype).kind == "f":
            return rng.random(shape, self.dtype)
        return rng.integers(0, np.iinfo(self.dtype).max, shape, self.dtype, endpoint=True)


WORKLOADS = [
    Workload(dtype=dtype, channels=channels, **what)
    for dtype, channels in (("uint16", 3), ("float32", 1), ("uint8", 3))
    for what in (
        *({"size": size} for size in (3, 9, 31, 127, 1023)),
        *({"sigma": sigma} for sigma in (1, 2, 4, 8, 16, 64, 256)),
    )
]
