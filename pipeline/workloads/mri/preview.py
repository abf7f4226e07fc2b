"""The preview of a series: one plane in shades of grey, also where another process has made it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import StorageError

_BRIGHTEST = 99.7  # percent of the pixels that a preview tells apart
_WIDEST = 512  # pixels of a plane that travels from process to process


def shades(plane: NDArray[Any]) -> NDArray[np.uint8]:
    """Magnitudes (y, x) as grey values, the brightest few alike."""
    brightest = float(np.percentile(plane, _BRIGHTEST)) or float(plane.max()) or 1.0
    return np.rint(np.clip(plane / brightest, 0, 1) * 255).astype(np.uint8)


def packed(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    """Ready for JSON; wide planes with fewer pixels."""
    step = -(-max(pixels.shape) // _WIDEST)
    thinned = np.ascontiguousarray(pixels[::step, ::step])
    return {"shape": list(thinned.shape), "zlib": base64.b64encode(zlib.compress(thinned.tobytes())).decode()}


def unpacked(found: Mapping[str, Any]) -> NDArray[np.uint8]:
    """StorageError where it is damaged."""
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(found["zlib"])), np.uint8).reshape(found["shape"])
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise StorageError(f"the preview that another process made is damaged: {error}") from error
