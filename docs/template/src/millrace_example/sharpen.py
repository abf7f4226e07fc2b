"""Sharpening as an operator: `millrace run sharpen IN OUT --radius 3 --amount 0.8`."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from pipeline import image_operator


def defined(block: Any, *, radius: int, amount: float) -> Any:
    """In float64, for the audit: of a block that is one pixel and its halo, the engine takes the middle."""
    return block + amount * (block - block.mean())


@image_operator(axes="YX", halo=lambda parameters: parameters.radius, dtype="float32", reference=defined)
def sharpen(
    block: Any,
    *,
    radius: Annotated[int, Field(ge=1, le=100, description="pixels that the mean reaches to each side")] = 2,
    amount: Annotated[float, Field(ge=0, description="how much of the difference is added")] = 1.0,
    xp: Any,
) -> Any:
    """Sharpen an image: add what differs from the mean over a box."""
    size, result = 2 * radius + 1, block.astype(np.float32)
    mean = result
    for axis in (0, 1):
        mean = sum(xp.roll(mean, by, axis) for by in range(-radius, radius + 1)) / np.float32(size)
    return result + np.float32(amount) * (result - mean)
