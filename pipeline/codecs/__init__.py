"""Codecs of files' blocks: decoding, encoding, and a cache of decoded blocks."""

from __future__ import annotations

import functools
import logging

_LIBRARIES = ("imagecodecs", "tifffile")


@functools.cache
def silence_loggers() -> None:
    """Silence imagecodecs and tifffile logging: without a handler, Python prints their warnings on stderr."""
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.CRITICAL)
