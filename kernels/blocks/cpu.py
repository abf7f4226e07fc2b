"""Blocks to samples in NumPy: the definition that the CUDA kernels are tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.blocks import BITS, BYTES, FILL, NO_SHUFFLE, Places


def place(decoded: NDArray[np.uint8], blocks: Any, origins: Any, region: NDArray[Any], places: Places) -> None:
    """As `kernels.blocks.place`."""
    for block in blocks:
        count, first = int(block["bytes"]) // region.itemsize, int(block["first"]) // region.itemsize
        if block["source"] == FILL:
            samples = np.full(count, places.fill_value, region.dtype)
        else:
            stored = decoded[block["source"] : block["source"] + block["bytes"]]
            samples = unshuffled(stored, int(block["typesize"]), int(block["shuffle"])).view(region.dtype)
        found = np.stack(np.unravel_index(np.arange(first, first + count), places.chunk), -1) + origins[block["chunk"]]
        inside = np.all((found >= 0) & (found < region.shape), axis=1)
        region[tuple(found[inside].T)] = samples[inside]


def unshuffled(stored: NDArray[np.uint8], typesize: int, shuffle: int) -> NDArray[np.uint8]:
    """A block's bytes in the order of its samples."""
    count = len(stored) // typesize
    if shuffle == NO_SHUFFLE or (shuffle == BITS and count % 8):
        return stored.copy()
    head, rest = stored[: count * typesize], stored[count * typesize :]
    if shuffle == BYTES:
        ordered = head.reshape(typesize, count).T
    else:
        bits = np.unpackbits(head, bitorder="little").reshape(typesize, 8, count)
        ordered = np.packbits(bits.transpose(2, 0, 1), axis=-1, bitorder="little")
    return np.concatenate([ordered.reshape(-1), rest])
