"""Random images for laws of smoothing."""

from __future__ import annotations

import numpy as np


def noise(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Integers over their whole range; floats about 0, of size 1."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    held = np.iinfo(dtype)
    return rng.integers(held.min, held.max, shape, dtype, endpoint=True)
