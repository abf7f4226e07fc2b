"""Compressed blocks of files: decoding, encoding, and keeping decoded blocks."""

from __future__ import annotations

import functools
import logging

_LIBRARIES = ("imagecodecs", "tifffile")


@functools.cache
def silence_loggers() -> None:
    """Silences imagecodecs and tifffile logging: without a handler, Python prints their remarks on stderr."""
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.CRITICAL)
