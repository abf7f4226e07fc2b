"""Large images of prime sides, and places for results that show what is written outside of them."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

OFFSETS = 8  # samples past the start of an allocation where inputs and results may begin
LEAST_SAMPLES = 3_800_000  # of an image


def prime_from(least: int) -> int:
    return next(n for n in count(least) if all(n % k for k in range(2, int(n**0.5) + 1)))


def at_offset(cupy: Any, values: Any, offset: int) -> Any:
    """A copy that starts `offset` samples after an aligned address."""
    copy = cupy.empty(values.size + OFFSETS, values.dtype)[offset : offset + values.size].reshape(values.shape)
    copy[...] = values
    return copy


def poisoned(cupy: Any, shape: tuple[int, ...], dtype: Any, offset: int) -> tuple[Any, Any]:
    """Bytes that no result contains, with room for a result among them."""
    size, itemsize = int(np.prod(shape)), np.dtype(dtype).itemsize
    holder = cupy.full((size + OFFSETS) * itemsize, 0xA5, np.uint8)
    return holder, holder.view(dtype)[offset : offset + size].reshape(shape)
