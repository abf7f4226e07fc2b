"""Memory that a thread uses again for one block after another: fresh pages cost as much as a fast codec."""

from __future__ import annotations

import threading
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_LARGEST_KEPT_BYTES = 8 << 20
_of_thread = threading.local()

Use = Literal["samples", "encoded", "predicted"]


def scratch(use: Use, nbytes: int) -> NDArray[np.uint8]:
    """Memory for one use of this thread, valid until its next call for the same use; larger blocks are not kept."""
    block: NDArray[np.uint8] | None = getattr(_of_thread, use, None)
    if block is None or len(block) < nbytes:
        block = np.empty(nbytes, np.uint8)
        if nbytes <= _LARGEST_KEPT_BYTES:
            setattr(_of_thread, use, block)
    return block[:nbytes]
